// Rows that are rounded to int8, as integer products (integers.h) read them.
#pragma once

#include "int8.h"
#include "simd.h"

namespace MOESAIC_ISA {

constexpr int64_t kLine = 32;  // numbers of a row with the same scale

// A group of a row. It lies where a float row has the group's first 16 numbers.
struct Line {
    int8_t codes[kLine];
    float scale;
    int32_t sums[2];  // of each half of the codes
    float total;      // scale times the sum of all codes
    float unused[4];
};
static_assert(sizeof(Line) == 16 * sizeof(float));

// Rounds 32 numbers, divided by the scale of a line, to its codes. Vectors are rounded to the nearest, halves to the even.
#if defined(MOESAIC_AVX512)
MOESAIC_INLINE void round_numbers(const float* numbers, Line& line) {
    Vec scale = set1(line.scale);
    MOESAIC_UNROLL for (int half = 0; half < 2; half++) {
        __m512i codes = _mm512_cvtps_epi32(divide(load(numbers + 16 * half), scale));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(line.codes + 16 * half), _mm512_cvtepi32_epi8(codes));
        line.sums[half] = _mm512_reduce_add_epi32(codes);
    }
}
#else
MOESAIC_INLINE void round_numbers(const float* numbers, Line& line) {
    Vec scale = set1(line.scale);
    MOESAIC_UNROLL for (int half = 0; half < 2; half++) {
        __m256i first = _mm256_cvtps_epi32(divide(load(numbers + 16 * half), scale));
        __m256i second = _mm256_cvtps_epi32(divide(load(numbers + 16 * half + 8), scale));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
        __m128i low = _mm256_castsi256_si128(both), high = _mm256_extracti128_si256(both, 1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(line.codes + 16 * half), _mm_packs_epi16(low, high));
        __m128i sums = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
        sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
        line.sums[half] = _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
    }
}
#endif

// row [count] -> lines. A group with a NaN or an infinity gets a scale that is NaN.
inline void pack_integers(const float* row, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += kLine) {
        float padded[kLine];
        const float* numbers = row + i;
        if (count - i < kLine) {
            std::memset(padded, 0, sizeof padded), std::memcpy(padded, numbers, size_t(count - i) * 4);
            numbers = padded;
        }
        Line& line = *reinterpret_cast<Line*>(out + i);
        line.scale = scale_for(peak_of(numbers, kLine));
        if (line.scale > 0) {
            round_numbers(numbers, line);
        } else {
            std::memset(line.codes, 0, kLine), line.sums[0] = line.sums[1] = 0;
        }
        line.total = line.scale * float(line.sums[0] + line.sums[1]);
    }
}

}  // namespace MOESAIC_ISA
