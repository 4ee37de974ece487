// Attention's products over a bf16 cache, with queries and probabilities that are rounded to bf16. Decode, prefill and
// shared prefixes are the same code, with few lines (query vectors) or many.
#pragma once

#include <algorithm>

#include "pair_products.h"

namespace MOESAIC_ISA {

constexpr int64_t TOKENS = 64;         // tokens whose keys or values are in tiles at a time
constexpr int64_t WAITED_TOKENS = 32;  // the same in a team that `waits`, whose first keys are not fetched ahead
#if defined(MOESAIC_AMX_BF16)
constexpr int64_t MANY_TOKENS = SPLIT;  // the same, for values that many lines use
#else
constexpr int64_t MANY_TOKENS = TOKENS;
#endif

class PairProducts : protected Units {
   protected:
    using Task = Registers<Narrow>;

    explicit PairProducts(const moesaic::Attention& job) : Units(job) {}

    void make_room(bool many) {
        int64_t numbers = std::max(TOKENS * key_width_, (many ? MANY_TOKENS : TOKENS) * value_width_);
        near_ = std::max(near_, numbers / 2 + LANES);
    }
    int64_t work_floats(int64_t lines) const { return whole_lines(lines) * (key_width_ / 2 + SPLIT); }
    // Memory of unit u of a team: the rounded query, then the scores. `near` is room for tiles.
    float* work_of(float* work, int64_t u) const { return work + u * work_floats(unit_lines_); }
    float* scores_of(float* work, const Unit& unit, int64_t u) const {
        return work_of(work, u) + whole_lines(unit.lines()) * key_width_ / 2;
    }

    // line: of the packed query, where the first line of the unit is written.
    void pack_query(const Unit& unit, float* work, float*, int64_t line = 0) const {
        bf16* query = reinterpret_cast<bf16*>(work) + line * key_width_;
        for (int64_t l = 0; l < unit.lines(); l++) {
            round_numbers(query_of(unit, l), job_.key_width, query + l * key_width_);
        }
    }

    // Computes the products of the queries with keys origin + [begin, end). Some tokens at a time meet all units, while
    // those after them are fetched. What is computed for other tokens is not used.
    void score(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work, float* near) const {
        const bf16 *keys[SPLIT], *values[SPLIT];
        int64_t head = team.waits ? 0 : team.units[0].kv_head;  // of these addresses
        find(team.units[0], head, origin, begin, end, job_.keys, job_.key_width, keys);
        if (job_.values != nullptr) {
            find(team.units[0], head, origin, begin, end, job_.values, job_.value_width, values);
        }
        std::fill(keys, keys + begin, keys[begin]), std::fill(keys + end, keys + SPLIT, keys[begin]);
        bf16* tiles = whole_line(near);
        int64_t some = team.waits ? WAITED_TOKENS : TOKENS, steps = team.size * some / SIDE * key_width_ / CHUNK;
        for (int64_t i = begin / some * some; i < end; i += some) {
            int64_t next = i + some, left = std::min(some, end - next);
            auto coming = left > 0 ? to_fetch(team, keys + next, left, job_.key_width, steps)
                                   : to_fetch(team, values + begin, first_values(begin, end), job_.value_width, steps);
            for (int64_t u = 0; u < team.size; u++) {
                const Unit& unit = team.units[u];
                if (u == 0 || unit.kv_head != team.units[u - 1].kv_head) {
                    turn(keys + i, (unit.kv_head - head) * job_.key_width, some, tiles, coming);
                }
                score_unit(unit, origin + i, some, work_of(work, u), tiles, scores_of(work, unit, u) + i);
            }
        }
    }

    // Computes the sums of values origin + [begin, end), each times its probability. The probabilities are rounded
    // where the scores were.
    template <class Part>
    void weigh(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work, float* near,
               const Part& part) const {
        const bf16* values[SPLIT] = {};
        bool in_key = job_.values == nullptr;
        int64_t head = team.waits ? 0 : team.units[0].kv_head, width = in_key ? job_.key_width : job_.value_width;
        find(team.units[0], head, origin, begin, end, in_key ? job_.keys : job_.values, width, values);
        for (int64_t u = 0; u < team.size; u++) {
            round_probs(team.units[u], begin, end, scores_of(work, team.units[u], u));
        }
        bf16* tiles = whole_line(near);
        int64_t some = is_many(team.units[0]) ? MANY_TOKENS : TOKENS;
        for (int64_t i = begin / some * some; i < end; i += some) {
            int64_t left = end - i - some, steps = 0, count = std::min(some, end - i);
            for (int64_t u = 0; u < team.size; u++) steps += count / 2 + 1;
            auto coming = to_fetch(team, values + i + some, in_key ? 0 : left, width, steps);
            for (int64_t u = 0; u < team.size; u++) {
                const Unit& unit = team.units[u];
                if (u == 0 || unit.kv_head != team.units[u - 1].kv_head) {
                    int64_t from = std::max<int64_t>(0, begin - i);
                    pair_tokens(values + i, (unit.kv_head - head) * width, from, count, tiles, coming);
                }
                PairSums sums{part(u).values, value_width_, i <= begin};
                weigh_unit(unit, origin + i, count, scores_of(work, unit, u) + i / 2, tiles, sums);
            }
        }
        for (int64_t u = 0; u < team.size; u++) without_sign(part(u).values, team.units[u].lines() * value_width_);
    }

    int64_t near_ = 0;  // floats of `near`

   private:
    static bf16* whole_line(float* near) {
        return reinterpret_cast<bf16*>((reinterpret_cast<uintptr_t>(near) + 63) / 64 * 64);
    }

    // Fetches at most TOKENS of the `left` tokens at these addresses in so many steps.
    Coming<bf16> to_fetch(const Team& team, const bf16* const* tokens, int64_t left, int64_t width,
                          int64_t steps) const {
        int64_t row = width * (team.waits ? job_.kv_heads : 1) * int64_t(sizeof(bf16));
        return Coming<bf16>(tokens, std::max<int64_t>(0, std::min(left, TOKENS)), row, steps);
    }
    // How many values are fetched while the last keys are multiplied.
    int64_t first_values(int64_t begin, int64_t end) const {
        return job_.values == nullptr ? 0 : std::min(end, (begin / TOKENS + 1) * TOKENS) - begin;
    }

    // Puts the keys of `tokens` tokens into tiles, each key `offset` after its address.
    void turn(const bf16* const* keys, int64_t offset, int64_t tokens, bf16* tiles, Coming<bf16>& coming) const {
        for (int64_t t = 0; t < tokens; t += SIDE) {
            const bf16* own[SIDE];
            for (int64_t k = 0; k < SIDE; k++) own[k] = keys[t + k] + offset;
            turn_pairs(own, job_.key_width, tiles + t / SIDE * TILE, tokens / SIDE * TILE, coming);
        }
    }

    void score_unit(const Unit& unit, int64_t token, int64_t tokens, const float* query, const bf16* tiles,
                    float* scores) const {
        const bf16* rows = reinterpret_cast<const bf16*>(query);
        each_rows(unit.lines(), [&](int64_t line, int64_t count) {
            Range range = seen(unit, line, count, token, tokens);
            if (range.begin >= range.end) return;
            int64_t first = range.begin / SIDE, last = (range.end + SIDE - 1) / SIDE;
            multiply_pairs({rows + line * key_width_, key_width_, count}, tiles, tokens / SIDE, first, last, 0,
                           (job_.key_width + 1) / 2, {scores + line * SPLIT + first * SIDE, SPLIT, true});
        });
    }

    // Rounds the probabilities of tokens [begin, end) and sets those that share a CHUNK with them to zero.
    void round_probs(const Unit& unit, int64_t begin, int64_t end, float* probs) const {
        int64_t from = begin / CHUNK * CHUNK, to = padded(end);
        for (int64_t line = 0; line < unit.lines(); line++) {
            float* own = probs + line * SPLIT;
            std::fill(own + from, own + begin, 0.0f), std::fill(own + end, own + to, 0.0f);
            round_numbers(own + from, to - from, reinterpret_cast<bf16*>(own) + from);
        }
    }

    // Puts the values of tokens [begin, end) into tiles, and zeros for others that share a CHUNK with them.
    void pair_tokens(const bf16* const* values, int64_t offset, int64_t begin, int64_t end, bf16* tiles,
                     Coming<bf16>& coming) const {
        auto at = [&](int64_t t) { return t < begin || t >= end ? nullptr : values[t] + offset; };
        for (int64_t t = begin / CHUNK * CHUNK; t < padded(end); t += 2) {
            bf16* to = tiles + t / CHUNK * (value_width_ / SIDE * TILE) + t % CHUNK / 2 * CHUNK;
            pair_up(at(t), at(t + 1), job_.value_width, to);
            coming();
        }
    }

    void weigh_unit(const Unit& unit, int64_t token, int64_t tokens, const float* probs, const bf16* tiles,
                    const PairSums& sums) const {
        const bf16* rows = reinterpret_cast<const bf16*>(probs);
        int64_t groups = value_width_ / SIDE;
        each_rows(unit.lines(), [&](int64_t line, int64_t count) {
            Range range = seen(unit, line, count, token, tokens);
            multiply_pairs({rows + line * 2 * SPLIT, 2 * SPLIT, count}, tiles, groups, 0, groups, range.begin / 2,
                           (range.end + 1) / 2, {sums.first + line * sums.stride, sums.stride, sums.fresh});
        });
    }

    // Changes -0 to 0. A sum that underflowed to -0 would become 0 if a probability of 0 followed. How many follow
    // depends on other rows, which must not change a bit.
    static void without_sign(float* sums, int64_t count) {
        for (int64_t i = 0; i < count; i += LANES) store(sums + i, add(load(sums + i), zero()));
    }
};

}  // namespace MOESAIC_ISA
