// Products of rows with the rows of a weight matrix, [n, k] times [columns, k] transposed.
//
// One arithmetic form for any number of rows: a sum over at most BLOCK numbers runs over LANES running
// sums and is folded once, and the blocks of a longer row are added in order. How many rows or columns
// share a tile changes which registers are busy, never a bit of the result.
#pragma once

#include "simd.h"

namespace MOESAIC_ISA {

constexpr int64_t BLOCK = 1024;

// In a register: GCC would read weights of an AVX2 tile from memory for every row.
template <class V>
MOESAIC_INLINE void keep([[maybe_unused]] V& x) {
#if defined(__AVX2__)
    asm("" : "+v"(x));
#endif
}

template <class T, int R, int C>
MOESAIC_INLINE void tile_step(Vec (&sums)[R][C], const RowOf<T>* const* rows, const T* const* weights) {
    using F = Form<T>;
    using Operand = typename F::Operand;
    for (int v = 0; v < F::kVectors; v++) {
        if constexpr (R <= C) {
            Operand x[R];
            for (int r = 0; r < R; r++) x[r] = F::row(rows[r], v);
            for (int c = 0; c < C; c++) {
                Operand w = F::stored(weights[c], v);
                for (int r = 0; r < R; r++) sums[r][c] = fma(x[r], w, sums[r][c]);
            }
        } else {
            Operand w[C];
            for (int c = 0; c < C; c++) w[c] = F::stored(weights[c], v), keep(w[c]);
            for (int r = 0; r < R; r++) {
                Operand x = F::row(rows[r], v);
                for (int c = 0; c < C; c++) sums[r][c] = fma(x, w[c], sums[r][c]);
            }
        }
    }
}

// Whole chunks of a tile: `count` numbers. `ahead` numbers further on lie the weights needed next; 0: nowhere.
template <class T, int R, int C, bool kFetch>
MOESAIC_INLINE void tile_steps(Vec (&sums)[R][C], const RowOf<T>* (&x)[R], const T* (&w)[C], int64_t count,
                               int64_t ahead) {
    for (int64_t i = 0; i < count; i += CHUNK) {
        for (int c = 0; kFetch && c < C; c++) {
            prefetch(w[c] + ahead);
            if (sizeof(T) * CHUNK > 64) prefetch(w[c] + ahead + CHUNK / 2);
        }
        tile_step<T, R, C>(sums, x, w);
        for (int r = 0; r < R; r++) x[r] += CHUNK;
        for (int c = 0; c < C; c++) w[c] += CHUNK;
    }
}

// The total of each sum, in registers until then.
template <int R, int C>
MOESAIC_INLINE void fold(const Vec (&sums)[R][C], float (&totals)[R * C + 3]) {
    Vec flat[R * C + 3];
    MOESAIC_UNROLL for (int i = 0; i < R * C + 3; i++) flat[i] = i < R * C ? sums[i / C][i % C] : zero();
    constexpr int kEights = R * C / 8 * 8;
    MOESAIC_UNROLL for (int i = 0; i < kEights; i += 8) totals8(flat + i, totals + i);
    MOESAIC_UNROLL for (int i = kEights; i < R * C; i += 4) totals4(flat + i, totals + i);
}

// out[r * stride + c] = (or +=) rows[r] . weights[c] over `count` numbers, at most BLOCK. Rows are packed
// and padded with zeros; weights are not padded.
template <class T, int R, int C>
MOESAIC_INLINE void tile(const RowOf<T>* const* rows, const T* const* weights, int64_t count, int64_t ahead, bool first,
                 float* out, int64_t stride) {
    const RowOf<T>* x[R];
    const T* w[C];
    for (int r = 0; r < R; r++) x[r] = rows[r];
    for (int c = 0; c < C; c++) w[c] = weights[c];
    int64_t whole = count / CHUNK * CHUNK;
    T rest[C][CHUNK];
    if (whole < count) {  // before the sums fill the registers
        std::memset(rest, 0, sizeof rest);
        for (int c = 0; c < C; c++) std::memcpy(rest[c], w[c] + whole, size_t(count - whole) * sizeof(T));
    }
    Vec sums[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) sums[r][c] = zero();
    }
    if (ahead != 0) {
        tile_steps<T, R, C, true>(sums, x, w, whole, ahead);
    } else {
        tile_steps<T, R, C, false>(sums, x, w, whole, 0);
    }
    if (whole < count) {
        for (int c = 0; c < C; c++) w[c] = rest[c];
        tile_step<T, R, C>(sums, x, w);
    }
    float totals[R * C + 3];
    fold<R, C>(sums, totals);
    for (int r = 0; r < R; r++) {
        float* to = out + r * stride;
        const float* from = totals + r * C;
        for (int c = 0; c < C; c++) to[c] = first ? from[c] : to[c] + from[c];
    }
}

// Where the weights lie that will be read next, to be fetched while others are used: those of the next columns,
// then what follows all of these. Where several tiles of rows use the columns, every tile fetches its share of that,
// and float32 columns, which lie in the L2 cache by then, are left there: they would push the rows out of the nearest.
template <class T>
struct Fetch {
    const T* then;  // what follows these columns, or null
    int64_t tile, tiles;

    int64_t ahead(const T* weights, int64_t group, bool last, int64_t step) const {
        if (tiles > 1 && then != nullptr && group % tiles == tile) return then - weights;
        if (tiles > 1) return sizeof(T) == 4 || last ? 0 : step;
        return !last ? step : then != nullptr ? then - (weights + group * step) : 0;
    }
};

// As many columns of a weight matrix as fit a tile of R rows, several times over.
template <class T, int R>
inline void strip(const RowOf<T>* const* rows, const T* weights, int64_t ld, int64_t columns, int64_t count,
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
inline void strip_of(int64_t n, const RowOf<T>* const* rows, const T* weights, int64_t ld, int64_t columns,
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
void multiply(const RowOf<T>* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
              float* out, int64_t stride, const T* then = nullptr) {
    const RowOf<T>* block_rows[TILE_ROWS];
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
