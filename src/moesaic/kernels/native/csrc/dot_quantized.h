// Products of rows with quantised weights, in the order of arithmetic of dot.h. Each number is rounded to float32 first.
#pragma once

#include <array>
#include <utility>

#include "dot.h"
#include "direct_blocks.h"

namespace MOESAIC_ISA {

// Columns of a matrix, as rows of type T or of blocks that become T. Products read a stretch of a few columns at a time.
template <class T>
struct Columns {
    static constexpr int64_t kStride = T::bytes(BLOCK);  // of unpacked columns

    const uint8_t* first;
    int64_t ld;        // bytes of a column
    int64_t stretch;   // bytes of BLOCK numbers
    int64_t of_group;  // bytes of a group, at most
    int64_t groups;    // of a block
    void (*unpack)(const uint8_t* from, int64_t count, uint8_t* out, Stream& stream, int64_t bytes);  // null: stored as T

    explicit Columns(const T* weights, int64_t row)
        : first(&weights->byte), ld(row), stretch(T::bytes(BLOCK)), of_group(BlockOf<T>::kBytes), groups(1),
          unpack(nullptr) {}
    template <class B>
    static Columns of_blocks(const B* weights, int64_t row) {
        Columns columns(reinterpret_cast<const T*>(weights), row);
        columns.stretch = B::bytes(BLOCK), columns.of_group = (B::kBytes + B::kGroups - 1) / B::kGroups;
        columns.groups = B::kGroups;
        columns.unpack = [](const uint8_t* from, int64_t count, uint8_t* out, Stream& stream, int64_t bytes) {
            Stream mine = stream;
            MOESAIC_ISA::unpack<B>(from, count, out, [&]() MOESAIC_INLINE_LAMBDA { mine.fetch(bytes); });
            stream = mine;
        };
        return columns;
    }

    // The stretch of `count` numbers from `begin` on of `some` columns. The next column is `ld` bytes further. room: has
    // kStride bytes for each. Columns that are unpacked prefetch `bytes` a group.
    struct Stretch {
        const T* first;
        int64_t ld;
    };
    MOESAIC_INLINE Stretch at(int64_t column, int64_t some, int64_t begin, int64_t count, uint8_t* room, Stream& stream,
                              int64_t bytes) const {
        const uint8_t* from = first + column * ld + begin / BLOCK * stretch;
        if (unpack == nullptr) return {reinterpret_cast<const T*>(from), ld};
        for (int64_t c = 0; c < some; c++) unpack(from + c * ld, count, room + c * kStride, stream, bytes * groups);
        return {reinterpret_cast<const T*>(room), kStride};
    }
};

template <class T, std::enable_if_t<kQuantized<T>, int> = 0>
inline void bring_near(const T* columns, int64_t ld, int64_t some, int64_t count, float* out, Stream& stream) {
    for (int64_t c = 0; c < some; c++) {
        stream.step();
        dequantize(columns + c * ld, count, out + c * WIDE);
    }
}

// The blocks of neighbouring columns. They are made where they stay: a copy would wait until what was stored is in L1.
template <class T, int... column>
MOESAIC_INLINE std::array<BlockOf<T>, sizeof...(column)> blocks_of_columns(const T* weights, int64_t ld, int64_t count,
                                                                           std::integer_sequence<int, column...>) {
    return {BlockOf<T>(weights + column * ld, count)...};
}

template <class Blocks, int... column>
MOESAIC_INLINE auto groups_of_columns(const Blocks& of, int64_t group, std::integer_sequence<int, column...>) {
    return std::array<decltype(of[0].numbers(group)), sizeof...(column)>{of[column].numbers(group)...};
}

// As `tile` for quantised weights, whose numbers stay in registers. The order of arithmetic is that of `tile`.
template <class T, int R, int C>
MOESAIC_INLINE void tile_quantized(const float* const* rows, const T* weights, int64_t ld, int64_t count,
                                   Stream& stream, bool first, float* out, int64_t stride) {
    auto of = blocks_of_columns(weights, ld, count, std::make_integer_sequence<int, C>{});
    constexpr int64_t kNumbers = BlockOf<T>::kNumbers;
    int64_t end = std::min(padded(count), of[0].groups * kNumbers);  // the rows end with the chunk
    Vec sums[R][C];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) sums[r][c] = zero();
    }
    auto add_group = [&](int64_t g, int64_t numbers) MOESAIC_INLINE_LAMBDA {
        int64_t begin = g * kNumbers;
        auto group = groups_of_columns(of, g, std::make_integer_sequence<int, C>{});
        MOESAIC_UNROLL for (int64_t i = 0; i < numbers; i += LANES) {
            Vec w[C];
            MOESAIC_UNROLL for (int c = 0; c < C; c++) w[c] = group[c](i), keep(w[c]);
            MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                Vec x = load(rows[r] + begin + i);
                if constexpr (C > 1) keep(x);
                MOESAIC_UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(x, w[c], sums[r][c]);
            }
        }
    };
    int64_t whole = end / kNumbers;
    for (int64_t g = 0; g < whole; g++) stream.step(), add_group(g, kNumbers);
    if (whole < of[0].groups) add_group(whole, end - whole * kNumbers);
    float totals[R * C + 3];
    fold<R, C>(sums, totals);
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            float* to = out + r * stride + c;
            *to = first ? totals[r * C + c] : *to + totals[r * C + c];
        }
    }
}

// With fewer rows than MANY_QUANTIZED, tiles of at most FEW_QUANTIZED rows convert numbers in registers. That is a
// conversion a tile, and with more rows it is faster to store the numbers of NEAR_COLUMNS columns in L1. These and
// NEAR_ROWS rows fit into an L1 of 32 KiB.
#if defined(MOESAIC_AVX512)
constexpr int FEW_QUANTIZED = 8, NEAR_ROWS = 4, NEAR_COLUMNS = 4;
template <class T>
constexpr int MANY_QUANTIZED = T::kNibbles ? 16 : 24;
constexpr int quantized_columns(int64_t rows) { return rows <= 6 ? 4 : 3; }  // 24 sums at most, as in `tile`
#elif defined(MOESAIC_AVX2)
constexpr int FEW_QUANTIZED = 5, NEAR_ROWS = 4, NEAR_COLUMNS = 3;
template <class T>
constexpr int MANY_QUANTIZED = 6;
constexpr int quantized_columns(int64_t rows) { return rows <= 2 ? 4 : 2; }
#else
template <class T>
constexpr int MANY_QUANTIZED = 1;
constexpr int FEW_QUANTIZED = 1, NEAR_ROWS = TILE_ROWS, NEAR_COLUMNS = TILE_COLUMNS;
constexpr int quantized_columns(int64_t) { return 1; }
#endif

template <class T, int R>
void multiply_few(const float* const* rows, const Columns<T>& weights, int64_t columns, int64_t k, float* out,
                  int64_t stride, Stream& stream) {
    constexpr int C = quantized_columns(R);
    alignas(64) uint8_t room[C * Columns<T>::kStride];
    for (int64_t column = 0; column < columns;) {
        int64_t some = column + C <= columns ? C : 1;
        for (int64_t begin = 0; begin < k; begin += BLOCK) {
            int64_t count = std::min(k - begin, BLOCK);
            const float* x[R];
            for (int r = 0; r < R; r++) x[r] = rows[r] + begin;
            auto from = weights.at(column, some, begin, count, room, stream, weights.of_group / 2);
            if (some == C) tile_quantized<T, R, C>(x, from.first, from.ld, count, stream, begin == 0, out + column, stride);
            else tile_quantized<T, R, 1>(x, from.first, from.ld, count, stream, begin == 0, out + column, stride);
        }
        column += some;
    }
}

// The same for n rows, at most R.
template <class T, int R = FEW_QUANTIZED, class... With>
void multiply_few_of(int64_t n, const float* const* rows, const Columns<T>& weights, With&&... with) {
    if (n == R) return multiply_few<T, R>(rows, weights, with...);
    if constexpr (R > 1) multiply_few_of<T, R - 1>(n, rows, weights, with...);
}

// As `multiply` for fewer rows than MANY_QUANTIZED. The first rows prefetch weights LEAD bytes ahead, other tiles of rows
// those that are read `then`.
template <class T>
void multiply_by_tiles(const float* const* rows, int64_t n, const Columns<T>& weights, int64_t columns, int64_t k,
                       float* out, int64_t stride, const void* then) {
    int64_t size = columns * weights.ld, lead = std::min(size, LEAD), tiles = (n + FEW_QUANTIZED - 1) / FEW_QUANTIZED;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t r = n * t / tiles, some = n * (t + 1) / tiles - r;
        int64_t step = quantized_columns(some) * weights.of_group;
        if (weights.unpack != nullptr) step /= 2;  // the other half while they are unpacked
        Stream stream;
        if (t == 0) {
            stream = Stream(weights.first + lead, size - lead, step);
            if (then != nullptr) stream.then = static_cast<const char*>(then), stream.then_size = lead;
        } else if (then != nullptr) {
            stream = Stream(then, size, step / (tiles - 1) + 1);
        }
        multiply_few_of<T>(some, rows + r, weights, columns, k, out + r * stride, stride, stream);
    }
}

// As `multiply` for many rows.
template <class T>
void multiply_in_turn(const float* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
                      float* out, int64_t stride, const T* then) {
    int64_t size = columns * ld, lead = std::min(size, LEAD);
    Stream stream(weights + lead, size - lead, span<T>(std::min(k, BLOCK)) + 64);
    if (then != nullptr) stream.then = reinterpret_cast<const char*>(then), stream.then_size = lead;
    for (int64_t c = 0; c < columns; c += NEAR_COLUMNS) {  // in the order of the columns in memory
        int64_t some = std::min<int64_t>(NEAR_COLUMNS, columns - c);
        multiply_near<T, float, NEAR_ROWS, NEAR_COLUMNS, NEAR_COLUMNS>(rows, n, weights + c * ld, ld, some, k, out + c,
                                                                      stride, stream);
    }
}

template <class T, std::enable_if_t<kQuantized<T> && !kInteger<T>, int> = 0>
inline void multiply(const float* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
                     float* out, int64_t stride, const T* then = nullptr) {
    if constexpr (kBlocks<T>) {
        using As = typename T::As;
        if constexpr (kDirect<T>) {
            if (n <= FEW_DIRECT) {
                return multiply_by_tiles(rows, n, Columns<T>(weights, ld), columns, k, out, stride, then);
            }
        }
        // Each tile of rows unpacks the columns anew.
        if (n > FEW_QUANTIZED) return multiply_in_turn(rows, n, weights, ld, columns, k, out, stride, then);
        multiply_by_tiles(rows, n, Columns<As>::of_blocks(weights, ld), columns, k, out, stride, then);
    } else {
        if (n >= MANY_QUANTIZED<T>) return multiply_in_turn(rows, n, weights, ld, columns, k, out, stride, then);
        multiply_by_tiles(rows, n, Columns<T>(weights, ld), columns, k, out, stride, then);
    }
}

}  // namespace MOESAIC_ISA
