// The products of attention's units: queries with keys, and probabilities with values. They read the paged cache.
#pragma once

#include <algorithm>

#include "attention_many.h"
#include "cache.h"

namespace MOESAIC_ISA {

template <class T>
class UnitProducts : protected Units {
   protected:
    using Task = Registers<T>;

    explicit UnitProducts(const moesaic::Attention& job) : Units(job) {}

    void make_room(bool many) {
        if (many) near_ = std::max(KEYS * key_width_, VALUES * value_width_);
    }
    int64_t work_floats(int64_t lines) const { return lines * (key_width_ + SPLIT); }
    // Memory of unit u of a team: the packed query, then the scores. `near` is room for tokens of a team.
    float* work_of(float* work, int64_t u) const { return work + u * work_floats(unit_lines_); }
    float* scores_of(float* work, const Unit& unit, int64_t u) const {
        return work_of(work, u) + unit.lines() * key_width_;
    }

    // line: of the packed query, where the first line of the unit is written.
    void pack_query(const Unit& unit, float* work, float* near, int64_t line = 0) const {
        float* query = work + line * key_width_;
        auto pack_line = [&](int64_t l, float* to) { pack<T>(query_of(unit, l), job_.key_width, to); };
        if (!is_many(unit)) {
            for (int64_t l = 0; l < unit.lines(); l++) pack_line(l, query + l * key_width_);
            return;
        }
        each_tile(unit.lines(), LINES, [&](int64_t first, int64_t rows) {
            for (int64_t r = 0; r < rows; r++) pack_line(first + r, near + r * key_width_);
            interleave(near, rows, key_width_, query + first * key_width_);
        });
    }

    // Computes the products of the queries with keys origin + [begin, end).
    void score(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work, float* near) const {
        if (is_many(team.units[0])) return score_near(team.units[0], origin, begin, end, work, near);
        score_few(team, origin, begin, end, work);
    }

    // Computes the sums of values origin + [begin, end), each times its probability.
    template <class Part>
    void weigh(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work, float* near,
               const Part& part) const {
        if (is_many(team.units[0])) return weigh_near(team.units[0], origin, begin, end, work, near, part(0));
        weigh_few(team, origin, begin, end, work, part);
    }

    int64_t near_ = 0;  // floats of `near`

   private:
    // As `score` and `weigh` for a unit of many lines. What is computed for tokens outside [begin, end) is not used.
    // The next keys and the values of these tokens are fetched meanwhile.
    void score_near(const Unit& unit, int64_t origin, int64_t begin, int64_t end, float* work,
                    float* near) const {
        const T *keys[SPLIT], *values[SPLIT];
        find(unit, unit.kv_head, origin, begin, end, job_.keys, stored<T>(job_.key_width), keys);
        std::fill(keys, keys + begin, keys[begin]), std::fill(keys + end, keys + SPLIT, keys[begin]);
        if (job_.values != nullptr) find(unit, unit.kv_head, origin, begin, end, job_.values, value_stored(), values);
        float* scores = scores_of(work, unit, 0);
        for (int64_t i = begin / KEYS * KEYS; i < end; i += KEYS) {
            int64_t from = std::max(begin, i), tiles = (unit.lines() + LINES - 1) / LINES;
            int64_t now = job_.values == nullptr ? 0 : std::min(end, i + KEYS) - from;
            int64_t next = std::max<int64_t>(0, std::min(end, i + 2 * KEYS) - i - KEYS);
            Coming<T> of_keys(keys + i + KEYS, next, stored<T>(job_.key_width) * int64_t(sizeof(T)), tiles);
            Coming<T> of_values(values + from, now, value_stored() * int64_t(sizeof(T)), tiles);
            auto of_lines = [&](int64_t line, int64_t rows) {
                of_keys(), of_values();
                return seen(unit, line, rows, origin + i, KEYS);
            };
            score_many<T>(work, unit.lines(), keys + i, job_.key_width, near, scores + i, of_lines);
        }
        if constexpr (sizeof(T) == 1) {
            float scales[SPLIT];
            for (int64_t i = begin; i < end; i++) scales[i] = scale_of(keys[i], job_.key_width);
            rescale(scores + begin, unit.lines(), scales + begin, end - begin);
        }
    }

    void weigh_near(const Unit& unit, int64_t origin, int64_t begin, int64_t end, float* work, float* near,
                    const Gathered& part) const {
        const T* values[SPLIT];
        const void* cache = job_.values == nullptr ? job_.keys : job_.values;
        find(unit, unit.kv_head, origin, begin, end, cache, value_stored(), values);
        float* probs = scores_of(work, unit, 0);
        if constexpr (sizeof(T) == 1) {
            float scales[SPLIT];
            for (int64_t i = begin; i < end; i++) scales[i] = scale_of(values[i], value_stored() - stored<T>(0));
            rescale(probs + begin, unit.lines(), scales + begin, end - begin);
        }
        for (int64_t i = begin; i < end; i += VALUES) {
            int64_t count = std::min(VALUES, end - i);
            widen_values<T>(values + i, count, job_.value_width, near);
            auto of_lines = [&](int64_t line, int64_t rows) { return seen(unit, line, rows, origin + i, count); };
            weigh_many(probs + i, unit.lines(), near, of_lines, i == begin, part.values, value_width_);
        }
    }

    // If a team waits, some tokens at a time meet all its units, while those after them are fetched.
    template <class Part>
    void weigh_few(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work, const Part& part) const {
        const T* tokens[SPLIT];  // values of all heads
        const void* cache = job_.values == nullptr ? job_.keys : job_.values;
        int64_t token = job_.kv_heads * value_stored(), bytes = token * int64_t(sizeof(T)), count = end - begin;
        each_run(team.units[0], origin, begin, end, [&](int64_t i, int64_t run, int64_t slot, int64_t) {
            for (int64_t r = 0; r < run; r++) tokens[i + r - begin] = static_cast<const T*>(cache) + (slot + r) * token;
        });
        int64_t near = team.waits ? std::max(FIRST_TOKENS, NEAR_BYTES / bytes) : count;
        for (int64_t i = 0, some = std::min(team.waits ? FIRST_TOKENS : count, count); i < count;) {
            int64_t next = std::min(near, count - i - some), steps = 1;
            for (int64_t u = 0; u < team.size; u++) steps += some * outer_tiles(team.units[u].lines());
            Coming<T> coming(tokens + i + some, job_.values == nullptr ? 0 : next, bytes, steps);
            for (int64_t u = 0; u < team.size; u++) {
                float* probs = scores_of(work, team.units[u], u) + begin + i;
                add_values(team.units[u], tokens + i, some, probs, i == 0, part(u).values, coming);
            }
            i += some, some = next;
        }
        for (int64_t u = 0; value_width_ > job_.value_width && u < team.size; u++) {
            for (int64_t line = 0; line < team.units[u].lines(); line++) {
                float* row = part(u).values + line * value_width_;
                std::memset(row + job_.value_width, 0, size_t(value_width_ - job_.value_width) * 4);
            }
        }
    }

    // Adds the values of some tokens to those of a unit, or begins with them.
    void add_values(const Unit& unit, const T* const* tokens, int64_t count, float* probs, bool fresh, float* sums,
                    Coming<T>& coming) const {
        const T* values[SPLIT];
        for (int64_t i = 0; i < count; i++) values[i] = tokens[i] + unit.kv_head * value_stored();
        if constexpr (sizeof(T) == 1) {
            float scales[SPLIT];
            for (int64_t i = 0; i < count; i++) scales[i] = scale_of(values[i], value_stored() - stored<T>(0));
            rescale(probs, unit.lines(), scales, count);
        }
        const float* own[MOST_LINES] = {};
        for (int64_t line = 0; line < unit.lines(); line++) own[line] = probs + line * SPLIT;
        auto add = [&](auto& step) {
            outer<T>(own, unit.lines(), values, job_.value_width, count, sums, value_width_, fresh, step);
        };
        Nothing nothing;
        coming.token < coming.end ? add(coming) : add(nothing);
    }

    int64_t value_stored() const { return stored<T>(job_.values == nullptr ? job_.key_width : job_.value_width); }
    int64_t outer_tiles(int64_t lines) const {
        int64_t columns = std::max<int64_t>(1, job_.value_width / (OUTER_CHUNKS * CHUNK));
        return (lines + OUTER_ROWS - 1) / OUTER_ROWS * columns;
    }

    const T* in_block(const void* cache, int64_t slot, int64_t kv_head, int64_t width) const {
        return static_cast<const T*>(cache) + (slot * job_.kv_heads + kv_head) * stored<T>(width);
    }

    // Each block meets all units of a team while the next one is fetched. The keys of all heads lie together there, so
    // memory is read in order.
    void score_few(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work) const {
        int64_t width = stored<T>(job_.key_width), token = job_.kv_heads * width;
        each_run(team.units[0], origin, begin, end, [&](int64_t i, int64_t run, int64_t slot, int64_t next) {
            int64_t after = !team.waits || next < 0 ? 0 : std::min(run, end - i - run);  // tokens to fetch
            int64_t bytes = after * token * int64_t(sizeof(T));
            const T* first = static_cast<const T*>(job_.keys) + (after > 0 ? next * token : 0);
            auto coming = reinterpret_cast<const char*>(first);
            for (int64_t u = 0; u < team.size; u++) {
                const Unit& unit = team.units[u];
                const float *query = work_of(work, u), *rows[MOST_LINES];
                for (int64_t line = 0; line < unit.lines(); line++) rows[line] = query + line * key_width_;
                const T* keys = in_block(job_.keys, slot, unit.kv_head, job_.key_width);
                float* scores = scores_of(work, unit, u) + i;
                int64_t tiles = (unit.lines() + TILE_ROWS - 1) / TILE_ROWS * std::max<int64_t>(1, run / TILE_COLUMNS);
                int64_t from = bytes * u / team.size, size = bytes * (u + 1) / team.size - from;
                Stream stream(coming + from, size, size / (tiles * (key_width_ / CHUNK)) + 1);
                multiply_beside<T>(rows, unit.lines(), keys, token, run, job_.key_width, scores, SPLIT, nullptr,
                                   stream);
                if constexpr (sizeof(T) == 1) {
                    float scales[SPLIT];
                    for (int64_t r = 0; r < run; r++) scales[r] = scale_of(keys + r * token, job_.key_width);
                    rescale(scores, unit.lines(), scales, run);
                }
            }
        });
    }

    // Multiplies `count` numbers of each line by the scales of their cached rows.
    static void rescale(float* numbers, int64_t lines, const float* scales, int64_t count) {
        for (int64_t line = 0; line < lines; line++) {
            float* own = numbers + line * SPLIT;
            for (int64_t i = 0; i < count; i++) own[i] *= scales[i];
        }
    }
};

}  // namespace MOESAIC_ISA
