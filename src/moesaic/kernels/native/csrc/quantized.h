// Quantised weights: numbers of 4 or 8 bits, with a scale for each group of a row and in some types an offset.
//
//   number = scale * value, or scale * value + offset; each operation rounds once
//
// A row is stored in blocks of BLOCK numbers; the last one is shorter. A block is the scales of its groups (float32),
// their offsets if the type has them (float32), and the codes, padded to whole groups. Codes of eight bits are in order.
// With codes of four bits, 32 numbers take 16 bytes: the low half of byte i is number i, the high half number 16 + i.
// kernels/quantized.py writes this layout, and core/stored.py says which types there are.
#pragma once

#include <cmath>

#include "simd.h"

namespace MOESAIC_ISA {

enum class Values { kE4M3, kInt8, kUint8, kInt4, kUint4, kE2M1 };  // what a code means

template <Values kOf, int64_t kGroupSize, bool kOffset>
struct Quantized {
    uint8_t byte;
    static constexpr Values kValues = kOf;
    static constexpr int64_t kGroup = kGroupSize;  // numbers with the same scale
    static constexpr bool kHasOffset = kOffset;
    static constexpr bool kNibbles = kOf == Values::kInt4 || kOf == Values::kUint4 || kOf == Values::kE2M1;
    static constexpr int64_t kHead = kOffset ? 8 : 4;  // bytes of a group's scale and offset
    static constexpr int64_t kCodes = kNibbles ? kGroup / 2 : kGroup;
};

using Fp8 = Quantized<Values::kE4M3, 128, false>;
using Int8 = Quantized<Values::kInt8, 32, false>;
using Int8Offset = Quantized<Values::kUint8, 32, true>;
using Int4 = Quantized<Values::kInt4, 32, false>;
using Int4Offset = Quantized<Values::kUint4, 32, true>;
using Mxfp4 = Quantized<Values::kE2M1, 32, false>;
using Int8Of16 = Quantized<Values::kInt8, 16, false>;

template <Values kOf, int64_t kGroupSize, bool kOffset>
constexpr bool kQuantized<Quantized<kOf, kGroupSize, kOffset>> = true;

template <class T>
constexpr int64_t quantized_bytes(int64_t numbers) {
    int64_t groups = numbers / BLOCK * (BLOCK / T::kGroup) + (numbers % BLOCK + T::kGroup - 1) / T::kGroup;
    return groups * (T::kHead + T::kCodes);
}

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

#if defined(MOESAIC_AVX512) || defined(MOESAIC_AVX2)
// Half-precision numbers with the sign, exponent and mantissa of 16 codes of E4M3. They are 1 / kUnit of the codes'
// numbers, subnormal ones included.
MOESAIC_INLINE __m256i halves_of(__m128i codes) {
    __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    return _mm256_and_si256(shifted, _mm256_set1_epi16(short(0xbf80)));
}
#endif

// `Decoder16` gives the numbers of one group, 16 at a time: use(index of the first number, vector). `half`: which 16 of
// the 32 numbers of 16 bytes of nibbles.
#if defined(MOESAIC_AVX512)
template <class T>
struct Decoder16 {
    Affine group;
    Vec numbers;  // of each code of four bits

    MOESAIC_INLINE explicit Decoder16(const Affine& of) : group(of) {
        if constexpr (T::kNibbles) {
            __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<T::kValues>::kTable));
            numbers = apply<T>(group, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(table)));
        }
    }
    template <class Use>
    MOESAIC_INLINE void operator()(const uint8_t* p, int half, const Use& use) const {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        if constexpr (T::kNibbles) {
            __m512i codes = _mm512_cvtepu8_epi32(bytes);
            use(0, _mm512_permutexvar_ps(half ? _mm512_srli_epi32(codes, 4) : codes, numbers));  // reads four bits
        } else if constexpr (T::kValues == Values::kE4M3) {
            use(0, apply<T>(group, _mm512_cvtph_ps(halves_of(bytes))));
        } else if constexpr (T::kValues == Values::kInt8) {
            use(0, apply<T>(group, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))));
        } else {
            use(0, apply<T>(group, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))));
        }
    }
};

#elif defined(MOESAIC_AVX2)
template <class T>
struct Decoder16 {
    Affine group;

    MOESAIC_INLINE explicit Decoder16(const Affine& of) : group(of) {}
    template <class Use>
    MOESAIC_INLINE void operator()(const uint8_t* p, int half, const Use& use) const {
        __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        if constexpr (T::kValues == Values::kE4M3) {
            __m256i both = halves_of(bytes);
            use(0, apply<T>(group, _mm256_cvtph_ps(_mm256_castsi256_si128(both))));
            use(8, apply<T>(group, _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1))));
            return;
        }
        if constexpr (T::kNibbles) {
            __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<T::kValues>::kTable));
            __m128i codes = _mm_and_si128(half ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
            bytes = _mm_shuffle_epi8(table, codes);
        }
        auto number = [&](__m128i eight) {
            __m256i wide = T::kValues == Values::kUint8 ? _mm256_cvtepu8_epi32(eight) : _mm256_cvtepi8_epi32(eight);
            return apply<T>(group, _mm256_cvtepi32_ps(wide));
        };
        use(0, number(bytes)), use(8, number(_mm_srli_si128(bytes, 8)));
    }
};

#else
template <class T>
struct Decoder16 {
    Affine group;

    explicit Decoder16(const Affine& of) : group(of) {}
    static float value(uint8_t byte, int half) {
        if constexpr (T::kNibbles) return float(Nibble<T::kValues>::kTable[byte >> (4 * half) & 15]);
        if constexpr (T::kValues == Values::kInt8) return float(int8_t(byte));
        if constexpr (T::kValues == Values::kUint8) return float(byte);
        int exponent = byte >> 3 & 15, mantissa = byte & 7;
        float magnitude = exponent ? std::ldexp(float(8 + mantissa), exponent - 18) : std::ldexp(float(mantissa), -17);
        return byte & 0x80 ? -magnitude : magnitude;
    }
    template <class Use>
    void operator()(const uint8_t* p, int half, const Use& use) const {
        float values[16];
        for (int i = 0; i < 16; i++) values[i] = value(p[i], half);
        for (int i = 0; i < 16; i += LANES) use(i, apply<T>(group, load(values + i)));
    }
};
#endif

// The bytes of a block of a row.
template <class T>
struct BlockOf {
    int64_t groups;
    const uint8_t *head, *codes;

    BlockOf() = default;
    BlockOf(const T* block, int64_t count)
        : groups((count + T::kGroup - 1) / T::kGroup),
          head(reinterpret_cast<const uint8_t*>(block)),
          codes(head + T::kHead * groups) {}
    MOESAIC_INLINE Decoder16<T> decoder(int64_t group) const { return Decoder16<T>(affine<T>(head, groups, group)); }
    MOESAIC_INLINE const uint8_t* at(int64_t number) const {
        return codes + (T::kNibbles ? number / 32 * 16 : number);
    }
};

// Dequantises a block of `count` numbers to floats in order, and fills up the last chunk with finite numbers.
template <class T>
inline void dequantize(const T* block, int64_t count, float* out) {
    BlockOf<T> of(block, count);
    int64_t i = 0;
    for (int64_t g = 0; g < of.groups; g++) {
        Decoder16<T> decode = of.decoder(g);
        MOESAIC_UNROLL for (int64_t in = 0; in < T::kGroup; in += 16, i += 16) {
            decode(of.at(i), int(in / 16 % 2), [&](int64_t first, Vec number) { store(out + i + first, number); });
        }
    }
    for (; i < padded(count); i += LANES) store(out + i, zero());
}

}  // namespace MOESAIC_ISA
