// Products of rows with the rows of a weight matrix, [n, k] times [columns, k] transposed.
//
// One arithmetic form for any number of rows: a sum over at most BLOCK numbers runs over LANES running
// sums and is folded once, and the blocks of a longer row are added in order. How many rows or columns
// share a tile changes which registers are busy, never a bit of the result.
#pragma once

#include "simd.h"

namespace MOESAIC_ISA {

constexpr int64_t BLOCK = 1024;

template <class T, int R, int C>
MOESAIC_INLINE void tile_step(Vec (&sums)[R][C], const float* const* rows, const T* const* weights) {
    for (int half = 0; half < 2; half++) {
        if constexpr (R <= C) {
            Vec x[R];
            for (int r = 0; r < R; r++) x[r] = load(rows[r] + half * LANES);
            for (int c = 0; c < C; c++) {
                Vec w = half ? high(weights[c]) : low(weights[c]);
                for (int r = 0; r < R; r++) sums[r][c] = fma(x[r], w, sums[r][c]);
            }
        } else {
            Vec w[C];
            for (int c = 0; c < C; c++) w[c] = half ? high(weights[c]) : low(weights[c]);
            for (int r = 0; r < R; r++) {
                Vec x = load(rows[r] + half * LANES);
                for (int c = 0; c < C; c++) sums[r][c] = fma(x, w[c], sums[r][c]);
            }
        }
    }
}

// out[r * stride + c] = (or +=) rows[r] . weights[c] over `count` numbers, at most BLOCK. Rows are packed
// and padded with zeros; weights are not padded. `ahead` numbers further on lie the weights needed next.
template <class T, int R, int C>
MOESAIC_INLINE void tile(const float* const* rows, const T* const* weights, int64_t count, int64_t ahead, bool first,
                 float* out, int64_t stride) {
    Vec sums[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) sums[r][c] = zero();
    }
    const float* x[R];
    const T* w[C];
    for (int r = 0; r < R; r++) x[r] = rows[r];
    for (int c = 0; c < C; c++) w[c] = weights[c];
    int64_t whole = count / CHUNK * CHUNK;
    for (int64_t i = 0; i < whole; i += CHUNK) {
        for (int c = 0; c < C; c++) {
            prefetch(w[c] + ahead);
            if (sizeof(T) * CHUNK > 64) prefetch(w[c] + ahead + CHUNK / 2);
        }
        tile_step<T, R, C>(sums, x, w);
        for (int r = 0; r < R; r++) x[r] += CHUNK;
        for (int c = 0; c < C; c++) w[c] += CHUNK;
    }
    if (whole < count) {
        T rest[C][CHUNK] = {};
        for (int c = 0; c < C; c++) {
            std::memcpy(rest[c], w[c], size_t(count - whole) * sizeof(T));
            w[c] = rest[c];
        }
        tile_step<T, R, C>(sums, x, w);
    }
    for (int r = 0; r < R; r++) {
        float folded[(C + 3) / 4 * 4];
        for (int c = 0; c < C; c += 4) {
            Vec four[4];
            for (int i = 0; i < 4; i++) four[i] = c + i < C ? sums[r][c + i < C ? c + i : 0] : zero();
            totals4(four, folded + c);
        }
        float* to = out + r * stride;
        for (int c = 0; c < C; c++) to[c] = first ? folded[c] : to[c] + folded[c];
    }
}

// Where the weights lie that will be read next, to be fetched while others are used. Columns that several
// tiles of rows use are fetched once; then every tile fetches its share of what follows them.
template <class T>
struct Fetch {
    const T* then;  // what follows these columns, or null
    int64_t tile, tiles;

    int64_t ahead(const T* weights, int64_t group, bool last, int64_t step) const {
        if (tiles > 1) return then != nullptr && group % tiles == tile ? then - weights : 0;
        return !last ? step : then != nullptr ? then - (weights + group * step) : 0;
    }
};

// As many columns of a weight matrix as fit a tile of R rows, several times over.
template <class T, int R>
inline void strip(const float* const* rows, const T* weights, int64_t ld, int64_t columns, int64_t count,
                  Fetch<T> fetch, bool first, float* out, int64_t stride) {
    // Few rows need several columns, or the multiply-adds wait for each other; with more than four the lines
    // that are read and fetched at one time push each other out of the nearest cache.
    constexpr int C = R <= 3 ? 4 : TILE_COLUMNS;
    const T* w[C];
    int64_t column = 0;
    for (; column + C <= columns; column += C) {
        for (int c = 0; c < C; c++) w[c] = weights + (column + c) * ld;
        int64_t ahead = fetch.ahead(weights, column / C, column + 2 * C > columns, C * ld);
        tile<T, R, C>(rows, w, count, ahead, first, out + column, stride);
    }
    for (; column < columns; column++) {
        w[0] = weights + column * ld;
        tile<T, R, 1>(rows, w, count, 0, first, out + column, stride);
    }
}

template <class T, int R>
inline void strip_of(int64_t n, const float* const* rows, const T* weights, int64_t ld, int64_t columns,
                     int64_t count, Fetch<T> fetch, bool first, float* out, int64_t stride) {
    if (n == R) return strip<T, R>(rows, weights, ld, columns, count, fetch, first, out, stride);
    if constexpr (R > 1) {
        strip_of<T, R - 1>(n, rows, weights, ld, columns, count, fetch, first, out, stride);
    }
}

// out[r * stride + c] = rows[r] . weights[c * ld ..] for n rows and all `columns`, over k numbers.
// Reads each weight once for every TILE_ROWS rows; keep `columns` so few that they stay in the L2 cache.
// `then`: as many weights that this thread will read next, if it knows.
template <class T>
void multiply(const float* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
              float* out, int64_t stride, const T* then = nullptr) {
    const float* block_rows[TILE_ROWS];
    int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t t = 0; t < tiles; t++) {  // of like size: 8 rows are 4 and 4, not 6 and 2
        int64_t r = n * t / tiles, some = n * (t + 1) / tiles - r;
        for (int64_t begin = 0; begin < k; begin += BLOCK) {
            int64_t count = k - begin < BLOCK ? k - begin : BLOCK;
            for (int64_t i = 0; i < some; i++) block_rows[i] = rows[r + i] + begin;
            const T* next = tiles == 1 && begin + BLOCK < k ? weights + begin + BLOCK : then;
            if (next == then && then != nullptr && tiles > 1) next += begin;
            Fetch<T> fetch{next, t, tiles};
            strip_of<T, TILE_ROWS>(some, block_rows, weights + begin, ld, columns, count, fetch, begin == 0,
                                   out + r * stride, stride);
        }
    }
}

}  // namespace MOESAIC_ISA
