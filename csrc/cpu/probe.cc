#include "probe.h"

#include "abi.h"

namespace jax_beam_attn {
namespace {

xla::ffi::Error Probe(Vector x, xla::ffi::Result<Vector> y) {
  if (auto error = CheckProbe(x, y); error.failure()) return error;
  for (size_t i = 0; i < x.element_count(); ++i) {
    y->typed_data()[i] = x.typed_data()[i] + kAbiVersion;
  }
  return xla::ffi::Error::Success();
}

}  // namespace
}  // namespace jax_beam_attn

JAX_BEAM_ATTN_HANDLER(jax_beam_attn_probe, jax_beam_attn::Probe,
                      xla::ffi::Ffi::Bind()
                          .Arg<jax_beam_attn::Vector>()
                          .Ret<jax_beam_attn::Vector>());
