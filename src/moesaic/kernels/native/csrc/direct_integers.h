// Integer products of few rows with blocks as they are stored, for the types of most files that are decoded.
//
// Unpacking a stretch of codes takes several times as long as the products of one row. Here codes stay in vectors of 64
// bytes, and the scales of a block are made for all columns of a panel at once. Sums of integers are exact, and what follows
// has the order of a panel (integers.h), so the bits are those of unpacked codes.
#pragma once

namespace MOESAIC_ISA {

constexpr int FEW_STORED_ROWS = 4;  // with more, it is faster to order the codes once for all rows

// How blocks are multiplied as they are stored: nothing by default.
template <class B>
struct StoredIntegers {
    static constexpr bool kIsDefined = false;
};

#if defined(MOESAIC_AVX512)
constexpr int64_t STEP_NUMBERS = 128;  // of a column, in two vectors of codes

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

MOESAIC_INLINE Bytes masked(Bytes x, uint32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(int32_t(mask))); }
MOESAIC_INLINE Vec halves_of(Bytes words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
MOESAIC_INLINE void put_floats(uint8_t* panel, int64_t group, Vec numbers) {
    _mm512_store_ps(reinterpret_cast<float*>(panel) + group * LANES, numbers);
}

// The codes of two lines of a row.
MOESAIC_INLINE Bytes two_lines(const Line& first, const Line& second) {
    auto codes = [](const Line& line) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line.codes)); };
    return _mm512_inserti64x4(_mm512_castsi256_si512(codes(first)), codes(second), 1);
}

template <>
struct StoredIntegers<Q4_K> {
    static constexpr bool kIsDefined = true;
    using T = Integer<Int4Offset>;
    static constexpr int64_t kSums = 1;              // vectors of the sums of four groups, of a step
    static constexpr int64_t kPlaces[] = {0, 2, 1, 3};  // of the groups of a step in the sums
    static constexpr int32_t kZero = 0;              // what must be subtracted from a code

    static MOESAIC_INLINE void put_scales(const uint8_t* blocks, int64_t ld, int64_t some, int64_t group, IntegerPanel& panel) {
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
    // The low halves of 32 bytes are a group, the high ones the next.
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, Bytes (&codes)[2]) {
        Bytes both = _mm512_loadu_si512(block + 16 + 64 * step);
        codes[0] = low_half(both), codes[1] = high_half(both);
    }
    static MOESAIC_INLINE void load_row(const Line* row, Bytes (&codes)[2]) {
        codes[0] = two_lines(row[0], row[4]), codes[1] = two_lines(row[2], row[6]);
    }
    static MOESAIC_INLINE void add_up(Bytes first, Bytes second, Bytes (&sums)[kSums]) {
        sums[0] = add_neighbours(first, second);
    }
};

template <>
struct StoredIntegers<Q6_K> {
    static constexpr bool kIsDefined = true;
    using T = Integer<Int8Of16>;
    static constexpr int64_t kSums = 2;
    static constexpr int64_t kPlaces[] = {0, 1, 2, 3, 4, 5, 6, 7};
    static constexpr int32_t kZero = 32;

    static MOESAIC_INLINE void put_scales(const uint8_t* blocks, int64_t ld, int64_t some, int64_t group, IntegerPanel& panel) {
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
    // The two upper bits of the numbers i, 32 + i, 64 + i and 96 + i of a step are a byte.
    static MOESAIC_INLINE void load(const uint8_t* block, int64_t step, Bytes (&codes)[2]) {
        Bytes both = _mm512_loadu_si512(block + 64 * step);
        Bytes top = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 128 + 32 * step)));
        const Bytes left = _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2), right = _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2);
        const Bytes kTops = _mm512_set1_epi8(48);
        constexpr int kPick = 0xea;  // (x & y) | z
        codes[0] = _mm512_ternarylogic_epi64(_mm512_sllv_epi64(top, left), kTops, low_half(both), kPick);
        codes[1] = _mm512_ternarylogic_epi64(_mm512_srlv_epi64(top, right), kTops, high_half(both), kPick);
    }
    static MOESAIC_INLINE void load_row(const Line* row, Bytes (&codes)[2]) {
        codes[0] = two_lines(row[0], row[2]), codes[1] = two_lines(row[4], row[6]);
    }
    static MOESAIC_INLINE void add_up(Bytes first, Bytes second, Bytes (&sums)[kSums]) { sums[0] = first, sums[1] = second; }
};

// sums[r][i] = codes of row r times those of a panel's columns in a group of a step.
template <class S, int R, bool kWhole>
MOESAIC_INLINE void step_of_columns(const Bytes (&rows)[R][2], const uint8_t* blocks, int64_t ld, int64_t some, int64_t step,
                                    Bytes (&sums)[R][S::kSums][PIECES]) {
    MOESAIC_UNROLL for (int64_t four = 0; four < PANEL_COLUMNS / 4; four++) {
        Bytes of[R][4][S::kSums];
        MOESAIC_UNROLL for (int64_t i = 0; i < 4; i++) {
            int64_t c = 4 * four + i;
            Bytes codes[2];
            S::load(blocks + (kWhole || c < some ? c : 0) * ld, step, codes);
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
    Stream mine = stream;
    Vec sums[R];
    const Line* lines[R];
    for (int r = 0; r < R; r++) lines[r] = reinterpret_cast<const Line*>(rows[r]), sums[r] = zero();
    int64_t group = 0;
    for (int64_t at = 0; at < count; at += STEP_NUMBERS) {
        mine.step();
        const uint8_t* block = blocks + at / B::kNumbers * B::kBytes;
        int64_t step = at % B::kNumbers / STEP_NUMBERS;
        Bytes codes[R][2], integers[R][S::kSums][PIECES];
        MOESAIC_UNROLL for (int r = 0; r < R; r++) S::load_row(lines[r] + at / kLine * 2, codes[r]);
        if (some == PANEL_COLUMNS) step_of_columns<S, R, true>(codes, block, ld, some, step, integers);
        else step_of_columns<S, R, false>(codes, block, ld, some, step, integers);
        MOESAIC_UNROLL for (int64_t i = 0; i < S::kSums * PIECES; i++, group++) {
            Scales<T> scales(panel, group);
            int64_t place = S::kPlaces[i];
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

// The same for n rows, at most R.
template <class S, class B, int R = FEW_STORED_ROWS>
MOESAIC_INLINE void few_stored(int64_t n, const float* const* rows, const uint8_t* blocks, int64_t ld, int64_t some,
                               const IntegerPanel& panel, int64_t count, Stream& stream, bool first, float* out,
                               int64_t stride) {
    if constexpr (R > 1) {
        if (n < R) return few_stored<S, B, R - 1>(n, rows, blocks, ld, some, panel, count, stream, first, out, stride);
    }
    stored_products<S, B, R>(rows, blocks, ld, some, panel, count, stream, first, out, stride);
}

// As `multiply` in dot.h, for n rows, at most FEW_STORED_ROWS.
template <class B>
void multiply_stored(const float* const* rows, int64_t n, const B* weights, int64_t ld, int64_t columns, int64_t k, float* out,
                     int64_t stride, const void* then) {
    using S = StoredIntegers<B>;
    const uint8_t* blocks = &weights->byte;
    int64_t size = columns * ld, lead = std::min(size, PANEL_COLUMNS * ld + LEAD);
    int64_t step_bytes = PANEL_COLUMNS * B::bytes(STEP_NUMBERS * 2) / 2 + 1;  // a block has two steps
    Stream stream(blocks + lead, size - lead, step_bytes);
    if (then != nullptr) stream.then = static_cast<const char*>(then), stream.then_size = lead;
    IntegerPanel panel;
    for (int64_t c = 0; c < columns; c += PANEL_COLUMNS) {
        int64_t some = std::min(PANEL_COLUMNS, columns - c);
        for (int64_t begin = 0; begin < k; begin += BLOCK) {
            int64_t count = std::min(k - begin, BLOCK);
            const uint8_t* from = blocks + c * ld + B::bytes(begin);
            for (int64_t i = 0; i < count; i += B::kNumbers) {
                S::put_scales(from + B::bytes(i), ld, some, i / B::kGroup, panel);
            }
            const float* x[FEW_STORED_ROWS];
            for (int64_t r = 0; r < FEW_STORED_ROWS; r++) x[r] = rows[std::min(r, n - 1)] + begin;
            few_stored<S, B>(n, x, from, ld, some, panel, count, stream, begin == 0, out + c, stride);
        }
    }
}
#endif

}  // namespace MOESAIC_ISA
