// Quantised weights: numbers of 4 or 8 bits, with a scale for each group of a row and in some types an offset.
//
//   number = scale * value, or scale * value + offset; each operation rounds once
//
// A row is stored in blocks of BLOCK numbers; the last one is shorter. A block is the scales of its groups (float32),
// their offsets if the type has them (float32), and the codes, padded to whole groups. Codes of eight bits are in order.
// With codes of four bits, 32 numbers take 16 bytes: the low half of byte i is number i, the high half number 16 + i.
// kernels/quantized_layout.py writes this layout, and core/weight_types.py says which types there are.
#pragma once

#include <cmath>
#include <type_traits>

#include "simd.h"
#include "table.h"

namespace MOESAIC_ISA {

enum class Values { kE4M3, kInt8, kUint8, kInt4, kUint4, kE2M1, kUneven };  // what a code means

template <Values kOf, int64_t kGroupSize, bool kOffset>
struct Quantized {
    uint8_t byte;
    static constexpr Values kValues = kOf;
    static constexpr int64_t kGroup = kGroupSize;  // numbers with the same scale
    static constexpr bool kHasOffset = kOffset;
    static constexpr bool kNibbles = kOf == Values::kInt4 || kOf == Values::kUint4 || kOf == Values::kE2M1 ||
                                      kOf == Values::kUneven;
    static constexpr int64_t kHead = kOffset ? 8 : 4;  // bytes of a group's scale and offset
    static constexpr int64_t kCodes = kNibbles ? kGroup / 2 : kGroup;
    static constexpr int64_t bytes(int64_t numbers) {  // of a row
        int64_t groups = numbers / BLOCK * (BLOCK / kGroup) + (numbers % BLOCK + kGroup - 1) / kGroup;
        return groups * (kHead + kCodes);
    }
};

using Fp8 = Quantized<Values::kE4M3, 128, false>;
using Int8 = Quantized<Values::kInt8, 32, false>;
using Int8Offset = Quantized<Values::kUint8, 32, true>;
using Int4 = Quantized<Values::kInt4, 32, false>;
using Int4Offset = Quantized<Values::kUint4, 32, true>;
using Mxfp4 = Quantized<Values::kE2M1, 32, false>;
using Int8Of16 = Quantized<Values::kInt8, 16, false>;
using Uneven4 = Quantized<Values::kUneven, 32, false>;  // only of blocks (blocks.h) while they are multiplied
using Int8Of16Offset = Quantized<Values::kUint8, 16, true>;

template <Values kOf, int64_t kGroupSize, bool kOffset>
constexpr bool kQuantized<Quantized<kOf, kGroupSize, kOffset>> = true;

// Values of the codes of four bits. Those of E2M1 are doubled, and their scale is halved: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
template <Values kOf>
struct Nibble {
    static constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
template <>
struct Nibble<Values::kInt4> {
    static constexpr int8_t kTable[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
};
template <>
struct Nibble<Values::kE2M1> {
    static constexpr int8_t kTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
};

// Codes of IQ4_NL and IQ4_XS stand for these.
template <>
struct Nibble<Values::kUneven> {
    static constexpr int8_t kTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
};

// What the scale is multiplied by once, since `values` are smaller or larger by this power of two.
template <Values kOf>
constexpr float kUnit = kOf == Values::kE4M3 ? 256.0f : kOf == Values::kE2M1 ? 0.5f : 1.0f;

// The scale and the offset of one group, times kUnit.
struct Affine {
    Vec scale, offset;
};
template <class T>
MOESAIC_INLINE Affine affine(const uint8_t* head, int64_t groups, int64_t group) {
    float scale, offset = 0;
    std::memcpy(&scale, head + 4 * group, 4);
    if constexpr (T::kHasOffset) std::memcpy(&offset, head + 4 * (groups + group), 4);
    return {set1(scale * kUnit<T::kValues>), set1(offset)};
}
template <class T>
MOESAIC_INLINE Vec apply(const Affine& group, Vec value) {
    if constexpr (T::kHasOffset) return add(mul(value, group.scale), group.offset);
    return mul(value, group.scale);
}

// The first byte of code i of a group, or of two codes of four bits: of number i and of the one 16 before or after it.
template <class T>
MOESAIC_INLINE constexpr int64_t byte_of(int64_t i) {
    return T::kNibbles ? i / 32 * 16 + i % 16 : i;
}

// Sign, exponent and mantissa in the upper nine bits of a half-precision number. With the bits of a code of E4M3 this is
// 1 / kUnit of the code's number, if that is subnormal too.
constexpr int16_t kHalf = int16_t(0xbf80);

// Numbers of a group, as many as a vector has. codes: the first one's. high: the upper halves of bytes with two codes.
#if defined(MOESAIC_AVX512)
template <class T>
struct Dequantizer {
    Affine group;
    Vec numbers;  // of each code of four bits

    Dequantizer() = default;
    MOESAIC_INLINE explicit Dequantizer(const Affine& of) : group(of) {
        if constexpr (T::kNibbles) {
            __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<T::kValues>::kTable));
            numbers = apply<T>(group, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(table)));
        }
    }
    MOESAIC_INLINE Vec operator()(const uint8_t* codes, bool high) const {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
        if constexpr (T::kNibbles) {
            __m512i wide = _mm512_cvtepu8_epi32(bytes);
            return _mm512_permutexvar_ps(high ? _mm512_srli_epi32(wide, 4) : wide, numbers);  // reads four bits
        } else if constexpr (T::kValues == Values::kE4M3) {
            __m256i halves = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
            return apply<T>(group, _mm512_cvtph_ps(_mm256_and_si256(halves, _mm256_set1_epi16(kHalf))));
        } else if constexpr (T::kValues == Values::kInt8) {
            return apply<T>(group, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
        } else {
            return apply<T>(group, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
        }
    }
};

#elif defined(MOESAIC_AVX2)
template <class T>
struct Dequantizer {
    Affine group;

    Dequantizer() = default;
    MOESAIC_INLINE explicit Dequantizer(const Affine& of) : group(of) {}
    MOESAIC_INLINE Vec operator()(const uint8_t* codes, bool high) const {
        __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
        if constexpr (T::kValues == Values::kE4M3) {
            __m128i halves = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
            return apply<T>(group, _mm256_cvtph_ps(_mm_and_si128(halves, _mm_set1_epi16(kHalf))));
        }
        if constexpr (T::kNibbles) {
            bytes = _mm_and_si128(high ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
        }
        if constexpr (T::kValues == Values::kInt4) bytes = _mm_sub_epi8(bytes, _mm_set1_epi8(8));
        if constexpr (T::kValues == Values::kE2M1 || T::kValues == Values::kUneven) {
            __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<T::kValues>::kTable));
            bytes = _mm_shuffle_epi8(table, bytes);
        }
        __m256i wide = T::kValues == Values::kUint8 ? _mm256_cvtepu8_epi32(bytes) : _mm256_cvtepi8_epi32(bytes);
        return apply<T>(group, _mm256_cvtepi32_ps(wide));
    }
};

#else
template <class T>
struct Dequantizer {
    Affine group;

    Dequantizer() = default;
    explicit Dequantizer(const Affine& of) : group(of) {}
    static float value(uint8_t byte, bool high) {
        if constexpr (T::kNibbles) return float(Nibble<T::kValues>::kTable[byte >> (high ? 4 : 0) & 15]);
        if constexpr (T::kValues == Values::kInt8) return float(int8_t(byte));
        if constexpr (T::kValues == Values::kUint8) return float(byte);
        int exponent = byte >> 3 & 15, mantissa = byte & 7;
        float magnitude = exponent ? std::ldexp(float(8 + mantissa), exponent - 18) : std::ldexp(float(mantissa), -17);
        return byte & 0x80 ? -magnitude : magnitude;
    }
    Vec operator()(const uint8_t* codes, bool high) const {
        float values[LANES];
        for (int64_t at = 0; at < LANES; at++) values[at] = value(codes[at], high);
        return apply<T>(group, load(values));
    }
};
#endif

// The numbers of a group: number i and those after it, as many as a vector has.
template <class T>
struct GroupOf {
    Dequantizer<T> number;
    const uint8_t* codes;
    MOESAIC_INLINE Vec operator()(int64_t i) const { return number(codes + byte_of<T>(i), i % 32 >= 16); }
};

// The bytes of a block of a row.
template <class T>
struct BlockOf {
    static constexpr int64_t kNumbers = T::kGroup, kBytes = T::kHead + T::kCodes;  // of a group
    int64_t groups;
    const uint8_t *head, *codes;

    BlockOf() = default;
    BlockOf(const T* block, int64_t count)
        : groups((count + T::kGroup - 1) / T::kGroup),
          head(reinterpret_cast<const uint8_t*>(block)),
          codes(head + T::kHead * groups) {}
    MOESAIC_INLINE GroupOf<T> numbers(int64_t group) const {
        return {Dequantizer<T>(affine<T>(head, groups, group)), codes + group * T::kCodes};
    }
};

// Dequantises a block of `count` numbers to floats in order, and fills up the last chunk with finite numbers.
template <class T, std::enable_if_t<!kBlocks<T>, int> = 0>
inline void dequantize(const T* block, int64_t count, float* out) {
    BlockOf<T> of(block, count);
    int64_t i = 0;
    for (int64_t g = 0; g < of.groups; g++) {
        GroupOf<T> numbers = of.numbers(g);
        MOESAIC_UNROLL for (int64_t in = 0; in < T::kGroup; in += LANES, i += LANES) store(out + i, numbers(in));
    }
    for (; i < padded(count); i += LANES) store(out + i, zero());
}

}  // namespace MOESAIC_ISA
