#pragma once

#include <cuda_runtime.h>

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_beam_attn {

// What became of the launch just made by the handler `name`.
inline xla::ffi::Error LaunchStatus(const char* name) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return xla::ffi::Error::Success();
  return xla::ffi::Error::Internal(std::string(name) + ": " + cudaGetErrorString(status));
}

}  // namespace jax_beam_attn
