// The scales and offsets of blocks of some columns, in the order of a panel (integers.h): those of a group are neighbours.
//
// A lane is a column, so scales are made for all columns at once from the bytes that say them.
#pragma once

namespace MOESAIC_ISA {

MOESAIC_INLINE Bytes masked_words(Bytes x, uint32_t mask) { return masked(x, every(int32_t(mask))); }
MOESAIC_INLINE void put_floats(uint8_t* to, int64_t group, Vec numbers) {
    store(reinterpret_cast<float*>(to) + group * LANES, numbers);
}

#if defined(MOESAIC_AVX512)
// The numbers of half precision in the lower halves of words.
MOESAIC_INLINE Vec halves_of(Bytes words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
template <int kByte>
MOESAIC_INLINE Bytes signed_bytes(Bytes words) {
    return _mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 8 * kByte), 24);
}
#else
MOESAIC_INLINE Vec halves_of(Bytes words) {
    Bytes halves = masked_words(words, 0xffff);
    halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
}
template <int kByte>
MOESAIC_INLINE Bytes signed_bytes(Bytes words) {
    return _mm256_srai_epi32(_mm256_slli_epi32(words, 24 - 8 * kByte), 24);
}
#endif
template <int kByte>
MOESAIC_INLINE Bytes bytes_of(Bytes words) { return masked_words(shifted<-8 * kByte>(words), 255); }

// How a block of 32 numbers stores its scale.
template <class B>
struct StoredScale {
    using Type = uint16_t;
    static MOESAIC_INLINE Vec widen(const Type* halves) {
#if defined(MOESAIC_AVX512)
        return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
#else
        return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(halves)));
#endif
    }
};
#if defined(MOESAIC_AVX512)
template <>
struct StoredScale<Mxfp4Integers> {
    using Type = uint8_t;
    static MOESAIC_INLINE Vec widen(const Type* exponents) {  // as power_of_two, halved
        Bytes x = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(exponents)));
        Bytes bits = _mm512_slli_epi32(_mm512_sub_epi32(x, every(1)), 23);
        bits = _mm512_mask_sllv_epi32(bits, _mm512_cmplt_epi32_mask(x, every(2)), every(1 << 21), x);
        bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(x, every(255)), every(0x7fc00000));
        return _mm512_castsi512_ps(bits);
    }
};
#else
template <>
struct StoredScale<Mxfp4Integers> {
    using Type = uint8_t;
    static MOESAIC_INLINE Vec widen(const Type* exponents) {
        Bytes x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents)));
        Bytes bits = _mm256_slli_epi32(_mm256_sub_epi32(x, every(1)), 23);
        bits = _mm256_blendv_epi8(bits, _mm256_sllv_epi32(every(1 << 21), x), _mm256_cmpgt_epi32(every(2), x));
        bits = _mm256_blendv_epi8(bits, every(0x7fc00000), _mm256_cmpeq_epi32(x, every(255)));
        return _mm256_castsi256_ps(bits);
    }
};
#endif

constexpr int64_t GROUPS_OF_SCALES = LANES;  // that are brought into the order of a panel at a time

// The scales or offsets of blocks of 32 numbers. at: where a block has them.
template <class B>
MOESAIC_INLINE void put_plain_scales(const uint8_t* blocks, int64_t ld, int64_t some, int64_t groups, int64_t at,
                                     uint8_t* to) {
    using Type = typename StoredScale<B>::Type;
    alignas(64) Type stored[PANEL_COLUMNS][GROUPS_OF_SCALES];
    for (int64_t c = 0; c < PANEL_COLUMNS; c++) {
        const uint8_t* from = blocks + (c < some ? c : 0) * ld + at;
        MOESAIC_UNROLL for (int64_t i = 0; i < GROUPS_OF_SCALES; i++) {
            std::memcpy(&stored[c][i], from + std::min(i, groups - 1) * B::kBytes, sizeof(Type));
        }
    }
    Vec x[PANEL_COLUMNS];
    MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) x[c] = StoredScale<B>::widen(stored[c]);
    transpose(x);
    MOESAIC_UNROLL for (int64_t i = 0; i < GROUPS_OF_SCALES; i++) put_floats(to, i, x[i]);
}

// 16 bytes from each column of a panel -> the first four of all columns, the next four, ..
MOESAIC_INLINE void transpose_heads(const uint8_t* from, int64_t ld, int64_t some, Bytes (&words)[4]) {
    Bytes x[4];
    MOESAIC_UNROLL for (int64_t i = 0; i < 4; i++) {
        const int8_t* pieces[PIECES];
        MOESAIC_UNROLL for (int64_t j = 0; j < PIECES; j++) {
            int64_t c = i + 4 * j;
            pieces[j] = reinterpret_cast<const int8_t*>(from + (c < some ? c : 0) * ld);
        }
        x[i] = join(pieces);
    }
    Bytes low = low_pairs(x[0], x[1]), more_low = low_pairs(x[2], x[3]);
    Bytes high = high_pairs(x[0], x[1]), more_high = high_pairs(x[2], x[3]);
    words[0] = low_fours(low, more_low), words[1] = high_fours(low, more_low);
    words[2] = low_fours(high, more_high), words[3] = high_fours(high, more_high);
}

// The scales of blocks of 256 numbers, one of each column. Their factors are integers.
template <class B>
struct StoredFactors;

// Eight factors of six bits for scales, and as many for minima. As put_six_bits of blocks.h.
struct SixBitFactors {
    static MOESAIC_INLINE void put(const uint8_t* block, int64_t ld, int64_t some, uint8_t* scales_to, uint8_t* offsets_to) {
        Bytes words[4];
        transpose_heads(block, ld, some, words);
        Bytes minimum_bits = shifted<-16>(words[0]) ^ every(0x8000);  // its negative
        Vec scale = halves_of(words[0]), minimum = halves_of(minimum_bits);
        auto tops = [](Bytes x) MOESAIC_INLINE_LAMBDA { return masked_words(shifted<-2>(x), 0x30303030u); };
        auto fours = [](Bytes x) MOESAIC_INLINE_LAMBDA { return masked_words(x, 0x0f0f0f0fu); };
        Bytes scales[] = {masked_words(words[1], 0x3f3f3f3fu), fours(words[3]) | tops(words[1])};
        Bytes minima[] = {masked_words(words[2], 0x3f3f3f3fu), fours(shifted<-4>(words[3])) | tops(words[2])};
        unroll<8>([&](auto i) MOESAIC_INLINE_LAMBDA {
            put_floats(scales_to, i, mul(floats(bytes_of<i % 4>(scales[i / 4])), scale));
            put_floats(offsets_to, i, mul(floats(bytes_of<i % 4>(minima[i / 4])), minimum));
        });
    }
};
template <>
struct StoredFactors<Q4_K> : SixBitFactors {};
template <>
struct StoredFactors<Q5_K> : SixBitFactors {};

template <>
struct StoredFactors<Q6_K> {
    static MOESAIC_INLINE void put(const uint8_t* block, int64_t ld, int64_t some, uint8_t* scales_to, uint8_t*) {
        Bytes words[4], last[4];
        transpose_heads(block + 192, ld, some, words), transpose_heads(block + 194, ld, some, last);
        Vec scale = halves_of(shifted<-16>(last[3]));
        unroll<16>([&](auto i) MOESAIC_INLINE_LAMBDA {
            put_floats(scales_to, i, mul(floats(signed_bytes<i % 4>(words[i / 4])), scale));
        });
    }
};

template <>
struct StoredFactors<Q2_K> {
    static MOESAIC_INLINE void put(const uint8_t* block, int64_t ld, int64_t some, uint8_t* scales_to, uint8_t* offsets_to) {
        Bytes words[4], last[4];
        transpose_heads(block, ld, some, words), transpose_heads(block + 68, ld, some, last);
        Bytes minimum_bits = shifted<-16>(last[3]) ^ every(0x8000);
        Vec scale = halves_of(last[3]), minimum = halves_of(minimum_bits);
        unroll<16>([&](auto i) MOESAIC_INLINE_LAMBDA {
            Bytes low = masked_words(shifted<-8 * (i % 4)>(words[i / 4]), 15);
            Bytes high = masked_words(shifted<-8 * (i % 4) - 4>(words[i / 4]), 15);
            put_floats(scales_to, i, mul(floats(low), scale)), put_floats(offsets_to, i, mul(floats(high), minimum));
        });
    }
};

template <>
struct StoredFactors<Q3_K> {
    static MOESAIC_INLINE void put(const uint8_t* block, int64_t ld, int64_t some, uint8_t* scales_to, uint8_t*) {
        Bytes words[4], of[3];  // two bytes before the factors' twelve, and the scale after them
        transpose_heads(block + 94, ld, some, words);
        MOESAIC_UNROLL for (int i = 0; i < 3; i++) {
            of[i] = masked_words(shifted<-16>(words[i]), 0xffff) | masked_words(shifted<16>(words[i + 1]), 0xffff0000u);
        }
        Vec scale = halves_of(shifted<-16>(words[3]));
        unroll<4>([&](auto i) MOESAIC_INLINE_LAMBDA {
            Bytes low = masked_words(shifted<-4 * (i / 2)>(of[i % 2]), 0x0f0f0f0fu);
            Bytes factors = add_bytes(low | masked_words(shifted<4 - 2 * i>(of[2]), 0x30303030u), every_byte(-32));
            unroll<4>([&](auto j) MOESAIC_INLINE_LAMBDA {
                put_floats(scales_to, 4 * i + j, mul(floats(signed_bytes<j>(factors)), scale));
            });
        });
    }
};

template <>
struct StoredFactors<Iq4Xs> {
    static MOESAIC_INLINE void put(const uint8_t* block, int64_t ld, int64_t some, uint8_t* scales_to, uint8_t*) {
        Bytes words[4];
        transpose_heads(block, ld, some, words);
        Vec scale = halves_of(words[0]);
        unroll<8>([&](auto i) MOESAIC_INLINE_LAMBDA {
            Bytes low = masked_words(shifted<-4 * i>(words[1]), 15);
            Bytes factor = low | masked_words(shifted<-12 - 2 * i>(words[0]), 48);
            put_floats(scales_to, i, mul(floats(add_integers(factor, every(-32))), scale));
        });
    }
};

// Brings the scales of `count` numbers of some columns into the order of a panel.
template <class B>
MOESAIC_INLINE void put_stored_scales(const uint8_t* blocks, int64_t ld, int64_t some, int64_t count, IntegerPanel& panel) {
    constexpr int64_t kAtOnce = B::kNumbers == 32 ? GROUPS_OF_SCALES : B::kGroups;
    for (int64_t groups = count / B::kGroup, g = 0; g < groups; g += kAtOnce) {
        const uint8_t* from = blocks + B::bytes(g * B::kGroup);
        uint8_t *scales = panel.scales + g * int64_t(sizeof(Vec)), *offsets = panel.offsets + g * int64_t(sizeof(Vec));
        if constexpr (B::kNumbers == 32) {
            put_plain_scales<B>(from, ld, some, groups - g, 0, scales);
            if constexpr (B::As::kHasOffset) put_plain_scales<B>(from, ld, some, groups - g, 2, offsets);
        } else {
            StoredFactors<B>::put(from, ld, some, scales, offsets);
        }
    }
}

}  // namespace MOESAIC_ISA
