// Weights in blocks: ggml's, as GGUF files have them, and those that groups of GPTQ, AWQ and compressed-tensors are brought
// into. kernels/blocks.py reads the same, and says what a code means.
//
// A type says where the scales of its blocks are, and how a block becomes codes of four or eight bits with a scale for each
// group, and an offset in some types. `unpack` brings a stretch of a row into the layout of `As` (quantized.h), the type that
// holds the same numbers. All products are written for those types, and read what is unpacked from L1.
#pragma once

#include "quantized.h"

namespace MOESAIC_ISA {

MOESAIC_INLINE float half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return widen_half(half);
}

template <class AsType, int64_t kNumbersOf, int64_t kBytesOf, int64_t kScale = 0>
struct Blocks {
    uint8_t byte;
    using As = AsType;
    static constexpr Values kValues = As::kValues;
    static constexpr int64_t kGroup = As::kGroup;
    static constexpr int64_t kNumbers = kNumbersOf, kBytes = kBytesOf;  // of a block
    static constexpr int64_t kGroups = kNumbers / kGroup;               // of a block
    static constexpr int64_t bytes(int64_t numbers) { return (numbers + kNumbers - 1) / kNumbers * kBytes; }
    static MOESAIC_INLINE float scale_of(const uint8_t* block) { return half_at(block + kScale); }
    static MOESAIC_INLINE float offset_of(const uint8_t*) { return 0; }
};

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes32 __attribute__((vector_size(32)));

template <class V>
MOESAIC_INLINE V codes_at(const uint8_t* p) {
    V codes;
    std::memcpy(&codes, p, sizeof codes);
    return codes;
}
template <class V>
MOESAIC_INLINE void put_codes(uint8_t* p, const V& codes) { std::memcpy(p, &codes, sizeof codes); }

// Each byte shifted to the left, or by -kBy to the right. Bits of neighbours come in, which the caller masks.
template <int kBy, class V>
MOESAIC_INLINE V shifted(V x) {
    typedef uint64_t Words __attribute__((vector_size(sizeof(V))));
    if constexpr (kBy >= 0) return V(Words(x) << kBy);
    return V(Words(x) >> (kBy < 0 ? -kBy : 0));
}

// Calls use(integral constant) for 0 to kCount - 1.
template <int kCount, int i = 0, class Use>
MOESAIC_INLINE void unroll(const Use& use) {
    if constexpr (i < kCount) use(std::integral_constant<int, i>{}), unroll<kCount, i + 1>(use);
}

// A number times eight factors, which are integers of eight bits.
#if defined(__AVX2__)
template <bool kSigned>
MOESAIC_INLINE void multiply_eight(__m128i factors, float number, float* out) {
    __m256i wide = kSigned ? _mm256_cvtepi8_epi32(factors) : _mm256_cvtepu8_epi32(factors);
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(wide), _mm256_set1_ps(number)));
}
#endif
template <bool kSigned>
MOESAIC_INLINE void multiply_eight(uint64_t factors, float number, float* out) {
#if defined(__AVX2__)
    multiply_eight<kSigned>(_mm_cvtsi64_si128(int64_t(factors)), number, out);
#else
    for (int i = 0; i < 8; i++) {
        uint8_t factor = uint8_t(factors >> 8 * i);
        out[i] = (kSigned ? float(int8_t(factor)) : float(factor)) * number;
    }
#endif
}

constexpr uint64_t kLowHalves = 0x0f0f0f0f0f0f0f0fu;  // of bytes

// Subtracts 32 from eight bytes, which are less than 64 before.
MOESAIC_INLINE uint64_t subtract_32(uint64_t bytes) {
    constexpr uint64_t kSigns = 0x8080808080808080u;  // no subtraction borrows from the next byte
    return ((bytes | kSigns) - 0x2020202020202020u) ^ kSigns;
}

MOESAIC_INLINE uint64_t load_8_bytes(const uint8_t* p) {
    uint64_t bytes;
    std::memcpy(&bytes, p, 8);
    return bytes;
}

// 16 codes of four bits, replaced by what a table says.
MOESAIC_INLINE Bytes16 look_up(const int8_t (&table)[16], Bytes16 codes) {
#if defined(__AVX2__)
    __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return Bytes16(_mm_shuffle_epi8(numbers, __m128i(codes)));
#else
    for (int i = 0; i < 16; i++) codes[i] = uint8_t(table[codes[i]]);
    return codes;
#endif
}

// 16 for each set bit of two bytes, 0 for each other one.
MOESAIC_INLINE Bytes16 fifth_bits(const uint8_t* bits) {
    constexpr Bytes16 kBit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
#if defined(__AVX2__)
    uint16_t all_bits;
    std::memcpy(&all_bits, bits, 2);
    const __m128i places = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    Bytes16 bytes = Bytes16(_mm_shuffle_epi8(_mm_cvtsi32_si128(all_bits), places));
#else
    Bytes16 bytes;
    for (int i = 0; i < 16; i++) bytes[i] = bits[i / 8];
#endif
    return Bytes16((bytes & kBit) == kBit) & 16;
}

// A byte of `even`, then one of `odd`, and so on.
MOESAIC_INLINE void put_interleaved(Bytes16 even, Bytes16 odd, uint8_t* out) {
#if defined(__AVX2__)
    put_codes(out, Bytes16(_mm_unpacklo_epi8(__m128i(even), __m128i(odd))));
    put_codes(out + 16, Bytes16(_mm_unpackhi_epi8(__m128i(even), __m128i(odd))));
#else
    for (int i = 0; i < 16; i++) out[2 * i] = even[i], out[2 * i + 1] = odd[i];
#endif
}

struct Q8_0 : Blocks<Int8, 32, 34> {
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        put_codes(codes, codes_at<Bytes32>(block + 2));
    }
};

struct Q4_0 : Blocks<Int4, 32, 18> {
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) { std::memcpy(codes, block + 2, 16); }
};

struct Q4_1 : Blocks<Int4Offset, 32, 20> {
    static MOESAIC_INLINE float offset_of(const uint8_t* block) { return half_at(block + 2); }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) { std::memcpy(codes, block + 4, 16); }
};

struct Q5_0 : Blocks<Int8, 32, 22> {
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        Bytes16 halves = codes_at<Bytes16>(block + 6);
        put_codes(codes, ((halves & 15) | fifth_bits(block + 2)) - 16);
        put_codes(codes + 16, (halves >> 4 | fifth_bits(block + 4)) - 16);
    }
};

struct Q5_1 : Blocks<Int8Offset, 32, 24> {
    static MOESAIC_INLINE float offset_of(const uint8_t* block) { return half_at(block + 2); }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        Bytes16 halves = codes_at<Bytes16>(block + 8);
        put_codes(codes, (halves & 15) | fifth_bits(block + 4));
        put_codes(codes + 16, halves >> 4 | fifth_bits(block + 6));
    }
};

// What a table says for the low halves of 16 bytes, then for the high ones.
MOESAIC_INLINE void put_numbers(const int8_t (&table)[16], const uint8_t* from, uint8_t* codes) {
    Bytes16 halves = codes_at<Bytes16>(from);
    put_codes(codes, look_up(table, halves & 15)), put_codes(codes + 16, look_up(table, halves >> 4));
}

struct Iq4Nl : Blocks<Int8, 32, 18> {
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        put_numbers(Nibble<Values::kUneven>::kTable, block + 2, codes);
    }
};

// The bits of the numbers of MXFP4's exponents. They are halved where codes stand for doubled numbers. 255 stands for NaN.
template <bool kHalved>
struct PowersOfTwo {
    uint32_t bits[256] = {};
    constexpr PowersOfTwo() {
        for (int exponent = 0; exponent < 255; exponent++) {
            int power = exponent - (kHalved ? 1 : 0);
            bits[exponent] = power > 0 ? uint32_t(power) << 23 : uint32_t(1) << (22 + power);
        }
        bits[255] = 0x7fc00000u;
    }
};

template <bool kHalved>
MOESAIC_INLINE float power_of_two(uint8_t exponent) {
    static constexpr PowersOfTwo<kHalved> kPowers;
    float number;
    std::memcpy(&number, kPowers.bits + exponent, 4);
    return number;
}

struct Mxfp4Blocks : Blocks<Mxfp4, 32, 17> {
    static MOESAIC_INLINE float scale_of(const uint8_t* block) { return power_of_two<false>(block[0]); }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) { std::memcpy(codes, block + 1, 16); }
};

// The same as integers.
struct Mxfp4Integers : Blocks<Mxfp4, 32, 17> {
    static MOESAIC_INLINE float scale_of(const uint8_t* block) { return power_of_two<true>(block[0]); }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) { std::memcpy(codes, block + 1, 16); }
};

// Blocks of 256 numbers also say which multiples of the block's scale, and of its offset, those of their groups are.
// Factors of Q4_K and Q5_K: eight of six bits for scales, and as many for minima, in 12 bytes.
MOESAIC_INLINE void put_six_bits(const uint8_t* from, float scale, float minimum, float* scales, float* offsets) {
    // Four factors have their bits together. The others have four low bits in one place, and two top bits in another.
#if defined(__AVX2__)
    __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));  // the last four are codes
    __m128i low = _mm_srlv_epi32(_mm_shuffle_epi32(bytes, 0x98), _mm_setr_epi32(0, 0, 0, 4));
    __m128i top = _mm_srli_epi32(_mm_shuffle_epi32(bytes, 0x50), 2);
    low = _mm_and_si128(low, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    top = _mm_and_si128(top, _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
    __m128i factors = _mm_or_si128(low, top);
    multiply_eight<false>(factors, scale, scales);
    multiply_eight<false>(_mm_unpackhi_epi64(factors, factors), -minimum, offsets);
#else
    uint32_t low, middle, high;
    std::memcpy(&low, from, 4), std::memcpy(&middle, from + 4, 4), std::memcpy(&high, from + 8, 4);
    auto join_factors = [](uint64_t first_four, uint64_t low_bits, uint64_t top_bits) MOESAIC_INLINE_LAMBDA {
        return (first_four & 0x3f3f3f3fu) | ((low_bits & 0x0f0f0f0fu) | (top_bits >> 2 & 0x30303030u)) << 32;
    };
    uint64_t of_scales = join_factors(low, high, low), of_minima = join_factors(middle, high >> 4, middle);
    multiply_eight<false>(of_scales, scale, scales), multiply_eight<false>(of_minima, -minimum, offsets);
#endif
}

struct Q4_K : Blocks<Int4Offset, 256, 144> {
    static MOESAIC_INLINE float offset_of(const uint8_t* block) { return half_at(block + 2); }
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float minimum, float* scales, float* offsets) {
        put_six_bits(block + 4, scale, minimum, scales, offsets);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        unroll<4>([&](auto i) MOESAIC_INLINE_LAMBDA {  // the low halves of 32 bytes are a group, the high ones the next
            Bytes16 first = codes_at<Bytes16>(block + 16 + 32 * i), second = codes_at<Bytes16>(block + 32 + 32 * i);
            put_codes(codes + 32 * i, (first & 15) | (shifted<4>(second) & 0xf0));
            put_codes(codes + 32 * i + 16, (shifted<-4>(first) & 15) | (second & 0xf0));
        });
    }
};

struct Q5_K : Blocks<Int8Offset, 256, 176> {
    static MOESAIC_INLINE float offset_of(const uint8_t* block) { return half_at(block + 2); }
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float minimum, float* scales, float* offsets) {
        put_six_bits(block + 4, scale, minimum, scales, offsets);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        Bytes32 top_bits = codes_at<Bytes32>(block + 16);
        unroll<4>([&](auto i) MOESAIC_INLINE_LAMBDA {
            Bytes32 halves = codes_at<Bytes32>(block + 48 + 32 * i);
            put_codes(codes + 64 * i, (halves & 15) | (shifted<4 - 2 * i>(top_bits) & 16));
            put_codes(codes + 64 * i + 32, (shifted<-4>(halves) & 15) | (shifted<3 - 2 * i>(top_bits) & 16));
        });
    }
};

struct Q6_K : Blocks<Int8Of16, 256, 210, 208> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        multiply_eight<true>(load_8_bytes(block + 192), scale, scales);
        multiply_eight<true>(load_8_bytes(block + 200), scale, scales + 8);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int half = 0; half < 2; half++, codes += 128) {
            Bytes32 top_bits = codes_at<Bytes32>(block + 128 + 32 * half);
            unroll<2>([&](auto i) MOESAIC_INLINE_LAMBDA {
                Bytes32 halves = codes_at<Bytes32>(block + 64 * half + 32 * i);
                put_codes(codes + 32 * i, ((halves & 15) | (shifted<4 - 2 * i>(top_bits) & 48)) - 32);
                put_codes(codes + 64 + 32 * i, ((shifted<-4>(halves) & 15) | (shifted<-2 * i>(top_bits) & 48)) - 32);
            });
        }
    }
};

struct Q2_K : Blocks<Int8Of16Offset, 256, 84, 80> {
    static MOESAIC_INLINE float offset_of(const uint8_t* block) { return half_at(block + 82); }
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float minimum, float* scales, float* offsets) {
        MOESAIC_UNROLL for (int i = 0; i < 16; i += 8) {
            uint64_t halves = load_8_bytes(block + i), low = halves & kLowHalves, high = halves >> 4 & kLowHalves;
            multiply_eight<false>(low, scale, scales + i), multiply_eight<false>(high, -minimum, offsets + i);
        }
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int half = 0; half < 2; half++) {
            Bytes32 quarters = codes_at<Bytes32>(block + 16 + 32 * half);
            unroll<4>([&](auto i) MOESAIC_INLINE_LAMBDA {
                put_codes(codes + 128 * half + 32 * i, shifted<-2 * i>(quarters) & 3);
            });
        }
    }
};

struct Q3_K : Blocks<Int8Of16, 256, 110, 108> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        uint64_t low = load_8_bytes(block + 96);
        uint32_t top_bits;
        std::memcpy(&top_bits, block + 104, 4);
        MOESAIC_UNROLL for (int i = 0; i < 2; i++) {  // eight groups
            uint64_t first = top_bits >> 4 * i & 0x03030303u, second = top_bits >> (4 * i + 2) & 0x03030303u;
            uint64_t factors = (low >> 4 * i & kLowHalves) | (first | second << 32) << 4;
            multiply_eight<true>(subtract_32(factors), scale, scales + 8 * i);
        }
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        Bytes32 third_bits = codes_at<Bytes32>(block);
        unroll<2>([&](auto half) MOESAIC_INLINE_LAMBDA {
            Bytes32 quarters = codes_at<Bytes32>(block + 32 + 32 * half);
            unroll<4>([&](auto i) MOESAIC_INLINE_LAMBDA {
                Bytes32 top_bits = shifted<2 - 4 * half - i>(third_bits) & 4;
                put_codes(codes + 128 * half + 32 * i, ((shifted<-2 * i>(quarters) & 3) | top_bits) - 4);
            });
        });
    }
};

struct Iq4Xs : Blocks<Int8, 256, 136> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        uint16_t top_bits;
        uint32_t halves;
        std::memcpy(&top_bits, block + 2, 2), std::memcpy(&halves, block + 4, 4);
        uint64_t factors = 0;
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            factors |= uint64_t((halves >> 4 * i & 15) | (top_bits >> 2 * i & 3) << 4) << 8 * i;
        }
        multiply_eight<true>(subtract_32(factors), scale, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) put_numbers(Nibble<Values::kUneven>::kTable, block + 8 + 16 * i, codes + 32 * i);
    }
};

// A group of integers with a scale of 16 bits. The highest bit of the first byte says that the scale is bf16, not float16.
template <int64_t kNumbersOf, int64_t kBytesOf>
struct IntegerGroup : Blocks<Int8, kNumbersOf, kBytesOf> {
    static constexpr int64_t kHead = 3;
    static MOESAIC_INLINE float scale_of(const uint8_t* block) {
        float half = half_at(block + 1), number;
        uint32_t bits = uint32_t(block[1] | block[2] << 8) << 16;
        std::memcpy(&number, &bits, 4);
        return block[0] & 0x80 ? number : half;
    }
    static MOESAIC_INLINE void put_scales(const uint8_t*, float scale, float, float* scales, float*) {
        MOESAIC_UNROLL for (int64_t i = 0; i < kNumbersOf / Int8::kGroup; i++) scales[i] = scale;
    }
};

// Codes of four bits: the low half of a byte is the even number. The low half of the first byte is the zero point.
template <int64_t kNumbersOf>
struct Int4Group : IntegerGroup<kNumbersOf, 3 + kNumbersOf / 2> {
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        uint8_t zero = block[0] & 15;
        MOESAIC_UNROLL for (int64_t i = 0; i < kNumbersOf / 2; i += 16, codes += 32) {
            Bytes16 halves = codes_at<Bytes16>(block + 3 + i);
            put_interleaved((halves & 15) - zero, (halves >> 4) - zero, codes);
        }
    }
};
using Int4By128 = Int4Group<128>;
using Int4By64 = Int4Group<64>;
using Int4By32 = Int4Group<32>;

struct Int8By128 : IntegerGroup<128, 131> {
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int64_t i = 0; i < 128; i += 32) put_codes(codes + i, codes_at<Bytes32>(block + kHead + i));
    }
};

// Integers without a sign, with a zero point in the first byte and a scale in float32.
struct Int8OffsetBy128 : Blocks<Int8Offset, 128, 133> {
    static MOESAIC_INLINE float scale_of(const uint8_t* block) {
        float scale;
        std::memcpy(&scale, block + 1, 4);
        return scale;
    }
    static MOESAIC_INLINE float offset_of(const uint8_t* block) { return -(scale_of(block) * float(block[0])); }
    static MOESAIC_INLINE void put_scales(const uint8_t*, float scale, float offset, float* scales, float* offsets) {
        MOESAIC_UNROLL for (int64_t i = 0; i < kGroups; i++) scales[i] = scale, offsets[i] = offset;
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int64_t i = 0; i < 128; i += 32) put_codes(codes + i, codes_at<Bytes32>(block + 5 + i));
    }
};

}  // namespace MOESAIC_ISA
#include "small_blocks.h"
namespace MOESAIC_ISA {

#define MOESAIC_BLOCKS(use)                                                                                           \
    use(Q8_0) use(Q4_0) use(Q4_1) use(Q5_0) use(Q5_1) use(Q2_K) use(Q3_K) use(Q4_K) use(Q5_K) use(Q6_K) use(Iq4Nl)    \
    use(Iq4Xs) use(Iq1S) use(Iq1M) use(Iq2Xxs) use(Iq2Xs) use(Iq2S) use(Iq3Xxs) use(Iq3S) use(Tq1_0) use(Tq2_0)       \
    use(Mxfp4Blocks) use(Int4By128) use(Int4By64) use(Int4By32) use(Int8By128) use(Int8OffsetBy128)        \
    use(Nvfp4By128) use(Nvfp4By64)

#define MOESAIC_IS_BLOCKS(T)               \
    template <>                            \
    constexpr bool kQuantized<T> = true;   \
    template <>                            \
    constexpr bool kBlocks<T> = true;
MOESAIC_BLOCKS(MOESAIC_IS_BLOCKS)
#undef MOESAIC_IS_BLOCKS

// Calls use(pointer to a quantised type). Rows are packed alike for all of them.
template <class Use>
auto with_quantized(moesaic::Stored stored, const Use& use) {
    switch (stored) {
        case moesaic::Stored::kFp8: return use(static_cast<Fp8*>(nullptr));
        case moesaic::Stored::kInt8: return use(static_cast<Int8*>(nullptr));
        case moesaic::Stored::kInt8Offset: return use(static_cast<Int8Offset*>(nullptr));
        case moesaic::Stored::kInt4: return use(static_cast<Int4*>(nullptr));
        case moesaic::Stored::kInt4Offset: return use(static_cast<Int4Offset*>(nullptr));
        case moesaic::Stored::kInt8Of16: return use(static_cast<Int8Of16*>(nullptr));
        case moesaic::Stored::kInt8Of16Offset: return use(static_cast<Int8Of16Offset*>(nullptr));
#define MOESAIC_CASE(T) \
    case moesaic::Stored::k##T: return use(static_cast<T*>(nullptr));
            MOESAIC_BLOCKS(MOESAIC_CASE)
#undef MOESAIC_CASE
        default: return use(static_cast<Mxfp4*>(nullptr));
    }
}

// The scales of the groups of a block, and their offsets if its type has them.
template <class T>
MOESAIC_INLINE void put_scales_of(const uint8_t* block, float* scales, float* offsets) {
    float scale = T::scale_of(block), offset = T::offset_of(block);
    if constexpr (T::kNumbers == 32) {
        *scales = scale;
        if constexpr (T::As::kHasOffset) *offsets = offset;
    } else {
        T::put_scales(block, scale, offset, scales, offsets);
    }
}

// Brings `count` numbers of a row, at most BLOCK and whole blocks, into the layout of As. Calls `passing` for each block.
template <class T, class Passing>
MOESAIC_INLINE void unpack(const uint8_t* from, int64_t count, uint8_t* out, const Passing& passing) {
    using As = typename T::As;
    int64_t groups = count / T::kGroup;
    float* scales = reinterpret_cast<float*>(out);
    float* offsets = scales + groups;
    uint8_t* codes = out + As::kHead * groups;
    for (int64_t i = 0; i < count; i += T::kNumbers, from += T::kBytes) {
        passing();
        put_scales_of<T>(from, scales, offsets);
        T::unpack(from, codes);
        scales += T::kGroups, offsets += T::kGroups, codes += T::kGroups * As::kCodes;
    }
}

// As `dequantize` of quantized.h.
template <class T, std::enable_if_t<kBlocks<T>, int> = 0>
inline void dequantize(const T* block, int64_t count, float* out) {
    using As = typename T::As;
    alignas(64) uint8_t room[As::bytes(BLOCK)];
    unpack<T>(&block->byte, count, room, [] {});
    dequantize(reinterpret_cast<const As*>(room), count, out);
}

}  // namespace MOESAIC_ISA
