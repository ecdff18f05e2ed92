// expm1, exp and the other types of floats, with the bits of numerics/elementary.py and of torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// numerics/elementary.py: x = k * ln(2) + r, with k in the lowest bits of k_bits; returns expm1(r).
inline float reduce(float x, uint32_t& k_bits) {
    const float to_integer = 12582912.0f;  // 1.5 * 2^23, from which on float32 holds integers only
    const float shifted = x * 1.4426950408889634f + to_integer;
    const float k = shifted - to_integer;
    const float r = (x - k * (355.0f / 512.0f)) - k * static_cast<float>(0.6931471805599453 - 355.0 / 512.0);
    float series = r * (1.0f / 5040) + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    k_bits = to_bits(shifted);
    return r + r * r * series;
}

inline uint32_t power_of_two_bits(uint32_t k_bits) { return (k_bits + 127) << 23; }  // k from -126 on; 128 is infinity

inline float expm1_series(float x) {
    uint32_t k_bits;
    x = x < -50.0f ? -50.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float rest = reduce(x, k_bits);
    const uint32_t scale_bits = power_of_two_bits(k_bits);
    const float inverse = from_bits((254u << 23) - scale_bits);  // of infinity it is -infinity, and the result infinite
    return from_bits(scale_bits) * (rest + (1.0f - inverse));
}

inline float exp_series(float x) {
    uint32_t k_bits;
    x = x < -110.0f ? -110.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float rest = reduce(x, k_bits);
    const int k = static_cast<int>(k_bits << 16) >> 16;
    return (k < -126 ? std::ldexp(1.0f, k) : from_bits(power_of_two_bits(k_bits))) * (1.0f + rest);
}

inline float widen_bfloat16(uint16_t half) {
    return from_bits(static_cast<uint32_t>(half) << 16);
}

inline uint16_t round_to_bfloat16(float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

enum Type { FLOAT32, BFLOAT16, FLOAT16 };

void load(const void* values, int64_t type, int64_t first, int width, float* __restrict out) {
    if (type == FLOAT32) {
        const float* from = static_cast<const float*>(values) + first;
        std::copy(from, from + width, out);
    } else if (type == BFLOAT16) {
        const uint16_t* from = static_cast<const uint16_t*>(values) + first;
        for (int j = 0; j < width; ++j) out[j] = widen_bfloat16(from[j]);
    }
#ifdef __FLT16_MAX__
    if (type == FLOAT16) {
        const _Float16* from = static_cast<const _Float16*>(values) + first;
        for (int j = 0; j < width; ++j) out[j] = static_cast<float>(from[j]);
    }
#endif
}

void store(const float* values, int64_t type, int64_t first, int width, void* __restrict out) {
    if (type == FLOAT32) {
        std::copy(values, values + width, static_cast<float*>(out) + first);
    } else if (type == BFLOAT16) {
        uint16_t* to = static_cast<uint16_t*>(out) + first;
        for (int j = 0; j < width; ++j) to[j] = round_to_bfloat16(values[j]);
    }
#ifdef __FLT16_MAX__
    if (type == FLOAT16) {
        _Float16* to = static_cast<_Float16*>(out) + first;
        for (int j = 0; j < width; ++j) to[j] = static_cast<_Float16>(values[j]);
    }
#endif
}

}  // namespace
