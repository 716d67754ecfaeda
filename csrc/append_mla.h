// `jax_beam_attn_append_mla`: quantises keys and writes them into their slots of a cache, in place.
//
//   cache   one byte an element, [num_blocks, page_size, 1, token_bytes] or [num_blocks,
//           block_bytes], or bf16 [num_blocks, page_size, 1, Dqk]; the result is the same buffer
//   keys    f32 or bf16 [N, Dqk]
//   slots   s32 [N]; one outside the cache writes nothing
//   format  "v32", "model1" or "bf16"
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "mla_format.h"
#include "xla/ffi/api/ffi.h"

namespace jax_beam_attn {

using Slots = xla::ffi::Buffer<xla::ffi::S32, 1>;

// A cache as kernels see it.
struct MlaCache {
  uint8_t* data;
  int64_t num_blocks, page_size, block_bytes;
};

// Where a token is: null for a slot outside the cache.
struct Place {
  uint8_t* row;
  uint8_t* scales;
};

JAX_BEAM_ATTN_HOST_DEVICE inline Place PlaceOf(const MlaCache& cache, int32_t slot, int row_bytes,
                                               int scale_bytes) {
  if (slot < 0 || slot >= cache.num_blocks * cache.page_size) return {nullptr, nullptr};
  const auto page_size = static_cast<uint32_t>(cache.page_size);  // at most the number of slots
  const uint32_t block = static_cast<uint32_t>(slot) / page_size;
  const int64_t offset = static_cast<uint32_t>(slot) % page_size;
  uint8_t* const start = cache.data + block * cache.block_bytes;
  return {start + offset * row_bytes,
          start + cache.page_size * row_bytes + offset * scale_bytes};
}

// What the binding has not checked.
inline xla::ffi::Error CheckAppend(xla::ffi::AnyBuffer cache, xla::ffi::AnyBuffer keys,
                                   const Slots& slots, std::string_view format, int64_t page_size,
                                   xla::ffi::Result<xla::ffi::AnyBuffer> out) {
  const auto refuse = [](const std::string& what) {
    return xla::ffi::Error::InvalidArgument("jax_beam_attn_append_mla: " + what);
  };
  if (out->untyped_data() != cache.untyped_data()) return refuse("the result is not the cache");
  if (keys.element_type() != xla::ffi::F32 && keys.element_type() != xla::ffi::BF16) {
    return refuse("keys are neither F32 nor BF16");
  }
  const auto shape = keys.dimensions();
  if (shape.size() != 2 || shape[0] != static_cast<int64_t>(slots.element_count())) {
    return refuse("expected as many keys [N, Dqk] as slots");
  }
  int64_t head_dim = shape[1], token_bytes = 2 * head_dim;
  if (format == "v32") {
    head_dim = V32::kQuantizedDim + kRopeDim;
    token_bytes = V32::kRowBytes;
  } else if (format == "model1") {
    head_dim = Model1::kQuantizedDim + kRopeDim;
    token_bytes = Model1::kRowBytes + Model1::kScaleBytes;
  } else if (format != "bf16" || head_dim % kRopeDim != 0) {
    return refuse("no keys of " + std::to_string(head_dim) + " in format " + std::string(format));
  }
  if (shape[1] != head_dim) {
    return refuse("keys are " + std::to_string(shape[1]) + " wide, expected " +
                  std::to_string(head_dim));
  }
  const auto num_blocks = cache.dimensions().front();
  const auto needed = num_blocks * page_size * token_bytes;
  if (page_size < 0 || num_blocks * page_size > INT32_MAX ||
      needed > static_cast<int64_t>(cache.size_bytes())) {
    return refuse("the cache has no " + std::to_string(num_blocks) + " blocks of " +
                  std::to_string(page_size) + " tokens");
  }
  return xla::ffi::Error::Success();
}

inline MlaCache CacheOf(xla::ffi::AnyBuffer out, int64_t page_size) {
  const auto num_blocks = out.dimensions().front();
  const auto bytes = static_cast<int64_t>(out.size_bytes());
  return {static_cast<uint8_t*>(out.untyped_data()), num_blocks, page_size,
          num_blocks ? bytes / num_blocks : 0};
}

}  // namespace jax_beam_attn
