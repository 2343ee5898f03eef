// libcudart of two H100s that are not there: device memory is host memory, copies are memmove. Kernels are computed in Python
// (operators.py, triton_kernels.py, modules.py), so whatever is launched here is told to a listener: nobody computes it.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace {
constexpr size_t kPage = 2 << 20;
constexpr size_t kTotalBytes = 80ull << 30;

enum Kind { kUnknown = 0, kHost = 1, kDevice = 2 };  // as cudaMemoryType

std::mutex mutex;
std::map<size_t, std::pair<size_t, int>> regions;  // start -> (bytes, kind)
size_t device_bytes = 0;
std::atomic<size_t> next_handle{0x7000};
std::atomic<bool> capturing{false};
const cudaGraph_t kGraph = (cudaGraph_t)0x6660;

// Leaked: destructors of other libraries still launch at exit.
std::map<std::string, long> &counts = *new std::map<std::string, long>;
std::unordered_map<const void *, const char *> &kernel_names = *new std::unordered_map<const void *, const char *>;
void (*listener)(const char *what) = nullptr;

void count(const std::string &what) {
  std::lock_guard<std::mutex> lock(mutex);
  ++counts[what];
}

// Pages are not backed before they are written, so a pool of any size costs nothing.
cudaError_t allocate(void **pointer, size_t bytes, int kind) {
  bytes = (bytes + kPage - 1) / kPage * kPage + (bytes ? 0 : kPage);
  char *raw = (char *)mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED)
    return cudaErrorMemoryAllocation;
  size_t start = ((size_t)raw + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> lock(mutex);
  regions[start] = {bytes, kind};
  if (kind == kDevice)
    device_bytes += bytes;
  *pointer = (void *)start;
  return cudaSuccess;
}

cudaError_t release(void *pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto region = regions.find((size_t)pointer);
  if (region != regions.end()) {
    if (region->second.second == kDevice)
      device_bytes -= region->second.first;
    munmap(pointer, region->second.first);
    regions.erase(region);
  }
  return cudaSuccess;
}

template <typename Handle>
cudaError_t make_handle(Handle *handle) {
  *handle = (Handle)(next_handle += 16);
  return cudaSuccess;
}

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  void *stream;
};
thread_local LaunchConfiguration configurations[64];
thread_local int configuration_count = 0;
thread_local int current_device = 0;
}  // namespace

extern "C" {
// -- for Python
void host_cuda_listen(void (*function)(const char *what)) { listener = function; }
// Writes "name\tcount\n" for all that was counted; the bytes that all of it takes, nothing being written if there are fewer.
size_t host_cuda_counts(char *out, size_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  std::string text;
  for (auto &[name, number] : counts)
    text += name + "\t" + std::to_string(number) + "\n";
  if (text.size() < size)
    memcpy(out, text.c_str(), text.size() + 1);
  return text.size();
}

// -- for driver.cpp and cublas.cpp, too
int host_cuda_refuse(const char *what) {
  count(std::string("not computed: ") + what);
  if (listener)
    listener(what);
  return 0;
}
int host_cuda_device_count() { return 2; }
int host_cuda_device() { return current_device; }
// The runtime's and the driver's device attributes share their numbers.
int host_cuda_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrMemoryPoolsSupported: return 1;
  }
  return 0;
}
int host_cuda_memory_kind(const void *pointer) {
  std::lock_guard<std::mutex> lock(mutex);
  auto region = regions.upper_bound((size_t)pointer);
  if (region == regions.begin())
    return kUnknown;
  --region;
  return (size_t)pointer < region->first + region->second.first ? region->second.second : kUnknown;
}

// -- memory
cudaError_t cudaMalloc(void **pointer, size_t bytes) { return allocate(pointer, bytes, kDevice); }
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) { return allocate(pointer, bytes, kDevice); }
cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned) { return allocate(pointer, bytes, kDevice); }
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) { return allocate(pointer, bytes, kHost); }
cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return allocate(pointer, bytes, kHost); }
cudaError_t cudaFree(void *pointer) { return release(pointer); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return release(pointer); }
cudaError_t cudaFreeHost(void *pointer) { return release(pointer); }
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) { *device = host; return cudaSuccess; }
static cudaError_t copy(const char *call, void *to, const void *from, size_t bytes) {
  static const char *const kinds[] = {"pageable", "pinned", "device"};
  std::string what = std::string(call) + " " + kinds[host_cuda_memory_kind(from)] + " to " + kinds[host_cuda_memory_kind(to)];
  count(what);
  if (capturing)
    host_cuda_refuse((what + " while a graph is captured").c_str());
  memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) { return copy("cudaMemcpy", to, from, bytes); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copy("cudaMemcpyAsync", to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t) {
  return copy("cudaMemcpyPeerAsync", to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t) {
  if (capturing)
    host_cuda_refuse("cudaMemcpy2DAsync while a graph is captured");
  for (size_t row = 0; row < height; ++row)
    memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  if (capturing)
    host_cuda_refuse("cudaMemset while a graph is captured");
  // Larger memory is fresh, and fresh memory is 0: zeros would only back its pages.
  if (value || bytes < (64u << 20))
    memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = kTotalBytes;
  *available = kTotalBytes - (1ull << 30) - device_bytes;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  int kind = host_cuda_memory_kind(pointer);
  attributes->type = (cudaMemoryType)kind;
  attributes->device = kind == kDevice ? current_device : -1;
  attributes->devicePointer = kind ? (void *)pointer : nullptr;
  attributes->hostPointer = kind == kDevice ? nullptr : (void *)pointer;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *) {
  static char scratch[1 << 20];
  *pointer = scratch;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolSize(size_t *bytes, const void *) { *bytes = 4; return cudaSuccess; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) { *pool = (cudaMemPool_t)0x5550; return cudaSuccess; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *) { memset(handle, 0, sizeof *handle); return cudaSuccess; }

// -- the device
cudaError_t cudaGetDeviceCount(int *count) { *count = host_cuda_device_count(); return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = host_cuda_device(); return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3 (on the host)");
  p->totalGlobalMem = kTotalBytes;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9;
  p->minor = 0;
  p->multiProcessorCount = 132;
  p->l2CacheSize = 52428800;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448;
  p->maxBlocksPerMultiProcessor = 32;
  p->unifiedAddressing = 1;
  p->cooperativeLaunch = 1;
  p->textureAlignment = 512;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) { *value = host_cuda_attribute(attribute); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int) { strncpy(text, "0000:01:00.0", bytes); return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "host CUDA"; }
const char *cudaGetErrorName(cudaError_t) { return "host CUDA"; }

// -- streams and events
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return make_handle(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return make_handle(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return make_handle(stream); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return make_handle(event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return make_handle(event); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t, cudaEvent_t) { *ms = 0.5f; return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) { function(data); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { count("cudaStreamSynchronize"); return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { count("cudaDeviceSynchronize"); return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { count("cudaEventSynchronize"); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { count("cudaStreamWaitEvent"); return cudaSuccess; }

// -- graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { capturing = true; return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) { capturing = false; *graph = kGraph; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) {
  if (id) *id = 1;
  if (graph) *graph = kGraph;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t, unsigned long long) { return make_handle(executable); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t, unsigned long long) { return make_handle(executable); }
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *count) { *count = 1; return cudaSuccess; }

// -- kernels
void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *, void *, int *) {
  std::lock_guard<std::mutex> lock(mutex);
  kernel_names[host] = name;
}
static cudaError_t launch(const void *function) {
  mutex.lock();
  auto found = kernel_names.find(function);
  const char *name = found == kernel_names.end() ? "a kernel without a name" : found->second;
  mutex.unlock();
  return (cudaError_t)host_cuda_refuse(name);
}
cudaError_t cudaLaunchKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t) { return launch(f); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3, dim3, void **, size_t, cudaStream_t) { return launch(f); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *f, void **) { return launch(f); }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3, dim3, void **, size_t, cudaStream_t) { return launch(f); }
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t f, dim3, dim3, void **, size_t, cudaStream_t) { return launch(f); }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *, int, size_t) { *count = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *status) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (!*function) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, symbol) : nullptr;
  }
  if (status)
    *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *status) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, status);
}
void **__cudaRegisterFatBinary(void *) {
  static void *handle[4];
  return handle;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
  configurations[configuration_count++ & 63] = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  LaunchConfiguration &top = configurations[--configuration_count & 63];
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *(void **)stream = top.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *f) { *kernel = (void *)f; return cudaSuccess; }
}
