// Blocks whose numbers are dequantised in registers as they are stored. Their codes are bytes, or halves of bytes. Those of
// Q6_K are put together for each half of a block.
//
// Few rows are bound by instructions as much as by memory. Unpacking takes about as many as dequantising, so products of few
// rows do without it. The bits of other types lie apart. Those are unpacked first (blocks.h), 32 bytes at a time.
#pragma once

#include "blocks.h"
#include "byte_vectors.h"

namespace MOESAIC_ISA {

template <class T>
constexpr bool kDirect = false;
constexpr int FEW_DIRECT = 4;  // rows; more of them share what is unpacked

#if defined(__AVX2__)
// Columns of a type whose blocks have one scale. Their codes begin `kAt` bytes behind their start, in the order of As.
template <class T, class As, int64_t kAt>
struct PlainBlocks {
    static constexpr int64_t kNumbers = T::kNumbers, kBytes = T::kBytes;
    int64_t groups;
    const uint8_t* first;

    PlainBlocks() = default;
    PlainBlocks(const T* blocks, int64_t count) : groups(count / kNumbers), first(&blocks->byte) {}
    MOESAIC_INLINE GroupOf<As> numbers(int64_t group) const {
        const uint8_t* block = first + group * kBytes;
        Affine affine{set1(T::scale_of(block) * kUnit<As::kValues>), set1(T::offset_of(block))};
        return {Dequantizer<As>(affine), block + kAt};
    }
};

template <class T>
struct DirectBlocks;

#if defined(MOESAIC_AVX512)
// The scales of a stretch of blocks that have factors for their groups, and the offsets.
template <class T>
struct Factors {
    static constexpr int64_t kMost = BLOCK / T::kGroup;
    float scales[kMost], offsets[T::As::kHasOffset ? kMost : 1];

    Factors() = default;
    MOESAIC_INLINE Factors(const uint8_t* block, int64_t count) {
        for (int64_t i = 0; i < count; i += T::kNumbers, block += T::kBytes) {
            put_scales_of<T>(block, scales + i / T::kGroup, offsets + i / T::kGroup);
        }
    }
};

// Two groups share 32 bytes: the low halves are one, the high ones the other.
template <>
struct DirectBlocks<Q4_K> {
    static constexpr int64_t kNumbers = 64, kBytes = 144 / 4;
    int64_t groups;
    const uint8_t* first;
    Factors<Q4_K> factors;

    struct Pair {
        Dequantizer<Int4Offset> low, high;
        const uint8_t* codes;
        MOESAIC_INLINE Vec operator()(int64_t i) const { return i < 32 ? low(codes + i, false) : high(codes + i - 32, true); }
    };
    DirectBlocks() = default;
    DirectBlocks(const Q4_K* blocks, int64_t count)
        : groups(count / kNumbers), first(&blocks->byte), factors(first, count) {}
    MOESAIC_INLINE Pair numbers(int64_t group) const {
        auto of = [&](int64_t i) MOESAIC_INLINE_LAMBDA {
            return Dequantizer<Int4Offset>({set1(factors.scales[i]), set1(factors.offsets[i])});
        };
        return {of(2 * group), of(2 * group + 1), first + group / 4 * Q4_K::kBytes + 16 + group % 4 * 32};
    }
};

// Codes of six bits are put together in L1, half a block at a time.
template <>
struct DirectBlocks<Q6_K> {
    static constexpr int64_t kNumbers = 128, kBytes = 210 / 2;
    int64_t groups;
    const uint8_t* first;
    Factors<Q6_K> factors;

    struct Half {
        alignas(64) int8_t codes[kNumbers];
        const float* scales;
        MOESAIC_INLINE Half(const uint8_t* block, int64_t half, const float* of_half) : scales(of_half) {
            Bytes of[2];
            load_six_bits(block, half, of);
            MOESAIC_UNROLL for (int v = 0; v < 2; v++) _mm512_store_si512(codes + 64 * v, add_bytes(of[v], every_byte(-32)));
        }
        MOESAIC_INLINE Vec operator()(int64_t i) const {
            __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(codes + i));
            return mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), set1(scales[i / 16]));
        }
    };
    DirectBlocks() = default;
    DirectBlocks(const Q6_K* blocks, int64_t count)
        : groups(count / kNumbers), first(&blocks->byte), factors(first, count) {}
    MOESAIC_INLINE Half numbers(int64_t group) const {
        return Half(first + group / 2 * Q6_K::kBytes, group % 2, factors.scales + 8 * group);
    }
};

template <>
struct DirectBlocks<Iq4Xs> {
    static constexpr int64_t kNumbers = 32, kBytes = 136 / 8;
    int64_t groups;
    const uint8_t* first;
    Factors<Iq4Xs> factors;

    DirectBlocks() = default;
    DirectBlocks(const Iq4Xs* blocks, int64_t count)
        : groups(count / kNumbers), first(&blocks->byte), factors(first, count) {}
    MOESAIC_INLINE GroupOf<Uneven4> numbers(int64_t group) const {
        return {Dequantizer<Uneven4>({set1(factors.scales[group]), zero()}),
                first + group / 8 * Iq4Xs::kBytes + 8 + group % 8 * 16};
    }
};
#endif

// The low half of a byte is a number, the high half the next one.
template <int64_t kNumbersOf>
struct DirectBlocks<Int4Group<kNumbersOf>> {
    using T = Int4Group<kNumbersOf>;
    static constexpr int64_t kNumbers = kNumbersOf, kBytes = T::kBytes;
    int64_t groups;
    const uint8_t* first;

    struct Group {
#if defined(MOESAIC_AVX512)
        Vec table;
        __m512i codes;
        Group() = default;
        MOESAIC_INLINE explicit Group(const uint8_t* block) {
            __m128i few = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<Values::kUint4>::kTable));
            __m512i integers = _mm512_sub_epi32(_mm512_cvtepi8_epi32(few), _mm512_set1_epi32(block[0] & 15));
            table = mul(_mm512_cvtepi32_ps(integers), set1(T::scale_of(block)));
            const uint8_t* p = block + T::kHead;
            if constexpr (kNumbers == 128) codes = _mm512_loadu_si512(p);
            else if constexpr (kNumbers == 64) codes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
            else codes = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        }
        MOESAIC_INLINE Vec operator()(int64_t i) const {
            const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            __m512i eights = _mm512_permutexvar_epi32(_mm512_add_epi32(halves, _mm512_set1_epi32(int(i / 8))), codes);
            return _mm512_permutexvar_ps(_mm512_srlv_epi32(eights, shifts), table);
        }
#else
        Vec scale;
        __m256i zero_point;
        const uint8_t* codes;
        Group() = default;
        MOESAIC_INLINE explicit Group(const uint8_t* block)
            : scale(set1(T::scale_of(block))), zero_point(_mm256_set1_epi32(block[0] & 15)), codes(block + T::kHead) {}
        MOESAIC_INLINE Vec operator()(int64_t i) const {
            const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            int32_t eight;
            std::memcpy(&eight, codes + i / 2, 4);
            __m256i halves = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts), _mm256_set1_epi32(15));
            return mul(_mm256_cvtepi32_ps(_mm256_sub_epi32(halves, zero_point)), scale);
        }
#endif
    };
    DirectBlocks() = default;
    DirectBlocks(const T* blocks, int64_t count) : groups(count / kNumbers), first(&blocks->byte) {}
    MOESAIC_INLINE Group numbers(int64_t group) const { return Group(first + group * kBytes); }
};

#define MOESAIC_PLAIN(T, As, at)                                     \
    template <>                                                      \
    struct DirectBlocks<T> : PlainBlocks<T, As, at> {                \
        using PlainBlocks<T, As, at>::PlainBlocks;                   \
    };
MOESAIC_PLAIN(Q8_0, Int8, 2)
MOESAIC_PLAIN(Q4_0, Int4, 2)
MOESAIC_PLAIN(Mxfp4Blocks, Mxfp4, 1)
MOESAIC_PLAIN(Int8By128, Int8, 3)
MOESAIC_PLAIN(Int8OffsetBy128, Int8Offset, 5)
#if defined(MOESAIC_AVX512)
MOESAIC_PLAIN(Iq4Nl, Uneven4, 2)
#endif
#undef MOESAIC_PLAIN

#define MOESAIC_IS_DIRECT(T)                                         \
    template <>                                                      \
    constexpr bool kDirect<T> = true;                                \
    template <>                                                      \
    struct BlockOf<T> : DirectBlocks<T> {                            \
        using DirectBlocks<T>::DirectBlocks;                         \
    };
MOESAIC_IS_DIRECT(Q8_0)
MOESAIC_IS_DIRECT(Q4_0)
MOESAIC_IS_DIRECT(Mxfp4Blocks)
MOESAIC_IS_DIRECT(Int4By128)
MOESAIC_IS_DIRECT(Int4By64)
MOESAIC_IS_DIRECT(Int4By32)
MOESAIC_IS_DIRECT(Int8By128)
MOESAIC_IS_DIRECT(Int8OffsetBy128)
#if defined(MOESAIC_AVX512)  // AVX2 takes about as long to look numbers of four bits up as to unpack them
MOESAIC_IS_DIRECT(Q4_K)
MOESAIC_IS_DIRECT(Q6_K)
MOESAIC_IS_DIRECT(Iq4Nl)
MOESAIC_IS_DIRECT(Iq4Xs)
#endif
#undef MOESAIC_IS_DIRECT
#endif

}  // namespace MOESAIC_ISA
