// Blocks of GGUF's smallest types, and NVFP4. Codes of IQ types are entries of grids, those of TQ types digits of base three.
//
// blocks.h includes this file. Numbers of an entry of a grid have no signs; a bit says each sign. With -8, 0 and 8 from its
// grid, and plus or minus one for eight or 32 numbers together, IQ1 has codes of eight times its numbers.
#pragma once

#include "grids.h"

namespace moesaic {

// The number of each byte of E4M3.
struct E4m3Numbers {
    float numbers[256] = {};
    constexpr E4m3Numbers() {
        for (int i = 0; i < 127; i++) {
            float number = (i < 8 ? float(i) : float(8 + i % 8)) / 512;
            for (int exponent = 1; exponent < i / 8; exponent++) number *= 2;
            numbers[i] = number, numbers[128 + i] = -number;
        }
        numbers[127] = numbers[255] = std::numeric_limits<float>::quiet_NaN();
    }
};
inline constexpr E4m3Numbers kE4m3;

}  // namespace moesaic

namespace MOESAIC_ISA {

typedef uint32_t Words4Of8 __attribute__((vector_size(32)));
typedef uint64_t Words8Of4 __attribute__((vector_size(32)));

template <class Word>
MOESAIC_INLINE Word load_word(const uint8_t* p) {
    Word word;
    std::memcpy(&word, p, sizeof word);
    return word;
}

// Negative numbers where `signs` has a bit.
MOESAIC_INLINE Bytes32 with_signs(Bytes32 numbers, uint32_t signs) {
    constexpr Bytes32 kBit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                              1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
#if defined(__AVX2__)
    const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    Bytes32 bytes = Bytes32(_mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(signs)), places));
#else
    Bytes32 bytes;
    for (int i = 0; i < 32; i++) bytes[i] = uint8_t(signs >> i / 8 * 8);
#endif
    Bytes32 mask = Bytes32((bytes & kBit) == kBit);
    return (numbers ^ mask) - mask;
}

// Four bytes with seven signs each -> eight signs each, of which an even number is set.
MOESAIC_INLINE uint32_t even_signs(uint32_t sevens) {
    uint32_t odd = sevens ^ (sevens >> 4 & 0x07070707u);
    odd ^= odd >> 2, odd ^= odd >> 1;
    return sevens | (odd & 0x01010101u) << 7;
}

// The same for seven signs in each seven bits.
MOESAIC_INLINE uint32_t even_signs_of_28(uint32_t bits) {
    return even_signs((bits & 0x7f) | (bits & 0x3f80) << 1 | (bits & 0x1fc000) << 2 | (bits & 0xfe00000) << 3);
}

// Four entries of eight numbers, or eight of four.
template <class Table, class Index>
MOESAIC_INLINE Bytes32 entries_of(const Table& grid, const Index& index) {
    if constexpr (sizeof(typename Table::Word) == 8) {
        return Bytes32(Words8Of4{grid[index(0)], grid[index(1)], grid[index(2)], grid[index(3)]});
    } else {
        return Bytes32(Words4Of8{grid[index(0)], grid[index(1)], grid[index(2)], grid[index(3)],
                                 grid[index(4)], grid[index(5)], grid[index(6)], grid[index(7)]});
    }
}

// kGroups times `scale` times an odd factor, of what `factor` says.
template <class B, class Factor>
MOESAIC_INLINE void put_odd_factors(float scale, const Factor& factor, float* scales) {
    MOESAIC_UNROLL for (int i = 0; i < int(B::kGroups); i++) scales[i] = scale * float(int32_t(2 * factor(i) + 1));
}

// The half of a byte: first the low half of the first one.
MOESAIC_INLINE uint32_t half_byte(const uint8_t* bytes, int i) { return bytes[i / 2] >> i % 2 * 4 & 15; }

struct Iq2Xxs : Blocks<Int8, 256, 66> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        auto factor = [&](int i) MOESAIC_INLINE_LAMBDA { return uint32_t(block[9 + 8 * i] >> 4); };
        put_odd_factors<Iq2Xxs>(scale * 0.125f, factor, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            const uint8_t* from = block + 2 + 8 * i;
            Bytes32 numbers = entries_of(moesaic::kIq2XxsGrid, [&](int j) { return from[j]; });
            put_codes(codes + 32 * i, with_signs(numbers, even_signs_of_28(load_word<uint32_t>(from + 4))));
        }
    }
};

struct Iq2Xs : Blocks<Int8Of16, 256, 74> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        auto factor = [&](int i) MOESAIC_INLINE_LAMBDA { return half_byte(block + 66, i); };
        put_odd_factors<Iq2Xs>(scale * 0.125f, factor, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            uint64_t four = load_word<uint64_t>(block + 2 + 8 * i), sevens = four >> 9 & 0x007f007f007f007fu;
            Bytes32 numbers = entries_of(moesaic::kIq2XsGrid, [&](int j) { return four >> 16 * j & 511; });
            sevens = (sevens | sevens >> 8) & 0x0000ffff0000ffffu;
            put_codes(codes + 32 * i, with_signs(numbers, even_signs(uint32_t(sevens | sevens >> 16))));
        }
    }
};

struct Iq2S : Blocks<Int8Of16, 256, 82> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        auto factor = [&](int i) MOESAIC_INLINE_LAMBDA { return half_byte(block + 74, i); };
        put_odd_factors<Iq2S>(scale * 0.125f, factor, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            const uint8_t* from = block + 2 + 4 * i;
            uint32_t top_bits = block[66 + i];
            auto index = [&](int j) MOESAIC_INLINE_LAMBDA { return from[j] | (top_bits >> 2 * j & 3) << 8; };
            put_codes(codes + 32 * i, with_signs(entries_of(moesaic::kIq2SGrid, index), load_word<uint32_t>(from + 32)));
        }
    }
};

struct Iq3Xxs : Blocks<Int8, 256, 98> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        auto factor = [&](int i) MOESAIC_INLINE_LAMBDA { return uint32_t(block[69 + 4 * i] >> 4); };
        put_odd_factors<Iq3Xxs>(scale * 0.25f, factor, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            Bytes32 numbers = entries_of(moesaic::kIq3XxsGrid, [&](int j) { return block[2 + 8 * i + j]; });
            put_codes(codes + 32 * i, with_signs(numbers, even_signs_of_28(load_word<uint32_t>(block + 66 + 4 * i))));
        }
    }
};

struct Iq3S : Blocks<Int8, 256, 110> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        auto factor = [&](int i) MOESAIC_INLINE_LAMBDA { return half_byte(block + 106, i); };
        put_odd_factors<Iq3S>(scale, factor, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            uint32_t top_bits = block[66 + i];
            auto index = [&](int j) MOESAIC_INLINE_LAMBDA { return block[2 + 8 * i + j] | (top_bits >> j & 1) << 8; };
            uint32_t signs = load_word<uint32_t>(block + 74 + 4 * i);
            put_codes(codes + 32 * i, with_signs(entries_of(moesaic::kIq3SGrid, index), signs));
        }
    }
};

struct Iq1S : Blocks<Int8, 256, 50> {
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        auto factor = [&](int i) MOESAIC_INLINE_LAMBDA { return uint32_t(block[35 + 2 * i] >> 4 & 7); };
        put_odd_factors<Iq1S>(scale * 0.125f, factor, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            uint32_t bits = load_word<uint16_t>(block + 34 + 2 * i);
            auto index = [&](int j) MOESAIC_INLINE_LAMBDA { return block[2 + 4 * i + j] | (bits >> 3 * j & 7) << 8; };
            const uint8_t one = bits & 0x8000 ? 0xff : 1;
            put_codes(codes + 32 * i, entries_of(moesaic::kIq1Grid, index) + one);
        }
    }
};

struct Iq1M : Blocks<Int8Of16, 256, 56> {
    static MOESAIC_INLINE float scale_of(const uint8_t* block) {  // four bits of it are the upper ones of each of four words
        uint64_t bits = load_word<uint64_t>(block + 48);
        uint32_t half = (bits >> 12 & 15) | (bits >> 24 & 0xf0) | (bits >> 36 & 0xf00) | (bits >> 48 & 0xf000);
        return widen_half(uint16_t(half));
    }
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float scale, float, float* scales, float*) {
        uint64_t bits = load_word<uint64_t>(block + 48);
        auto factor = [&](int i) MOESAIC_INLINE_LAMBDA { return uint32_t(bits >> (i / 4 * 16 + i % 4 * 3)) & 7; };
        put_odd_factors<Iq1M>(scale * 0.125f, factor, scales);
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            uint32_t bits = load_word<uint16_t>(block + 32 + 2 * i);
            auto index = [&](int j) MOESAIC_INLINE_LAMBDA { return block[4 * i + j] | (bits >> 4 * j & 7) << 8; };
            auto one = [&](int j) MOESAIC_INLINE_LAMBDA { return bits >> 4 * j & 8 ? ~uint64_t(0) : 0x0101010101010101u; };
            Bytes32 ones = Bytes32(Words8Of4{one(0), one(1), one(2), one(3)});
            put_codes(codes + 32 * i, entries_of(moesaic::kIq1Grid, index) + ones);
        }
    }
};

// One scale for the groups of a block.
template <int64_t kBytesOf>
struct Ternary : Blocks<Int8, 256, kBytesOf, kBytesOf - 2> {
    static MOESAIC_INLINE void put_scales(const uint8_t*, float scale, float, float* scales, float*) {
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) scales[i] = scale;
    }
};

// Five numbers share a byte: a fraction of 256 in base three, whose first digits are those of the first numbers.
struct Tq1_0 : Ternary<54> {
    static constexpr uint8_t kPowers[5] = {1, 3, 9, 27, 81};
    // The digit behind a power of three, less one.
    template <class V>
    static MOESAIC_INLINE V digits(V bytes, int power) {
        V fraction = bytes * kPowers[power];  // of 256: what is before the digit is lost
        return V(fraction < 86) - V(fraction > 170);  // a comparison that holds gives -1
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        Bytes32 first = codes_at<Bytes32>(block);
        Bytes16 second = codes_at<Bytes16>(block + 32);
        MOESAIC_UNROLL for (int i = 0; i < 5; i++) put_codes(codes + 32 * i, digits(first, i));
        MOESAIC_UNROLL for (int i = 0; i < 5; i++) put_codes(codes + 160 + 16 * i, digits(second, i));
        uint32_t last = load_word<uint32_t>(block + 48);
        for (int i = 0; i < 16; i++) {
            uint32_t fraction = uint8_t((last >> i % 4 * 8) * kPowers[i / 4]);
            codes[240 + i] = uint8_t((fraction * 3 >> 8) - 1);
        }
    }
};

struct Tq2_0 : Ternary<66> {
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int half = 0; half < 2; half++) {
            Bytes32 quarters = codes_at<Bytes32>(block + 32 * half);
            unroll<4>([&](auto i) MOESAIC_INLINE_LAMBDA {
                put_codes(codes + 128 * half + 32 * i, (shifted<-2 * i>(quarters) & 3) - 1);
            });
        }
    }
};

// Numbers of E2M1, twice as large as integers. Each 16 have a scale in E4M3, which is multiplied by the factor of the block,
// or divided by its magnitude if it is negative.
template <int64_t kNumbersOf>
struct Nvfp4Group : Blocks<Int8Of16, kNumbersOf, 4 + kNumbersOf / 16 + kNumbersOf / 2> {
    static constexpr int64_t kGroupsOf = kNumbersOf / 16;
    static MOESAIC_INLINE float scale_of(const uint8_t* block) { return load_word<float>(block); }
    static MOESAIC_INLINE void put_scales(const uint8_t* block, float factor, float, float* scales, float*) {
        MOESAIC_UNROLL for (int64_t i = 0; i < kGroupsOf; i++) {
            float scale = moesaic::kE4m3.numbers[block[4 + i]];
            scales[i] = 0.5f * (factor < 0 ? scale / -factor : scale * factor);
        }
    }
    static MOESAIC_INLINE void unpack(const uint8_t* block, uint8_t* codes) {
        MOESAIC_UNROLL for (int64_t i = 0; i < kNumbersOf / 2; i += 16, codes += 32) {
            Bytes16 halves = codes_at<Bytes16>(block + 4 + kGroupsOf + i);
            const auto& table = Nibble<Values::kE2M1>::kTable;
            put_interleaved(look_up(table, halves & 15), look_up(table, halves >> 4), codes);
        }
    }
};
using Nvfp4By128 = Nvfp4Group<128>;
using Nvfp4By64 = Nvfp4Group<64>;

}  // namespace MOESAIC_ISA
