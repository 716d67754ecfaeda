// The formats of MLA caches and the arithmetic of quantising into them, for host and device.
//
// Bytes equal those of `quantize` in jax_beam_attn/sparse_mla/cache.py, which spells the rounding
// out in the same integers: conversions in hardware differ in NaN and in subnormals.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAX_BEAM_ATTN_HOST_DEVICE __host__ __device__
#else
#define JAX_BEAM_ATTN_HOST_DEVICE
#endif

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

JAX_BEAM_ATTN_HOST_DEVICE inline uint32_t Bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

JAX_BEAM_ATTN_HOST_DEVICE inline float FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Elements of keys as f32: a bf16 is the upper half of one.
struct Bf16 {
  uint16_t bits;
};
JAX_BEAM_ATTN_HOST_DEVICE inline float ToFloat(float x) { return x; }
JAX_BEAM_ATTN_HOST_DEVICE inline float ToFloat(Bf16 x) {
  return FromBits(static_cast<uint32_t>(x.bits) << 16);
}

// Sizes are compared as integers: their order is that of the numbers, with NaN above infinity.
inline constexpr uint32_t kSmallestAmax = 0x38d1b717;  // 1e-4
inline constexpr uint32_t kInfinity = 0x7f800000, kQuietNan = 0x7fc00000;
JAX_BEAM_ATTN_HOST_DEVICE inline uint32_t SizeBits(float x) { return Bits(x) & 0x7fffffff; }

// Adds what makes cutting off the lower bits round to nearest, ties to even.
JAX_BEAM_ATTN_HOST_DEVICE inline uint32_t RoundAwayBits(uint32_t bits, int shift) {
  return (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift;
}

JAX_BEAM_ATTN_HOST_DEVICE inline uint16_t ToBf16(float x) {
  return SizeBits(x) > kInfinity ? kQuietNan >> 16 : RoundAwayBits(Bits(x), 16);
}

// Saturates at 448, the largest e4m3.
JAX_BEAM_ATTN_HOST_DEVICE inline uint8_t ToE4m3(float x) {
  constexpr uint32_t kNan = 0x7f, kLargest = 0x7e;
  constexpr uint32_t kLargestBits = 0x43e00000, kSmallestNormalBits = 0x3c800000;  // 448, 2**-6
  const uint32_t size = SizeBits(x), sign = Bits(x) >> 24 & 0x80;
  if (size > kInfinity) return kNan;
  if (size >= kLargestBits) return sign | kLargest;
  // Three bits of mantissa are left, and the exponent's bias goes from 127 to 7.
  if (size >= kSmallestNormalBits) return sign | (RoundAwayBits(size, 20) - (120 << 3));
  // Subnormals count steps of 2**-9, which is the last bit of a float from 2**14 on.
  constexpr float kSteps = 16384.0f;
  return sign | (Bits(FromBits(size) + kSteps) - Bits(kSteps));
}

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
