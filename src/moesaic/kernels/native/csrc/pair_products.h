// Products of rows of bf16 numbers with columns of bf16 numbers in tiles, for attention with rounded numbers.
//
// A tile has CHUNK numbers of each of SIDE columns, as the instructions read them: [pair][column][2]. The tiles of some
// columns lie beside each other, and those of the next CHUNK numbers follow. Sums run over all numbers in order, so how
// many rows and columns share an instruction or a call changes no bit.
//   VDPBF16PS adds the products of a pair to the sum, and then those of the next pair.
//   TDPBF16PS adds CHUNK numbers at a time, in the order of tiles_amx.h.
#pragma once

#include "attention_units.h"

namespace MOESAIC_ISA {

// Rows [count] of bf16 numbers, `stride` apart.
struct PairRows {
    const bf16* first;
    int64_t stride, count;
};

struct PairSums {
    float* first;
    int64_t stride;
    bool fresh;  // whether the sums begin with zero
};

#if defined(MOESAIC_AMX_BF16)
constexpr int64_t whole_lines(int64_t lines) { return (lines + SIDE - 1) / SIDE * SIDE; }

// Calls use(first, count) for lines that are multiplied together: two tiles.
template <class Use>
inline void each_rows(int64_t lines, const Use& use) {
    for (int64_t line = 0; line < lines; line += 2 * SIDE) use(line, std::min(lines - line, 2 * SIDE));
}

template <int L, int C, int i = 0>
MOESAIC_INLINE void load_sums(const float* from, int64_t stride) {
    if constexpr (i < L * C) {
        load_tile<i>(reinterpret_cast<const bf16*>(from + i / C * SIDE * stride + i % C * SIDE), 2 * stride);
        load_sums<L, C, i + 1>(from, stride);
    }
}

template <int L, int C, int i = 0>
MOESAIC_INLINE void store_sums_of(float* to, int64_t stride) {
    if constexpr (i < L * C) {
        store_tile<i>(to + i / C * SIDE * stride + i % C * SIDE, stride);
        store_sums_of<L, C, i + 1>(to, stride);
    }
}

// Multiplies L tiles of rows by C tiles of columns, blocks [begin, end). Rows after `count` can be read, but have no
// sums.
template <int L, int C>
void pair_tile(const PairRows& rows, const bf16* tiles, int64_t apart, int64_t begin, int64_t end, PairSums sums) {
    alignas(64) float block[L * SIDE][C * SIDE];
    bool whole = rows.count == L * SIDE;
    float* at = whole ? sums.first : block[0];
    int64_t stride = whole ? sums.stride : C * SIDE;
    if (sums.fresh) {
        clear_tiles<L * C>();
    } else {
        for (int64_t r = 0; !whole && r < L * SIDE; r++) {
            std::memcpy(block[r], sums.first + std::min(r, rows.count - 1) * sums.stride, sizeof block[r]);
        }
        load_sums<L, C>(at, stride);
    }
    for (int64_t b = begin; b < end; b++) {
        tiles_step<L, C>(static_cast<const Tiled*>(rows.first + b * CHUNK), rows.stride, tiles + b * apart, TILE);
    }
    store_sums_of<L, C>(at, stride);
    for (int64_t r = 0; !whole && r < rows.count; r++) {
        std::memcpy(sums.first + r * sums.stride, block[r], sizeof block[r]);
    }
}

// sums[row][column] = (or +=) the products of rows, at most two tiles, with groups [first, last) of SIDE columns.
// tiles: has `groups` of them. Pairs [begin, end) of each row are added, and those that share a block with them.
inline void multiply_pairs(const PairRows& rows, const bf16* tiles, int64_t groups, int64_t first, int64_t last,
                           int64_t begin, int64_t end, const PairSums& sums) {
    begin /= SIDE, end = (end + SIDE - 1) / SIDE;
    auto some = [&](auto of_lines, int64_t most) {
        for (int64_t group = first; group < last; group += most) {
            with_rows<4>(std::min(most, last - group), [&](auto c) {
                constexpr int L = decltype(of_lines)::value, C = decltype(c)::value;
                if constexpr (L * C <= 4) {
                    PairSums own{sums.first + (group - first) * SIDE, sums.stride, sums.fresh};
                    pair_tile<L, C>(rows, tiles + group * TILE, groups * TILE, begin, end, own);
                }
            });
        }
    };
    rows.count > SIDE ? some(std::integral_constant<int, 2>{}, 2) : some(std::integral_constant<int, 1>{}, 4);
}
#else
constexpr int64_t SIDE = LANES, TILE = SIDE * CHUNK;

constexpr int64_t whole_lines(int64_t lines) { return lines; }

template <class Use>
inline void each_rows(int64_t lines, const Use& use) {
    each_tile(lines, TILE_ROWS, use);
}

inline Pairs pair_everywhere(const bf16* pair) {
    int bits;
    std::memcpy(&bits, pair, 4);
    return Pairs(_mm512_set1_epi32(bits));
}

// Multiplies R rows by C tiles of columns, pairs [begin, end).
template <int R, int C>
MOESAIC_APART void pair_tile(const PairRows& rows, const bf16* tiles, int64_t apart, int64_t begin, int64_t end,
                             PairSums out) {
    Vec sums[R][C];
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        MOESAIC_UNROLL for (int c = 0; c < C; c++) {
            sums[r][c] = out.fresh ? zero() : load(out.first + r * out.stride + c * LANES);
        }
    }
    const bf16* x = rows.first;
    int64_t stride = rows.stride;
    for (int64_t pair = begin; pair < end;) {
        int64_t stop = std::min(end, (pair / SIDE + 1) * SIDE);
        const bf16* from = tiles + pair / SIDE * apart + pair % SIDE * CHUNK;
        for (; pair < stop; pair++, from += CHUNK) {
            Pairs column[C];
            MOESAIC_UNROLL for (int c = 0; c < C; c++) {
                column[c] = Pairs(_mm512_loadu_si512(from + c * TILE)), keep(column[c]);
            }
            MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                Pairs factor = pair_everywhere(x + r * stride + 2 * pair);
                keep(factor);
                MOESAIC_UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(factor, column[c], sums[r][c]);
            }
        }
    }
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        MOESAIC_UNROLL for (int c = 0; c < C; c++) store(out.first + r * out.stride + c * LANES, sums[r][c]);
    }
}

// sums[row][column] = (or +=) the products of rows, at most TILE_ROWS, with groups [first, last) of SIDE columns.
// tiles: has `groups` of them. Pairs [begin, end) of each row are added.
inline void multiply_pairs(const PairRows& rows, const bf16* tiles, int64_t groups, int64_t first, int64_t last,
                           int64_t begin, int64_t end, const PairSums& sums) {
    for (int64_t group = first; group < last; group += TILE_COLUMNS) {
        PairSums own{sums.first + (group - first) * SIDE, sums.stride, sums.fresh};
        with_rows<TILE_COLUMNS>(std::min<int64_t>(TILE_COLUMNS, last - group), [&](auto c) {
            with_rows<TILE_ROWS>(rows.count, [&](auto r) {
                pair_tile<decltype(r)::value, decltype(c)::value>(rows, tiles + group * TILE, groups * TILE, begin, end,
                                                                  own);
            });
        });
    }
}
#endif

inline __m512i load_numbers(const bf16* from, int64_t count) {  // CHUNK numbers, with zeros after `count`
    if (count >= CHUNK) return _mm512_loadu_si512(from);
    return _mm512_maskz_loadu_epi16(__mmask32((uint32_t(1) << count) - 1), from);
}

// Puts a row of each column [SIDE], `width` numbers of it, into tiles that are `apart` from one CHUNK to the next.
template <class Step>
inline void turn_pairs(const bf16* const* columns, int64_t width, bf16* tiles, int64_t apart, Step& step) {
    for (int64_t i = 0; i < width; i += CHUNK, tiles += apart) {
        Vec x[SIDE];
        for (int64_t c = 0; c < SIDE; c++) x[c] = _mm512_castsi512_ps(load_numbers(columns[c] + i, width - i));
        transpose(x);
        for (int64_t pair = 0; pair < SIDE; pair++) _mm512_storeu_ps(tiles + pair * CHUNK, x[pair]);
        step();
    }
}

// Puts two rows of numbers [width], null for zeros, into a pair of each column. Columns go on in the next tile.
inline void pair_up(const bf16* even, const bf16* odd, int64_t width, bf16* tiles) {
    alignas(64) static constexpr uint16_t kLow[CHUNK] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < width; i += CHUNK, tiles += 2 * TILE) {
        __m512i a = even == nullptr ? _mm512_setzero_si512() : load_numbers(even + i, width - i);
        __m512i b = odd == nullptr ? _mm512_setzero_si512() : load_numbers(odd + i, width - i);
        _mm512_storeu_si512(tiles, _mm512_permutex2var_epi16(a, low, b));
        if (width - i > SIDE) _mm512_storeu_si512(tiles + TILE, _mm512_permutex2var_epi16(a, high, b));
    }
}

// Rounds numbers [count] to bf16, padded with zeros to whole CHUNKs. `out` may be the memory of `from`.
inline void round_numbers(const float* from, int64_t count, bf16* out) {
    for (int64_t i = 0; i < count; i += CHUNK) {
        uint32_t there = count - i >= CHUNK ? ~uint32_t(0) : (uint32_t(1) << (count - i)) - 1;
        Vec low = _mm512_maskz_loadu_ps(__mmask16(there), from + i);
        Vec high = _mm512_maskz_loadu_ps(__mmask16(there >> LANES), from + i + LANES);
        _mm512_storeu_si512(out + i, rounded(low, high));
    }
}

}  // namespace MOESAIC_ISA
