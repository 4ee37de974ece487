// The codes of blocks in vectors, as blocks store them: two vectors have a step of a column.
//
// A type says which order its codes have there, what must be subtracted from a code (kZero), what the largest magnitude of a
// code is (kMost), and how the codes of a step are loaded. left: the number of blocks that may be read, of those with 32
// numbers. Without VNNI codes are bytes without a sign if kMost fits twice into sums of 16 bits, or else int8.
#pragma once

namespace MOESAIC_ISA {

// How blocks are multiplied as they are stored: nothing by default.
template <class B>
struct StoredIntegers {
    static constexpr bool kIsDefined = false;
};

constexpr int64_t STEP_NUMBERS = 2 * int64_t(sizeof(Bytes));  // of a column
constexpr int64_t STEP_LINES = STEP_NUMBERS / kLine;

// Sums of products of codes. Each adds kPairs products of two codes, or is the sum of four products if there is VNNI.
#if defined(MOESAIC_VNNI)
template <class S>
MOESAIC_INLINE Bytes products_of(Bytes codes, Bytes row) { return add_fours(every(0), codes, row); }
template <class S, int kPairs>
MOESAIC_INLINE Bytes add_sums(Bytes x, Bytes y) { return add_integers(x, y); }
template <class S, int kPairs>
MOESAIC_INLINE Bytes whole_sums(Bytes sums) { return sums; }
constexpr int32_t kAbove = 128;  // what makes a number of 8 bits a code without a sign
#else
// Such sums have 16 bits as long as they cannot overflow them.
template <class S>
constexpr int kMostPairs = 32767 / (2 * 127 * S::kMost);
template <class S>
MOESAIC_INLINE Bytes products_of(Bytes codes, Bytes row) {
    static_assert(kMostPairs<S> > 0);
    if constexpr (S::kSigned) return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(row, codes));
    return _mm256_maddubs_epi16(codes, row);
}
template <class S, int kPairs>
MOESAIC_INLINE Bytes whole_sums(Bytes sums) {
    return kPairs <= kMostPairs<S> ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums;
}
template <class S, int kPairs>
MOESAIC_INLINE Bytes add_sums(Bytes x, Bytes y) {
    if constexpr (kPairs <= kMostPairs<S>) return _mm256_add_epi16(x, y);
    return add_integers(whole_sums<S, kPairs / 2>(x), whole_sums<S, kPairs / 2>(y));
}
constexpr int32_t kAbove = 0;
#endif

// The orders in which two vectors hold the numbers of a step. place: where a panel has the four numbers `j` of vector `v`.
// sums_of: vector `v` of the sums of groups, each in 16 bytes. kPlaces: of the groups there. kPairs: of such a sum.

#if defined(MOESAIC_AVX512)
template <int32_t factor>  // a power of two
MOESAIC_INLINE Bytes multiplied(Bytes x) { return _mm512_slli_epi32(x, __builtin_ctz(factor)); }
MOESAIC_INLINE Bytes join_halves(const void* first, const void* second) {
    auto half = [](const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); };
    return _mm512_inserti64x4(_mm512_castsi256_si512(half(first)), half(second), 1);
}
MOESAIC_INLINE void load_lines(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
    codes[0] = join_halves(lines[0]->codes, lines[1]->codes), codes[1] = join_halves(lines[2]->codes, lines[3]->codes);
}
#else
template <int32_t factor>
MOESAIC_INLINE Bytes multiplied(Bytes x) { return _mm256_slli_epi32(x, __builtin_ctz(factor)); }
MOESAIC_INLINE void load_lines(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
    codes[0] = any_bytes(lines[0]->codes), codes[1] = any_bytes(lines[1]->codes);
}
#endif

struct InOrder {  // the first half of the numbers, the others; groups have 16
    static constexpr int64_t kSums = 2, kPairs = 1;
    static constexpr int64_t kPlaces[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static constexpr int64_t place(int64_t v, int64_t j) { return PANEL_COLUMNS * v + j; }
    static MOESAIC_INLINE void load_row(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
        load_lines(lines, codes);
    }
    template <class S>
    static MOESAIC_INLINE Bytes sums_of(int64_t v, const Bytes (&codes)[2], const Bytes (&row)[2]) {
        return products_of<S>(codes[v], row[v]);
    }
};

struct HalfGroups {  // the first 16 numbers of each group of 32, the last 16
    static constexpr int64_t kSums = 1, kPairs = 2;
    static constexpr int64_t kPlaces[] = {0, 1, 2, 3};
    static constexpr int64_t place(int64_t v, int64_t j) { return j / 4 * 8 + 4 * v + j % 4; }
    static MOESAIC_INLINE void load_row(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
        MOESAIC_UNROLL for (int64_t v = 0; v < 2; v++) {
            const int8_t* pieces[PIECES];
            MOESAIC_UNROLL for (int64_t i = 0; i < STEP_LINES; i++) pieces[i] = lines[i]->codes + 16 * v;
            codes[v] = join(pieces);
        }
    }
    template <class S>
    static MOESAIC_INLINE Bytes sums_of(int64_t, const Bytes (&codes)[2], const Bytes (&row)[2]) {
        return add_sums<S, kPairs>(products_of<S>(codes[0], row[0]), products_of<S>(codes[1], row[1]));
    }
};

// kSteps: how many steps of a block are loaded in ways of their own; then `load` is told the step by a constant.
template <class B, class OrderOf, int32_t kZeroOf, int kMostOf, int kStepsOf = 1>
struct StoredAs : OrderOf {
    static constexpr bool kIsDefined = true;
    using T = Integer<typename B::As>;
    static constexpr int32_t kZero = kZeroOf;
    static constexpr int kMost = kMostOf, kSteps = kStepsOf;
    static constexpr bool kSigned = !T::kE2M1 && kMost > 64;
};

// The 16 bytes of codes of neighbouring blocks.
template <class B>
MOESAIC_INLINE Bytes some_blocks(const uint8_t* block, int64_t left) {
    const int8_t* pieces[PIECES];
    MOESAIC_UNROLL for (int64_t i = 0; i < PIECES; i++) {
        pieces[i] = reinterpret_cast<const int8_t*>(block + (std::min(i, left - 1) + 1) * B::kBytes - 16);
    }
    return join(pieces);
}

template <class B>
struct StoredHalves : StoredAs<B, HalfGroups, Integer<typename B::As>::kZero, 15> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t, int64_t left, Bytes (&codes)[2]) {
        Bytes both = some_blocks<B>(block, left);
        codes[0] = low_half(both), codes[1] = high_half(both);
    }
};
template <>
struct StoredIntegers<Q4_0> : StoredHalves<Q4_0> {};
template <>
struct StoredIntegers<Q4_1> : StoredHalves<Q4_1> {};

// What a table says for the halves of bytes, plus kZero.
template <Values kOf, int32_t kZero>
MOESAIC_INLINE void look_up_halves(Bytes both, Bytes (&codes)[2]) {
    __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<kOf>::kTable));
    __m128i table = _mm_add_epi8(numbers, _mm_set1_epi8(char(kZero)));
    codes[0] = look_up(table, low_half(both)), codes[1] = look_up(table, high_half(both));
}

template <class B, Values kOf, int32_t kZeroOf, int kMostOf>
struct StoredNumbers : StoredAs<B, HalfGroups, kZeroOf, kMostOf> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t, int64_t left, Bytes (&codes)[2]) {
        look_up_halves<kOf, kZeroOf>(some_blocks<B>(block, left), codes);
    }
};
template <>
struct StoredIntegers<Iq4Nl> : StoredNumbers<Iq4Nl, Values::kUneven, kAbove, 127> {};
template <>
struct StoredIntegers<Mxfp4Integers> : StoredNumbers<Mxfp4Integers, Values::kE2M1, 12, 24> {};

template <>
struct StoredIntegers<Iq4Xs> : StoredAs<Iq4Xs, HalfGroups, kAbove, 127> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        constexpr int64_t kSize = sizeof(Bytes);
        look_up_halves<Values::kUneven, kZero>(any_bytes(block + 8 + kSize * step), codes);
    }
};

#if defined(MOESAIC_AVX512)
struct EvenAndOdd {  // groups 0 and 2, groups 1 and 3
    static constexpr int64_t kSums = 1, kPairs = 2;
    static constexpr int64_t kPlaces[] = {0, 2, 1, 3};
    static constexpr int64_t place(int64_t v, int64_t j) { return (j / 8 * 2 + v) * 8 + j % 8; }
    static MOESAIC_INLINE void load_row(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
        codes[0] = join_halves(lines[0]->codes, lines[2]->codes), codes[1] = join_halves(lines[1]->codes, lines[3]->codes);
    }
    template <class S>
    static MOESAIC_INLINE Bytes sums_of(int64_t, const Bytes (&codes)[2], const Bytes (&row)[2]) {
        return add_neighbours(products_of<S>(codes[0], row[0]), products_of<S>(codes[1], row[1]));
    }
};

struct InOrderBy32 {  // groups 0 and 1, groups 2 and 3
    static constexpr int64_t kSums = 1, kPairs = 2;
    static constexpr int64_t kPlaces[] = {0, 1, 2, 3};
    static constexpr int64_t place(int64_t v, int64_t j) { return PANEL_COLUMNS * v + j; }
    static MOESAIC_INLINE void load_row(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
        load_lines(lines, codes);
    }
    template <class S>
    static MOESAIC_INLINE Bytes sums_of(int64_t, const Bytes (&codes)[2], const Bytes (&row)[2]) {
        return add_neighbours(products_of<S>(codes[0], row[0]), products_of<S>(codes[1], row[1]));
    }
};

template <>
struct StoredIntegers<Q8_0> : StoredAs<Q8_0, InOrderBy32, 128, 255> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t, int64_t left, Bytes (&codes)[2]) {
        auto of = [&](int64_t i) { return block + std::min(i, left - 1) * Q8_0::kBytes + 2; };
        codes[0] = flip(join_halves(of(0), of(1))), codes[1] = flip(join_halves(of(2), of(3)));
    }
};

template <>
struct StoredIntegers<Q4_K> : StoredAs<Q4_K, EvenAndOdd, 0, 15> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        Bytes both = any_bytes(block + 16 + 64 * step);
        codes[0] = low_half(both), codes[1] = high_half(both);
    }
};

template <>
struct StoredIntegers<Q5_K> : StoredAs<Q5_K, EvenAndOdd, 0, 31> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        Bytes both = any_bytes(block + 48 + 64 * step), top = twice(block + 16);  // bit i: of group i
        int64_t left = 68 - 4 * step;  // a rotation by 64 more is the same
        codes[0] = with_bits(low_half(both), _mm512_rolv_epi64(top, counts(left, left - 2)), 16);
        codes[1] = with_bits(high_half(both), _mm512_rolv_epi64(top, counts(left - 1, left - 3)), 16);
    }
};

template <>
struct StoredIntegers<Q6_K> : StoredAs<Q6_K, InOrder, 32, 63> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        load_six_bits(block, step, codes);
    }
};

// The quarters of 32 bytes, as codes of two bits.
MOESAIC_INLINE void load_quarters(const uint8_t* from, Bytes (&codes)[2]) {
    Bytes quarters = twice(from);
    codes[0] = masked(_mm512_srlv_epi64(quarters, counts(0, 2)), every_byte(3));
    codes[1] = masked(_mm512_srlv_epi64(quarters, counts(4, 6)), every_byte(3));
}

template <>
struct StoredIntegers<Q2_K> : StoredAs<Q2_K, InOrder, 0, 3> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        load_quarters(block + 16 + 32 * step, codes);
    }
};

template <>
struct StoredIntegers<Q3_K> : StoredAs<Q3_K, InOrder, 4, 7> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        load_quarters(block + 32 + 32 * step, codes);
        Bytes top = twice(block);  // bit i: of 32 numbers
        int64_t left = 66 - 4 * step;
        codes[0] = with_bits(codes[0], _mm512_rolv_epi64(top, counts(left, left - 1)), 4);
        codes[1] = with_bits(codes[1], _mm512_rolv_epi64(top, counts(left - 2, left - 3)), 4);
    }
};
#else
template <>
struct StoredIntegers<Q8_0> : StoredAs<Q8_0, HalfGroups, kAbove, 128> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t, int64_t left, Bytes (&codes)[2]) {
        MOESAIC_UNROLL for (int64_t v = 0; v < 2; v++) {
            const int8_t* pieces[PIECES];
            MOESAIC_UNROLL for (int64_t i = 0; i < PIECES; i++) {
                pieces[i] = reinterpret_cast<const int8_t*>(block + std::min(i, left - 1) * Q8_0::kBytes + 2 + 16 * v);
            }
            codes[v] = kZero == 0 ? join(pieces) : flip(join(pieces));
        }
    }
};

// The low halves of 16 bytes, then the high ones.
MOESAIC_INLINE Bytes low_and_high(const uint8_t* p) { return low_half(_mm256_srlv_epi64(twice(p), counts(0, 4))); }

template <>
struct StoredIntegers<Q4_K> : StoredAs<Q4_K, HalfGroups, 0, 15> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        const uint8_t* from = block + 16 + 32 * step;
        codes[0] = low_and_high(from), codes[1] = low_and_high(from + 16);
    }
};

template <>
struct StoredIntegers<Q5_K> : StoredAs<Q5_K, HalfGroups, 0, 31, 4> {
    template <class Step>
    static MOESAIC_INLINE void load(const uint8_t* block, Step step, int64_t, Bytes (&codes)[2]) {
        MOESAIC_UNROLL for (int64_t v = 0; v < 2; v++) {
            Bytes top = twice(block + 16 + 16 * v);  // bit i: of group i
            if constexpr (step < 2) top = _mm256_sllv_epi64(top, counts(4 - 2 * step, 3 - 2 * step));
            else top = _mm256_srlv_epi64(top, counts(2 * step - 4, 2 * step - 3));
            codes[v] = with_bits(low_and_high(block + 48 + 32 * step + 16 * v), top, 16);
        }
    }
};

template <>
struct StoredIntegers<Q6_K> : StoredAs<Q6_K, InOrder, 32, 63, 4> {
    // The two upper bits of the numbers i, 32 + i, 64 + i and 96 + i of half a block are a byte.
    template <class Step>
    static MOESAIC_INLINE void load(const uint8_t* block, Step step, int64_t, Bytes (&codes)[2]) {
        Bytes top = any_bytes(block + 128 + step / 2 * 32);
        unroll<2>([&](auto v) MOESAIC_INLINE_LAMBDA {
            Bytes both = any_bytes(block + step / 2 * 64 + 32 * v), halves = step % 2 ? high_half(both) : low_half(both);
            codes[v] = with_bits(halves, shifted<4 - 4 * (Step::value % 2) - 2 * v>(top), 48);
        });
    }
};

// The quarters of 32 bytes are codes of two bits.
template <class Step>
MOESAIC_INLINE void load_quarters(const uint8_t* from, Step, Bytes (&codes)[2]) {
    Bytes quarters = any_bytes(from + Step::value / 2 * 32);
    codes[0] = masked(shifted<-4 * (Step::value % 2)>(quarters), every_byte(3));
    codes[1] = masked(shifted<-4 * (Step::value % 2) - 2>(quarters), every_byte(3));
}

template <>
struct StoredIntegers<Q2_K> : StoredAs<Q2_K, InOrder, 0, 3, 4> {
    template <class Step>
    static MOESAIC_INLINE void load(const uint8_t* block, Step step, int64_t, Bytes (&codes)[2]) {
        load_quarters(block + 16, step, codes);
    }
};

template <>
struct StoredIntegers<Q3_K> : StoredAs<Q3_K, InOrder, 4, 7, 4> {
    template <class Step>
    static MOESAIC_INLINE void load(const uint8_t* block, Step step, int64_t, Bytes (&codes)[2]) {
        load_quarters(block + 32, step, codes);
        Bytes top = any_bytes(block);  // bit i: of 32 numbers
        codes[0] = with_bits(codes[0], shifted<2 - 2 * Step::value>(top), 4);
        codes[1] = with_bits(codes[1], shifted<1 - 2 * Step::value>(top), 4);
    }
};
#endif

}  // namespace MOESAIC_ISA
