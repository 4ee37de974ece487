// AMX with BF16: one instruction computes the products of 16 columns of weights and a panel of 16 rows, for 32 numbers
// of each. Weights are read in place. Rows are rounded to bf16, as in pairs_avx512.h, and packed as panels once.
//
// Of 32 numbers the instruction adds the products of the even ones one after another, and likewise those of the odd
// ones. Then it adds the two results, and adds that to the sum. The order is always the same, so a sum only depends on
// its row and its column.
//
// With PARTS > 1 a number of a row is stored as the sum of so many bf16 numbers, each the nearest to what those before
// it leave. Three hold a float32. A loaded tile of weights meets every part. Each part has sums of its own, which are
// added up at the end, the smallest first. Intel's oneMKL calls these modes float_to_bf16x2 and float_to_bf16x3.
#pragma once

#include <limits>

#include "amx.h"

namespace MOESAIC_ISA {

struct Tiled : bf16 {};  // a bf16 weight whose rows are rounded or split, and packed as panels
using Narrow = Tiled;    // the type of bf16 weights in products

constexpr int PARTS = MOESAIC_AMX_PARTS;
struct Parts {  // memory of a number of a row. A panel has [CHUNK numbers][part][pair][row][2].
    bf16 part[PARTS];
};

constexpr int64_t SIDE = 16;                     // columns, or rows, of a tile
constexpr int64_t TILE = SIDE * CHUNK;           // numbers of a tile
constexpr int64_t PANELS = PARTS == 1 ? 2 : 1;   // panels that a loaded tile of weights meets

template <>
constexpr int64_t kTogether<Tiled> = SIDE;

template <>
struct Form<Tiled> {
    using Row = Parts;
};

// Tile registers of a task. Configuring them takes a sixth of a microsecond, so it is done once per task. They are
// released at its end: otherwise the kernel would save them at every thread switch, and the thread's next task may be
// another library's.
template <>
struct Registers<Tiled> {
    Registers() {
        static constexpr Shapes kShapes;
        configure_tiles(kShapes);
    }
    ~Registers() { release_tiles(); }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Splits two vectors into PARTS vectors of bf16. What follows a NaN or an infinity is zero.
MOESAIC_INLINE void split(Vec low, Vec high, __m512i (&parts)[PARTS]) {
    for (int p = 0; p < PARTS; p++) {
        parts[p] = rounded(low, high);
        if (p + 1 == PARTS) return;
        auto rest = [](Vec x, __m256i part) {
            Vec taken = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16));
            __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(taken), set1(kInfinity), _CMP_LT_OQ);
            return _mm512_maskz_sub_ps(finite, x, taken);
        };
        low = rest(low, _mm512_castsi512_si256(parts[p]));
        high = rest(high, _mm512_extracti64x4_epi64(parts[p], 1));
    }
}

// Tile of part p in a panel, for the chunk that begins at number i.
inline bf16* tile_of(Parts* panel, int64_t i, int p) { return reinterpret_cast<bf16*>(panel + i * SIDE) + p * TILE; }

// Splits numbers [i, i + CHUNK) of a row [count], with zeros after its end.
MOESAIC_INLINE void split_chunk(const float* row, int64_t i, int64_t count, __m512i (&parts)[PARTS]) {
    if (i + CHUNK <= count) return split(load(row + i), load(row + i + LANES), parts);
    float rest[CHUNK] = {};
    std::memcpy(rest, row + i, size_t(count - i) * 4);
    split(load(rest), load(rest + LANES), parts);
}

// Packs rows [count], null for absent ones, as a panel that is padded with zeros.
template <>
inline void pack_set<Tiled>(const float* const* rows, int64_t count, Parts* out) {
    for (int64_t i = 0; i < count; i += CHUNK) {
        Vec pairs[PARTS][SIDE];
        for (int r = 0; r < SIDE; r++) {
            __m512i parts[PARTS] = {};
            if (rows[r] != nullptr) split_chunk(rows[r], i, count, parts);
            for (int p = 0; p < PARTS; p++) pairs[p][r] = _mm512_castsi512_ps(parts[p]);
        }
        for (int p = 0; p < PARTS; p++) {
            transpose(pairs[p]);
            for (int pair = 0; pair < SIDE; pair++) _mm512_storeu_ps(tile_of(out, i, p) + pair * CHUNK, pairs[p][pair]);
        }
    }
}

// Multiplies CHUNK numbers of C tiles of columns, ld apart, by R tiles of rows, `apart` numbers from one to the next.
template <int C, int R, int i = 0>
MOESAIC_INLINE void tiles_step(const Tiled* weights, int64_t ld, const bf16* rows, int64_t apart) {
    if constexpr (i < C * R) {
        constexpr bool kAll = R <= 2;  // whether there are registers for all tiles of rows
        constexpr int kRows = kAll ? 6 + i % R : 7, kWeights = kAll ? 4 + i / R % 2 : 6;
        static_assert(C * R <= (kAll ? 4 : 6));
        if constexpr (i < R || !kAll) load_tile<kRows>(rows + i % R * apart, CHUNK);
        if constexpr (i % R == 0) load_tile<kWeights>(weights + i / R * SIDE * ld, ld);
        add_products<i, kWeights, kRows>();
        tiles_step<C, R, i + 1>(weights, ld, rows, apart);
    }
}

template <int N, int i = 0>
MOESAIC_INLINE void clear_tiles() {
    if constexpr (i < N) clear_tile<i>(), clear_tiles<N, i + 1>();
}

template <int C, int R, int i = 0>
MOESAIC_INLINE void store_tiles(float* out) {
    if constexpr (i < C * R) {
        store_tile<i>(out + i / R * SIDE * R * SIDE + i % R * SIDE, R * SIDE);
        store_tiles<C, R, i + 1>(out);
    }
}

template <int C, int R, int i = 0>
MOESAIC_INLINE void load_tiles(const float* from) {
    if constexpr (i < C * R) {
        load_tile<i>(from + i / R * SIDE * R * SIDE + i % R * SIDE, R * SIDE);
        load_tiles<C, R, i + 1>(from);
    }
}

// Adds up the sums of parts: block[column][row] of apart[column][part][row].
template <int C>
MOESAIC_INLINE void add_parts(const float* apart, float* block) {
    for (int64_t column = 0; column < C * SIDE; column++, apart += PARTS * SIDE) {
        Vec sum = load(apart + (PARTS - 1) * SIDE);
        for (int p = PARTS - 2; p >= 0; p--) sum = add(load(apart + p * SIDE), sum);
        store(block + column * SIDE, sum);
    }
}

// Stores the sums of C tiles of columns and P panels as block[column][row]. Those of parts are added up.
template <int C, int P>
MOESAIC_INLINE void store_sums(float* block) {
    if constexpr (PARTS == 1) {
        store_tiles<C, P>(block);
    } else {
        static_assert(P == 1);
        alignas(64) float apart[C * SIDE * PARTS * SIDE];
        store_tiles<C, PARTS>(apart);
        add_parts<C>(apart, block);
    }
}

// Tiles of weights: C * SIDE columns of k numbers, ld apart, and as many that are needed next, or null.
struct Source {
    const Tiled* weights;
    const Tiled* next;
    int64_t ld, k;
};

// Computes block[column][row] for C tiles of columns and P panels, which are padded with zeros. columns: less than SIDE
// if the only tile has fewer.
template <int C, int P>
inline void tiles(const Source& from, const Parts* panels, float* block, int64_t columns = SIDE) {
    constexpr int kTiles = P * PARTS;
    int64_t apart = PARTS > 1 ? TILE : SIDE * padded(from.k);
    int64_t whole = C == 1 && columns < SIDE ? 0 : from.k / CHUNK * CHUNK;
    const Tiled* weights = from.weights;
    const bf16* rows = reinterpret_cast<const bf16*>(panels);
    clear_tiles<C * kTiles>();
    for (int64_t i = 0; i < whole; i += CHUNK) {
        for (int r = 0; from.next != nullptr && r < C * SIDE; r++) prefetch(from.next + i + r * from.ld);
        tiles_step<C, kTiles>(weights, from.ld, rows, apart);
        weights += CHUNK, rows += TILE * PARTS;
    }
    for (int64_t i = whole; i < from.k; i += CHUNK) {  // the last numbers, or columns, after which other data follows
        alignas(64) Tiled copies[C * SIDE][CHUNK];
        std::memset(static_cast<void*>(copies), 0, sizeof copies);
        int64_t lines = C == 1 ? columns : C * SIDE, numbers = from.k - i < CHUNK ? from.k - i : CHUNK;
        for (int64_t line = 0; line < lines; line++) {
            std::memcpy(static_cast<void*>(copies[line]), weights + line * from.ld, size_t(numbers) * 2);
        }
        tiles_step<C, kTiles>(copies[0], CHUNK, rows, apart);
        weights += CHUNK, rows += TILE * PARTS;
    }
    store_sums<C, P>(block);
}

constexpr int64_t FEW = 4;  // maximum number of rows for which gathering is faster than transposing the block

// from[0], from[stride], ...
inline Vec lane_of(const float* from, int64_t stride) {
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_ps(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(int(stride))), from, 4);
}

// Writes block[column][P * SIDE], or some columns and n rows of it, to out[row * stride + column].
template <int P>
inline void write_rows(const float* block, int64_t columns, int64_t n, float* out, int64_t stride) {
    for (int64_t column = 0; column < columns; column += SIDE) {
        __mmask16 there = __mmask16(columns - column < SIDE ? (1 << (columns - column)) - 1 : 0xffff);
        float* to = out + column;
        if (n <= FEW) {
            const float* from = block + column * P * SIDE;
            for (int64_t i = 0; i < n; i++) _mm512_mask_storeu_ps(to + i * stride, there, lane_of(from + i, P * SIDE));
            continue;
        }
        for (int64_t row = 0; row < n; row += SIDE) {
            Vec x[SIDE];
            for (int i = 0; i < SIDE; i++) x[i] = load(block + (column + i) * P * SIDE + row);
            transpose(x);
            int64_t some = n - row < SIDE ? n - row : SIDE;
            for (int64_t i = 0; i < some; i++) _mm512_mask_storeu_ps(to + (row + i) * stride, there, x[i]);
        }
    }
}

// Writes the blocks of a strip as rows, through one temporary block.
template <int P>
struct ToRows {
    float* out;
    int64_t stride, n;
    alignas(64) float one[4 * SIDE * SIDE];

    ToRows(float* out, int64_t stride, int64_t n) : out(out), stride(stride), n(n) {}
    float* block(int64_t) { return one; }
    void done(int64_t begin, int64_t columns) { write_rows<P>(one, columns, n, out + begin, stride); }
};

// Writes the blocks of a strip one after another: [columns][P * SIDE].
template <int P>
struct ToBlocks {
    float* first;

    float* block(int64_t column) { return first + column * P * SIDE; }
    void done(int64_t, int64_t) {}
};

// Columns of a matrix and those that follow, or null. fresh: they come from memory, so each tile prefetches the next.
struct Strip {
    const Tiled* weights;
    const Tiled* then;
    int64_t ld, columns, k;
    bool fresh;

    Source source(int64_t column, int64_t taken) const {
        const Tiled* next = nullptr;
        if (!fresh && then != nullptr) next = then + column * ld;
        if (fresh) next = column + taken < columns ? weights + (column + taken) * ld : then;
        return {weights + column * ld, next, ld, k};
    }
};

// Multiplies the columns of a strip from `column` on, C tiles at a time, then fewer.
template <int C, int P, class To>
inline void products(const Strip& strip, const Parts* panels, To& to, int64_t column = 0) {
    for (; column + C * SIDE <= strip.columns; column += C * SIDE) {
        tiles<C, P>(strip.source(column, C * SIDE), panels, to.block(column));
        to.done(column, C * SIDE);
    }
    if (column == strip.columns) return;
    if constexpr (C > 1) {
        products<C / 2, P>(strip, panels, to, column);
    } else {
        int64_t rest = strip.columns - column;
        tiles<1, P>(strip.source(column, rest), panels, to.block(column), rest);
        to.done(column, rest);
    }
}

// Multiplies a strip by P panels. Weights in memory are read faster if fewer columns are read at a time.
template <int P, class To>
inline void products_of(const Strip& strip, const Parts* panels, To&& to) {
    constexpr int C = P * PARTS == 1 ? 4 : 2;
    P == 1 && strip.fresh ? products<1, P>(strip, panels, to) : products<C, P>(strip, panels, to);
}

// Many rows meet one block of weights after another, which is copied to L1 as tiles. So weights are read from L2, where
// their rows are far apart, once for MANY rows. Sums between two blocks of the same columns are kept in memory.
constexpr int64_t KEPT = 256;                 // numbers of a column in a block
constexpr int64_t KEPT_COLUMNS = 2 * SIDE;    // columns of a block
constexpr int64_t STRIP = 2 * KEPT_COLUMNS;   // columns whose sums are kept
constexpr int64_t MANY = 16 * SIDE;           // rows whose sums are kept
constexpr int64_t ROWS = PANELS * SIDE;       // rows that meet a loaded tile
constexpr int64_t WORTH = 3;  // times ROWS from which copying weights is worth it

// sums[pair of tiles][times ROWS][column][row], or [column][part][row] until all numbers are added.
struct KeptSums {
    alignas(64) float of[STRIP / KEPT_COLUMNS][MANY / ROWS][KEPT_COLUMNS * PARTS * ROWS];
};

// How many times ROWS of n more rows are multiplied in this way.
inline int64_t kept_blocks(int64_t n) {
    return n < WORTH * ROWS ? 0 : std::min(in_sets<Tiled>(n), MANY) / ROWS;
}

// Copies numbers [begin, end) of the columns from `column` on: kept[chunk][column][CHUNK]. Zeros follow the last ones.
// Fetches the block that is copied next.
inline void keep(const Strip& strip, int64_t column, int64_t begin, int64_t end, Tiled* kept) {
    bool turn = column + KEPT_COLUMNS >= strip.columns;  // the next block is of the first columns
    const Tiled* next = strip.weights + (turn ? begin + KEPT : (column + KEPT_COLUMNS) * strip.ld + begin);
    if (turn && begin + KEPT >= strip.k) next = strip.then;
    for (int64_t c = 0; c < KEPT_COLUMNS; c++) {
        const Tiled* from = strip.weights + (column + c) * strip.ld;
        for (int64_t i = begin; i < end; i += CHUNK) {
            int64_t numbers = column + c < strip.columns ? std::min(strip.k - i, CHUNK) : 0;
            __mmask32 there = numbers == CHUNK ? ~__mmask32(0) : (__mmask32(1) << numbers) - 1;
            if (next != nullptr) prefetch(next + c * strip.ld + (i - begin));
            void* to = kept + ((i - begin) * KEPT_COLUMNS + c * CHUNK);
            _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(there, from + i));
        }
    }
}

// The products of at most STRIP columns and `blocks` times ROWS rows.
inline void kept_products(const Strip& strip, const Parts* panels, int64_t blocks, KeptSums& sums) {
    constexpr int C = KEPT_COLUMNS / SIDE, R = PANELS * PARTS;
    alignas(64) Tiled kept[KEPT * KEPT_COLUMNS];
    int64_t width = padded(strip.k), apart = PARTS > 1 ? TILE : SIDE * width;
    for (int64_t begin = 0; begin < width; begin += KEPT) {
        int64_t end = std::min(begin + KEPT, width);
        for (int64_t column = 0; column < strip.columns; column += KEPT_COLUMNS) {
            keep(strip, column, begin, end, kept);
            for (int64_t b = 0; b < blocks; b++) {
                float* own = sums.of[column / KEPT_COLUMNS][b];
                const bf16* rows = reinterpret_cast<const bf16*>(panels + b * ROWS * width + begin * SIDE);
                begin == 0 ? clear_tiles<C * R>() : load_tiles<C, R>(own);
                for (int64_t i = 0; i < end - begin; i += CHUNK, rows += TILE * PARTS) {
                    tiles_step<C, R>(kept + i * KEPT_COLUMNS, CHUNK, rows, apart);
                }
                store_tiles<C, R>(own);
                if (PARTS > 1 && end == width) add_parts<C>(own, own);
            }
        }
    }
}

// Multiplies `blocks` times ROWS rows, of which n are there, and any number of columns.
MOESAIC_APART inline void multiply_many(const Parts* panels, int64_t blocks, int64_t n, const Strip& all, float* out,
                                        int64_t stride) {
    KeptSums sums;
    for (int64_t c = 0; c < all.columns; c += STRIP) {
        const Tiled* next = c + STRIP < all.columns ? all.weights + (c + STRIP) * all.ld : all.then;
        const Strip strip{all.weights + c * all.ld, next, all.ld, std::min(all.columns - c, STRIP), all.k, false};
        kept_products(strip, panels, blocks, sums);
        for (int64_t first = 0; first < strip.columns; first += KEPT_COLUMNS) {
            int64_t some = std::min(strip.columns - first, KEPT_COLUMNS);
            for (int64_t b = 0, row = 0; b < blocks; b++, row += ROWS) {
                float* to = out + row * stride + c + first;
                write_rows<PANELS>(sums.of[first / KEPT_COLUMNS][b], some, std::min(ROWS, n - row), to, stride);
            }
        }
    }
}

// As `multiply` in dot.h, for n rows in panels.
template <class T>
void multiply(const Parts* panels, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k, float* out,
              int64_t stride, const T* then = nullptr) {
    int64_t row = 0;
    for (int64_t blocks; (blocks = kept_blocks(n - row)) > 0; row += blocks * ROWS) {
        const Strip strip{weights, then, ld, columns, k, false};
        multiply_many(panels + row * padded(k), blocks, n - row, strip, out + row * stride, stride);
    }
    for (; row < n; row += ROWS) {
        const Parts* own = panels + row * padded(k);
        int64_t left = n - row;
        Strip strip{weights, left > ROWS ? nullptr : then, ld, columns, k, row == 0};
        if (PANELS > 1 && left > SIDE) {
            products_of<PANELS>(strip, own, ToRows<PANELS>(out + row * stride, stride, left < ROWS ? left : ROWS));
        } else {
            products_of<1>(strip, own, ToRows<1>(out + row * stride, stride, left < SIDE ? left : SIDE));
        }
    }
}

}  // namespace MOESAIC_ISA
