// Projections: several matrices times the same rows, split over threads by columns.
#pragma once

#include <algorithm>
#include <type_traits>

#include "dot.h"
#include "pool.h"
#include "table.h"

namespace MOESAIC_ISA {

using moesaic::kInner;
using moesaic::kRows;
using moesaic::kWork;
using moesaic::scratch;
using moesaic::worker_scratch;

#if defined(MOESAIC_AMX_BF16)
constexpr int64_t PANEL = MANY;  // rows whose results are kept at a time before they are used
constexpr int64_t BAND = PANEL;  // maximum rows of a task
#else
constexpr int64_t PANEL = 16 * TILE_ROWS;
constexpr int64_t BAND = 4 * PANEL;
#endif
constexpr int64_t COLUMNS = 64;           // maximum columns of a task, so that its weights stay in L2
constexpr int64_t FEW_COLUMNS = 16;       // minimum columns of a task

template <class U>
struct Array {  // std::vector would compile code for one instruction set that others would share
    U* data;
    int64_t size = 0;
    explicit Array(int64_t capacity) : data(new U[size_t(capacity)]) {}
    ~Array() { delete[] data; }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    U& operator[](int64_t i) { return data[i]; }
    const U& operator[](int64_t i) const { return data[i]; }
};

// Runs `body(task, worker)` for every task: on the pool, or on this thread if all tasks together are too little work to
// wake other threads. products: approximate number of multiply-adds.
template <class Body>
inline void parallel(int64_t count, int64_t products, const Body& body) {
    constexpr int64_t kWorth = 100'000;  // takes about five microseconds
    if (products < kWorth) {
        for (int64_t task = 0; task < count; task++) body(task, 0);
        return;
    }
    moesaic::pool().run(
        count, [](void* context, int64_t task, int worker) { (*static_cast<const Body*>(context))(task, worker); },
        const_cast<Body*>(&body));
}

// Runs `body(begin, end)` over [0, count), in pieces that are large enough for a task each.
template <class Body>
inline void parallel_rows(int64_t count, int64_t floats_a_row, const Body& body) {
    constexpr int64_t kPiece = 1 << 16;
    int64_t piece = kPiece / (floats_a_row < 1 ? 1 : floats_a_row) + 1;
    int64_t tasks = (count + piece - 1) / piece;
    parallel(tasks, count * floats_a_row, [&](int64_t task, int) {
        int64_t begin = task * piece;
        body(begin, begin + piece < count ? begin + piece : count);
    });
}

// Memory for packed rows of `numbers` together, a multiple of a chunk.
template <class T>
inline RowOf<T>* room_of(moesaic::Slot slot, int64_t numbers) {
    return reinterpret_cast<RowOf<T>*>(scratch(slot, numbers * int64_t(sizeof(RowOf<T>)) / 4));
}

// Packs n rows [k] in the order of T's vectors. Row i is at row_at(i), which may return null for i >= n.
template <class T, class RowAt>
inline const RowOf<T>* packed_at(int64_t n, int64_t k, moesaic::Slot slot, const RowAt& row_at) {
    constexpr int64_t kSet = kTogether<T>;
    int64_t width = padded(k);
    RowOf<T>* out = room_of<T>(slot, in_sets<T>(n) * width);
    parallel_rows(in_sets<T>(n) / kSet, kSet * width, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin * kSet; row < end * kSet; row += kSet) {
            const float* rows[kSet];
            for (int64_t i = 0; i < kSet; i++) rows[i] = row_at(row + i);
            pack_set<T>(rows, k, out + row * width);
        }
    });
    return out;
}

// Packs rows [n, k] in the order of T's vectors. Returns the rows themselves if that changes nothing.
template <class T>
inline const RowOf<T>* packed(const float* rows, int64_t n, int64_t k, moesaic::Slot slot) {
    if constexpr (kInOrder<T>) {
        if (k % CHUNK == 0) return rows;
    }
    return packed_at<T>(n, k, slot, [&](int64_t row) { return row < n ? rows + row * k : nullptr; });
}

// Calls `use` with the packed rows of one task in the form that `multiply` takes, at most PANEL at a time.
template <class T, class Use>
inline void panels(const RowOf<T>* rows, int64_t width, int64_t n, const Use& use) {
    for (int64_t begin = 0; begin < n; begin += PANEL) {
        int64_t count = n - begin < PANEL ? n - begin : PANEL;
        if constexpr (kTogether<T> > 1) {
            use(begin, count, rows + begin * width);
        } else {
            const RowOf<T>* some[PANEL];
            for (int64_t i = 0; i < count; i++) some[i] = rows + (begin + i) * width;
            use(begin, count, some);
        }
    }
}

// The columns of one part that a task multiplies, with all rows or some of them.
struct Share {
    const moesaic::Part* part;
    int64_t begin, columns;

    // Address of their weights. Rows have k numbers.
    template <class Types>
    const void* weights(int64_t k) const {
        int64_t row = Types::with(part->stored, [&](auto* of) {
            using T = std::remove_pointer_t<decltype(of)>;
            return span<T>(k) * int64_t(sizeof(T));
        });
        return static_cast<const char*>(part->weight) + begin * row;
    }
};

inline int64_t strips_of(const moesaic::Linear& job, int64_t columns) {
    int64_t strips = 0;
    for (int64_t p = 0; p < job.num_parts; p++) strips += (job.parts[p].columns + columns - 1) / columns;
    return strips;
}

// Columns of a task. They are fewer if there would be too few tasks for the threads (a gate, a key projection).
inline int64_t task_columns(const moesaic::Linear& job) {
    int64_t columns = COLUMNS;
    while (columns > FEW_COLUMNS && strips_of(job, columns) < 4 * moesaic::pool().threads()) columns /= 2;
    return columns;
}

inline Share share_of(const moesaic::Linear& job, int64_t columns, int64_t strip) {
    const moesaic::Part* part = job.parts;
    for (int64_t own; strip >= (own = (part->columns + columns - 1) / columns); part++) strip -= own;
    int64_t begin = strip * columns;
    return {part, begin, std::min(columns, part->columns - begin)};
}

// The products of n rows, from row `first` on, with a task's weights, plus the bias. `then`: as for `multiply`.
template <class T, class X>
inline void multiply_share(const moesaic::Linear& job, const Share& mine, int64_t first, int64_t n, const X& x,
                           const void* weights, const void* then) {
    const moesaic::Part& part = *mine.part;
    float* out = part.out + first * part.columns + mine.begin;
    multiply<T>(x, n, static_cast<const T*>(weights), span<T>(job.k), mine.columns, job.k, out, part.columns,
                static_cast<const T*>(then));
    if (part.bias == nullptr) return;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t c = 0; c < mine.columns; c++) out[i * part.columns + c] += part.bias[mine.begin + c];
    }
}

// Types: which types the parts may have. Rows are packed alike for all of them.
template <class Types>
void linear_of(const moesaic::Linear& job) {
    using Rows = typename Types::Rows;
    const RowOf<Rows>* rows = packed<Rows>(job.rows, job.n, job.k, kRows);
    int64_t width = padded(job.k);
    // Many rows are split too, since a narrow matrix has few columns to split.
    int64_t bands = job.n > BAND ? (job.n + BAND - 1) / BAND : 1;
    int64_t band = in_sets<Rows>((job.n + bands - 1) / bands);
    int64_t columns = task_columns(job), tasks = strips_of(job, columns) * bands, products = 0;
    int64_t like = std::max<int64_t>(job.n, 4);  // rows: fewer wait for the weights as long as four
    for (int64_t p = 0; p < job.num_parts; p++) products += like * job.k * job.parts[p].columns;
    parallel(tasks, products, [&](int64_t task, int) {
        Registers<Rows> registers;
        int64_t first = task % bands * band, last = first + band < job.n ? first + band : job.n;
        Share mine = share_of(job, columns, task / bands);
        const void* weights = mine.weights<Types>(job.k);
        panels<Rows>(rows + first * width, width, last - first, [&](int64_t row, int64_t n, auto x) {
            // Tasks take similar times, so threads claim them in turn.
            int64_t next = row + n == last - first ? task + moesaic::pool().threads() : tasks;
            const void* then = next < tasks ? share_of(job, columns, next / bands).template weights<Types>(job.k) : nullptr;
            Types::with(mine.part->stored, [&](auto* of) {
                multiply_share<std::remove_pointer_t<decltype(of)>>(job, mine, first + row, n, x, weights, then);
            });
        });
    });
}

template <class T>
struct Only {
    using Rows = T;
    template <class Use>
    static auto with(moesaic::Stored, const Use& use) { return use(static_cast<T*>(nullptr)); }
};

#if !defined(MOESAIC_AMX_BF16)
struct WideOrQuantized {
    using Rows = float;
    template <class Use>
    static auto with(moesaic::Stored stored, const Use& use) {
        if (stored == moesaic::Stored::kWide) return use(static_cast<float*>(nullptr));
        return with_quantized(stored, use);
    }
};
#endif

inline void linear(const moesaic::Linear& job) {
    bool narrow = true, wide = true;
    for (int64_t p = 0; p < job.num_parts; p++) {
        narrow = narrow && job.parts[p].stored == moesaic::Stored::kNarrow;
        wide = wide && job.parts[p].stored == moesaic::Stored::kWide;
    }
    if (narrow) return linear_of<Only<Narrow>>(job);
    if (wide) return linear_of<Only<float>>(job);
#if !defined(MOESAIC_AMX_BF16)
    linear_of<WideOrQuantized>(job);
#endif
}

struct Nothing {  // to do at a step
    MOESAIC_INLINE void operator()() {}
};

// out[columns] = (or +=) sum over i of x[i] * weight[i * ld ..], in the order of i. It is for weights whose columns are
// contiguous instead of rows. R rows at once, C chunks of columns. Calls `step` for each i.
template <class T, int R, int C, class Step>
MOESAIC_INLINE void outer_tile(const float* const* x, const T* const* weights, int64_t offset, int64_t k, bool fresh,
                               float* const* out, Step& step) {
    Step mine = step;
    Vec sums[R][2 * C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < 2 * C; c++) sums[r][c] = zero();
        for (int c = 0; !fresh && c < C; c++) load_chunk<T>(out[r] + c * CHUNK, sums[r][2 * c], sums[r][2 * c + 1]);
    }
    for (int64_t i = 0; i < k; i++) {
        mine();
        const T* w = weights[i] + offset;
        Vec row[2 * C];
        for (int c = 0; c < C; c++) row[2 * c] = low(w + c * CHUNK), row[2 * c + 1] = high(w + c * CHUNK);
        for (int r = 0; r < R; r++) {
            Vec factor = set1(x[r][i]);
            for (int c = 0; c < 2 * C; c++) sums[r][c] = fma(factor, row[c], sums[r][c]);
        }
    }
    step = mine;
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) store_chunk<T>(out[r] + c * CHUNK, sums[r][2 * c], sums[r][2 * c + 1]);
    }
}

constexpr int OUTER_ROWS = LANES == 16 ? 4 : 2, OUTER_CHUNKS = LANES == 16 ? 2 : 1;

// The same for n rows and `columns` numbers of each weight row. Writes to out[row * stride ..].
template <class T, class Step>
inline void outer(const float* const* x, int64_t n, const T* const* weights, int64_t columns, int64_t k,
                  float* out, int64_t stride, bool fresh, Step& step) {
    constexpr int R = OUTER_ROWS, C = OUTER_CHUNKS;
    float spare[C * CHUNK] = {};  // output of a tile's rows beyond the last one
    for (int64_t r = 0; r < n; r += R) {
        const float* rows[R];
        int64_t some = n - r < R ? n - r : R, column = 0;
        for (int i = 0; i < R; i++) rows[i] = x[r + (i < some ? i : 0)];
        auto tile_of = [&](auto chunks) {
            constexpr int kChunks = decltype(chunks)::value;
            for (; column + kChunks * CHUNK <= columns; column += kChunks * CHUNK) {
                float* to[R];
                for (int i = 0; i < R; i++) to[i] = i < some ? out + (r + i) * stride + column : spare;
                some == 1 ? outer_tile<T, 1, kChunks>(rows, weights, column, k, fresh, to, step)
                          : outer_tile<T, R, kChunks>(rows, weights, column, k, fresh, to, step);
            }
        };
        tile_of(std::integral_constant<int, C>{});
        if constexpr (C > 1) tile_of(std::integral_constant<int, 1>{});
        for (; column < columns; column++) {
            for (int64_t i = 0; i < some; i++) {
                float* to = out + (r + i) * stride + column;
                Vec sum = fresh ? zero() : set1(*to);
                for (int64_t j = 0; j < k; j++) sum = fma(set1(rows[i][j]), set1(widen(weights[j][column])), sum);
                *to = first(sum);
            }
        }
    }
}

}  // namespace MOESAIC_ISA
