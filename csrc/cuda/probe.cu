#include "probe.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "abi.h"
#include "cuda/launch.h"

namespace jax_beam_attn {
namespace {

__global__ void AddAbiVersion(const int32_t* x, int32_t* y, int64_t n) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = first; i < n; i += stride) y[i] = x[i] + kAbiVersion;
}

xla::ffi::Error Probe(cudaStream_t stream, Vector x, xla::ffi::Result<Vector> y) {
  if (auto error = CheckProbe(x, y); error.failure()) return error;
  const auto n = static_cast<int64_t>(x.element_count());
  if (n == 0) return xla::ffi::Error::Success();  // an empty grid is a launch error
  constexpr int64_t kThreads = 256, kMaxBlocks = 1024;
  const auto blocks = static_cast<unsigned>(std::min((n + kThreads - 1) / kThreads, kMaxBlocks));
  AddAbiVersion<<<blocks, kThreads, 0, stream>>>(x.typed_data(), y->typed_data(), n);
  return LaunchStatus("jax_beam_attn_probe");
}

}  // namespace
}  // namespace jax_beam_attn

// Only work on XLA's stream, no synchronisation: XLA may capture the call into a CUDA graph.
JAX_BEAM_ATTN_HANDLER(jax_beam_attn_probe, jax_beam_attn::Probe,
                      xla::ffi::Ffi::Bind()
                          .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                          .Arg<jax_beam_attn::Vector>()
                          .Ret<jax_beam_attn::Vector>(),
                      {xla::ffi::Traits::kCmdBufferCompatible});
