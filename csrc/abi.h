#pragma once

#include "xla/ffi/api/ffi.h"

#if defined(_WIN32)
#define JAX_BEAM_ATTN_EXPORT __declspec(dllexport)
#else
#define JAX_BEAM_ATTN_EXPORT __attribute__((visibility("default")))
#endif

// The contract between these libraries and jax_beam_attn/_core/native.py, which holds the same
// number and refuses to load any other. Raise both when a handler's operands, results or attributes
// change.
inline constexpr int kAbiVersion = 1;

// Defines the handler `name` and exports it: all else in these libraries is hidden, so that nothing
// in them can be mixed up with XLA's own copy of the same inline functions.
#define JAX_BEAM_ATTN_HANDLER(name, ...)                                    \
  extern "C" JAX_BEAM_ATTN_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*);  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, __VA_ARGS__)
