#include "append_mla.h"

#include <algorithm>

#include "abi.h"

namespace jax_beam_attn {
namespace {

template <typename T>
void WriteBf16(const T* key, int64_t count, uint8_t* bytes) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t value = ToBf16(ToFloat(key[i]));
    std::memcpy(bytes + 2 * i, &value, 2);
  }
}

template <typename Format, typename T>
void WriteQuantized(const T* key, Place place) {
  constexpr int kGroups = Format::kQuantizedDim / Format::kGroup;
  for (int group = 0; group < kGroups; ++group) {
    const T* const values = key + group * Format::kGroup;
    uint32_t amax = 0;
    for (int i = 0; i < Format::kGroup; ++i) amax = std::max(amax, SizeBits(ToFloat(values[i])));
    const Scale scale = ScaleOf<Format>(amax);
    uint8_t* const codes = place.row + group * Format::kGroup;
    for (int i = 0; i < Format::kGroup; ++i) codes[i] = ToE4m3(ToFloat(values[i]) / scale.divisor);
    if constexpr (Format::kScaleBytes == 0) {
      std::memcpy(place.row + Format::kQuantizedDim + 4 * group, &scale.stored, 4);
    } else {
      place.scales[group] = static_cast<uint8_t>(scale.stored);
    }
  }
  if constexpr (Format::kScaleBytes != 0) place.scales[kGroups] = 0;
  WriteBf16(key + Format::kQuantizedDim, kRopeDim, place.row + Format::kRopeByte);
}

template <typename T>
void AppendAll(const MlaCache& cache, const T* keys, int64_t head_dim, const Slots& slots,
               std::string_view format) {
  const auto append = [&](int row_bytes, int scale_bytes, auto write) {
    for (int64_t n = 0; n < static_cast<int64_t>(slots.element_count()); ++n) {
      const Place place = PlaceOf(cache, slots.typed_data()[n], row_bytes, scale_bytes);
      if (place.row != nullptr) write(keys + n * head_dim, place);
    }
  };
  if (format == "v32") {
    append(V32::kRowBytes, V32::kScaleBytes, WriteQuantized<V32, T>);
  } else if (format == "model1") {
    append(Model1::kRowBytes, Model1::kScaleBytes, WriteQuantized<Model1, T>);
  } else {
    append(static_cast<int>(2 * head_dim), 0,
           [&](const T* key, Place place) { WriteBf16(key, head_dim, place.row); });
  }
}

xla::ffi::Error Append(xla::ffi::AnyBuffer cache, xla::ffi::AnyBuffer keys, Slots slots,
                       std::string_view format, int64_t page_size,
                       xla::ffi::Result<xla::ffi::AnyBuffer> out) {
  auto error = CheckAppend(cache, keys, slots, format, page_size, out);
  if (error.failure()) return error;
  const MlaCache all = CacheOf(*out, page_size);
  const int64_t head_dim = keys.dimensions()[1];
  if (keys.element_type() == xla::ffi::F32) {
    AppendAll(all, static_cast<const float*>(keys.untyped_data()), head_dim, slots, format);
  } else {
    AppendAll(all, static_cast<const Bf16*>(keys.untyped_data()), head_dim, slots, format);
  }
  return xla::ffi::Error::Success();
}

}  // namespace
}  // namespace jax_beam_attn

JAX_BEAM_ATTN_HANDLER(jax_beam_attn_append_mla, jax_beam_attn::Append,
                      xla::ffi::Ffi::Bind()
                          .Arg<xla::ffi::AnyBuffer>()
                          .Arg<xla::ffi::AnyBuffer>()
                          .Arg<jax_beam_attn::Slots>()
                          .Attr<std::string_view>("format")
                          .Attr<int64_t>("page_size")
                          .Ret<xla::ffi::AnyBuffer>());
