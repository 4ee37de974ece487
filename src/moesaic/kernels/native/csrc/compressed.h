// bf16 weights in 12 bits per number, without loss: their layout in memory, and how they are decompressed.
//
// A row is stored in blocks of BLOCK numbers; the last one is shorter. A block is a head of HEAD bytes and groups of
// GROUP numbers. Exponents of neighbouring weights are close together, so each is a code of four bits. A code
// c < WINDOW is the head's exponent minus c, ZERO is the exponent 0, and STRANGE marks a number that the head stores
// completely.
//   head:  exponent, number of strange numbers, two zeros; then for each its index in the block and its bits, 16 bits
//          each
//   group: sign and mantissa of every number, one byte each; then the codes, two per byte
// In a group, byte 16 j + i belongs to number 8 j + i, or to 32 + 8 j + i - 8 if i >= 8. Thus unpacking vectors of
// bytes within lanes of 16 yields consecutive numbers. The low four bits of code byte q belong to byte q, the high ones
// to byte q + 32. kernels/compressed_layout.py writes this format. DFloat11 (Zhang et al. 2025) observed that exponents of
// trained weights need few bits; its codes have lengths by frequency.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include "simd.h"

namespace MOESAIC_ISA {

constexpr int64_t HEAD = 64, GROUP = 64, GROUP_BYTES = GROUP + GROUP / 2;
constexpr int WINDOW = 14, ZERO = 14, MOST_STRANGE = 15;

// One byte of compressed weights. Rows are packed for them as for bf16 weights.
struct Compressed {
    uint8_t byte;
};
template <>
struct Form<Compressed> {
    using Row = Form<Narrow>::Row;
};
template <>
constexpr bool kInOrder<Compressed> = kInOrder<Narrow>;
template <>
inline void pack<Compressed>(const float* row, int64_t count, RowOf<Compressed>* out) {
    pack<Narrow>(row, count, out);
}

template <>
constexpr int64_t span<Compressed>(int64_t numbers) {
    int64_t rest = numbers % BLOCK;
    return numbers / BLOCK * (HEAD + BLOCK / GROUP * GROUP_BYTES) +
           (rest > 0 ? HEAD + (rest + GROUP - 1) / GROUP * GROUP_BYTES : 0);
}

#if defined(MOESAIC_AVX512) || defined(MOESAIC_AVX2)
// By code, the exponent's bits in the upper and in the lower byte of a bf16 number.
struct Exponents {
    __m128i upper, lower;

    explicit Exponents(uint8_t largest) {
        const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0, 0);
        const __m128i window = _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 0);
        __m128i exponents = _mm_and_si128(_mm_sub_epi8(_mm_set1_epi8(char(largest)), codes), window);
        upper = _mm_and_si128(_mm_srli_epi16(exponents, 1), _mm_set1_epi8(0x7f));
        lower = _mm_and_si128(_mm_slli_epi16(exponents, 7), _mm_set1_epi8(char(0x80)));
    }
};
#endif

// Decompresses groups to bf16 numbers in order, one vector at a time.
#if defined(MOESAIC_AVX512)
struct Decoder {
    __m512i upper, lower;

    explicit Decoder(uint8_t largest) {
        Exponents of(largest);
        upper = _mm512_broadcast_i32x4(of.upper), lower = _mm512_broadcast_i32x4(of.lower);
    }

    // Calls use(index of the first number, vector of 32 numbers).
    template <class Use>
    MOESAIC_INLINE void group(const uint8_t* p, const Use& use) const {
        const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        const __m512i sign = _mm512_set1_epi8(char(0x80)), four = _mm512_set1_epi8(0x0f);
        __m512i numbers = _mm512_loadu_si512(p);
        __m512i codes = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + GROUP)));
        codes = _mm512_and_si512(_mm512_srlv_epi16(codes, shifts), four);
        // (numbers & sign) | upper table; (numbers & ~sign) | lower table
        __m512i high = _mm512_ternarylogic_epi32(numbers, sign, _mm512_shuffle_epi8(upper, codes), 0xea);
        __m512i low = _mm512_ternarylogic_epi32(numbers, sign, _mm512_shuffle_epi8(lower, codes), 0xba);
        use(0, _mm512_unpacklo_epi8(low, high));
        use(32, _mm512_unpackhi_epi8(low, high));
    }
};

inline void put(__m512i numbers, float* out) {  // in the order of `widen`
    store(out, _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16)));
    store(out + LANES, _mm512_castsi512_ps(_mm512_and_si512(numbers, _mm512_set1_epi32(int(0xffff0000u)))));
}
inline void put(__m512i numbers, bf16* out) { _mm512_storeu_si512(out, numbers); }

#elif defined(MOESAIC_AVX2)
struct Decoder {
    __m256i upper, lower;

    explicit Decoder(uint8_t largest) {
        Exponents of(largest);
        upper = _mm256_broadcastsi128_si256(of.upper), lower = _mm256_broadcastsi128_si256(of.lower);
    }

    // Calls use(index of the first number, vector of 16 numbers).
    template <class Use>
    MOESAIC_INLINE void group(const uint8_t* p, const Use& use) const {
        const __m256i sign = _mm256_set1_epi8(char(0x80)), four = _mm256_set1_epi8(0x0f);
        __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + GROUP));
        for (int half = 0; half < 2; half++) {
            __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
            __m256i codes = _mm256_and_si256(half == 0 ? both : _mm256_srli_epi16(both, 4), four);
            __m256i high = _mm256_or_si256(_mm256_and_si256(numbers, sign), _mm256_shuffle_epi8(upper, codes));
            __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, numbers), _mm256_shuffle_epi8(lower, codes));
            use(16 * half, _mm256_unpacklo_epi8(low, high));
            use(32 + 16 * half, _mm256_unpackhi_epi8(low, high));
        }
    }
};

inline void put(__m256i numbers, bf16* out) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), numbers); }
inline void put(__m256i numbers, float* out) {
    store(out, _mm256_castsi256_ps(_mm256_slli_epi32(numbers, 16)));
    store(out + LANES, _mm256_castsi256_ps(_mm256_and_si256(numbers, _mm256_set1_epi32(int(0xffff0000u)))));
}

#else
struct Decoder {
    uint8_t largest;

    explicit Decoder(uint8_t of) : largest(of) {}

    // Calls use(index of the first number, a chunk of numbers).
    template <class Use>
    void group(const uint8_t* p, const Use& use) const {
        bf16 numbers[GROUP];
        for (int64_t byte = 0; byte < GROUP; byte++) {
            int64_t number = byte / 16 * 8 + byte % 8 + byte % 16 / 8 * 32;
            int code = p[GROUP + byte % 32] >> (byte / 32 * 4) & 0x0f;
            int exponent = code < WINDOW ? uint8_t(largest - code) : 0;
            numbers[number].bits = uint16_t((p[byte] & 0x80) << 8 | exponent << 7 | (p[byte] & 0x7f));
        }
        for (int64_t i = 0; i < GROUP; i += CHUNK) use(i, numbers + i);
    }
};

inline void put(const bf16* numbers, bf16* out) { std::memcpy(out, numbers, CHUNK * sizeof(bf16)); }
inline void put(const bf16* numbers, float* out) { store(out, low(numbers)), store(out + LANES, high(numbers)); }
#endif

// Writes the strange numbers of a block to their places.
template <class Near>
inline void put_strange(const uint8_t* head, Near* out) {
    for (int i = 0; i < std::min<int>(head[1], MOST_STRANGE); i++) {
        uint16_t strange[2];
        std::memcpy(strange, head + 4 + 4 * i, 4);
        strange[0] %= BLOCK;  // a damaged file cannot cause a write outside the block
        if constexpr (std::is_same_v<Near, float>) {
            out[place<bf16>(strange[0])] = widen(bf16{strange[1]});
        } else {
            out[strange[0]].bits = strange[1];
        }
    }
}

// Decompresses C blocks of `count` numbers each: to floats in the order of `widen`, or to bf16 if Near is bf16. The
// last group is filled up with zeros. Blocks are ld apart, results `stride`. Calls `passing` for every group.
template <int C, class Near, class Passing>
inline void decompress(const Compressed* blocks, int64_t ld, int64_t count, Near* out, int64_t stride,
                       const Passing& passing) {
    const uint8_t* at = reinterpret_cast<const uint8_t*>(blocks);
    auto decoders = [&](auto... c) { return std::array<Decoder, C>{Decoder(at[c * ld])...}; };
    const std::array<Decoder, C> decoder = [&] {
        if constexpr (C == 4) return decoders(0, 1, 2, 3);
        else return decoders(0);
    }();
    const uint8_t* group = at + HEAD;
    for (int64_t begin = 0; begin < count; begin += GROUP, group += GROUP_BYTES) {
        passing();
        MOESAIC_UNROLL for (int c = 0; c < C; c++) {
            Near* to = out + c * stride + begin;
            decoder[size_t(c)].group(group + c * ld, [&](int64_t first, auto numbers) { put(numbers, to + first); });
        }
    }
    for (int c = 0; c < C; c++) put_strange(at + c * ld, out + c * stride);
}

}  // namespace MOESAIC_ISA
