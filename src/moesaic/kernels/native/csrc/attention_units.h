// What attention computes together, and the results that are joined.
#pragma once

#include <algorithm>

#include "linear.h"

namespace MOESAIC_ISA {

constexpr int64_t SPLIT = 256;
constexpr int64_t MOST_STORED = int64_t(1) << 24;  // floats of results of splits
constexpr int64_t FIRST_TOKENS = 16;     // of a split, whose values are not fetched before they are needed
constexpr int64_t NEAR_BYTES = 1 << 16;  // of values that meet all units of a team at a time: they are read again
constexpr int64_t MOST_LINES = 4 * TILE_ROWS;  // query vectors that are computed together with the same keys
constexpr int64_t MANY_LINES = 8 * MOST_LINES;  // the same of a unit whose rows are many

inline int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Query vectors with the same keys: some rows of a sequence, and some query heads of a key head.
struct Unit {
    int64_t sequence, first_row, rows, head, heads, kv_head;
    int64_t lines() const { return rows * heads; }
};

struct Range {
    int64_t begin, end;
};

// Calls use(first, count) for tiles of similar size, of at most `most` lines each.
template <class Use>
inline void each_tile(int64_t lines, int64_t most, const Use& use) {
    int64_t tiles = (lines + most - 1) / most;
    for (int64_t t = 0; t < tiles; t++) use(lines * t / tiles, lines * (t + 1) / tiles - lines * t / tiles);
}

// Calls use(integral constant) for n, 1 to R.
template <int R, class Use>
inline void with_rows(int64_t n, const Use& use) {
    if (n == R) return use(std::integral_constant<int, R>{});
    if constexpr (R > 1) with_rows<R - 1>(n, use);
}

// Units of the same rows, which a task computes together. They differ in their heads.
struct Team {
    const Unit* units;
    int64_t size;
    bool waits;  // whether it reads the cache faster than it computes, so that what comes next is fetched
};

// Partial result of a unit: for each line the largest score, the sum, and the values weighted by both.
struct Gathered {
    float* most;
    float* sum;
    float* values;  // [lines, width]
    int64_t width;

    static int64_t floats(int64_t lines, int64_t width) { return lines * (width + 2); }
    static Gathered at(float* memory, int64_t lines, int64_t width) {
        return {memory + lines * width, memory + lines * (width + 1), memory, width};
    }
};

// Adds `later` to `into` for one line. An empty part (sum 0) changes nothing.
inline void join(const Gathered& into, const Gathered& later, int64_t line) {
    if (later.sum[line] == 0) return;
    float* values = into.values + line * into.width;
    const float* more = later.values + line * into.width;
    if (into.sum[line] == 0) {
        into.most[line] = later.most[line], into.sum[line] = later.sum[line];
        std::memcpy(values, more, size_t(into.width) * 4);
        return;
    }
    float most = std::max(into.most[line], later.most[line]);
    float old = exponential1(into.most[line] - most), fresh = exponential1(later.most[line] - most);
    into.most[line] = most;
    into.sum[line] = into.sum[line] * old + later.sum[line] * fresh;
    for (int64_t i = 0; i < into.width; i += LANES) {
        store(values + i, fma(set1(fresh), load(more + i), mul(set1(old), load(values + i))));
    }
}

// Replaces scores [begin, end) by exp(scale * score - most), and by 0 outside [first, last). Vectors start at fixed
// offsets in the split, so the sum over them does not depend on `begin` and `end`.
inline void soften(float* scores, int64_t begin, int64_t end, int64_t first, int64_t last, float factor, float* most,
                   float* sum) {
    if (first >= last) {
        std::memset(scores + begin, 0, size_t(end - begin) * 4);
        return;
    }
    int64_t from = first / LANES * LANES, to = whole_lanes(last);
    Vec scale = set1(factor), usual = set1(scores[first]);
    auto only = [&](int64_t i, Vec x, Vec other) {
        return i >= first && i + LANES <= last ? x : inside(x, other, first - i, last - i);
    };
    auto scaled = [&](int64_t i) { return mul(only(i, load(scores + i), usual), scale); };
    Vec peak = scaled(from);
    for (int64_t i = from + LANES; i < to; i += LANES) peak = vmax(peak, scaled(i));
    *most = largest(peak);
    Vec sums = zero();
    for (int64_t i = from; i < to; i += LANES) {
        Vec probs = only(i, exponential(sub(scaled(i), set1(*most))), zero());
        store(scores + i, probs);
        sums = add(sums, probs);
    }
    *sum = total(sums);
    for (int64_t i = begin; i < from; i++) scores[i] = 0;
    for (int64_t i = to; i < end; i++) scores[i] = 0;
}

// Cached tokens to prefetch in so many steps.
template <class T>
struct Coming {
    const T* const* token;
    const T* const* end;
    int64_t bytes;  // of a token
    int64_t each;   // bytes for a step
    int64_t due = 0, at = 0;

    Coming(const T* const* tokens, int64_t count, int64_t bytes, int64_t steps)
        : token(tokens), end(tokens + count), bytes(bytes), each(count * bytes / steps + 1) {}

    MOESAIC_INLINE void operator()() {
        for (due += each; due > 0 && token < end; due -= 64) {
            prefetch_l2(reinterpret_cast<const char*>(*token) + at);
            at += 64;
            if (at >= bytes) at = 0, token++;
        }
    }
};

// The rows of units, and where their tokens are cached.
class Units {
   protected:
    explicit Units(const moesaic::Attention& job) : job_(job) {}

    int64_t rows_of(int64_t s) const { return job_.query_starts[s + 1] - job_.query_starts[s]; }
    bool few(int64_t s) const { return rows_of(s) <= few_rows_; }
    bool is_many(const Unit& unit) const { return !few(unit.sequence); }

    // A row of the unit attends to tokens [first, last).
    int64_t last_of(const Unit& unit, int64_t row) const {
        return job_.context_lens[unit.sequence] - rows_of(unit.sequence) + unit.first_row + row + 1;
    }
    int64_t first_of(const Unit& unit, int64_t row) const {
        return job_.window > 0 ? std::max<int64_t>(0, last_of(unit, row) - job_.window) : 0;
    }

    // Which of the tokens begin + [0, count) any of these lines attends to.
    Range seen(const Unit& unit, int64_t line, int64_t lines, int64_t begin, int64_t count) const {
        int64_t first = std::max<int64_t>(0, first_of(unit, line / unit.heads) - begin);
        int64_t last = std::min(count, last_of(unit, (line + lines - 1) / unit.heads) - begin);
        return {std::min(first, count), std::max(last, std::min(first, count))};
    }

    // Query of a line of the unit.
    const float* query_of(const Unit& unit, int64_t line) const {
        int64_t row = job_.query_starts[unit.sequence] + unit.first_row + line / unit.heads;
        return job_.query + (row * job_.heads + unit.head + line % unit.heads) * job_.key_width;
    }

    // Calls `use(i, run, slot, next)` for each run of tokens origin + [begin, end) in consecutive slots of one block.
    // next: slot of the run after it, or -1.
    template <class Use>
    void each_run(const Unit& unit, int64_t origin, int64_t begin, int64_t end, const Use& use) const {
        const int64_t* table = job_.block_tables + unit.sequence * job_.table_width;
        for (int64_t i = begin; i < end;) {
            int64_t block = (origin + i) / job_.block_size, offset = (origin + i) - block * job_.block_size;
            int64_t run = std::min(job_.block_size - offset, end - i);
            int64_t next = i + run < end ? table[block + 1] * job_.block_size : -1;
            use(i, run, table[block] * job_.block_size + offset, next);
            i += run;
        }
    }

    // Addresses of the rows that the cache has of tokens origin + [begin, end) for a key head. row: elements of one.
    template <class T>
    void find(const Unit& unit, int64_t kv_head, int64_t origin, int64_t begin, int64_t end, const void* cache,
              int64_t row, const T** tokens) const {
        each_run(unit, origin, begin, end, [&](int64_t i, int64_t run, int64_t slot, int64_t) {
            const T* from = static_cast<const T*>(cache) + (slot * job_.kv_heads + kv_head) * row;
            for (int64_t r = 0; r < run; r++) tokens[i + r] = from + r * job_.kv_heads * row;
        });
    }

    const moesaic::Attention& job_;
    int64_t key_width_ = padded(job_.key_width), value_width_ = whole_lanes(job_.value_width);
    int64_t unit_lines_ = 1, few_rows_ = 1;  // unit_lines_: the most of a unit
};

}  // namespace MOESAIC_ISA
