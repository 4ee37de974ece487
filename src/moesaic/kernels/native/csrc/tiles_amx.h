// AMX with BF16: one instruction computes the products of 16 columns of weights and a panel of 16 rows, for 32 numbers
// of each. Weights are read in place. Rows are rounded to bf16, as in pairs_avx512.h, and packed as panels once.
//
// Of 32 numbers the instruction adds the products of the even ones one after another, and likewise those of the odd
// ones. Then it adds the two results, and adds that to the sum. The order is always the same, so a sum only depends on
// its row and its column.
#pragma once

namespace MOESAIC_ISA {

struct Tiled : bf16 {};  // a bf16 weight whose rows are rounded and packed as panels
using Narrow = Tiled;    // the type of bf16 weights in products

constexpr int64_t SIDE = 16;  // columns, or rows, of a tile

template <>
constexpr int64_t kTogether<Tiled> = SIDE;

template <>
struct Form<Tiled> {
    using Row = bf16;
};

struct alignas(64) Shapes {  // shapes of the eight tile registers, in the format of the instruction
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
};

// Tile registers of a task. Configuring them takes a sixth of a microsecond, so it is done once per task. They are
// released at its end: otherwise the kernel would save them at every thread switch, and the thread's next task may be
// another library's.
template <>
struct Registers<Tiled> {
    Registers() {
        static constexpr Shapes kShapes;
        asm volatile("ldtilecfg %0" ::"m"(kShapes));
    }
    ~Registers() { asm volatile("tilerelease" ::: "memory"); }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};

// GCC's intrinsics do not tell the compiler that a tile load reads memory.
template <int N>
MOESAIC_INLINE void load_tile(const bf16* from, int64_t ld) {
    asm volatile("tileloadd (%0,%1,2), %%tmm%c2" ::"r"(from), "r"(ld), "i"(N) : "memory");
}
template <int N>
MOESAIC_INLINE void store_tile(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(to), "r"(stride), "i"(N) : "memory");
}
template <int N>
MOESAIC_INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(N));
}
template <int kSum, int kWeights, int kRows>
MOESAIC_INLINE void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kWeights), "i"(kRows));
}

// x[i] lane j <-> x[j] lane i
MOESAIC_INLINE void transpose(Vec (&x)[SIDE]) {
    Vec y[SIDE];
    MOESAIC_UNROLL for (int i = 0; i < SIDE; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    MOESAIC_UNROLL for (int i = 0; i < SIDE; i += 4) {
        for (int j = 0; j < 2; j++) {
            __m512d a = _mm512_castps_pd(y[i + j]), b = _mm512_castps_pd(y[i + 2 + j]);
            x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    MOESAIC_UNROLL for (int i = 0; i < SIDE; i += 8) {
        for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_f32x4(x[i + j], x[i + 4 + j], 0x88);
            y[i + 4 + j] = _mm512_shuffle_f32x4(x[i + j], x[i + 4 + j], 0xdd);
        }
    }
    MOESAIC_UNROLL for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0x88);
        x[8 + j] = _mm512_shuffle_f32x4(y[j], y[8 + j], 0xdd);
    }
}

// Numbers [i, i + CHUNK) of a row [count] as bf16 pairs, with zeros after its end.
MOESAIC_INLINE Vec pairs_of(const float* row, int64_t i, int64_t count) {
    float rest[CHUNK];
    if (i + CHUNK > count) {
        std::memset(rest, 0, sizeof rest);
        std::memcpy(rest, row + i, size_t(count - i) * 4);
        return _mm512_castsi512_ps(rounded(load(rest), load(rest + LANES)));
    }
    return _mm512_castsi512_ps(rounded(load(row + i), load(row + i + LANES)));
}

// Packs rows [count], null for absent ones, as a panel [CHUNK numbers][pair][row][2], padded with zeros.
template <>
inline void pack_set<Tiled>(const float* const* rows, int64_t count, bf16* out) {
    for (int64_t i = 0; i < count; i += CHUNK) {
        Vec pairs[SIDE];
        for (int r = 0; r < SIDE; r++) pairs[r] = rows[r] == nullptr ? zero() : pairs_of(rows[r], i, count);
        transpose(pairs);
        for (int p = 0; p < SIDE; p++) _mm512_storeu_ps(out + i * SIDE + p * CHUNK, pairs[p]);
    }
}

// Multiplies CHUNK numbers of C tiles of columns, ld apart, by those of P panels.
template <int C, int P, int c = 0>
MOESAIC_INLINE void tiles_step(const Tiled* weights, int64_t ld, const bf16* rows, int64_t panel) {
    if constexpr (c == 0) load_tile<6>(rows, CHUNK);
    if constexpr (c == 0 && P == 2) load_tile<7>(rows + panel, CHUNK);
    if constexpr (c < C) {
        load_tile<4 + c % 2>(weights + c * SIDE * ld, ld);
        add_products<c * P, 4 + c % 2, 6>();
        if constexpr (P == 2) add_products<c * P + 1, 4 + c % 2, 7>();
        tiles_step<C, P, c + 1>(weights, ld, rows, panel);
    }
}

template <int N, int i = 0>
MOESAIC_INLINE void clear_tiles() {
    if constexpr (i < N) clear_tile<i>(), clear_tiles<N, i + 1>();
}

template <int C, int P, int i = 0>
MOESAIC_INLINE void store_tiles(float* out) {
    if constexpr (i < C * P) {
        store_tile<i>(out + i / P * SIDE * P * SIDE + i % P * SIDE, P * SIDE);
        store_tiles<C, P, i + 1>(out);
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
inline void tiles(const Source& from, const bf16* panels, float* block, int64_t columns = SIDE) {
    int64_t panel = SIDE * padded(from.k), whole = C == 1 && columns < SIDE ? 0 : from.k / CHUNK * CHUNK;
    const Tiled* weights = from.weights;
    clear_tiles<C * P>();
    for (int64_t i = 0; i < whole; i += CHUNK) {
        for (int r = 0; from.next != nullptr && r < C * SIDE; r++) prefetch(from.next + i + r * from.ld);
        tiles_step<C, P>(weights, from.ld, panels, panel);
        weights += CHUNK, panels += CHUNK * SIDE;
    }
    for (int64_t i = whole; i < from.k; i += CHUNK) {  // the last numbers, or columns, after which other data follows
        alignas(64) Tiled copies[C * SIDE][CHUNK];
        std::memset(static_cast<void*>(copies), 0, sizeof copies);
        int64_t lines = C == 1 ? columns : C * SIDE, numbers = from.k - i < CHUNK ? from.k - i : CHUNK;
        for (int64_t line = 0; line < lines; line++) {
            std::memcpy(static_cast<void*>(copies[line]), weights + line * from.ld, size_t(numbers) * 2);
        }
        tiles_step<C, P>(copies[0], CHUNK, panels, panel);
        weights += CHUNK, panels += CHUNK * SIDE;
    }
    store_tiles<C, P>(block);
}

constexpr int64_t FEW = 4;  // maximum number of rows for which gathering is faster than transposing the block

// from[0], from[stride], ...
inline Vec lane_of(const float* from, int64_t stride) {
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_ps(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(int(stride))), from, 4);
}

// Writes the blocks of a strip to out[row * stride + column], through one temporary block.
template <int P>
struct ToRows {
    float* out;
    int64_t stride, n;
    alignas(64) float one[4 * SIDE * SIDE];

    ToRows(float* out, int64_t stride, int64_t n) : out(out), stride(stride), n(n) {}
    float* block(int64_t) { return one; }
    void done(int64_t begin, int64_t columns) {
        for (int64_t column = 0; column < columns; column += SIDE) {
            __mmask16 there = __mmask16(columns - column < SIDE ? (1 << (columns - column)) - 1 : 0xffff);
            float* to = out + begin + column;
            if (n <= FEW) {
                const float* from = one + column * P * SIDE;
                for (int64_t i = 0; i < n; i++) _mm512_mask_storeu_ps(to + i * stride, there, lane_of(from + i, P * SIDE));
                continue;
            }
            for (int64_t row = 0; row < n; row += SIDE) {
                Vec x[SIDE];
                for (int i = 0; i < SIDE; i++) x[i] = load(one + (column + i) * P * SIDE + row);
                transpose(x);
                int64_t some = n - row < SIDE ? n - row : SIDE;
                for (int64_t i = 0; i < some; i++) _mm512_mask_storeu_ps(to + (row + i) * stride, there, x[i]);
            }
        }
    }
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
inline void products(const Strip& strip, const bf16* panels, To& to, int64_t column = 0) {
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
inline void products_of(const Strip& strip, const bf16* panels, To&& to) {
    if constexpr (P == 2) return products<2, 2>(strip, panels, to);
    strip.fresh ? products<1, P>(strip, panels, to) : products<4, P>(strip, panels, to);
}

// As `multiply` in dot.h, for n rows in panels.
template <class T>
void multiply(const bf16* panels, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k, float* out,
              int64_t stride, const T* then = nullptr) {
    for (int64_t row = 0; row < n; row += 2 * SIDE) {
        const bf16* own = panels + row * padded(k);
        int64_t left = n - row;
        Strip strip{weights, left > 2 * SIDE ? nullptr : then, ld, columns, k, row == 0};
        if (left > SIDE) {
            products_of<2>(strip, own, ToRows<2>(out + row * stride, stride, left < 2 * SIDE ? left : 2 * SIDE));
        } else {
            products_of<1>(strip, own, ToRows<1>(out + row * stride, stride, left));
        }
    }
}

}  // namespace MOESAIC_ISA
