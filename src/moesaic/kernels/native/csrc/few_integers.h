// Integer products of one or two rows, as experts have them when few requests decode.
//
// Codes of weights are multiplied in the order in which they are stored, and the sums are brought into the order of a
// panel (integers.h). There are a quarter or an eighth as many sums as codes. Sums of integers are exact, and what follows
// has the same order as with a panel. So the bits are the same too.
#pragma once

namespace MOESAIC_ISA {

constexpr int FEW_INTEGER_ROWS = 2;                  // with more, it is faster to order the codes once for all rows
constexpr int64_t PIECES = sizeof(Bytes) / 16;       // of 16 bytes, in a vector
constexpr int64_t GROUPS_AT_ONCE = PIECES;           // each has four sums in a vector

#if defined(MOESAIC_AVX512)
MOESAIC_INLINE Bytes join(const int8_t* const (&pieces)[PIECES]) {
    auto piece = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(pieces[i])); };
    Bytes low = _mm512_inserti32x4(_mm512_castsi128_si512(piece(0)), piece(1), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(low, piece(2), 2), piece(3), 3);
}
MOESAIC_INLINE Bytes low_pairs(Bytes x, Bytes y) { return _mm512_unpacklo_epi32(x, y); }
MOESAIC_INLINE Bytes high_pairs(Bytes x, Bytes y) { return _mm512_unpackhi_epi32(x, y); }
MOESAIC_INLINE Bytes low_fours(Bytes x, Bytes y) { return _mm512_unpacklo_epi64(x, y); }
MOESAIC_INLINE Bytes high_fours(Bytes x, Bytes y) { return _mm512_unpackhi_epi64(x, y); }

// Pieces 0, 2, .. of x and then of y, plus pieces 1, 3, ..
MOESAIC_INLINE Bytes add_neighbours(Bytes x, Bytes y) {
    return add_integers(_mm512_shuffle_i32x4(x, y, 0x88), _mm512_shuffle_i32x4(x, y, 0xdd));
}

// x [4][4] pieces, transposed.
MOESAIC_INLINE void transpose_pieces(Bytes (&x)[4]) {
    Bytes a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
    Bytes c = _mm512_shuffle_i32x4(x[0], x[1], 0xee), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_i32x4(a, b, 0x88), x[1] = _mm512_shuffle_i32x4(a, b, 0xdd);
    x[2] = _mm512_shuffle_i32x4(c, d, 0x88), x[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}
#else
MOESAIC_INLINE Bytes join(const int8_t* const (&pieces)[PIECES]) {
    auto piece = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(pieces[i])); };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(piece(0)), piece(1), 1);
}
MOESAIC_INLINE Bytes low_pairs(Bytes x, Bytes y) { return _mm256_unpacklo_epi32(x, y); }
MOESAIC_INLINE Bytes high_pairs(Bytes x, Bytes y) { return _mm256_unpackhi_epi32(x, y); }
MOESAIC_INLINE Bytes low_fours(Bytes x, Bytes y) { return _mm256_unpacklo_epi64(x, y); }
MOESAIC_INLINE Bytes high_fours(Bytes x, Bytes y) { return _mm256_unpackhi_epi64(x, y); }

MOESAIC_INLINE Bytes add_neighbours(Bytes x, Bytes y) {
    return add_integers(_mm256_permute2x128_si256(x, y, 0x20), _mm256_permute2x128_si256(x, y, 0x31));
}

MOESAIC_INLINE void transpose_pieces(Bytes (&x)[2]) {
    Bytes low = _mm256_permute2x128_si256(x[0], x[1], 0x20);
    x[1] = _mm256_permute2x128_si256(x[0], x[1], 0x31), x[0] = low;
}
#endif

// The vectors of codes of GROUPS_AT_ONCE groups. With codes of 4 bits, the first one has the first 16 codes of each group.
template <class T>
constexpr int kVectors = T::kGroup == 16 ? 1 : 2;

// Those of a column. size: bytes of it that may be read.
template <class T, bool kWhole>
struct ColumnCodes {
    IntegerWeights<T> of[kVectors<T>];

    MOESAIC_INLINE ColumnCodes(const uint8_t* codes, int64_t size) {
        auto bytes = [&](int64_t at) MOESAIC_INLINE_LAMBDA {
            return load_bytes(codes + at, kWhole ? int64_t(sizeof(Bytes)) : std::max<int64_t>(0, size - at));
        };
        if constexpr (T::kNibbles) {
            Bytes both = bytes(0);
            of[0] = IntegerWeights<T>(as_integers<T>(low_half(both)));
            of[1] = IntegerWeights<T>(as_integers<T>(high_half(both)));
        } else {
            MOESAIC_UNROLL for (int i = 0; i < kVectors<T>; i++) {
                of[i] = IntegerWeights<T>(ordered<T>(bytes(i * int64_t(sizeof(Bytes)))));
            }
        }
    }
};

// Those of a row. lines: how many of it may be read.
template <class T>
struct RowCodes {
    Bytes of[kVectors<T>];

    RowCodes() = default;
    MOESAIC_INLINE RowCodes(const Line* row, int64_t lines) {
        MOESAIC_UNROLL for (int v = 0; v < kVectors<T>; v++) {
            const int8_t* pieces[PIECES];
            MOESAIC_UNROLL for (int64_t i = 0; i < PIECES; i++) {
                int64_t number = T::kNibbles ? kLine * i + 16 * v : 16 * (PIECES * v + i);
                pieces[i] = row[2 * std::min(number / kLine, lines - 1)].codes + number % kLine;
            }
            of[v] = join(pieces);
        }
    }
};

// Four sums of the products of each group.
template <class T, bool kWhole>
MOESAIC_INLINE Bytes sums_of_groups(const ColumnCodes<T, kWhole>& column, const RowCodes<T>& row) {
    IntegerSums<T> sums(0);
    sums.add(column.of[0], row.of[0]);
    if constexpr (T::kNibbles) {
        sums.add(column.of[1], row.of[1]);
    } else if constexpr (kVectors<T> > 1) {
        IntegerSums<T> others(0);
        others.add(column.of[1], row.of[1]);
        return add_neighbours(sums.products(), others.products());
    }
    return sums.products();
}

// sums[r][i] = codes of row r times those of a panel's columns in group i, of GROUPS_AT_ONCE groups.
template <class T, int R, bool kWhole>
MOESAIC_INLINE void groups_of_columns(const RowCodes<T> (&rows)[R], const uint8_t* codes, int64_t ld, int64_t some,
                                      int64_t size, Bytes (&sums)[R][GROUPS_AT_ONCE]) {
    MOESAIC_UNROLL for (int64_t four = 0; four < PANEL_COLUMNS / 4; four++) {
        Bytes of[R][4];
        MOESAIC_UNROLL for (int64_t i = 0; i < 4; i++) {
            int64_t c = 4 * four + i;
            ColumnCodes<T, kWhole> column(codes + (kWhole || c < some ? c : 0) * ld, size);
            MOESAIC_UNROLL for (int r = 0; r < R; r++) of[r][i] = sums_of_groups(column, rows[r]);
        }
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            Bytes a = add_integers(low_pairs(of[r][0], of[r][1]), high_pairs(of[r][0], of[r][1]));
            Bytes b = add_integers(low_pairs(of[r][2], of[r][3]), high_pairs(of[r][2], of[r][3]));
            sums[r][four] = add_integers(low_fours(a, b), high_fours(a, b));
        }
    }
    MOESAIC_UNROLL for (int r = 0; r < R; r++) transpose_pieces(sums[r]);
}

// As `panel_products`, with the codes at `codes`. The panel has scales and offsets only.
template <class T, int R>
MOESAIC_INLINE void column_products(const float* const* rows, const uint8_t* codes, int64_t ld, int64_t some,
                                    const IntegerPanel& panel, int64_t groups, Stream& stream, Vec (&sums)[R]) {
    Stream mine = stream;
    constexpr int64_t kSize = GROUPS_AT_ONCE * T::kCodes;
    const Line* lines[R];
    for (int r = 0; r < R; r++) lines[r] = reinterpret_cast<const Line*>(rows[r]), sums[r] = zero();
    for (int64_t g = 0; g < groups; g += GROUPS_AT_ONCE, codes += kSize) {
        mine.step();
        int64_t size = (groups - g) * T::kCodes, left = (groups - g) * T::kGroup;
        RowCodes<T> x[R];
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            x[r] = RowCodes<T>(lines[r] + g * T::kGroup / kLine * 2, (left + kLine - 1) / kLine);
        }
        Bytes integers[R][GROUPS_AT_ONCE];
        bool whole = some == PANEL_COLUMNS && size >= kSize;
        if (whole) groups_of_columns<T, R, true>(x, codes, ld, some, size, integers);
        else groups_of_columns<T, R, false>(x, codes, ld, some, size, integers);
        MOESAIC_UNROLL for (int64_t i = 0; i < GROUPS_AT_ONCE; i++) {
            if (!whole && g + i >= groups) break;
            Scales<T> scales(panel, g + i);
            MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                const Line& line = lines[r][(g + i) * T::kGroup / kLine * 2];
                int64_t first = (g + i) * T::kGroup % kLine;
                int32_t missing = IntegerSums<T>::kMissing * sum_of<T>(line, first);
                sums[r] = scales.add(floats(add_integers(integers[r][i], every(missing))), line, first, sums[r]);
            }
        }
    }
    stream = mine;
}

// The same for n rows, at most R -> out [n, stride], `some` columns of it.
template <class T, int R = FEW_INTEGER_ROWS>
void few_rows(int64_t n, const float* const* rows, const uint8_t* codes, int64_t ld, int64_t some,
              const IntegerPanel& panel, int64_t groups, Stream& stream, bool first, float* out, int64_t stride) {
    if constexpr (R > 1) {
        if (n < R) return few_rows<T, R - 1>(n, rows, codes, ld, some, panel, groups, stream, first, out, stride);
    }
    Vec sums[R];
    column_products<T, R>(rows, codes, ld, some, panel, groups, stream, sums);
    for (int r = 0; r < R; r++) put_sums(sums[r], first, out + r * stride, some);
}

}  // namespace MOESAIC_ISA
