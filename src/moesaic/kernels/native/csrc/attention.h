// Causal attention over a paged KV cache, with the same arithmetic for prefill and decode.
//
// The context is split at fixed positions, every SPLIT tokens, whatever a step computes. For each split a row gets its
// largest score, its sum and its weighted values. Splits are joined in order by an online softmax (Milakov & Gimelshein
// 2018); Flash-Decoding (Dao et al. 2023) has this split form. So a row's bits depend neither on its chunk nor on the
// threads. Decode rows whose sequences share a prefix read its splits together, once for all of them.
#pragma once

#include <algorithm>

#include "attention_units.h"
#include "cache.h"
#include "shared_splits.h"

namespace MOESAIC_ISA {

template <class T>
class AttentionOf {
   public:
    explicit AttentionOf(const moesaic::Attention& job) : job_(job) {
        per_kv_head_ = job.heads / job.kv_heads;
        head_groups_ = (per_kv_head_ + MOST_LINES - 1) / MOST_LINES;
        group_heads_ = (per_kv_head_ + head_groups_ - 1) / head_groups_;
        unit_rows_ = std::max<int64_t>(1, MOST_LINES / group_heads_);
        all_units_ = job.kv_heads * head_groups_;
        key_width_ = padded(job.key_width), value_width_ = whole_lanes(job.value_width);
    }

    void run() {
        Array<Unit> units(num_units());
        Array<Team> teams(num_units());
        int64_t splits = 0;
        for (int64_t s = 0; s < job_.sequences; s++) {
            add_units(s, units, teams);
            products_ += rows_of(s) * job_.context_lens[s] * job_.heads * (job_.key_width + job_.value_width);
            splits = std::max(splits, (job_.context_lens[s] + SPLIT - 1) / SPLIT);
        }
        int64_t size = Gathered::floats(group_heads_, value_width_) * job_.kv_heads * head_groups_;
        SharedSplits shared(job_, SPLIT, MOST_STORED / (size * std::max<int64_t>(1, job_.sequences)));
        Stored stored{shared, shared.total == 0 ? nullptr : scratch(moesaic::kWork, shared.total * size), size};
        if (shared.total > 0) gather_shared(stored);
        int64_t wanted = 4 * moesaic::pool().threads();
        bool stores = units.size * splits * Gathered::floats(unit_lines_, value_width_) <= MOST_STORED;
        if (splits > 1 && (units.size < wanted || (teams.size < wanted && stores))) {
            return run_split(units, teams, splits, stored);
        }
        bool apart = teams.size < wanted;
        parallel(apart ? units.size : teams.size, products_, [&](int64_t task, int worker) {
            whole(apart ? Team{&units[task], 1, false} : teams[task], stored, worker);
        });
    }

   private:
    int64_t num_units() const {
        int64_t units = 0;
        for (int64_t s = 0; s < job_.sequences; s++) units += blocks_of_rows(s);
        return units * all_units_;
    }
    int64_t rows_of(int64_t s) const { return job_.query_starts[s + 1] - job_.query_starts[s]; }
    int64_t blocks_of_rows(int64_t s) const { return (rows_of(s) + unit_rows_ - 1) / unit_rows_; }

    // Few rows wait for the cache, so all their heads are a team. Of many rows each unit is one.
    void add_units(int64_t s, Array<Unit>& units, Array<Team>& teams) {
        bool few = rows_of(s) <= unit_rows_;
        unit_lines_ = std::max(unit_lines_, std::min(unit_rows_, rows_of(s)) * group_heads_);
        int64_t together = few ? all_units_ : 1;
        for (int64_t row = 0; row < rows_of(s); row += unit_rows_) {
            for (int64_t u = 0; u < all_units_; u += together) {
                teams[teams.size++] = {&units[units.size + u], together, few};
            }
            for (int64_t kv = 0; kv < job_.kv_heads; kv++) {
                for (int64_t head = 0; head < per_kv_head_; head += group_heads_) {
                    units[units.size++] = {s, row, std::min(unit_rows_, rows_of(s) - row), kv * per_kv_head_ + head,
                                           std::min(group_heads_, per_kv_head_ - head), kv};
                }
            }
        }
    }

    // A row of the unit attends to tokens [first, last).
    int64_t last_of(const Unit& unit, int64_t row) const {
        return job_.context_lens[unit.sequence] - rows_of(unit.sequence) + unit.first_row + row + 1;
    }
    int64_t first_of(const Unit& unit, int64_t row) const {
        return job_.window > 0 ? std::max<int64_t>(0, last_of(unit, row) - job_.window) : 0;
    }

    // The parts of splits that sequences share, for each of these sequences.
    struct Stored {
        const SharedSplits& shared;
        float* memory;
        int64_t size;  // floats of a split of one sequence
        bool has(const Unit& unit, int64_t split) const { return split < shared.splits[unit.sequence]; }
    };
    Gathered stored_part(const Stored& stored, int64_t sequence, int64_t split, int64_t group, int64_t heads) const {
        float* own = stored.memory + (stored.shared.parts[sequence] + split) * stored.size;
        return Gathered::at(own + group * Gathered::floats(group_heads_, value_width_), heads, value_width_);
    }
    Gathered stored_part(const Stored& stored, const Unit& unit, int64_t split) const {
        int64_t group = unit.kv_head * head_groups_ + (unit.head - unit.kv_head * per_kv_head_) / group_heads_;
        return stored_part(stored, unit.sequence, split, group, unit.heads);
    }

    // Computes every split that sequences share, once for all of them. A task has some query heads of one key head.
    void gather_shared(const Stored& stored) const {
        const SharedSplits& shared = stored.shared;
        Array<SplitClass> classes(shared.total);
        shared.each([&](const SplitClass& one) { classes[classes.size++] = one; });
        int64_t groups = job_.kv_heads * head_groups_, together = MOST_LINES / group_heads_;
        parallel(classes.size * groups, products_, [&](int64_t task, int worker) {
            const SplitClass& one = classes[task / groups];
            int64_t group = task % groups, kv = group / head_groups_, head = group % head_groups_ * group_heads_;
            int64_t heads = std::min(group_heads_, per_kv_head_ - head);
            for (int64_t first = 0; first < one.count; first += together) {
                int64_t count = std::min(together, one.count - first), lines = count * heads;
                float* memory = worker_scratch(worker, work_floats(lines) + Gathered::floats(lines, value_width_));
                Gathered all = Gathered::at(memory + work_floats(lines), lines, value_width_);
                const int64_t* members = shared.order.data + one.first + first;
                gather_together(members, count, {members[0], 0, count, kv * per_kv_head_ + head, heads, kv},
                                one.split * SPLIT, memory, all);
                for (int64_t m = 0; m < count; m++) {
                    Gathered part = stored_part(stored, members[m], one.split, group, heads);
                    std::memcpy(part.values, all.values + m * heads * value_width_, size_t(heads * value_width_) * 4);
                    std::memcpy(part.most, all.most + m * heads, size_t(heads) * 4);
                    std::memcpy(part.sum, all.sum + m * heads, size_t(heads) * 4);
                }
            }
        });
    }

    // As `gather` for rows of several sequences that attend to all of a split. unit: has a row for each of them.
    void gather_together(const int64_t* members, int64_t count, const Unit& unit, int64_t origin, float* work,
                         const Gathered& part) const {
        for (int64_t m = 0; m < count; m++) {
            pack_query({members[m], 0, 1, unit.head, unit.heads, unit.kv_head}, work + m * unit.heads * key_width_);
        }
        float* scores = scores_of(work, unit, 0);
        score({&unit, 1, false}, origin, 0, SPLIT, work);
        for (int64_t line = 0; line < unit.lines(); line++) {
            soften(scores + line * SPLIT, 0, SPLIT, 0, SPLIT, part.most + line, part.sum + line);
        }
        weigh({&unit, 1, false}, origin, 0, SPLIT, work, [&](int64_t) { return part; });
    }

    // Computes all splits of a team, one after another. Those in `stored` are computed already.
    void whole(const Team& team, const Stored& stored, int worker) const {
        int64_t size = Gathered::floats(unit_lines_, value_width_);
        float* memory = worker_scratch(worker, team.size * (work_floats(unit_lines_) + 2 * size));
        float* work = memory + team.size * 2 * size;
        auto at = [&](float* from, int64_t u) {
            return Gathered::at(from + u * size, team.units[u].lines(), value_width_);
        };
        auto all = [&](int64_t u) { return at(memory, u); };
        auto part = [&](int64_t u) { return at(memory + team.size * size, u); };
        for (int64_t u = 0; u < team.size; u++) {
            pack_query(team.units[u], work_of(work, u)), clear(all(u), team.units[u].lines());
        }
        int64_t begin = first_of(team.units[0], 0) / SPLIT;
        int64_t end = (last_of(team.units[0], team.units[0].rows - 1) + SPLIT - 1) / SPLIT;
        for (int64_t split = begin; split < end; split++) {
            bool known = stored.has(team.units[0], split);
            if (!known) gather(team, split, work, part);
            for (int64_t u = 0; u < team.size; u++) {
                const Gathered& next = known ? stored_part(stored, team.units[u], split) : part(u);
                for (int64_t line = 0; line < team.units[u].lines(); line++) join(all(u), next, line);
            }
        }
        for (int64_t u = 0; u < team.size; u++) finish(team.units[u], all(u));
    }

    // For few teams with long contexts: every split is a task, then splits are joined in the same order.
    void run_split(Array<Unit>& units, const Array<Team>& teams, int64_t splits, const Stored& stored) const {
        int64_t size = Gathered::floats(unit_lines_, value_width_);
        float* parts = scratch(moesaic::kInner, units.size * splits * size);
        auto part_of = [&](int64_t unit, int64_t split) {
            if (stored.has(units[unit], split)) return stored_part(stored, units[unit], split);
            return Gathered::at(parts + (unit * splits + split) * size, units[unit].lines(), value_width_);
        };
        bool apart = teams.size * splits < 2 * moesaic::pool().threads();  // too few tasks: each unit is one
        int64_t tasks = (apart ? units.size : teams.size) * splits;
        parallel(tasks, products_, [&](int64_t task, int worker) {
            const Team team = apart ? Team{&units[task / splits], 1, false} : teams[task / splits];
            int64_t split = task % splits, unit = team.units - units.data;
            if (stored.has(team.units[0], split)) return;
            float* work = worker_scratch(worker, team.size * work_floats(unit_lines_));
            for (int64_t u = 0; u < team.size; u++) pack_query(team.units[u], work_of(work, u));
            gather(team, split, work, [&](int64_t u) { return part_of(unit + u, split); });
        });
        parallel(units.size, units.size * splits * size, [&](int64_t task, int) {
            Gathered all = part_of(task, 0);
            for (int64_t split = 1; split < splits; split++) {
                for (int64_t line = 0; line < units[task].lines(); line++) join(all, part_of(task, split), line);
            }
            finish(units[task], all);
        });
    }

    int64_t work_floats(int64_t lines) const { return lines * (key_width_ + SPLIT); }
    // Memory of unit u of a team: the packed query, then the scores.
    float* work_of(float* work, int64_t u) const { return work + u * work_floats(unit_lines_); }
    float* scores_of(float* work, const Unit& unit, int64_t u) const {
        return work_of(work, u) + unit.lines() * key_width_;
    }

    void clear(const Gathered& part, int64_t lines) const {
        for (int64_t line = 0; line < lines; line++) part.sum[line] = 0, part.most[line] = 0;
    }

    void pack_query(const Unit& unit, float* query) const {
        for (int64_t line = 0; line < unit.lines(); line++) {
            int64_t row = job_.query_starts[unit.sequence] + unit.first_row + line / unit.heads;
            const float* from = job_.query + (row * job_.heads + unit.head + line % unit.heads) * job_.key_width;
            pack<T>(from, job_.key_width, query + line * key_width_);
        }
    }

    // Computes one split of a team. `work` contains the packed queries. part(u): for the results of unit u.
    template <class Part>
    void gather(const Team& team, int64_t split, float* work, const Part& part) const {
        for (int64_t u = 0; u < team.size; u++) clear(part(u), team.units[u].lines());
        int64_t origin = split * SPLIT;
        int64_t begin = std::max(first_of(team.units[0], 0), origin) - origin;
        int64_t end = std::min(last_of(team.units[0], team.units[0].rows - 1), origin + SPLIT) - origin;
        if (begin >= end) return;
        score(team, origin, begin, end, work);
        for (int64_t u = 0; u < team.size; u++) {
            const Unit& unit = team.units[u];
            float* scores = scores_of(work, unit, u);
            for (int64_t line = 0; line < unit.lines(); line++) {
                int64_t first = std::max(first_of(unit, line / unit.heads) - origin, begin);
                int64_t last = std::min(last_of(unit, line / unit.heads) - origin, end);
                soften(scores + line * SPLIT, begin, end, first, last, part(u).most + line, part(u).sum + line);
            }
        }
        weigh(team, origin, begin, end, work, part);
    }

    // Computes the sums of values origin + [begin, end), each times its probability. If a team waits, some tokens at a
    // time meet all its units, while those after them are fetched.
    template <class Part>
    void weigh(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work, const Part& part) const {
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
                float* chances = scores_of(work, team.units[u], u) + begin + i;
                add_values(team.units[u], tokens + i, some, chances, i == 0, part(u).values, coming);
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
    void add_values(const Unit& unit, const T* const* tokens, int64_t count, float* chances, bool fresh, float* sums,
                    Coming<T>& coming) const {
        const T* values[SPLIT];
        for (int64_t i = 0; i < count; i++) values[i] = tokens[i] + unit.kv_head * value_stored();
        if constexpr (sizeof(T) == 1) {
            float scales[SPLIT];
            for (int64_t i = 0; i < count; i++) scales[i] = scale_of(values[i], value_stored() - stored<T>(0));
            rescale(chances, unit.lines(), scales, count);
        }
        const float* own[MOST_LINES] = {};
        for (int64_t line = 0; line < unit.lines(); line++) own[line] = chances + line * SPLIT;
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

    // Computes the products of the queries with keys origin + [begin, end). Each block meets all units of a team while
    // the next one is fetched. The keys of all heads lie together there, so memory is read in order.
    void score(const Team& team, int64_t origin, int64_t begin, int64_t end, float* work) const {
        int64_t width = stored<T>(job_.key_width), token = job_.kv_heads * width;
        each_run(team.units[0], origin, begin, end, [&](int64_t i, int64_t run, int64_t slot, int64_t next) {
            int64_t after = !team.waits || next < 0 ? 0 : std::min(run, end - i - run);  // tokens to fetch
            int64_t bytes = after * token * int64_t(sizeof(T));
            auto coming = reinterpret_cast<const char*>(static_cast<const T*>(job_.keys) + (after > 0 ? next * token : 0));
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

    // Replaces scores [begin, end) by exp(scale * score - most), and by 0 outside [first, last). Vectors start at fixed
    // offsets in the split, so the sum over them does not depend on `begin` and `end`.
    void soften(float* scores, int64_t begin, int64_t end, int64_t first, int64_t last, float* most,
                float* sum) const {
        if (first >= last) {
            std::memset(scores + begin, 0, size_t(end - begin) * 4);
            return;
        }
        int64_t from = first / LANES * LANES, to = whole_lanes(last);
        Vec scale = set1(job_.scale), usual = set1(scores[first]);
        auto scaled = [&](int64_t i) {
            return mul(inside(load(scores + i), usual, first - i, last - i), scale);
        };
        Vec peak = scaled(from);
        for (int64_t i = from + LANES; i < to; i += LANES) peak = vmax(peak, scaled(i));
        *most = largest(peak);
        Vec sums = zero();
        for (int64_t i = from; i < to; i += LANES) {
            Vec chances = inside(exponential(sub(scaled(i), set1(*most))), zero(), first - i, last - i);
            store(scores + i, chances);
            sums = add(sums, chances);
        }
        *sum = total(sums);
        for (int64_t i = begin; i < from; i++) scores[i] = 0;
        for (int64_t i = to; i < end; i++) scores[i] = 0;
    }

    // The part of a head's sink in the sum of chances, which are relative to the score `most`.
    float beside(int64_t head, float most) const {
        return job_.sinks == nullptr ? 0 : exponential1(job_.sinks[head] - most);
    }

    void finish(const Unit& unit, const Gathered& all) const {
        for (int64_t line = 0; line < unit.lines(); line++) {
            int64_t row = job_.query_starts[unit.sequence] + unit.first_row + line / unit.heads;
            float* out = job_.out + (row * job_.heads + unit.head + line % unit.heads) * job_.value_width;
            const float* values = all.values + line * value_width_;
            float sum = all.sum[line] + beside(unit.head + line % unit.heads, all.most[line]);
            for (int64_t i = 0; i < job_.value_width; i++) out[i] = values[i] / sum;
        }
    }

    const moesaic::Attention& job_;
    int64_t products_ = 0, unit_lines_ = 1;  // unit_lines_: the most of a unit
    int64_t per_kv_head_, head_groups_, group_heads_, unit_rows_, all_units_, key_width_, value_width_;
};

inline void attention(const moesaic::Attention& job) {
    if (job.item == 1) return AttentionOf<int8_t>(job).run();
    job.item == 2 ? AttentionOf<bf16>(job).run() : AttentionOf<float>(job).run();
}

}  // namespace MOESAIC_ISA
