#include "append_mla.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "abi.h"
#include "cuda/launch.h"

namespace jax_beam_attn {
namespace {

// A warp writes a token. XLA aligns buffers to more than 16 bytes, rows of keys are multiples of 16
// and those of caches of 8, so keys are read 16 bytes at a time and codes written 8 at a time.
constexpr int kWarp = 32, kTokensPerBlock = 4;
constexpr int kLaneValues = 16;  // consecutive ones, all of one group

__device__ void Load(const float* from, float (&values)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

__device__ void Load(const Bf16* from, float (&values)[kLaneValues]) {
#pragma unroll
  for (int i = 0; i < kLaneValues; i += 8) {
    const uint4 eight = *reinterpret_cast<const uint4*>(from + i);
    const uint32_t pairs[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[i + 2 * j] = FromBits(pairs[j] << 16);
      values[i + 2 * j + 1] = FromBits(pairs[j] & 0xffff0000);
    }
  }
}

template <typename T>
__device__ uint32_t TwoBf16(const T* two) {
  return static_cast<uint32_t>(ToBf16(ToFloat(two[1]))) << 16 | ToBf16(ToFloat(two[0]));
}

// Reads the key before it knows whether there is a slot for it: both take the same long time.
template <typename Format, typename T>
__device__ void WriteQuantized(const T* key, const MlaCache& cache, const int32_t* slot, int lane) {
  constexpr int kGroupLanes = Format::kGroup / kLaneValues;
  const bool active = lane * kLaneValues < Format::kQuantizedDim;
  float values[kLaneValues] = {};
  if (active) Load(key + lane * kLaneValues, values);
  const uint32_t rope = TwoBf16(key + Format::kQuantizedDim + 2 * lane);
  const Place place = PlaceOf(cache, *slot, Format::kRowBytes, Format::kScaleBytes);
  if (place.row == nullptr) return;

  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) amax = max(amax, SizeBits(values[i]));
#pragma unroll
  for (int distance = 1; distance < kGroupLanes; distance *= 2) {
    amax = max(amax, __shfl_xor_sync(~0u, amax, distance));
  }
  const Scale scale = ScaleOf<Format>(amax);
  if (active) {
#pragma unroll
    for (int i = 0; i < kLaneValues; i += 8) {
      uint32_t codes[2] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t code = ToE4m3(__fdiv_rn(values[i + j], scale.divisor));
        codes[j / 4] |= code << 8 * (j % 4);
      }
      *reinterpret_cast<uint2*>(place.row + lane * kLaneValues + i) = {codes[0], codes[1]};
    }
  }
  if (lane % kGroupLanes == 0) {
    const int group = lane / kGroupLanes;
    if constexpr (Format::kScaleBytes == 0) {
      *reinterpret_cast<uint32_t*>(place.row + Format::kQuantizedDim + 4 * group) = scale.stored;
    } else {
      place.scales[group] = active ? scale.stored : 0;  // the one behind the last is the pad byte
    }
  }
  *reinterpret_cast<uint32_t*>(place.row + Format::kRopeByte + 4 * lane) = rope;
}

template <typename T>
__device__ void WriteBf16(const T* key, int head_dim, const MlaCache& cache, const int32_t* slot,
                          int lane) {
  const Place place = PlaceOf(cache, *slot, 2 * head_dim, 0);
  if (place.row == nullptr) return;
  for (int i = 2 * lane; i < head_dim; i += 2 * kWarp) {
    *reinterpret_cast<uint32_t*>(place.row + 2 * i) = TwoBf16(key + i);
  }
}

// `Format` void stands for bf16.
template <typename Format, typename T>
__global__ void AppendTokens(MlaCache cache, const T* keys, int head_dim, const int32_t* slots,
                             int64_t count) {
  const int lane = threadIdx.x % kWarp;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokensPerBlock + threadIdx.x / kWarp;
  if (token >= count) return;
  const T* const key = keys + token * head_dim;
  if constexpr (std::is_void_v<Format>) {
    WriteBf16(key, head_dim, cache, slots + token, lane);
  } else {
    WriteQuantized<Format>(key, cache, slots + token, lane);
  }
}

template <typename T>
void Launch(cudaStream_t stream, const MlaCache& cache, const T* keys, int64_t head_dim,
            const Slots& slots, std::string_view format) {
  const auto count = static_cast<int64_t>(slots.element_count());
  const auto blocks = static_cast<unsigned>((count + kTokensPerBlock - 1) / kTokensPerBlock);
  const auto kernel = format == "v32"      ? AppendTokens<V32, T>
                      : format == "model1" ? AppendTokens<Model1, T>
                                           : AppendTokens<void, T>;
  kernel<<<blocks, kTokensPerBlock * kWarp, 0, stream>>>(cache, keys, static_cast<int>(head_dim),
                                                         slots.typed_data(), count);
}

xla::ffi::Error Append(cudaStream_t stream, xla::ffi::AnyBuffer cache, xla::ffi::AnyBuffer keys,
                       Slots slots, std::string_view format, int64_t page_size,
                       xla::ffi::Result<xla::ffi::AnyBuffer> out) {
  auto error = CheckAppend(cache, keys, slots, format, page_size, out);
  if (error.failure()) return error;
  if (slots.element_count() == 0) return error;  // an empty grid is a launch error
  const MlaCache all = CacheOf(*out, page_size);
  const int64_t head_dim = keys.dimensions()[1];
  if (keys.element_type() == xla::ffi::F32) {
    Launch(stream, all, static_cast<const float*>(keys.untyped_data()), head_dim, slots, format);
  } else {
    Launch(stream, all, static_cast<const Bf16*>(keys.untyped_data()), head_dim, slots, format);
  }
  return LaunchStatus("jax_beam_attn_append_mla");
}

}  // namespace
}  // namespace jax_beam_attn

JAX_BEAM_ATTN_HANDLER(jax_beam_attn_append_mla, jax_beam_attn::Append,
                      xla::ffi::Ffi::Bind()
                          .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                          .Arg<xla::ffi::AnyBuffer>()
                          .Arg<xla::ffi::AnyBuffer>()
                          .Arg<jax_beam_attn::Slots>()
                          .Attr<std::string_view>("format")
                          .Attr<int64_t>("page_size")
                          .Ret<xla::ffi::AnyBuffer>(),
                      {xla::ffi::Traits::kCmdBufferCompatible});
