// Products of rows with the rows of a weight matrix, [n, k] times [columns, k] transposed.
//
// There is one order of arithmetic for any number of rows. A sum over at most BLOCK numbers uses LANES running sums
// and is folded once; the blocks of a longer row are added in order. How many rows or columns share a tile only
// affects the use of registers, never a bit of the result.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pool.h"
#include "simd.h"
#if !defined(MOESAIC_AMX_BF16)
#include "compressed.h"
#endif

namespace MOESAIC_ISA {

constexpr int64_t WIDE = BLOCK + 64 / sizeof(float);  // stride of widened columns: they use different cache sets

// Forces x into a register. Otherwise GCC would read a tile's weights from memory for every row, or rows per column.
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
                if constexpr (LANES == 16) keep(x);  // 32 registers leave one for the row
                for (int c = 0; c < C; c++) sums[r][c] = fma(x, w[c], sums[r][c]);
            }
        }
    }
}

// Data to prefetch while tiles compute. Each step fetches some of it, since the memory would be idle between bursts.
struct Stream {
    const char* line = nullptr;  // next line to prefetch
    const char* end = nullptr;
    const char* due = nullptr;   // lines before this one should have been prefetched by now
    int64_t bytes = 0;           // bytes per step
    int64_t of_group = 0;        // bytes per group of numbers that is decompressed
    const char* then = nullptr;  // where to continue after `end`, or null
    int64_t then_size = 0;

    Stream() = default;
    Stream(const void* from, int64_t size, int64_t of_step)
        : line(static_cast<const char*>(from)), end(line + size), due(line), bytes(of_step) {}

    MOESAIC_INLINE void step() { fetch(bytes); }
    MOESAIC_INLINE void fetch(int64_t some) {
        due += some;
        for (; line < due && line < end; line += 64) prefetch_l2(line);
        if (line >= end && then != nullptr) {
            due = then + (due - line), line = then, end = then + then_size, then = nullptr;
        }
    }
};

// What the tiles of a strip prefetch: nothing; the next tile's columns, to L1; or also those of a tile LEAD bytes
// further on, to L2. Prefetching to L1 alone keeps too few memory requests in flight.
enum class Fetch { kNothing, kNext, kNextAndFar };
constexpr int64_t LEAD = 1 << 14;

// Offset in numbers from the columns of a tile to the columns that it prefetches.
struct Ahead {
    int64_t next = 0, far = 0;
};

template <class T>
MOESAIC_INLINE constexpr int64_t lines() {  // cache lines of a chunk
    return sizeof(T) * CHUNK > 64 ? 2 : 1;
}

// Multiplies the whole chunks of a tile: `count` numbers.
template <class T, int R, int C, Fetch kFetch>
MOESAIC_INLINE void tile_steps(Vec (&sums)[R][C], const RowOf<T>* (&x)[R], const T* (&w)[C], int64_t count,
                               Ahead ahead, Stream& stream) {
    Stream mine = stream;
    for (int64_t i = 0; i < count; i += CHUNK) {
        for (int c = 0; kFetch != Fetch::kNothing && c < C; c++) {
            for (int64_t line = 0; line < CHUNK; line += CHUNK / lines<T>()) {
                if (kFetch == Fetch::kNextAndFar) prefetch_l2(w[c] + ahead.far + line);
                prefetch(w[c] + ahead.next + line);
            }
        }
        mine.step();
        tile_step<T, R, C>(sums, x, w);
        for (int r = 0; r < R; r++) x[r] += CHUNK;
        for (int c = 0; c < C; c++) w[c] += CHUNK;
    }
    stream = mine;
}

// Computes the total of each sum, in registers.
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
MOESAIC_INLINE void tile(const RowOf<T>* const* rows, const T* const* weights, int64_t count, Ahead ahead,
                         Stream& stream, bool first, float* out, int64_t stride) {
    const RowOf<T>* x[R];
    const T* w[C];
    for (int r = 0; r < R; r++) x[r] = rows[r];
    for (int c = 0; c < C; c++) w[c] = weights[c];
    int64_t whole = count / CHUNK * CHUNK;
    T rest[C][CHUNK];
    if (whole < count) {  // before the sums occupy the registers
        std::memset(rest, 0, sizeof rest);
        for (int c = 0; c < C; c++) std::memcpy(rest[c], w[c] + whole, size_t(count - whole) * sizeof(T));
    }
    Vec sums[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) sums[r][c] = zero();
    }
    if (ahead.far != 0) {
        tile_steps<T, R, C, Fetch::kNextAndFar>(sums, x, w, whole, ahead, stream);
    } else if (ahead.next != 0) {
        tile_steps<T, R, C, Fetch::kNext>(sums, x, w, whole, ahead, stream);
    } else {
        tile_steps<T, R, C, Fetch::kNothing>(sums, x, w, whole, ahead, stream);
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

// Number of columns of a tile with this many rows. With few rows it must be several, or the multiply-adds wait for each
// other. With more than four, the lines that are read and prefetched at a time evict each other from L1.
constexpr int columns_of(int rows) { return rows <= 3 ? 4 : TILE_COLUMNS; }

// Multiplies the columns of a weight matrix, in tiles of R rows and C columns. `then`: the weights after them, which
// the last tiles prefetch, or null.
template <class T, int R, int C>
inline void strip(const RowOf<T>* const* rows, const T* weights, int64_t ld, int64_t columns, int64_t count,
                  Fetch fetch, const T* then, Stream& stream, bool first, float* out, int64_t stride) {
    const T* w[C];
    int64_t column = 0, whole = columns / C * C, far = LEAD / (C * count * int64_t(sizeof(T))) * C;
    auto to = [&](int64_t later) {  // offset from this tile to the columns `later` further on
        if (column + later < whole) return later * ld;
        return then != nullptr ? then + (column + later - whole) * ld - w[0] : 0;
    };
    for (; column < whole; column += C) {
        for (int c = 0; c < C; c++) w[c] = weights + (column + c) * ld;
        Ahead ahead;
        if (fetch != Fetch::kNothing) ahead.next = to(C);
        if (fetch == Fetch::kNextAndFar && far > C) ahead.far = to(far);
        tile<T, R, C>(rows, w, count, ahead, stream, first, out + column, stride);
    }
    for (; column < columns; column++) {
        w[0] = weights + column * ld;
        tile<T, R, 1>(rows, w, count, {}, stream, first, out + column, stride);
    }
}

// The strip of n rows, at most R. C: columns of a tile; 0 means the number that suits n.
template <class T, int R = TILE_ROWS, int C = 0>
inline void strip_of(int64_t n, const RowOf<T>* const* rows, const T* weights, int64_t ld, int64_t columns,
                     int64_t count, Fetch fetch, const T* then, Stream& stream, bool first, float* out,
                     int64_t stride) {
    constexpr int kColumns = C > 0 ? C : columns_of(R);
    if (n == R) {
        return strip<T, R, kColumns>(rows, weights, ld, columns, count, fetch, then, stream, first, out, stride);
    }
    if constexpr (R > 1) {
        strip_of<T, R - 1, C>(n, rows, weights, ld, columns, count, fetch, then, stream, first, out, stride);
    }
}

// Whether T's numbers are converted to float once for all tiles of n rows, instead of in each tile. That is faster with
// many rows, if L1 has room for the columns and the rows of a tile.
template <class T>
inline bool widened(int64_t n) {
    constexpr int64_t kRoom = (WIDE_ROWS * BLOCK + WIDE_COLUMNS * WIDE) * int64_t(sizeof(float));
    static const bool fits = kRoom <= moesaic::nearest_cache();
    return fits && n >= MANY_ROWS;
}

// Converts a block of columns to type N, in the order of rows that were packed for T.
template <class T, class N>
inline void bring_near(const T* columns, int64_t ld, int64_t some, int64_t count, N* out, Stream&) {
    for (int64_t c = 0; c < some; c++) widen<T>(columns + c * ld, count, out + c * WIDE);
}

// As `multiply`, but converts C columns at a time to type N, once for all tiles of R rows. The columns stay in L1, and
// the rows are read from L2. kTile: columns of a tile if there are C columns; 0 means the number that suits the rows.
template <class T, class N, int R, int C, int kTile>
void multiply_near(const RowOf<T>* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
                   float* out, int64_t stride, Stream& stream) {
    alignas(64) N near[C * WIDE];
    const RowOf<T>* some[R];
    int64_t tiles = (n + R - 1) / R;
    for (int64_t begin = 0; begin < k; begin += BLOCK) {
        int64_t count = k - begin < BLOCK ? k - begin : BLOCK;
        for (int64_t column = 0; column < columns; column += C) {
            int64_t wanted = columns - column < C ? columns - column : C;
            bring_near(weights + column * ld + span<T>(begin), ld, wanted, count, near, stream);
            auto pass_rows = [&](auto of_tile) {
                for (int64_t t = 0; t < tiles; t++) {
                    int64_t r = n * t / tiles, more = n * (t + 1) / tiles - r;
                    for (int64_t i = 0; i < more; i++) some[i] = rows[r + i] + begin;
                    strip_of<N, R, decltype(of_tile)::value>(more, some, near, WIDE, wanted, padded(count),
                                                             Fetch::kNothing, nullptr, stream, begin == 0,
                                                             out + r * stride + column, stride);
                }
            };
            wanted == C ? pass_rows(std::integral_constant<int, kTile>{})
                        : pass_rows(std::integral_constant<int, 0>{});
        }
    }
}

template <class T>
void multiply_beside(const RowOf<T>* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
                     float* out, int64_t stride, const T* then, Stream stream);

// out[r * stride + c] = rows[r] . weights[c * ld ..] for n rows and all `columns`, over k numbers.
// This reads each weight once per TILE_ROWS rows, so `columns` must be few enough to stay in L2.
// `then`: the weights that this thread will probably read next, as many as these; or null. A single tile of rows
// prefetches the columns that it needs next. With several tiles, each prefetches a part of `then`. Their own columns
// are in L2 for all but the first tile. They prefetch these to L1 as well, except in float32, where the columns would
// evict the rows from L1.
template <class T, std::enable_if_t<!kQuantized<T>, int> = 0>
void multiply(const RowOf<T>* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
              float* out, int64_t stride, const T* then = nullptr) {
    int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    Stream stream;
    if (tiles > 1 && then != nullptr) {
        constexpr int64_t kLines = TILE_COLUMNS * CHUNK * int64_t(sizeof(T)) / 64;  // that a step of a tile reads
        stream = {then, columns * k * int64_t(sizeof(T)), (kLines + tiles - 1) / tiles * 64};
    }
    multiply_beside<T>(rows, n, weights, ld, columns, k, out, stride, then, stream);
}

// The same with the stream that its tiles prefetch. A single tile of rows also prefetches `then`.
template <class T>
void multiply_beside(const RowOf<T>* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
                     float* out, int64_t stride, const T* then, Stream stream) {
    const RowOf<T>* block_rows[TILE_ROWS];
    int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
    bool single = tiles == 1;
    Fetch fetch = single ? Fetch::kNextAndFar : sizeof(T) < 4 ? Fetch::kNext : Fetch::kNothing;
    if constexpr (kToWiden<T>) {
        if (widened<T>(n)) {
            return multiply_near<T, float, WIDE_ROWS, WIDE_COLUMNS, WIDE_COLUMNS>(rows, n, weights, ld, columns, k, out,
                                                                                  stride, stream);
        }
    }
    for (int64_t t = 0; t < tiles; t++) {  // tiles of similar size: 8 rows are 4 and 4, not 6 and 2
        int64_t r = n * t / tiles, some = n * (t + 1) / tiles - r;
        for (int64_t begin = 0; begin < k; begin += BLOCK) {
            int64_t count = k - begin < BLOCK ? k - begin : BLOCK;
            for (int64_t i = 0; i < some; i++) block_rows[i] = rows[r + i] + begin;
            const T* next = !single ? nullptr : begin + BLOCK < k ? weights + begin + BLOCK : then;
            strip_of<T>(some, block_rows, weights + begin, ld, columns, count, fetch, next, stream, begin == 0,
                        out + r * stride, stride);
        }
    }
}

#if !defined(MOESAIC_AMX_BF16)
template <class N>
inline void bring_near(const Compressed* columns, int64_t ld, int64_t some, int64_t count, N* out, Stream& stream) {
    int64_t c = 0;
    for (; c + 4 <= some; c += 4) {
        decompress<4>(columns + c * ld, ld, count, out + c * WIDE, WIDE, [&] { stream.fetch(4 * stream.of_group); });
    }
    for (; c < some; c++) {
        decompress<1>(columns + c * ld, ld, count, out + c * WIDE, WIDE, [&] { stream.fetch(stream.of_group); });
    }
}

// As `multiply` for compressed weights. They are converted once for all rows, to bf16, or to float where bf16 weights would
// be. They are prefetched LEAD bytes ahead at a constant rate, while decompressing and while multiplying.
template <>
inline void multiply(const RowOf<Compressed>* const* rows, int64_t n, const Compressed* weights, int64_t ld,
                     int64_t columns, int64_t k, float* out, int64_t stride, const Compressed* then) {
    constexpr int64_t kGroup = GROUP_BYTES + 20;  // with its share of a head; slightly too much
    constexpr int64_t kStep = kGroup * CHUNK * TILE_COLUMNS / GROUP;
    int64_t turns = 1 + (n + TILE_ROWS - 1) / TILE_ROWS, lead = std::min(columns * ld, LEAD);
    Stream stream(weights + lead, columns * ld - lead, kStep / turns);
    stream.of_group = kGroup / turns;
    if (then != nullptr) stream.then = reinterpret_cast<const char*>(then), stream.then_size = lead;
    auto by = [&](auto multiply_some, int64_t some) {  // in the order of the columns in memory
        for (int64_t c = 0; c < columns; c += some) {
            multiply_some(rows, n, weights + c * ld, ld, std::min(some, columns - c), k, out + c, stride, stream);
        }
    };
    if constexpr (kToWiden<Narrow>) {
        if (widened<Narrow>(n)) {
            return by(multiply_near<Compressed, float, WIDE_ROWS, WIDE_COLUMNS, WIDE_COLUMNS>, WIDE_COLUMNS);
        }
    }
    by(multiply_near<Compressed, Narrow, TILE_ROWS, 2 * TILE_COLUMNS, 0>, 2 * TILE_COLUMNS);
}
#endif

}  // namespace MOESAIC_ISA

#if !defined(MOESAIC_AMX_BF16)
#include "dot_quantized.h"
#endif
