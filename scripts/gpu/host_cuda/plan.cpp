// FlashInfer's own plan() for prefill and decode, without its kernels, so that g++ compiles it in seconds (plans.py calls it).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <vector>

// The header of positional encodings is device code; planning wants one name of it.
#define FLASHINFER_POS_ENC_CUH_
namespace flashinfer {
enum class PosEncodingMode { kNone = 0U, kRoPELlama = 1U, kALiBi = 2U };
// As CUDA's: without a namespace, and of mixed integers.
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) { return a < (std::common_type_t<A, B>)b ? b : a; }
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) { return (std::common_type_t<A, B>)b < a ? b : a; }
}  // namespace flashinfer
#include <flashinfer/attention/scheduler.cuh>

namespace flashinfer {
// Only its address is taken, to ask how many blocks of it fit (runtime.cpp: two).
template <PosEncodingMode, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, typename AttentionVariant, typename Params>
__global__ void BatchDecodeWithPagedKVCacheKernel(const __grid_constant__ Params) {}
}  // namespace flashinfer

namespace {
struct Variant {};
struct Params {
  using DTypeKV = uint16_t;  // bfloat16 and float16 alike
  using IdType = int32_t;
};

int finish(cudaError_t status, const std::vector<int64_t> &info, int64_t *out) {
  if (status != cudaSuccess)
    return -1;
  for (size_t i = 0; i < info.size(); ++i)
    out[i] = info[i];
  return (int)info.size();
}

template <uint32_t kHeadDim, uint32_t kGroupSize>
cudaError_t plan_decode(void *floats, size_t float_bytes, void *ints, void *pinned, size_t int_bytes, flashinfer::DecodePlanInfo &info,
                        int32_t *indptr, int64_t batch, int64_t heads, int64_t page_size, bool has_graph) {
  constexpr auto kNone = flashinfer::PosEncodingMode::kNone;
  auto estimate = flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<kGroupSize, kHeadDim, kNone, Variant, Params>;
  return flashinfer::DecodePlan<kHeadDim, kNone, Variant, Params>(floats, float_bytes, ints, pinned, int_bytes, info, indptr, batch,
                                                                  heads, page_size, has_graph, nullptr, estimate);
}
}  // namespace

extern "C" {
// Both return how many numbers they wrote to `out`, or -1; a message is on standard error.
int host_cuda_plan_prefill(void *floats, size_t float_bytes, void *ints, void *pinned, size_t int_bytes, int32_t *qo_indptr,
                           int32_t *kv_indptr, int64_t rows, int64_t batch, int64_t heads, int64_t kv_heads, int64_t page_size,
                           int has_graph, int64_t head_dim_qk, int64_t head_dim_vo, int64_t window_left, int64_t fixed_split_size,
                           int disable_split_kv, int64_t colocated_ctas, int64_t uniform_q_len, int64_t *out) {
  try {
    flashinfer::PrefillPlanInfo info;
    auto status = flashinfer::PrefillPlan<int32_t>(floats, float_bytes, ints, pinned, int_bytes, info, qo_indptr, kv_indptr, rows,
                                                   batch, heads, kv_heads, head_dim_qk, head_dim_vo, page_size, has_graph, 2,
                                                   window_left, fixed_split_size, disable_split_kv, colocated_ctas, uniform_q_len,
                                                   nullptr, 2);
    return finish(status, info.ToVector(), out);
  } catch (const std::exception &error) {
    fprintf(stderr, "host CUDA: FlashInfer's plan of a prefill: %s\n", error.what());
    return -1;
  }
}

int host_cuda_plan_decode(void *floats, size_t float_bytes, void *ints, void *pinned, size_t int_bytes, int32_t *indptr, int64_t batch,
                          int64_t heads, int64_t kv_heads, int64_t page_size, int has_graph, int64_t head_dim, int64_t *out) {
  try {
    flashinfer::DecodePlanInfo info;
    auto plan = [&](auto head_dim_constant) {
      constexpr uint32_t kHeadDim = decltype(head_dim_constant)::value;
      switch (heads / kv_heads) {
#define CASE(size) \
  case size: return plan_decode<kHeadDim, size>(floats, float_bytes, ints, pinned, int_bytes, info, indptr, batch, heads, page_size, has_graph)
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(6);
        CASE(8);
#undef CASE
      }
      fprintf(stderr, "host CUDA: %ld heads for %ld of keys are not planned\n", (long)heads, (long)kv_heads);
      return cudaErrorInvalidValue;
    };
    if (head_dim == 64 || head_dim == 128) {
      cudaError_t status = head_dim == 64 ? plan(std::integral_constant<uint32_t, 64>()) : plan(std::integral_constant<uint32_t, 128>());
      return finish(status, info.ToVector(), out);
    }
    fprintf(stderr, "host CUDA: heads of %ld are not planned\n", (long)head_dim);
    return -1;
  } catch (const std::exception &error) {
    fprintf(stderr, "host CUDA: FlashInfer's plan of a decode step: %s\n", error.what());
    return -1;
  }
}
}
