// libcuda: modules load and functions are found; a launch is told to the listener in runtime.cpp.
#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#undef cuGetProcAddress
#undef cuCtxGetCurrent

extern "C" {
// In runtime.cpp.
int host_cuda_attribute(int);
int host_cuda_device();
int host_cuda_device_count();
int host_cuda_memory_kind(const void *);
int host_cuda_refuse(const char *);

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = host_cuda_device_count(); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
  *value = host_cuda_attribute((int)attribute);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)0x3330; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = host_cuda_device(); return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) { *context = (CUcontext)0x3330; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule *module, const void *) { *module = (CUmodule)0x2220; return CUDA_SUCCESS; }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *, unsigned, CUjit_option *, void **) {
  *module = (CUmodule)0x2220;
  return CUDA_SUCCESS;
}
// A function is its name.
CUresult cuModuleGetFunction(CUfunction *function, CUmodule, const char *name) { *function = (CUfunction)strdup(name); return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **) {
  return (CUresult)host_cuda_refuse((const char *)f);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction f, void **, void **) { return (CUresult)host_cuda_refuse((const char *)f); }
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **) {
  return (CUresult)host_cuda_refuse((const char *)f);
}
CUresult cuLibraryLoadData(CUlibrary *library, const void *, CUjit_option *, void **, unsigned, CUlibraryOption *, void **, unsigned) {
  *library = (CUlibrary)0x2221;
  return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary, const char *name) { *kernel = (CUkernel)strdup(name); return CUDA_SUCCESS; }
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) { *function = (CUfunction)kernel; return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction, int, size_t) { *count = 2; return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  int kind = host_cuda_memory_kind((void *)pointer);
  if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
    *(unsigned *)data = kind == 2 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    return kind ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr *)data = pointer;
  else
    *(int *)data = 0;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char **text) { *text = "host CUDA"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult, const char **name) { *name = "host CUDA"; return CUDA_SUCCESS; }

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int, cuuint64_t, CUdriverProcAddressQueryResult *status) {
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(self ? self : RTLD_DEFAULT, symbol);
  if (status)
    *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return CUDA_SUCCESS;
}
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, nullptr);
}
}
