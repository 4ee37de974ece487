// Attention's products for many query vectors, which are the prefill's. Keys and values of some tokens are widened once
// for all of them. Keys lie in columns then, so that a vector has a number of LANES tokens.
//
// The bits are those of dot.h and of `outer`: each lane of a sum there is a sum of its own here, and these are added in
// the order in which `fold` adds lanes.
#pragma once

#include "attention_units.h"
#include "cache.h"

namespace MOESAIC_ISA {

constexpr int64_t KEYS = LANES == 16 ? 2 * LANES : LANES;  // tokens whose keys are in columns at a time
constexpr int64_t VALUES = LANES == 16 ? 64 : 32;          // tokens whose values are widened at a time
constexpr int LINES = LANES == 4 ? 4 : 6;                  // query vectors of a tile
constexpr int VALUE_VECTORS = LANES == 16 ? 4 : 2;         // vectors of values of a tile
static_assert(SPLIT % KEYS == 0 && SPLIT % VALUES == 0);

// Widens the keys [width] of LANES tokens and stores them as columns, KEYS numbers apart. Columns lie in the order of
// `fold`: those whose products are added to its first lane, then those of its second one, and so on.
template <class T>
inline void turn(const T* const* keys, int64_t width, float* out) {
    int64_t vectors = padded(width) / LANES;
    for (int64_t i = 0; i < width; i += CHUNK) {
        T rest[LANES][CHUNK];
        const T* from[LANES];
        for (int64_t t = 0; t < LANES; t++) from[t] = keys[t] + i;
        if (i + CHUNK > width) {
            std::memset(rest, 0, sizeof rest);
            for (int64_t t = 0; t < LANES; t++) {
                std::memcpy(rest[t], from[t], size_t(width - i) * sizeof(T)), from[t] = rest[t];
            }
        }
        for (int half = 0; half < 2; half++) {
            Vec x[LANES];
            for (int64_t t = 0; t < LANES; t++) x[t] = half ? high(from[t]) : low(from[t]);
            transpose(x);
            float* to = out + (i / LANES + half) * KEYS;
            for (int64_t n = 0; n < LANES; n++) store(to + n * vectors * KEYS, x[folded_lane(n)]);
        }
    }
}

// Reorders the packed queries [rows, key_width] of a tile: out[vector][row][lane].
inline void interleave(const float* queries, int64_t rows, int64_t key_width, float* out) {
    for (int64_t r = 0; r < rows; r++) {
        const float* from = queries + r * key_width;
        for (int64_t i = 0; i < key_width; i += LANES) store(out + i * rows + r * LANES, load(from + i));
    }
}

// out[r * SPLIT + token] = (or +=) the products of R interleaved queries with C vectors of keys in columns.
// Vectors [begin, end) of `vectors` are added, BLOCK numbers at most. The sums of two lanes are in registers at a time.
template <int R, int C>
MOESAIC_APART void score_tile(const float* queries, const float* keys, int64_t vectors, int64_t begin, int64_t end,
                              float* out) {
    constexpr int N = R * C, kLevels = LANES == 16 ? 3 : LANES == 8 ? 2 : 1;
    Vec waiting[kLevels][N];  // sums of 2, 4 and 8 lanes
    for (int i = 0; LANES == 4 && i < N; i++) waiting[0][i] = zero();  // or GCC warns
    for (int64_t n = 0; n < LANES; n += 2) {
        Vec sums[2][N];
        MOESAIC_UNROLL for (int i = 0; i < 2 * N; i++) sums[i / N][i % N] = zero();
        const float *x = queries + begin * R * LANES + folded_lane(n), *key = keys + (n * vectors + begin) * KEYS;
        for (int64_t v = begin; v < end; v++, x += R * LANES, key += KEYS) {
            MOESAIC_UNROLL for (int lane = 0; lane < 2; lane++) {
                Vec k[C];
                const float* at = key + lane * vectors * KEYS;
                MOESAIC_UNROLL for (int c = 0; c < C; c++) k[c] = load(at + c * LANES), keep(k[c]);
                MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                    Vec factor = set1(x[lane * folded_lane(1) + r * LANES]);
                    MOESAIC_UNROLL for (int c = 0; c < C; c++) {
                        sums[lane][r * C + c] = fma(factor, k[c], sums[lane][r * C + c]);
                    }
                }
            }
        }
        MOESAIC_UNROLL for (int i = 0; i < N; i++) sums[0][i] = add(sums[0][i], sums[1][i]);
        int level = 0;
        for (; n / 2 >> level & 1; level++) {
            MOESAIC_UNROLL for (int i = 0; i < N; i++) sums[0][i] = add(waiting[level][i], sums[0][i]);
        }
        level = std::min(level, kLevels - 1);  // the last sum is stored over one that is added
        MOESAIC_UNROLL for (int i = 0; i < N; i++) waiting[level][i] = sums[0][i];
    }
    for (int i = 0; i < N; i++) {
        float* to = out + i / C * SPLIT + i % C * LANES;
        store(to, begin == 0 ? waiting[kLevels - 1][i] : add(load(to), waiting[kLevels - 1][i]));
    }
}

// scores[line * SPLIT + token] of interleaved queries [lines, padded(width)] and KEYS tokens.
// near: room for their keys. seen(line, rows): the tokens that these lines attend to. Others may be left out.
template <class T, class Seen>
inline void score_many(const float* queries, int64_t lines, const T* const* keys, int64_t width, float* near,
                       float* scores, const Seen& seen) {
    constexpr int kMost = KEYS / LANES;
    int64_t vectors = padded(width) / LANES;
    for (int64_t t = 0; t < KEYS; t += LANES) turn(keys + t, width, near + t);
    each_tile(lines, LINES, [&](int64_t line, int64_t rows) {
        Range range = seen(line, rows);
        if (range.begin >= range.end) return;
        int64_t first = range.begin / LANES * LANES;
        auto tile = [&](auto r, auto c, int64_t token) {
            for (int64_t begin = 0; begin < vectors; begin += BLOCK / LANES) {
                int64_t end = std::min(vectors, begin + BLOCK / LANES);
                score_tile<decltype(r)::value, decltype(c)::value>(queries + line * vectors * LANES, near + token,
                                                                   vectors, begin, end, scores + line * SPLIT + token);
            }
        };
        with_rows<LINES>(rows, [&](auto r) {
            if (range.end - first > LANES) return tile(r, std::integral_constant<int, kMost>{}, 0);
            tile(r, std::integral_constant<int, 1>{}, first);
        });
    });
}

// Widens values [width] of `count` tokens to near [count, whole_lanes(width)], in the order of their columns.
template <class T>
inline void widen_values(const T* const* values, int64_t count, int64_t width, float* near) {
    int64_t stride = whole_lanes(width), whole = width / CHUNK * CHUNK;
    for (int64_t i = 0; i < count; i++) {
        float* to = near + i * stride;
        for (int64_t c = 0; c < whole; c += CHUNK) store_chunk<T>(to + c, low(values[i] + c), high(values[i] + c));
        for (int64_t c = whole; c < stride; c++) to[c] = c < width ? widen(values[i][c]) : 0;
    }
}

// sums[r * stride ..] = (or +=) the values of `count` tokens, each times probs[r * SPLIT + token]:
// R lines, C vectors.
template <int R, int C>
MOESAIC_APART void weigh_tile(const float* probs, const float* near, int64_t count, bool fresh, float* sums_at,
                              int64_t stride) {
    Vec sums[R][C];
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        MOESAIC_UNROLL for (int c = 0; c < C; c++) sums[r][c] = fresh ? zero() : load(sums_at + r * stride + c * LANES);
    }
    for (int64_t i = 0; i < count; i++) {
        Vec value[C];
        MOESAIC_UNROLL for (int c = 0; c < C; c++) value[c] = load(near + i * stride + c * LANES), keep(value[c]);
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            Vec x = set1(probs[r * SPLIT + i]);
            MOESAIC_UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(x, value[c], sums[r][c]);
        }
    }
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        MOESAIC_UNROLL for (int c = 0; c < C; c++) store(sums_at + r * stride + c * LANES, sums[r][c]);
    }
}

// The same for all columns of values near [tokens, stride]. seen(line, rows): the tokens that these lines attend to.
template <class Seen>
inline void weigh_many(const float* probs, int64_t lines, const float* near, const Seen& seen, bool fresh,
                       float* sums, int64_t stride) {
    constexpr int C = VALUE_VECTORS;
    auto columns = [&](int64_t column, auto vectors) {
        each_tile(lines, LINES, [&](int64_t line, int64_t rows) {
            Range range = seen(line, rows);
            with_rows<LINES>(rows, [&](auto r) {
                weigh_tile<decltype(r)::value, decltype(vectors)::value>(
                    probs + line * SPLIT + range.begin, near + range.begin * stride + column,
                    range.end - range.begin, fresh, sums + line * stride + column, stride);
            });
        });
    };
    int64_t column = 0;
    for (; column + C * LANES <= stride; column += C * LANES) columns(column, std::integral_constant<int, C>{});
    for (; column < stride; column += LANES) columns(column, std::integral_constant<int, 1>{});
}

}  // namespace MOESAIC_ISA
