// Causal attention over a paged KV cache, with the same arithmetic for prefill and decode.
//
// The context is split at fixed positions, every SPLIT tokens, whatever a step computes. For each split a row gets its
// largest score, its sum and its weighted values. Splits are joined in order by an online softmax (Milakov & Gimelshein
// 2018); Flash-Decoding (Dao et al. 2023) has this split form. So a row's bits depend neither on its chunk nor on the
// threads. Decode rows whose sequences share a prefix read its splits together, once for all of them.
#pragma once

#include <algorithm>

#include "cache.h"
#include "shared_splits.h"

namespace MOESAIC_ISA {

constexpr int64_t SPLIT = 256;
constexpr int64_t MOST_STORED = int64_t(1) << 24;  // floats of results of splits that sequences share
constexpr int64_t MOST_LINES = 4 * TILE_ROWS;  // query vectors that are computed together with the same keys

inline int64_t whole_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Query vectors with the same keys: some rows of a sequence, and some query heads of a key head.
struct Unit {
    int64_t sequence, first_row, rows, head, heads, kv_head;
    int64_t lines() const { return rows * heads; }
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

template <class T>
class AttentionOf {
   public:
    explicit AttentionOf(const moesaic::Attention& job) : job_(job) {
        per_kv_head_ = job.heads / job.kv_heads;
        head_groups_ = (per_kv_head_ + MOST_LINES - 1) / MOST_LINES;
        group_heads_ = (per_kv_head_ + head_groups_ - 1) / head_groups_;
        unit_rows_ = std::max<int64_t>(1, MOST_LINES / group_heads_);
        key_width_ = padded(job.key_width), value_width_ = whole_lanes(job.value_width);
    }

    void run() {
        Array<Unit> units(num_units());
        int64_t splits = 0;
        for (int64_t s = 0; s < job_.sequences; s++) {
            add_units(s, units);
            products_ += rows_of(s) * job_.context_lens[s] * job_.heads * (job_.key_width + job_.value_width);
            splits = std::max(splits, (job_.context_lens[s] + SPLIT - 1) / SPLIT);
        }
        int64_t size = Gathered::floats(group_heads_, value_width_) * job_.kv_heads * head_groups_;
        SharedSplits shared(job_, SPLIT, MOST_STORED / (size * std::max<int64_t>(1, job_.sequences)));
        Stored stored{shared, shared.total == 0 ? nullptr : scratch(moesaic::kWork, shared.total * size), size};
        if (shared.total > 0) gather_shared(stored);
        if (splits > 1 && units.size < 4 * moesaic::pool().threads()) {
            run_split(units, splits, stored);
        } else {
            parallel(units.size, products_, [&](int64_t task, int worker) { whole(units[task], stored, worker); });
        }
    }

   private:
    int64_t num_units() const {
        int64_t units = 0;
        for (int64_t s = 0; s < job_.sequences; s++) units += blocks_of_rows(s);
        return units * job_.kv_heads * head_groups_;
    }
    int64_t rows_of(int64_t s) const { return job_.query_starts[s + 1] - job_.query_starts[s]; }
    int64_t blocks_of_rows(int64_t s) const { return (rows_of(s) + unit_rows_ - 1) / unit_rows_; }

    void add_units(int64_t s, Array<Unit>& units) const {
        for (int64_t row = 0; row < rows_of(s); row += unit_rows_) {
            for (int64_t kv = 0; kv < job_.kv_heads; kv++) {
                for (int64_t head = 0; head < per_kv_head_; head += group_heads_) {
                    units[units.size++] = {s,
                                           row,
                                           std::min(unit_rows_, rows_of(s) - row),
                                           kv * per_kv_head_ + head,
                                           std::min(group_heads_, per_kv_head_ - head),
                                           kv};
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
        float* scores = work + unit.lines() * key_width_;
        score(unit, origin, 0, SPLIT, work, scores);
        for (int64_t line = 0; line < unit.lines(); line++) {
            soften(scores + line * SPLIT, 0, SPLIT, 0, SPLIT, part.most + line, part.sum + line);
        }
        weigh(unit, origin, 0, SPLIT, scores, part);
    }

    // Computes all splits of a unit, one after another. Those in `stored` are computed already.
    void whole(const Unit& unit, const Stored& stored, int worker) const {
        int64_t lines = unit.lines(), size = Gathered::floats(lines, value_width_);
        float* memory = worker_scratch(worker, work_floats(lines) + 2 * size);
        Gathered all = Gathered::at(memory, lines, value_width_);
        Gathered part = Gathered::at(memory + size, lines, value_width_);
        float* work = memory + 2 * size;
        pack_query(unit, work);
        clear(all, lines);
        int64_t begin = first_of(unit, 0) / SPLIT, end = (last_of(unit, unit.rows - 1) + SPLIT - 1) / SPLIT;
        for (int64_t split = begin; split < end; split++) {
            bool known = stored.has(unit, split);
            if (!known) gather(unit, split, work, part);
            const Gathered& next = known ? stored_part(stored, unit, split) : part;
            for (int64_t line = 0; line < lines; line++) join(all, next, line);
        }
        finish(unit, all);
    }

    // For few units with long contexts: every split is a task, then splits are joined in the same order.
    void run_split(Array<Unit>& units, int64_t splits, const Stored& stored) const {
        int64_t size = Gathered::floats(MOST_LINES, value_width_);
        float* parts = scratch(moesaic::kInner, units.size * splits * size);
        auto part_of = [&](int64_t unit, int64_t split) {
            if (stored.has(units[unit], split)) return stored_part(stored, units[unit], split);
            return Gathered::at(parts + (unit * splits + split) * size, units[unit].lines(), value_width_);
        };
        parallel(units.size * splits, products_, [&](int64_t task, int worker) {
            const Unit& unit = units[task / splits];
            if (stored.has(unit, task % splits)) return;
            float* work = worker_scratch(worker, work_floats(unit.lines()));
            pack_query(unit, work);
            gather(unit, task % splits, work, part_of(task / splits, task % splits));
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

    // Computes one split of a unit. `work` contains the packed query, then memory for the scores.
    void gather(const Unit& unit, int64_t split, float* work, const Gathered& part) const {
        int64_t lines = unit.lines();
        clear(part, lines);
        int64_t origin = split * SPLIT;
        int64_t begin = std::max(first_of(unit, 0), origin) - origin;
        int64_t end = std::min(last_of(unit, unit.rows - 1), origin + SPLIT) - origin;
        if (begin >= end) return;
        float* scores = work + lines * key_width_;
        score(unit, origin, begin, end, work, scores);
        for (int64_t line = 0; line < lines; line++) {
            int64_t first = std::max(first_of(unit, line / unit.heads) - origin, begin);
            int64_t last = std::min(last_of(unit, line / unit.heads) - origin, end);
            soften(scores + line * SPLIT, begin, end, first, last, part.most + line, part.sum + line);
        }
        weigh(unit, origin, begin, end, scores, part);
    }

    // Computes the sum of values origin + [begin, end), each times its probability.
    void weigh(const Unit& unit, int64_t origin, int64_t begin, int64_t end, float* chances,
               const Gathered& part) const {
        int64_t lines = unit.lines();
        const T* values[SPLIT];
        int64_t stride = job_.kv_heads * stored<T>(job_.values == nullptr ? job_.key_width : job_.value_width);
        each_run(unit, origin, begin, end, [&](int64_t i, int64_t run, int64_t slot) {
            const T* first = value_at(unit, slot);
            for (int64_t r = 0; r < run; r++) values[i + r - begin] = first + r * stride;
        });
        if constexpr (sizeof(T) == 1) {
            float scales[SPLIT];
            int64_t width = job_.values == nullptr ? job_.key_width : job_.value_width;
            for (int64_t i = begin; i < end; i++) scales[i] = scale_of(values[i - begin], width);
            rescale(chances, lines, scales, begin, end);
        }
        const float* own[MOST_LINES] = {};
        for (int64_t line = 0; line < lines; line++) own[line] = chances + line * SPLIT + begin;
        outer<T>(own, lines, values, job_.value_width, end - begin, part.values, value_width_);
        if (value_width_ == job_.value_width) return;
        for (int64_t line = 0; line < lines; line++) {
            float* row = part.values + line * value_width_;
            std::memset(row + job_.value_width, 0, size_t(value_width_ - job_.value_width) * 4);
        }
    }

    const T* in_block(const void* cache, int64_t slot, int64_t kv_head, int64_t width) const {
        return static_cast<const T*>(cache) + (slot * job_.kv_heads + kv_head) * stored<T>(width);
    }
    const T* value_at(const Unit& unit, int64_t slot) const {
        if (job_.values == nullptr) return in_block(job_.keys, slot, unit.kv_head, job_.key_width);
        return in_block(job_.values, slot, unit.kv_head, job_.value_width);
    }

    // Calls `use(i, run, slot)` for each run of tokens origin + [begin, end) in consecutive slots of one block.
    template <class Use>
    void each_run(const Unit& unit, int64_t origin, int64_t begin, int64_t end, const Use& use) const {
        const int64_t* table = job_.block_tables + unit.sequence * job_.table_width;
        for (int64_t i = begin; i < end;) {
            int64_t block = (origin + i) / job_.block_size, offset = (origin + i) - block * job_.block_size;
            int64_t run = std::min(job_.block_size - offset, end - i);
            use(i, run, table[block] * job_.block_size + offset);
            i += run;
        }
    }

    // Computes the products of the query with keys origin + [begin, end), block by block.
    void score(const Unit& unit, int64_t origin, int64_t begin, int64_t end, const float* query,
               float* scores) const {
        const float* rows[MOST_LINES];
        for (int64_t line = 0; line < unit.lines(); line++) rows[line] = query + line * key_width_;
        int64_t stride = job_.kv_heads * stored<T>(job_.key_width);
        [[maybe_unused]] float scales[SPLIT];
        each_run(unit, origin, begin, end, [&](int64_t i, int64_t run, int64_t slot) {
            const T* keys = in_block(job_.keys, slot, unit.kv_head, job_.key_width);
            multiply<T>(rows, unit.lines(), keys, stride, run, job_.key_width, scores + i, SPLIT);
            if constexpr (sizeof(T) == 1) {
                for (int64_t r = 0; r < run; r++) scales[i + r] = scale_of(keys + r * stride, job_.key_width);
            }
        });
        if constexpr (sizeof(T) == 1) rescale(scores, unit.lines(), scales, begin, end);
    }

    // Multiplies numbers [begin, end) of each line by the scales of their cached rows.
    static void rescale(float* numbers, int64_t lines, const float* scales, int64_t begin, int64_t end) {
        for (int64_t line = 0; line < lines; line++) {
            float* own = numbers + line * SPLIT;
            for (int64_t i = begin; i < end; i++) own[i] *= scales[i];
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
    int64_t products_ = 0;
    int64_t per_kv_head_, head_groups_, group_heads_, unit_rows_, key_width_, value_width_;
};

inline void attention(const moesaic::Attention& job) {
    if (job.item == 1) return AttentionOf<int8_t>(job).run();
    job.item == 2 ? AttentionOf<bf16>(job).run() : AttentionOf<float>(job).run();
}

}  // namespace MOESAIC_ISA
