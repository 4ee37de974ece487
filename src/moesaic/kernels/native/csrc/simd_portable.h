// For any CPU, with the vector extension of GCC and Clang: 4 floats per vector. A multiply-add rounds twice here,
// except on 64-bit ARM, which has a fused one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace MOESAIC_ISA {

typedef float Vec __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
constexpr int64_t LANES = 4;
constexpr int TILE_ROWS = 4, TILE_COLUMNS = 2;
constexpr int WIDE_ROWS = 4, WIDE_COLUMNS = 2;
constexpr int64_t MANY_ROWS = 20;

inline Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, 16);
    return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, 16); }
inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec zero() { return Vec{0, 0, 0, 0}; }
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
    return Vec(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
    return a * b + c;
#endif
}
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec divide(Vec a, Vec b) { return a / b; }
inline Vec vmax(Vec a, Vec b) {
    Vec out;
    for (int i = 0; i < 4; i++) out[i] = a[i] > b[i] ? a[i] : b[i];
    return out;
}
inline Vec vmin(Vec a, Vec b) {
    Vec out;
    for (int i = 0; i < 4; i++) out[i] = a[i] < b[i] ? a[i] : b[i];
    return out;
}
inline Vec nearest(Vec x) {
    Vec out;
    for (int i = 0; i < 4; i++) out[i] = std::nearbyintf(x[i]);
    return out;
}
inline float first(Vec x) { return x[0]; }

inline Vec scale2(Vec x, Vec n) {  // x * 2^n
    Bits power;
    for (int i = 0; i < 4; i++) power[i] = uint32_t(int32_t(n[i] == n[i] ? n[i] : 0) + 127) << 23;
    Vec scale;
    std::memcpy(&scale, &power, 16);
    return x * scale;
}

inline Vec widen_even(const uint16_t* p) {
    Bits raw;
    std::memcpy(&raw, p, 16);
    raw = raw << 16;
    Vec x;
    std::memcpy(&x, &raw, 16);
    return x;
}
inline Vec widen_odd(const uint16_t* p) {
    Bits raw;
    std::memcpy(&raw, p, 16);
    raw = raw & 0xffff0000u;
    Vec x;
    std::memcpy(&x, &raw, 16);
    return x;
}

// A number of half precision.
inline float widen_half(uint16_t half) {
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    float magnitude = std::ldexp(float(mantissa + (exponent > 0 ? 1024 : 0)), std::max(exponent, 1) - 25);
    if (exponent == 31) magnitude = mantissa > 0 ? NAN : INFINITY;
    return half & 0x8000 ? -magnitude : magnitude;
}
inline Vec widen_int8(const int8_t* p) { return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }

// Lanes [from, to) of a, and the other lanes of b.
inline Vec inside(Vec a, Vec b, int64_t from, int64_t to) {
    for (int64_t i = 0; i < LANES; i++) b[i] = i >= from && i < to ? a[i] : b[i];
    return b;
}

// Stores a[0], b[0], a[1], b[1], ...
inline void store_in_turn(float* p, Vec a, Vec b) {
    store(p, Vec{a[0], b[0], a[1], b[1]}), store(p + LANES, Vec{a[2], b[2], a[3], b[3]});
}

inline void load_in_turn(const float* p, Vec& a, Vec& b) {
    Vec one = load(p), other = load(p + LANES);
    a = Vec{one[0], one[2], other[0], other[2]}, b = Vec{one[1], one[3], other[1], other[3]};
}

MOESAIC_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
MOESAIC_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p); }

// Writes the totals of four vectors to out[0..3].
inline void totals4(const Vec* x, float* out) {
    for (int i = 0; i < 4; i++) out[i] = (x[i][0] + x[i][1]) + (x[i][2] + x[i][3]);
}

MOESAIC_INLINE void totals8(const Vec* x, float* out) { totals4(x, out), totals4(x + 4, out + 4); }

constexpr int64_t folded_lane(int64_t n) { return n; }  // see simd_avx512.h

// x[i] lane j <-> x[j] lane i
inline void transpose(Vec (&x)[LANES]) {
    for (int i = 0; i < LANES; i++) {
        for (int j = 0; j < i; j++) {
            float one = x[i][j];
            x[i][j] = x[j][i], x[j][i] = one;
        }
    }
}

}  // namespace MOESAIC_ISA
