// The formats of MLA caches and the arithmetic of quantising into them, for host and device.
//
// Bytes equal those of `quantize` in jax_beam_attn/sparse_mla/cache.py, which spells the rounding
// out in the same integers: conversions in hardware differ in NaN and in subnormals.
#pragma once

#include <cstdint>

#include "floats.h"

namespace jax_beam_attn {

inline constexpr int kRopeDim = 64;

// 512 e4m3, four f32 scales, 64 bf16: all in the token's row.
struct V32 {
  static constexpr int kQuantizedDim = 512, kGroup = 128;
  static constexpr int kRowBytes = 656, kRopeByte = 528, kScaleBytes = 0;
};

// 448 e4m3, 64 bf16; behind all rows of the block seven e8m0 scales and a pad byte for each token.
struct Model1 {
  static constexpr int kQuantizedDim = 448, kGroup = 64;
  static constexpr int kRowBytes = 576, kRopeByte = 448, kScaleBytes = 8;
};

inline constexpr uint32_t kSmallestAmax = 0x38d1b717;  // the bits of 1e-4

// What is stored of a group's scale, and what its values are divided by.
struct Scale {
  uint32_t stored;  // v32: the bits of the f32; model1: the e8m0 byte
  float divisor;
};

// From the bits of the group's largest |x|.
template <typename Format>
JAX_BEAM_ATTN_HOST_DEVICE inline Scale ScaleOf(uint32_t amax) {
  amax = amax < kSmallestAmax ? kSmallestAmax : amax;
  constexpr float kInverse = static_cast<float>(1.0 / 448.0);
  uint32_t bits = amax > kInfinity ? kQuietNan : Bits(FromBits(amax) * kInverse);
  if constexpr (Format::kScaleBytes == 0) return {bits, FromBits(bits)};
  uint32_t exponent = (bits + 0x7fffff) >> 23;  // rounded up unless the mantissa is 0
  exponent = exponent < 255 ? exponent : 255;   // which stands for NaN
  return {exponent, FromBits(exponent << 23)};
}

}  // namespace jax_beam_attn
