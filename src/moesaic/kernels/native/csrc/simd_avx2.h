// AVX2 with FMA: 8 floats per vector.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace MOESAIC_ISA {

using Vec = __m256;
constexpr int64_t LANES = 8;
constexpr int TILE_ROWS = 4, TILE_COLUMNS = 3;  // 12 sums, 3 weights and a row in 16 registers
constexpr int WIDE_ROWS = 4, WIDE_COLUMNS = 3;
constexpr int64_t MANY_ROWS = 20;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec vmax(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec nearest(Vec x) { return _mm256_round_ps(x, 0x08); }
inline float first(Vec x) { return _mm256_cvtss_f32(x); }

inline Vec scale2(Vec x, Vec n) {  // x * 2^n
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}

inline Vec widen_even(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
inline Vec widen_odd(const uint16_t* p) {
    __m256i mask = _mm256_set1_epi32(int(0xffff0000u));
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask));
}

// A number of half precision.
inline float widen_half(uint16_t half) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))); }

inline Vec widen_int8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Lanes [from, to) of a, and the other lanes of b.
inline Vec inside(Vec a, Vec b, int64_t from, int64_t to) {
    __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(from)), lanes);
    __m256i in = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(int(to)), lanes));
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(in));
}

// Stores a[0], b[0], a[1], b[1], ...
inline void store_in_turn(float* p, Vec a, Vec b) {
    Vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    store(p, _mm256_permute2f128_ps(low, high, 0x20)), store(p + LANES, _mm256_permute2f128_ps(low, high, 0x31));
}

inline void load_in_turn(const float* p, Vec& a, Vec& b) {
    Vec one = load(p), other = load(p + LANES);
    Vec low = _mm256_permute2f128_ps(one, other, 0x20), high = _mm256_permute2f128_ps(one, other, 0x31);
    a = _mm256_shuffle_ps(low, high, 0x88), b = _mm256_shuffle_ps(low, high, 0xdd);
}

MOESAIC_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
MOESAIC_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// Writes the totals of four vectors to out[0..3].
inline void totals4(const Vec* x, float* out) {
    __m256 c = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
}

MOESAIC_INLINE void totals8(const Vec* x, float* out) { totals4(x, out), totals4(x + 4, out + 4); }

constexpr int64_t folded_lane(int64_t n) { return n; }  // see simd_avx512.h

// x[i] lane j <-> x[j] lane i
MOESAIC_INLINE void transpose(Vec (&x)[LANES]) {
    Vec y[LANES];
    MOESAIC_UNROLL for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    MOESAIC_UNROLL for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 2; j++) {
            __m256d a = _mm256_castps_pd(y[i + j]), b = _mm256_castps_pd(y[i + 2 + j]);
            x[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            x[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    }
    MOESAIC_UNROLL for (int i = 0; i < 4; i++) {
        Vec a = x[i], b = x[4 + i];
        x[i] = _mm256_permute2f128_ps(a, b, 0x20), x[4 + i] = _mm256_permute2f128_ps(a, b, 0x31);
    }
}

}  // namespace MOESAIC_ISA
