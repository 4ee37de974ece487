// Vectors of bytes: the codes of weights as blocks store them (blocks.h), and how their bits are put together.
#pragma once

#include "simd.h"

#if defined(__AVX2__)
namespace MOESAIC_ISA {

#if defined(MOESAIC_AVX512)
using Bytes = __m512i;
MOESAIC_INLINE Bytes any_bytes(const void* p) { return _mm512_loadu_si512(p); }
MOESAIC_INLINE Bytes every(int32_t x) { return _mm512_set1_epi32(x); }
MOESAIC_INLINE Bytes every_byte(int x) { return _mm512_set1_epi8(char(x)); }
MOESAIC_INLINE Bytes masked(Bytes x, Bytes mask) { return _mm512_and_si512(x, mask); }
MOESAIC_INLINE Bytes add_bytes(Bytes x, Bytes y) { return _mm512_add_epi8(x, y); }
MOESAIC_INLINE Bytes high_half(Bytes x) { return masked(_mm512_srli_epi16(x, 4), every_byte(15)); }
// x with those bits of y that the mask has.
MOESAIC_INLINE Bytes with_bits(Bytes x, Bytes y, int mask) {
    return _mm512_ternarylogic_epi64(y, every_byte(mask), x, 0xea);  // (y & mask) | x
}
// What 16 bytes say for each code of four bits.
MOESAIC_INLINE Bytes look_up(__m128i table, Bytes codes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}
// The same 32 bytes twice.
MOESAIC_INLINE Bytes twice(const uint8_t* p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Counts for the words of the first 32 bytes, and for those of the others.
MOESAIC_INLINE Bytes counts(int64_t first, int64_t second) {
    return _mm512_inserti64x4(_mm512_set1_epi64(first), _mm256_set1_epi64x(second), 1);
}

// The codes of half a block of Q6_K, which are 32 more than the numbers. The two upper bits of the numbers i, 32 + i,
// 64 + i and 96 + i are a byte.
MOESAIC_INLINE void load_six_bits(const uint8_t* block, int64_t half, Bytes (&codes)[2]) {
    Bytes both = any_bytes(block + 64 * half), top = twice(block + 128 + 32 * half);
    codes[0] = with_bits(masked(both, every_byte(15)), _mm512_sllv_epi64(top, counts(4, 2)), 48);
    codes[1] = with_bits(high_half(both), _mm512_srlv_epi64(top, counts(0, 2)), 48);
}
#else
using Bytes = __m256i;
MOESAIC_INLINE Bytes any_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
MOESAIC_INLINE Bytes every(int32_t x) { return _mm256_set1_epi32(x); }
MOESAIC_INLINE Bytes every_byte(int x) { return _mm256_set1_epi8(char(x)); }
MOESAIC_INLINE Bytes masked(Bytes x, Bytes mask) { return _mm256_and_si256(x, mask); }
MOESAIC_INLINE Bytes add_bytes(Bytes x, Bytes y) { return _mm256_add_epi8(x, y); }
MOESAIC_INLINE Bytes high_half(Bytes x) { return masked(_mm256_srli_epi16(x, 4), every_byte(15)); }
MOESAIC_INLINE Bytes with_bits(Bytes x, Bytes y, int mask) { return _mm256_or_si256(x, masked(y, every_byte(mask))); }
MOESAIC_INLINE Bytes look_up(__m128i table, Bytes codes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
// The same 16 bytes twice.
MOESAIC_INLINE Bytes twice(const uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Counts for the words of the first 16 bytes, and for those of the others.
MOESAIC_INLINE Bytes counts(int64_t first, int64_t second) { return _mm256_setr_epi64x(first, first, second, second); }
#endif

MOESAIC_INLINE Bytes low_half(Bytes x) { return masked(x, every_byte(15)); }

}  // namespace MOESAIC_ISA
#endif
