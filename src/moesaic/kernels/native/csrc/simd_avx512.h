// AVX-512 (F and BW): 16 floats per vector.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace MOESAIC_ISA {

using Vec = __m512;
constexpr int64_t LANES = 16;
constexpr int TILE_ROWS = 6, TILE_COLUMNS = 4;  // 24 sums, 4 weights and a row in 32 registers
constexpr int WIDE_ROWS = 4, WIDE_COLUMNS = 6;  // for multiply_near: as many sums, fewer rows
constexpr int64_t MANY_ROWS = 32;               // minimum number of rows for which multiply_near is faster

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec vmax(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec vmin(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, 0x08); }
inline float first(Vec x) { return _mm512_cvtss_f32(x); }

inline Vec scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }  // x * 2^n

inline Vec widen_even(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
inline Vec widen_odd(const uint16_t* p) {
    __m512i mask = _mm512_set1_epi32(int(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask));
}

inline Vec widen_int8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

#if defined(MOESAIC_AVX512_BF16)
// Rounds two vectors to one vector of bf16, to nearest even.
inline __m512i rounded(Vec low, Vec high) { return __m512i(_mm512_cvtne2ps_pbh(high, low)); }
#endif

// Lanes [from, to) of a, and the other lanes of b.
inline Vec inside(Vec a, Vec b, int64_t from, int64_t to) {
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 in = _mm512_cmpge_epi32_mask(lanes, _mm512_set1_epi32(int(from)));
    return _mm512_mask_mov_ps(b, _mm512_mask_cmplt_epi32_mask(in, lanes, _mm512_set1_epi32(int(to))), a);
}

// Stores a[0], b[0], a[1], b[1], ...
inline void store_in_turn(float* p, Vec a, Vec b) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    store(p, _mm512_permutex2var_ps(a, low, b)), store(p + LANES, _mm512_permutex2var_ps(a, high, b));
}

inline void load_in_turn(const float* p, Vec& a, Vec& b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    Vec low = load(p), high = load(p + LANES);
    a = _mm512_permutex2var_ps(low, even, high);
    b = _mm512_permutex2var_ps(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
}

MOESAIC_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
MOESAIC_INLINE void prefetch_l2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// A number of half precision.
inline float widen_half(uint16_t half) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))); }

inline __m256 fold512(Vec x) {
    __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(x), upper);
}

// Writes the totals of four vectors to out[0..3].
inline void totals4(const Vec* x, float* out) {
    __m256 a = _mm256_hadd_ps(fold512(x[0]), fold512(x[1]));
    __m256 b = _mm256_hadd_ps(fold512(x[2]), fold512(x[3]));
    __m256 c = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
}

// The same for eight vectors, with additions in the same order and half the instructions.
MOESAIC_INLINE void totals8(const Vec* x, float* out) {
    Vec half[4], quarter[2];
    for (int i = 0; i < 4; i++) {
        Vec a = x[2 * i], b = x[2 * i + 1];
        half[i] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 2; i++) {
        Vec a = half[2 * i], b = half[2 * i + 1];
        quarter[i] = add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    }
    Vec a = quarter[0], b = quarter[1];
    Vec e = add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
    Vec t = add(_mm512_shuffle_f32x4(e, e, 0x88), _mm512_shuffle_f32x4(e, e, 0xdd));
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(_mm512_castps512_ps256(t), order));
}

// The order in which `totals8` adds lanes: lane folded_lane(0) is added to the next one, two such sums to each other,
// and so on.
constexpr int64_t folded_lane(int64_t n) { return n / 2 + n % 2 * (LANES / 2); }

// x[i] lane j <-> x[j] lane i
MOESAIC_INLINE void transpose(Vec (&x)[LANES]) {
    Vec y[LANES];
    MOESAIC_UNROLL for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    MOESAIC_UNROLL for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(y[i + j]), b = _mm512_castps_pd(y[i + 2 + j]);
            x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    MOESAIC_UNROLL for (int i = 0; i < LANES; i += 8) {
        for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_f32x4(x[i + j], x[i + 4 + j], 0x88);
            y[i + 4 + j] = _mm512_shuffle_f32x4(x[i + j], x[i + 4 + j], 0xdd);
        }
    }
    MOESAIC_UNROLL for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0x88);
        x[8 + j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0xdd);
    }
}

}  // namespace MOESAIC_ISA
