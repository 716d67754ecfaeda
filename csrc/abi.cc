// What Python asks a library before it registers any of its handlers.
#include "abi.h"

extern "C" JAX_BEAM_ATTN_EXPORT int jax_beam_attn_abi_version() { return kAbiVersion; }

// A handler built with newer headers than those of the running jaxlib stops JAX's backend from
// starting.
extern "C" JAX_BEAM_ATTN_EXPORT int jax_beam_attn_ffi_api_major() { return XLA_FFI_API_MAJOR; }
extern "C" JAX_BEAM_ATTN_EXPORT int jax_beam_attn_ffi_api_minor() { return XLA_FFI_API_MINOR; }
