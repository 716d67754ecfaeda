// `jax_beam_attn_probe`: y = x + ABI version, for x s32 [n]. The smallest handler that shows a
// build to work from Python down to the device, and that it is the build which Python believes it
// loaded.
#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

namespace jax_beam_attn {

using Vector = xla::ffi::Buffer<xla::ffi::S32, 1>;

// The binding has checked dtype and rank; the number of elements is left.
inline xla::ffi::Error CheckProbe(const Vector& x, xla::ffi::Result<Vector> y) {
  if (x.element_count() == y->element_count()) return xla::ffi::Error::Success();
  return xla::ffi::Error::InvalidArgument(
      "jax_beam_attn_probe: the result has " + std::to_string(y->element_count()) +
      " elements, expected those of x, " + std::to_string(x.element_count()));
}

}  // namespace jax_beam_attn
