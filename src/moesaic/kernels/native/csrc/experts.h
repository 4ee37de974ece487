// The routed experts of one layer: gate, up, activation and down over the experts that a batch is routed to.
//
// Tokens are grouped by expert through indices, and never copied per expert. Work is split by (expert, band of
// columns), so that a single busy expert uses every thread. The down bands of an expert start when its inner rows are
// complete.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <type_traits>
#include <utility>

#include "activation.h"

namespace MOESAIC_ISA {

constexpr int64_t DOWN_COLUMNS = 128;

struct Group {  // the (token, slot) pairs of one active expert
    int64_t expert, begin, end;
    int64_t place;  // index of its first row among all rows, in sets that are packed together
    int64_t room;   // index of its first inner row; an earlier group may have used the same memory
    std::atomic<int64_t> missing;  // bands of inner rows that are not computed yet
    std::atomic<int64_t> unread;   // down bands that still read them
};

struct Band {  // consecutive strips of columns, the work of one task
    int64_t group, begin, end;
    bool down;
};

// Sorts the pairs by expert (stable): fills `pairs` and `groups`. Returns kAllHeld, or the first pair whose expert does
// not exist or is not in this process.
inline int64_t group_by_expert(const moesaic::Experts& job, Array<int64_t>& pairs, Array<Group>& groups) {
    int64_t total = job.pairs();
    Array<int64_t> next(job.experts + 1);
    for (int64_t e = 0; e <= job.experts; e++) next[e] = 0;
    for (int64_t i = 0; i < total; i++) {
        int64_t e = job.ids ? job.ids[i] : 0;
        if (e < 0 || e >= job.experts || !job.gate[e] || !job.up[e] || !job.down[e]) return i;
        next[e + 1]++;
    }
    for (int64_t e = 0; e < job.experts; e++) {
        if (next[e + 1] > 0) {
            Group& group = groups[groups.size++];
            group.expert = e, group.begin = next[e], group.end = next[e] + next[e + 1];
        }
        next[e + 1] += next[e];
    }
    for (int64_t i = 0; i < total; i++) pairs[next[job.ids ? job.ids[i] : 0]++] = i;
    return moesaic::kAllHeld;
}

// Columns of one task, in whole strips: all columns of an expert if there are many experts, fewer if there are few. A
// long task knows what it reads next; short tasks keep every thread busy.
inline int64_t band_columns(int64_t columns, int64_t strip, int64_t groups) {
    int64_t wanted = 8 * moesaic::pool().threads(), strips = (columns + strip - 1) / strip;
    int64_t bands = std::min(strips, (wanted + groups - 1) / groups);
    return (strips + bands - 1) / bands * strip;
}

// Orders the bands: the inner bands of each expert come before the down bands of the one before it.
inline void order_bands(const moesaic::Experts& job, int64_t inner, int64_t down, Array<Group>& groups,
                        Array<Band>& bands) {
    auto add = [&](int64_t g, bool is_down) {
        int64_t columns = is_down ? job.h : job.w, step = is_down ? down : inner;
        for (int64_t c = 0; c < columns; c += step) {
            bands[bands.size++] = {g, c, std::min(c + step, columns), is_down};
        }
    };
    for (int64_t g = 0; g < groups.size; g++) {
        add(g, false);
        if (g > 0) add(g - 1, true);
    }
    if (groups.size > 0) add(groups.size - 1, true);
}

// The weights that follow a thread's last strip of a band: those of the band that it will most likely claim next. A
// wrong guess costs the prefetch of weights that another thread reads.
struct After {
    const moesaic::Experts& job;
    const Array<Group>& groups;
    const Array<Band>& bands;
    int64_t inner_row, down_row;  // bytes of a row of gate and up, and of down

    const void* operator()() const {
        int64_t next = moesaic::pool().unclaimed();
        if (next >= bands.size) return nullptr;
        const Band& band = bands[next];
        int64_t expert = groups[band.group].expert;
        uint64_t at = band.down ? job.down[expert] + uint64_t(band.begin * down_row)
                                : job.gate[expert] + uint64_t(band.begin * inner_row);
        return reinterpret_cast<const void*>(at);
    }
};

template <class T, class Act>
void inner_strip(const moesaic::Experts& job, const Group& group, int64_t begin, int64_t end,
                 const int64_t* pairs, const RowOf<T>* hidden, RowOf<T>* inner, const After& after) {
    int64_t columns = std::min(INNER_COLUMNS, end - begin);
    int64_t width = padded(job.h), inner_width = padded(job.w);
    int64_t ld = span<T>(job.h);
    const T* gate = reinterpret_cast<const T*>(job.gate[group.expert]) + begin * ld;
    const T* up = reinterpret_cast<const T*>(job.up[group.expert]) + begin * ld;
    const T* next = begin + columns < end ? gate + columns * ld : static_cast<const T*>(after());
    const Act activation(job, group.expert, begin, columns);
    float left[PANEL * INNER_COLUMNS], right[PANEL * INNER_COLUMNS];
    for (int64_t first = group.begin; first < group.end; first += PANEL) {
        const RowOf<T>* x[PANEL];
        int64_t n = std::min(PANEL, group.end - first);
        for (int64_t i = 0; i < n; i++) x[i] = hidden + job.row_of(pairs[first + i]) * width;
        bool last = first + n == group.end;
        multiply<T>(x, n, gate, ld, columns, job.h, left, INNER_COLUMNS, first == group.begin ? up : nullptr);
        multiply<T>(x, n, up, ld, columns, job.h, right, INNER_COLUMNS, last ? next : nullptr);
        for (int64_t i = 0; i < n; i++) {
            float *row = left + i * INNER_COLUMNS, *other = right + i * INNER_COLUMNS;
            for (int64_t c = columns; c % LANES != 0; c++) row[c] = other[c] = 0;
            for (int64_t c = 0; c < columns; c += LANES) {
                store(row + c, activation.of_row(load(row + c), load(other + c), c));
            }
            pack<T>(row, columns, inner + (group.room + first - group.begin + i) * inner_width + begin);
        }
    }
}

#if defined(MOESAIC_AMX_BF16)
}  // namespace MOESAIC_ISA
#include "inner_amx.h"
namespace MOESAIC_ISA {
#endif

template <class T, class Act>
void down_strip(const moesaic::Experts& job, const Group& group, int64_t begin, int64_t end,
                const int64_t* pairs, const RowOf<T>* inner, const After& after) {
    int64_t columns = std::min(DOWN_COLUMNS, end - begin), inner_width = padded(job.w), ld = span<T>(job.w);
    const T* down = reinterpret_cast<const T*>(job.down[group.expert]) + begin * ld;
    const T* next = begin + columns < end ? down + columns * ld : static_cast<const T*>(after());
    float sums[PANEL * DOWN_COLUMNS];
    int64_t rows = group.end - group.begin;
    panels<T>(inner + group.room * inner_width, inner_width, rows, [&](int64_t first, int64_t n, auto x) {
        multiply<T>(x, n, down, ld, columns, job.w, sums, DOWN_COLUMNS, first + n == rows ? next : nullptr);
        for (int64_t i = 0; i < n; i++) {
            float* out = job.out_of(pairs[group.begin + first + i]) + begin;
            Act::put(job, group.expert, begin, sums + i * DOWN_COLUMNS, columns, out);
        }
    });
}

// Sets the place of every group among all rows. Returns the number of rows.
template <class T>
int64_t place_groups(Array<Group>& groups) {
    int64_t rows = 0;
    for (int64_t g = 0; g < groups.size; g++) {
        groups[g].place = rows;
        rows += in_sets<T>(groups[g].end - groups[g].begin);
    }
    return rows;
}

// Number of groups that have inner rows at a time. It is large enough that threads rarely wait for memory to be read,
// and small enough that the memory for many rows stays in a cache.
inline int64_t rooms(int64_t bands_of_group) { return 3 + 2 * moesaic::pool().threads() / bands_of_group; }

// Assigns every group memory for its inner rows, which it shares with the `taken`-th group before it. Returns the
// number of rows of all this memory.
template <class T>
int64_t give_rooms(Array<Group>& groups, int64_t taken, int64_t placed) {
    int64_t largest = 0;
    for (int64_t g = 0; g < groups.size; g++) largest = std::max(largest, in_sets<T>(groups[g].end - groups[g].begin));
    bool shared = taken * largest < placed;
    for (int64_t g = 0; g < groups.size; g++) groups[g].room = shared ? g % taken * largest : groups[g].place;
    return shared ? taken * largest : placed;
}

// Waits for tasks that other threads began earlier.
// The task that it waits for must not throw: nobody would count it down.
inline void wait_for(const std::atomic<int64_t>& left) {
    for (int tries = 0; left.load(std::memory_order_acquire) > 0; tries++) {
        if (tries > 1000) std::this_thread::yield();
    }
}

// Packs the rows as `inner_strip` reads them: row after row, or group after group if rows are packed in sets.
template <class T>
const RowOf<T>* packed_rows(const moesaic::Experts& job, const Array<int64_t>& pairs, const Array<Group>& groups,
                            int64_t placed) {
    auto row_at = [&](int64_t row) {
        return job.apart.rows ? reinterpret_cast<const float*>(job.apart.rows[row]) : job.hidden + row * job.h;
    };
    if constexpr (kTogether<T> > 1) {
        Array<const float*> rows(placed);
        for (int64_t i = 0; i < placed; i++) rows[i] = nullptr;
        for (int64_t g = 0; g < groups.size; g++) {
            const Group& group = groups[g];
            for (int64_t i = group.begin; i < group.end; i++) {
                rows[group.place + i - group.begin] = row_at(job.row_of(pairs[i]));
            }
        }
        return packed_at<T>(placed, job.h, kRows, [&](int64_t row) { return rows[row]; });
    }
    if (!job.apart.rows) return packed<T>(job.hidden, job.n, job.h, kRows);
    return packed_at<T>(job.n, job.h, kRows, row_at);
}

// The strips of experts whose matrices all have type T.
template <class T, class Act>
struct Alike {
    using Rows = T;  // for which rows are packed
    static int64_t row(moesaic::Stored, int64_t numbers) { return span<T>(numbers) * int64_t(sizeof(T)); }
    template <class... Of>
    static void inner(Of&&... of) { inner_strip<T, Act>(std::forward<Of>(of)...); }
    template <class... Of>
    static void down(Of&&... of) { down_strip<T, Act>(std::forward<Of>(of)...); }
};

#if !defined(MOESAIC_AMX_BF16)
struct Dequantized {
    using Rows = Int8;
    template <class Use>
    static auto with(moesaic::Stored stored, const Use& use) { return with_quantized(stored, use); }
};

// The strips of experts whose matrices have types of `Types`: one for gate and up, and that or another for down.
template <class Act, class Types>
struct Mixed {
    using Rows = typename Types::Rows;
    static int64_t row(moesaic::Stored stored, int64_t numbers) {
        return Types::with(stored, [&](auto* of) { return span<std::remove_pointer_t<decltype(of)>>(numbers); });
    }
    template <class... Of>
    static void inner(const moesaic::Experts& job, const Of&... with) {
        Types::with(job.stored, [&](auto* of) { inner_strip<std::remove_pointer_t<decltype(of)>, Act>(job, with...); });
    }
    template <class... Of>
    static void down(const moesaic::Experts& job, const Of&... with) {
        Types::with(job.down_stored, [&](auto* of) {
            down_strip<std::remove_pointer_t<decltype(of)>, Act>(job, with...);
        });
    }
};
#endif

template <class Strips>
int64_t experts_by(const moesaic::Experts& job) {
    using T = typename Strips::Rows;
    int64_t total = job.pairs(), most = std::min(total, job.experts);
    Array<int64_t> pairs(total);
    Array<Group> groups(most);
    int64_t absent = group_by_expert(job, pairs, groups);
    if (absent != moesaic::kAllHeld || groups.size == 0) return absent;
    int64_t inner_columns = band_columns(job.w, INNER_COLUMNS, groups.size);
    int64_t down_columns = band_columns(job.h, DOWN_COLUMNS, groups.size);
    int64_t inner_bands = (job.w + inner_columns - 1) / inner_columns;
    int64_t down_bands = (job.h + down_columns - 1) / down_columns;
    Array<Band> bands(groups.size * (inner_bands + down_bands));
    order_bands(job, inner_columns, down_columns, groups, bands);
    for (int64_t g = 0; g < groups.size; g++) groups[g].missing = inner_bands, groups[g].unread = down_bands;
    int64_t placed = place_groups<T>(groups), apart = rooms(inner_bands + down_bands);
    const RowOf<T>* hidden = packed_rows<T>(job, pairs, groups, placed);
    RowOf<T>* inner = room_of<T>(kInner, give_rooms<T>(groups, apart, placed) * padded(job.w));
    After after{job, groups, bands, Strips::row(job.stored, job.h), Strips::row(job.down_stored, job.w)};
    parallel(bands.size, 3 * total * job.h * job.w, [&](int64_t task, int) {
        Band band = bands[task];
        Group& group = groups[band.group];
        // Tasks that this one waits for were claimed before it, so other threads are computing them.
        if (band.down) wait_for(group.missing);
        if (!band.down && band.group >= apart) wait_for(groups[band.group - apart].unread);
        Registers<T> registers;
        if (!band.down) {
            for (int64_t c = band.begin; c < band.end; c += INNER_COLUMNS) {
                Strips::inner(job, group, c, band.end, pairs.data, hidden, inner, after);
            }
            group.missing.fetch_sub(1, std::memory_order_release);
            return;
        }
        for (int64_t c = band.begin; c < band.end; c += DOWN_COLUMNS) {
            Strips::down(job, group, c, band.end, pairs.data, inner, after);
        }
        group.unread.fetch_sub(1, std::memory_order_release);
    });
    return moesaic::kAllHeld;
}

#if defined(MOESAIC_INT8)
}  // namespace MOESAIC_ISA
#include "integer_products.h"
#else
#if defined(MOESAIC_AMX_BF16)
constexpr bool kPacked = false;  // tiles are loaded from bf16 rows
#else
constexpr bool kPacked = true;
#endif

template <class T, class Act>
int64_t experts_of(const moesaic::Experts& job) { return experts_by<Alike<T, Act>>(job); }

template <class Act>
int64_t experts_with(const moesaic::Experts& job) {
    switch (job.stored) {
        case moesaic::Stored::kNarrow: return experts_of<Narrow, Act>(job);
        case moesaic::Stored::kWide: return experts_of<float, Act>(job);
#if defined(MOESAIC_AMX_BF16)
        default: return moesaic::kAllHeld;  // module.cpp refuses other types
#else
        case moesaic::Stored::kCompressed: return experts_of<Compressed, Act>(job);
        default: return experts_by<Mixed<Act, Dequantized>>(job);
#endif
    }
}

inline int64_t experts(const moesaic::Experts& job) {
    bool plain = job.activation.is_silu() && job.biases.gate == nullptr;
    return plain ? experts_with<Silu>(job) : experts_with<Biased>(job);
}

}  // namespace MOESAIC_ISA
#endif

namespace MOESAIC_ISA {

// A dense MLP is a single expert to which every row is routed.
inline void gated_mlp(const moesaic::GatedMlp& job) {
    uint64_t gate = uint64_t(job.gate), up = uint64_t(job.up), down = uint64_t(job.down);
    experts({job.rows, nullptr, &gate, &up, &down, job.out, job.n, 1, job.h, job.w, 1, job.stored, job.down_stored});
}

}  // namespace MOESAIC_ISA
