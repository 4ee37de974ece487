// Causal attention over a paged KV cache, with the same arithmetic for prefill and decode.
//
// The context is split at fixed positions, every SPLIT tokens, whatever a step computes. For each split a row gets its
// largest score, its sum and its weighted values. Splits are joined in order by an online softmax (Milakov & Gimelshein
// 2018); Flash-Decoding (Dao et al. 2023) has this split form. So a row's bits depend neither on its chunk nor on the
// threads. Decode rows whose sequences share a prefix read its splits together, once for all of them.
#pragma once

#include <algorithm>

#if defined(MOESAIC_AVX512_BF16)
#include "attention_pairs.h"
#else
#include "attention_products.h"
#endif
#include "shared_splits.h"

namespace MOESAIC_ISA {

template <class Products>
class AttentionOf : Products {
    using Products::job_, Products::value_width_, Products::unit_lines_, Products::few_rows_, Products::near_;
    using Products::few, Products::rows_of, Products::first_of, Products::last_of;
    using Products::work_floats, Products::work_of, Products::scores_of, Products::pack_query;

   public:
    explicit AttentionOf(const moesaic::Attention& job) : Products(job) {
        per_kv_head_ = job.heads / job.kv_heads;
        head_groups_ = (per_kv_head_ + MOST_LINES - 1) / MOST_LINES;
        group_heads_ = (per_kv_head_ + head_groups_ - 1) / head_groups_;
        few_rows_ = many_rows_ = rows_with(MOST_LINES);
        all_units_ = job.kv_heads * head_groups_;
        choose_many_rows();
        for (int64_t s = 0; s < job.sequences; s++) {
            this->make_room(!few(s));
        }
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
        bool stores = units.size * splits * Gathered::floats(unit_lines_, value_width_) <= MOST_STORED;
        if (splits > 1 && (units.size < wanted_ || (teams.size < wanted_ && stores))) {
            return run_split(units, teams, splits, stored);
        }
        bool apart = teams.size < wanted_;
        parallel(apart ? units.size : teams.size, products_, [&](int64_t task, int worker) {
            whole(apart ? Team{&units[task], 1, false} : teams[task], stored, worker);
        });
    }

   private:
    // Many query vectors share what is widened, if there are tasks enough.
    void choose_many_rows() {
        int64_t tasks = std::min(num_units(), wanted_);
        for (int64_t lines = 2 * MOST_LINES; lines <= MANY_LINES; lines *= 2) {
            int64_t before = many_rows_;
            many_rows_ = rows_with(lines);
            if (num_units() >= tasks) continue;
            many_rows_ = before;
            break;
        }
    }

    int64_t num_units() const {
        int64_t units = 0;
        for (int64_t s = 0; s < job_.sequences; s++) units += blocks_of_rows(s);
        return units * all_units_;
    }
    int64_t rows_with(int64_t lines) const { return std::max<int64_t>(1, lines / group_heads_); }
    int64_t blocks_of_rows(int64_t s) const { return few(s) ? 1 : (rows_of(s) + many_rows_ - 1) / many_rows_; }

    // Few rows wait for the cache, so all their heads are a team. Of many rows each unit is one. The last rows, which
    // attend to the most tokens, come first, so that threads end together.
    void add_units(int64_t s, Array<Unit>& units, Array<Team>& teams) {
        if (rows_of(s) == 0) return;
        int64_t rows = few(s) ? few_rows_ : many_rows_;
        unit_lines_ = std::max(unit_lines_, std::min(rows, rows_of(s)) * group_heads_);
        if (few(s)) teams[teams.size++] = {&units[units.size], all_units_, true};
        for (int64_t kv = 0; kv < job_.kv_heads; kv++) {
            for (int64_t head = 0; head < per_kv_head_; head += group_heads_) {
                for (int64_t row = (blocks_of_rows(s) - 1) * rows; row >= 0; row -= rows) {
                    if (!few(s)) teams[teams.size++] = {&units[units.size], 1, false};
                    units[units.size++] = {s, row, std::min(rows, rows_of(s) - row), kv * per_kv_head_ + head,
                                           std::min(group_heads_, per_kv_head_ - head), kv};
                }
            }
        }
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
            typename Products::Task registers;
            const SplitClass& one = classes[task / groups];
            int64_t group = task % groups, kv = group / head_groups_, head = group % head_groups_ * group_heads_;
            int64_t heads = std::min(group_heads_, per_kv_head_ - head);
            for (int64_t first = 0; first < one.count; first += together) {
                int64_t count = std::min(together, one.count - first), lines = count * heads;
                int64_t size = Gathered::floats(lines, value_width_);
                float* memory = worker_scratch(worker, work_floats(lines) + size + near_);
                float* near = memory + work_floats(lines) + size;
                Gathered all = Gathered::at(memory + work_floats(lines), lines, value_width_);
                const int64_t* members = shared.order.data + one.first + first;
                gather_together(members, count, {members[0], 0, count, kv * per_kv_head_ + head, heads, kv},
                                one.split * SPLIT, memory, near, all);
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
                         float* near, const Gathered& part) const {
        for (int64_t m = 0; m < count; m++) {
            pack_query({members[m], 0, 1, unit.head, unit.heads, unit.kv_head}, work, near, m * unit.heads);
        }
        float* scores = scores_of(work, unit, 0);
        this->score({&unit, 1, false}, origin, 0, SPLIT, work, near);
        for (int64_t line = 0; line < unit.lines(); line++) {
            soften(scores + line * SPLIT, 0, SPLIT, 0, SPLIT, job_.scale, part.most + line, part.sum + line);
        }
        this->weigh({&unit, 1, false}, origin, 0, SPLIT, work, near, [&](int64_t) { return part; });
    }

    // Computes all splits of a team, one after another. Those in `stored` are computed already.
    void whole(const Team& team, const Stored& stored, int worker) const {
        typename Products::Task registers;
        int64_t size = Gathered::floats(unit_lines_, value_width_);
        float* memory = worker_scratch(worker, team.size * (work_floats(unit_lines_) + 2 * size) + near_);
        float *work = memory + team.size * 2 * size, *near = work_of(work, team.size);
        auto at = [&](float* from, int64_t u) {
            return Gathered::at(from + u * size, team.units[u].lines(), value_width_);
        };
        auto all = [&](int64_t u) { return at(memory, u); };
        auto part = [&](int64_t u) { return at(memory + team.size * size, u); };
        for (int64_t u = 0; u < team.size; u++) {
            pack_query(team.units[u], work_of(work, u), near), clear(all(u), team.units[u].lines());
        }
        int64_t begin = first_of(team.units[0], 0) / SPLIT;
        int64_t end = (last_of(team.units[0], team.units[0].rows - 1) + SPLIT - 1) / SPLIT;
        for (int64_t split = begin; split < end; split++) {
            bool known = stored.has(team.units[0], split);
            if (!known && split == begin) {
                gather(team, split, work, near, all);
                continue;
            }
            if (!known) gather(team, split, work, near, part);
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
            typename Products::Task registers;
            float* work = worker_scratch(worker, team.size * work_floats(unit_lines_) + near_);
            float* near = work_of(work, team.size);
            for (int64_t u = 0; u < team.size; u++) pack_query(team.units[u], work_of(work, u), near);
            gather(team, split, work, near, [&](int64_t u) { return part_of(unit + u, split); });
        });
        parallel(units.size, units.size * splits * size, [&](int64_t task, int) {
            Gathered all = part_of(task, 0);
            for (int64_t split = 1; split < splits; split++) {
                for (int64_t line = 0; line < units[task].lines(); line++) join(all, part_of(task, split), line);
            }
            finish(units[task], all);
        });
    }

    void clear(const Gathered& part, int64_t lines) const {
        for (int64_t line = 0; line < lines; line++) part.sum[line] = 0, part.most[line] = 0;
    }

    // Computes one split of a team. `work` contains the packed queries. part(u): for the results of unit u.
    template <class Part>
    void gather(const Team& team, int64_t split, float* work, float* near, const Part& part) const {
        for (int64_t u = 0; u < team.size; u++) clear(part(u), team.units[u].lines());
        int64_t origin = split * SPLIT;
        int64_t begin = std::max(first_of(team.units[0], 0), origin) - origin;
        int64_t end = std::min(last_of(team.units[0], team.units[0].rows - 1), origin + SPLIT) - origin;
        if (begin >= end) return;
        this->score(team, origin, begin, end, work, near);
        for (int64_t u = 0; u < team.size; u++) {
            const Unit& unit = team.units[u];
            float* scores = scores_of(work, unit, u);
            for (int64_t line = 0; line < unit.lines(); line++) {
                int64_t first = std::max(first_of(unit, line / unit.heads) - origin, begin);
                int64_t last = std::min(last_of(unit, line / unit.heads) - origin, end);
                soften(scores + line * SPLIT, begin, end, first, last, job_.scale, part(u).most + line,
                       part(u).sum + line);
            }
        }
        this->weigh(team, origin, begin, end, work, near, part);
    }

    // The part of a head's sink in the sum of probabilities, which are relative to the score `most`.
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

    int64_t products_ = 0;
    int64_t wanted_ = 4 * moesaic::pool().threads();  // tasks
    int64_t per_kv_head_, head_groups_, group_heads_, many_rows_, all_units_;
};

#if defined(MOESAIC_AVX512_BF16)
inline void attention(const moesaic::Attention& job) { AttentionOf<PairProducts>(job).run(); }  // over a bf16 cache
#else
inline void attention(const moesaic::Attention& job) {
    if (job.item == 1) return AttentionOf<UnitProducts<int8_t>>(job).run();
    job.item == 2 ? AttentionOf<UnitProducts<bf16>>(job).run() : AttentionOf<UnitProducts<float>>(job).run();
}
#endif

}  // namespace MOESAIC_ISA
