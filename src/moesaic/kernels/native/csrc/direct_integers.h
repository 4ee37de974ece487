// Integer products with blocks as they are stored, for the types of most files.
//
// Unpacking a stretch of codes takes several times as long as the products of one row. Here codes stay in vectors of 64
// bytes: for few rows they are multiplied so, and for more they are brought into the order of a panel (integers.h). Sums of
// integers are exact, and what follows has the order of a panel, so the bits are those of unpacked codes.
#pragma once

namespace MOESAIC_ISA {

// How blocks are multiplied as they are stored: nothing by default.
template <class B>
struct StoredIntegers {
    static constexpr bool kIsDefined = false;
};
constexpr int FEW_STORED_ROWS = 2;     // with more, it is faster to order the codes once for all rows
constexpr int64_t STEP_NUMBERS = 128;  // of a column, in two vectors of codes
constexpr int64_t STEP_LINES = STEP_NUMBERS / kLine;

template <class B>
void fill_stored(const uint8_t* blocks, int64_t ld, int64_t some, int64_t count, IntegerPanel& panel, Stream& stream);

#if defined(MOESAIC_AVX512)

MOESAIC_INLINE Bytes masked(Bytes x, uint32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(int32_t(mask))); }
MOESAIC_INLINE Vec halves_of(Bytes words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
MOESAIC_INLINE void put_floats(uint8_t* panel, int64_t group, Vec numbers) {
    _mm512_store_ps(reinterpret_cast<float*>(panel) + group * LANES, numbers);
}
// x with those bits of y that the mask has.
MOESAIC_INLINE Bytes with_bits(Bytes x, Bytes y, uint8_t mask) {
    return _mm512_ternarylogic_epi64(y, _mm512_set1_epi8(char(mask)), x, 0xea);  // (y & mask) | x
}
// The same 32 bytes twice.
MOESAIC_INLINE Bytes twice(const uint8_t* p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Counts for the words of the first 32 bytes, and for those of the others.
MOESAIC_INLINE Bytes counts(int64_t first, int64_t second) {
    return _mm512_inserti64x4(_mm512_set1_epi64(first), _mm256_set1_epi64x(second), 1);
}
MOESAIC_INLINE Bytes join_halves(const void* first, const void* second) {
    auto half = [](const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); };
    return _mm512_inserti64x4(_mm512_castsi256_si512(half(first)), half(second), 1);
}

// The orders in which two vectors hold the numbers of a step. place: where a panel has the four numbers `j` of vector `v`.
// add_up: the vectors' sums of four products -> the sums of groups, four neighbours each. kPlaces: of the groups there.

template <int64_t kGroup>
struct InOrder {  // numbers 0 to 63 and 64 to 127
    static constexpr int64_t kSums = kGroup == 16 ? 2 : 1;
    static constexpr int64_t kPlaces[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static constexpr int64_t place(int64_t v, int64_t j) { return 16 * v + j; }
    static MOESAIC_INLINE void load_row(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
        codes[0] = join_halves(lines[0]->codes, lines[1]->codes), codes[1] = join_halves(lines[2]->codes, lines[3]->codes);
    }
    static MOESAIC_INLINE void add_up(Bytes first, Bytes second, Bytes (&sums)[kSums]) {
        if constexpr (kGroup == 16) sums[0] = first, sums[1] = second;
        else sums[0] = add_neighbours(first, second);
    }
};

struct EvenAndOdd {  // groups 0 and 2, groups 1 and 3
    static constexpr int64_t kSums = 1;
    static constexpr int64_t kPlaces[] = {0, 2, 1, 3};
    static constexpr int64_t place(int64_t v, int64_t j) { return (j / 8 * 2 + v) * 8 + j % 8; }
    static MOESAIC_INLINE void load_row(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
        codes[0] = join_halves(lines[0]->codes, lines[2]->codes), codes[1] = join_halves(lines[1]->codes, lines[3]->codes);
    }
    static MOESAIC_INLINE void add_up(Bytes first, Bytes second, Bytes (&sums)[kSums]) {
        sums[0] = add_neighbours(first, second);
    }
};

struct HalfGroups {  // the first 16 numbers of each group, the last 16
    static constexpr int64_t kSums = 1;
    static constexpr int64_t kPlaces[] = {0, 1, 2, 3};
    static constexpr int64_t place(int64_t v, int64_t j) { return j / 4 * 8 + 4 * v + j % 4; }
    static MOESAIC_INLINE void load_row(const Line* const (&lines)[STEP_LINES], Bytes (&codes)[2]) {
        MOESAIC_UNROLL for (int64_t v = 0; v < 2; v++) {
            const int8_t* pieces[PIECES];
            MOESAIC_UNROLL for (int64_t i = 0; i < STEP_LINES; i++) pieces[i] = lines[i]->codes + 16 * v;
            codes[v] = join(pieces);
        }
    }
    static MOESAIC_INLINE void add_up(Bytes first, Bytes second, Bytes (&sums)[kSums]) {
        sums[0] = add_integers(first, second);
    }
};

// How a block of 32 numbers stores its scale.
template <class B>
struct StoredScale {
    using Type = uint16_t;
    static MOESAIC_INLINE Vec widen(const Type* halves) {
        return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
    }
};
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

constexpr int64_t GROUPS_OF_SCALES = LANES;  // that are brought into the order of a panel at a time

MOESAIC_INLINE void put_transposed(Bytes (&x)[PANEL_COLUMNS], uint8_t* to) {
    transpose(x);
    MOESAIC_UNROLL for (int64_t i = 0; i < GROUPS_OF_SCALES; i++) store_bytes(to + i * int64_t(sizeof(Bytes)), x[i]);
}

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
    Bytes x[PANEL_COLUMNS];
    MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) {
        x[c] = _mm512_castps_si512(StoredScale<B>::widen(stored[c]));
    }
    put_transposed(x, to);
}

// Those of blocks that have several groups.
template <class B>
MOESAIC_INLINE void put_multiplied_scales(const uint8_t* blocks, int64_t ld, int64_t some, int64_t groups, uint8_t* scales_to,
                                          uint8_t* offsets_to) {
    alignas(64) float scales[PANEL_COLUMNS][GROUPS_OF_SCALES], offsets[PANEL_COLUMNS][GROUPS_OF_SCALES];
    for (int64_t c = 0; c < PANEL_COLUMNS; c++) {
        const uint8_t* block = blocks + (c < some ? c : 0) * ld;
        for (int64_t i = 0; i < std::min(GROUPS_OF_SCALES, groups); i += B::kGroups, block += B::kBytes) {
            put_scales_of<B>(block, scales[c] + i, offsets[c] + i);
        }
    }
    auto put = [&](const float (&of)[PANEL_COLUMNS][GROUPS_OF_SCALES], uint8_t* to) MOESAIC_INLINE_LAMBDA {
        Bytes x[PANEL_COLUMNS];
        MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) x[c] = _mm512_load_si512(of[c]);
        put_transposed(x, to);
    };
    put(scales, scales_to);
    if constexpr (B::As::kHasOffset) put(offsets, offsets_to);
}

// Brings the scales of `count` numbers of some columns into the order of a panel.
template <class B>
MOESAIC_INLINE void put_stored_scales(const uint8_t* blocks, int64_t ld, int64_t some, int64_t count, IntegerPanel& panel) {
    for (int64_t groups = count / B::kGroup, g = 0; g < groups; g += GROUPS_OF_SCALES) {
        const uint8_t* from = blocks + B::bytes(g * B::kGroup);
        uint8_t *scales = panel.scales + g * int64_t(sizeof(Bytes)), *offsets = panel.offsets + g * int64_t(sizeof(Bytes));
        if constexpr (B::kNumbers == 32) {
            put_plain_scales<B>(from, ld, some, groups - g, 0, scales);
            if constexpr (B::As::kHasOffset) put_plain_scales<B>(from, ld, some, groups - g, 2, offsets);
        } else {
            put_multiplied_scales<B>(from, ld, some, groups - g, scales, offsets);
        }
    }
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

template <>
MOESAIC_INLINE void put_stored_scales<Q4_K>(const uint8_t* blocks, int64_t ld, int64_t some, int64_t count,
                                            IntegerPanel& panel) {
    for (int64_t group = 0; group < count / Q4_K::kGroup; group += Q4_K::kGroups, blocks += Q4_K::kBytes) {
        Bytes words[4];
        transpose_heads(blocks, ld, some, words);
        Bytes minimum_bits = _mm512_xor_si512(_mm512_srli_epi32(words[0], 16), every(0x8000));  // its negative
        Vec scale = halves_of(words[0]), minimum = halves_of(minimum_bits);
        auto tops = [](Bytes x) { return masked(_mm512_srli_epi32(x, 2), 0x30303030u); };
        Bytes scales[] = {masked(words[1], 0x3f3f3f3fu), _mm512_or_si512(masked(words[3], 0x0f0f0f0fu), tops(words[1]))};
        Bytes fours = masked(_mm512_srli_epi32(words[3], 4), 0x0f0f0f0fu);
        Bytes minima[] = {masked(words[2], 0x3f3f3f3fu), _mm512_or_si512(fours, tops(words[2]))};
        MOESAIC_UNROLL for (int i = 0; i < 8; i++) {
            auto factor = [&](Bytes four) { return floats(masked(_mm512_srli_epi32(four, 8 * (i % 4)), 255)); };
            put_floats(panel.scales, group + i, mul(factor(scales[i / 4]), scale));
            put_floats(panel.offsets, group + i, mul(factor(minima[i / 4]), minimum));
        }
    }
}

template <>
MOESAIC_INLINE void put_stored_scales<Q6_K>(const uint8_t* blocks, int64_t ld, int64_t some, int64_t count,
                                            IntegerPanel& panel) {
    for (int64_t group = 0; group < count / Q6_K::kGroup; group += Q6_K::kGroups, blocks += Q6_K::kBytes) {
        Bytes words[4];
        transpose_heads(blocks + 192, ld, some, words);
        alignas(32) uint16_t halves[PANEL_COLUMNS];
        MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) {
            std::memcpy(halves + c, blocks + (c < some ? c : 0) * ld + 208, 2);
        }
        Vec scale = _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(halves)));
        MOESAIC_UNROLL for (int i = 0; i < 16; i++) {
            Bytes factor = _mm512_srai_epi32(_mm512_slli_epi32(words[i / 4], 24 - 8 * (i % 4)), 24);
            put_floats(panel.scales, group + i, mul(floats(factor), scale));
        }
    }
}

// A type says which order its codes have, what must be subtracted from a code (kZero), and how the codes of a step of 128
// numbers are loaded without a sign. left: the number of blocks that may be read, of those with 32 numbers.
template <class B, class OrderOf, int32_t kZeroOf>
struct StoredAs : OrderOf {
    static constexpr bool kIsDefined = true;
    using T = Integer<typename B::As>;
    static constexpr int32_t kZero = kZeroOf;
};

template <>
struct StoredIntegers<Q4_K> : StoredAs<Q4_K, EvenAndOdd, 0> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        Bytes both = _mm512_loadu_si512(block + 16 + 64 * step);
        codes[0] = low_half(both), codes[1] = high_half(both);
    }
};

template <>
struct StoredIntegers<Q5_K> : StoredAs<Q5_K, EvenAndOdd, 0> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        Bytes both = _mm512_loadu_si512(block + 48 + 64 * step), top = twice(block + 16);  // bit i: of group i
        int64_t left = 68 - 4 * step;  // a rotation by 64 more is the same
        codes[0] = with_bits(low_half(both), _mm512_rolv_epi64(top, counts(left, left - 2)), 16);
        codes[1] = with_bits(high_half(both), _mm512_rolv_epi64(top, counts(left - 1, left - 3)), 16);
    }
};

template <>
struct StoredIntegers<Q6_K> : StoredAs<Q6_K, InOrder<16>, 32> {
    // The two upper bits of the numbers i, 32 + i, 64 + i and 96 + i of a step are a byte.
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        Bytes both = _mm512_loadu_si512(block + 64 * step), top = twice(block + 128 + 32 * step);
        codes[0] = with_bits(low_half(both), _mm512_sllv_epi64(top, counts(4, 2)), 48);
        codes[1] = with_bits(high_half(both), _mm512_srlv_epi64(top, counts(0, 2)), 48);
    }
};

// The quarters of 32 bytes, as codes of two bits.
MOESAIC_INLINE void load_quarters(const uint8_t* from, Bytes (&codes)[2]) {
    Bytes quarters = twice(from);
    codes[0] = masked(_mm512_srlv_epi64(quarters, counts(0, 2)), 0x03030303u);
    codes[1] = masked(_mm512_srlv_epi64(quarters, counts(4, 6)), 0x03030303u);
}

template <>
struct StoredIntegers<Q2_K> : StoredAs<Q2_K, InOrder<16>, 0> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        load_quarters(block + 16 + 32 * step, codes);
    }
};

template <>
struct StoredIntegers<Q3_K> : StoredAs<Q3_K, InOrder<16>, 4> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        load_quarters(block + 32 + 32 * step, codes);
        Bytes top = twice(block);  // bit i: of 32 numbers
        int64_t left = 66 - 4 * step;
        codes[0] = with_bits(codes[0], _mm512_rolv_epi64(top, counts(left, left - 1)), 4);
        codes[1] = with_bits(codes[1], _mm512_rolv_epi64(top, counts(left - 2, left - 3)), 4);
    }
};

template <>
struct StoredIntegers<Q8_0> : StoredAs<Q8_0, InOrder<32>, 128> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t, int64_t left, Bytes (&codes)[2]) {
        auto of = [&](int64_t i) { return block + std::min(i, left - 1) * Q8_0::kBytes + 2; };
        codes[0] = flip(join_halves(of(0), of(1))), codes[1] = flip(join_halves(of(2), of(3)));
    }
};

// What a table says for the halves of 64 bytes, plus kZero.
template <Values kOf, int32_t kZero>
MOESAIC_INLINE void look_up_halves(Bytes both, Bytes (&codes)[2]) {
    __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<kOf>::kTable));
    __m128i table = _mm_add_epi8(numbers, _mm_set1_epi8(char(kZero)));
    codes[0] = look_up(table, low_half(both)), codes[1] = look_up(table, high_half(both));
}

template <>
struct StoredIntegers<Iq4Xs> : StoredAs<Iq4Xs, HalfGroups, 128> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, int64_t, Bytes (&codes)[2]) {
        look_up_halves<Values::kUneven, kZero>(_mm512_loadu_si512(block + 8 + 64 * step), codes);
    }
};

// The 16 bytes of codes of four blocks.
template <class B>
MOESAIC_INLINE Bytes four_blocks(const uint8_t* block, int64_t left) {
    const int8_t* pieces[PIECES];
    MOESAIC_UNROLL for (int64_t i = 0; i < PIECES; i++) {
        pieces[i] = reinterpret_cast<const int8_t*>(block + (std::min(i, left - 1) + 1) * B::kBytes - 16);
    }
    return join(pieces);
}

template <class B>
struct StoredHalves : StoredAs<B, HalfGroups, Integer<typename B::As>::kZero> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t, int64_t left, Bytes (&codes)[2]) {
        Bytes both = four_blocks<B>(block, left);
        codes[0] = low_half(both), codes[1] = high_half(both);
    }
};
template <>
struct StoredIntegers<Q4_0> : StoredHalves<Q4_0> {};
template <>
struct StoredIntegers<Q4_1> : StoredHalves<Q4_1> {};

template <class B, Values kOf>
struct StoredNumbers : StoredAs<B, HalfGroups, Integer<typename B::As>::kZero> {
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t, int64_t left, Bytes (&codes)[2]) {
        look_up_halves<kOf, StoredNumbers::kZero>(four_blocks<B>(block, left), codes);
    }
};
template <>
struct StoredIntegers<Iq4Nl> : StoredNumbers<Iq4Nl, Values::kUneven> {};
template <>
struct StoredIntegers<Mxfp4Integers> : StoredNumbers<Mxfp4Integers, Values::kE2M1> {};

// sums[r][i] = codes of row r times those of a panel's columns in a group of a step.
template <class S, int R, bool kWhole>
MOESAIC_INLINE void step_of_columns(const Bytes (&rows)[R][2], const uint8_t* blocks, int64_t ld, int64_t some, int64_t step,
                                    int64_t left, Bytes (&sums)[R][S::kSums][PIECES]) {
    MOESAIC_UNROLL for (int64_t four = 0; four < PANEL_COLUMNS / 4; four++) {
        Bytes of[R][4][S::kSums];
        MOESAIC_UNROLL for (int64_t i = 0; i < 4; i++) {
            int64_t c = 4 * four + i;
            Bytes codes[2];
            S::load(blocks + (kWhole || c < some ? c : 0) * ld, step, kWhole ? STEP_LINES : left, codes);
            MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                const Bytes none = _mm512_setzero_si512();
                S::add_up(add_fours(none, codes[0], rows[r][0]), add_fours(none, codes[1], rows[r][1]), of[r][i]);
            }
        }
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            MOESAIC_UNROLL for (int64_t v = 0; v < S::kSums; v++) {
                Bytes a = add_integers(low_pairs(of[r][0][v], of[r][1][v]), high_pairs(of[r][0][v], of[r][1][v]));
                Bytes b = add_integers(low_pairs(of[r][2][v], of[r][3][v]), high_pairs(of[r][2][v], of[r][3][v]));
                sums[r][v][four] = add_integers(low_fours(a, b), high_fours(a, b));
            }
        }
    }
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        MOESAIC_UNROLL for (int64_t v = 0; v < S::kSums; v++) transpose_pieces(sums[r][v]);
    }
}

// rows [R] times the columns of a panel, over `count` numbers. The panel has scales and offsets only.
template <class S, class B, int R>
void stored_products(const float* const* rows, const uint8_t* blocks, int64_t ld, int64_t some, const IntegerPanel& panel,
                     int64_t count, Stream& stream, bool first, float* out, int64_t stride) {
    using T = typename S::T;
    constexpr int64_t kGroups = STEP_NUMBERS / T::kGroup;  // of a step
    Stream mine = stream;
    Vec sums[R];
    const Line* lines[R];
    for (int r = 0; r < R; r++) lines[r] = reinterpret_cast<const Line*>(rows[r]), sums[r] = zero();
    for (int64_t at = 0; at < count; at += STEP_NUMBERS) {
        mine.step();
        const uint8_t* block = blocks + at / B::kNumbers * B::kBytes;
        int64_t step = at % B::kNumbers / STEP_NUMBERS, left = std::min(STEP_LINES, (count - at) / kLine);
        Bytes codes[R][2], integers[R][S::kSums][PIECES];
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            const Line* of_step[STEP_LINES];
            MOESAIC_UNROLL for (int64_t i = 0; i < STEP_LINES; i++) {
                of_step[i] = lines[r] + (at / kLine + std::min(i, left - 1)) * 2;
            }
            S::load_row(of_step, codes[r]);
        }
        bool whole = some == PANEL_COLUMNS && left == STEP_LINES;
        if (whole) step_of_columns<S, R, true>(codes, block, ld, some, step, left, integers);
        else step_of_columns<S, R, false>(codes, block, ld, some, step, left, integers);
        MOESAIC_UNROLL for (int64_t i = 0; i < kGroups; i++) {
            if (!whole && i * T::kGroup >= left * kLine) break;
            int64_t group = at / T::kGroup + i, place = S::kPlaces[i];
            Scales<T> scales(panel, group);
            MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                const Line& line = lines[r][group * T::kGroup / kLine * 2];
                int64_t from = group * T::kGroup % kLine;
                Bytes integer = integers[r][place / PIECES][place % PIECES];
                if constexpr (S::kZero != 0) integer = add_integers(integer, every(-S::kZero * sum_of<T>(line, from)));
                sums[r] = scales.add(floats(integer), line, from, sums[r]);
            }
        }
    }
    stream = mine;
    for (int r = 0; r < R; r++) put_sums(sums[r], first, out + r * stride, some);
}

// As `multiply` in dot.h, for n rows, at most FEW_STORED_ROWS.
template <class B>
void multiply_stored(const float* const* rows, int64_t n, const B* weights, int64_t ld, int64_t columns, int64_t k, float* out,
                     int64_t stride, const void* then) {
    using S = StoredIntegers<B>;
    const uint8_t* blocks = &weights->byte;
    int64_t size = columns * ld, lead = std::min(size, PANEL_COLUMNS * ld + LEAD);
    Stream stream(blocks + lead, size - lead, PANEL_COLUMNS * B::kBytes * STEP_NUMBERS / B::kNumbers + 1);
    if (then != nullptr) stream.then = static_cast<const char*>(then), stream.then_size = lead;
    IntegerPanel panel;
    for (int64_t c = 0; c < columns; c += PANEL_COLUMNS) {
        int64_t some = std::min(PANEL_COLUMNS, columns - c);
        for (int64_t begin = 0; begin < k; begin += BLOCK) {
            int64_t count = std::min(k - begin, BLOCK);
            const uint8_t* from = blocks + c * ld + B::bytes(begin);
            put_stored_scales<B>(from, ld, some, count, panel);
            const float* x[] = {rows[0] + begin, rows[n - 1] + begin};
            static_assert(FEW_STORED_ROWS == 2);
            auto products = n == 1 ? stored_products<S, B, 1> : stored_products<S, B, 2>;
            products(x, from, ld, some, panel, count, stream, begin == 0, out + c, stride);
        }
    }
}

// Brings `count` numbers of some columns into the order of a panel.
template <class B>
void fill_stored(const uint8_t* blocks, int64_t ld, int64_t some, int64_t count, IntegerPanel& panel, Stream& stream) {
    using S = StoredIntegers<B>;
    const Bytes kZeros = _mm512_set1_epi8(char(S::T::kZero - S::kZero));
    put_stored_scales<B>(blocks, ld, some, count, panel);
    for (int64_t at = 0; at < count; at += STEP_NUMBERS) {
        stream.step();
        const uint8_t* block = blocks + at / B::kNumbers * B::kBytes;
        int64_t step = at % B::kNumbers / STEP_NUMBERS, left = (count - at) / kLine;
        MOESAIC_UNROLL for (int64_t v = 0; v < 2; v++) {
            Bytes x[PANEL_COLUMNS];
            MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) {
                Bytes codes[2];
                S::load(block + (c < some ? c : 0) * ld, step, left, codes);
                x[c] = S::T::kZero == S::kZero ? codes[v] : _mm512_add_epi8(codes[v], kZeros);
            }
            transpose(x);
            uint8_t* to = panel.codes + at * PANEL_COLUMNS;
            MOESAIC_UNROLL for (int64_t j = 0; j < PANEL_COLUMNS; j++) {
                store_bytes(to + S::place(v, j) * int64_t(sizeof(Bytes)), x[j]);
            }
        }
    }
}
#endif

}  // namespace MOESAIC_ISA
