// Which decode rows read the same splits of the cache: those of sequences whose blocks are equal from the first on.
#pragma once

#include <algorithm>

#include "linear.h"

namespace MOESAIC_ISA {

// Sequences order[first, first + count) have the same blocks up to the end of this split.
struct SplitClass {
    int64_t split, first, count;
};

class SharedSplits {
   public:
    // split: tokens of a split. most: splits of a sequence that it may share. Sequences with several rows, and steps
    // with a window, share nothing.
    SharedSplits(const moesaic::Attention& job, int64_t split, int64_t most)
        : order(job.sequences), splits(job.sequences), parts(job.sequences), common_(job.sequences), job_(job),
          split_(split), most_(most) {
        for (int64_t s = 0; s < job.sequences; s++) {
            splits[s] = 0;
            bool one = job.query_starts[s + 1] - job.query_starts[s] == 1;
            if (one && job.window == 0 && job.context_lens[s] >= split) order[order.size++] = s;
        }
        if (order.size < 2) return;
        std::sort(order.data, order.data + order.size, [&](int64_t a, int64_t b) { return before(a, b); });
        for (int64_t i = 0; i + 1 < order.size; i++) {
            int64_t same = alike(order[i], order[i + 1]);
            common_[i] = same;
            splits[order[i]] = std::max(splits[order[i]], same);
            splits[order[i + 1]] = same;
        }
        for (int64_t i = 0; i < order.size; i++) parts[order[i]] = total, total += splits[order[i]];
    }

    Array<int64_t> order;   // sequences with one row; those with equal first blocks are neighbours
    Array<int64_t> splits;  // [sequences] leading splits that a sequence shares with another one
    Array<int64_t> parts;   // [sequences] number of these splits of the sequences before it in `order`
    int64_t total = 0;      // all of these splits

    // Calls `use` with every class of two or more sequences.
    template <class Use>
    void each(const Use& use) const {
        for (int64_t i = 0; i + 1 < order.size; i++) {
            // A class begins here at each split that this sequence shares with the next one, but not with the one before.
            int64_t from = i == 0 ? 0 : common_[i - 1];
            for (int64_t p = from; p < common_[i]; p++) {
                int64_t last = i + 1;
                while (last + 1 < order.size && common_[last] > p) last++;
                use(SplitClass{p, i, last + 1 - i});
            }
        }
    }

   private:
    const int64_t* blocks(int64_t s) const { return job_.block_tables + s * job_.table_width; }
    int64_t full_blocks(int64_t s) const { return job_.context_lens[s] / job_.block_size; }

    bool before(int64_t a, int64_t b) const {
        const int64_t *one = blocks(a), *other = blocks(b);
        return std::lexicographical_compare(one, one + full_blocks(a), other, other + full_blocks(b));
    }

    // Number of whole leading splits in which both sequences have the same blocks.
    int64_t alike(int64_t a, int64_t b) const {
        int64_t most = std::min(full_blocks(a), full_blocks(b)), same = 0;
        while (same < most && blocks(a)[same] == blocks(b)[same]) same++;
        return std::min(same * job_.block_size / split_, most_);
    }

    Array<int64_t> common_;  // whole splits that a sequence of `order` has in common with the next one
    const moesaic::Attention& job_;
    int64_t split_, most_;
};

}  // namespace MOESAIC_ISA
