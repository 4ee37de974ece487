// What attention computes together, and the results that are joined.
#pragma once

#include <algorithm>

#include "rows.h"

namespace MOESAIC_ISA {

constexpr int64_t SPLIT = 256;
constexpr int64_t MOST_STORED = int64_t(1) << 24;  // floats of results of splits
constexpr int64_t FIRST_TOKENS = 16;     // of a split, whose values are not fetched before they are needed
constexpr int64_t NEAR_BYTES = 1 << 16;  // of values that meet all units of a team at a time: they are read again
constexpr int64_t MOST_LINES = 4 * TILE_ROWS;  // query vectors that are computed together with the same keys

inline int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Query vectors with the same keys: some rows of a sequence, and some query heads of a key head.
struct Unit {
    int64_t sequence, first_row, rows, head, heads, kv_head;
    int64_t lines() const { return rows * heads; }
};

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
        Vec chances = only(i, exponential(sub(scaled(i), set1(*most))), zero());
        store(scores + i, chances);
        sums = add(sums, chances);
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

}  // namespace MOESAIC_ISA
