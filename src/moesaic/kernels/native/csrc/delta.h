// Linear attention by the gated delta rule, and the operations around it. kernels/states.py has the form and the layout
// of the states.
//
// Every number is a sum in one order: over the numbers of a key, then over the rows since the last stored state. How
// many rows a step has, or how many of them share a tile, changes no bit.
#pragma once

#include <algorithm>
#include <cmath>

#include "rows.h"

namespace MOESAIC_ISA {

using moesaic::kPeriod;

inline Vec sigmoid(Vec x) { return divide(set1(1.0f), add(set1(1.0f), exponential(sub(zero(), x)))); }

inline Vec silu(Vec x) { return divide(x, add(set1(1.0f), exponential(sub(zero(), x)))); }

// log(1 + exp(x)) = max(x, 0) + log(1 + z) with z = exp(-|x|). log(1 + z) is 2 artanh(s) with s = z / (2 + z), at most
// 1/3, whose series ends here after s^15. Above about 17 the result is x. NaN stays NaN.
inline Vec softplus(Vec x) {
    Vec z = exponential(sub(zero(), vmax(sub(zero(), x), x)));
    Vec s = divide(z, add(set1(2.0f), z)), square = mul(s, s);
    Vec p = set1(1.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) p = fma(p, square, set1(1.0f / float(odd)));
    return fma(add(s, s), p, vmax(zero(), x));
}

// exp(x) for x of at most 0, and 0 below about exp(-80). Products with smaller numbers would be subnormal, and some CPUs
// multiply these slowly.
inline Vec decayed(Vec x) { return vmax(zero(), sub(exponential(x), set1(0x1p-116f))); }

inline float decayed1(float x) { return first(decayed(set1(x))); }

// Lines of sums over rows: out = scale * from + sum over i of factor[i] * row[i], with i in order.
struct Sums {
    const float* factors;  // of line r and row i: factors[r * line + i * step]
    int64_t line, step;
    const float* rows;  // `steps` rows of `columns` numbers, columns apart
    int64_t steps;
    const float* from;   // [lines, columns], may be `out`; null: zeros
    const float* scale;  // of line r: scale[r * scale_line]
    int64_t scale_line;
    float* out;  // [lines, columns]
    int64_t lines, columns;
};

constexpr int kSums = LANES == 16 ? 16 : 8;  // vectors of sums in registers

// The sums of R lines and C vectors of columns. kWhole: whether all these columns exist.
template <int R, int C, bool kWhole>
MOESAIC_INLINE void sum_tile(const Sums& job, int64_t first, int64_t column) {
    int64_t rest = job.columns - column;
    auto get = [&](const float* p) MOESAIC_INLINE_LAMBDA { return kWhole ? load(p) : load_some(p, rest); };
    const float* x[R];
    Vec sums[R][C];
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        x[r] = job.factors + (first + r) * job.line;
        MOESAIC_UNROLL for (int c = 0; c < C; c++) sums[r][c] = zero();
        if (job.from == nullptr) continue;
        const float* from = job.from + (first + r) * job.columns + column;
        Vec scale = set1(job.scale[(first + r) * job.scale_line]);
        MOESAIC_UNROLL for (int c = 0; c < C; c++) sums[r][c] = mul(scale, get(from + c * LANES));
    }
    const float* row = job.rows + column;
    int64_t at = 0;
    for (int64_t i = 0; i < job.steps; i++) {
        Vec w[C];
        MOESAIC_UNROLL for (int c = 0; c < C; c++) w[c] = get(row + c * LANES), keep(w[c]);
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            Vec factor = set1(x[r][at]);
            MOESAIC_UNROLL for (int c = 0; c < C; c++) sums[r][c] = fma(factor, w[c], sums[r][c]);
        }
        at += job.step, row += job.columns;
    }
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        float* out = job.out + (first + r) * job.columns + column;
        MOESAIC_UNROLL for (int c = 0; c < C; c++) {
            if (kWhole) store(out + c * LANES, sums[r][c]);
            else store_some(out + c * LANES, sums[r][c], rest);
        }
    }
}

// Lines [first, last), R at a time, from a column on. The rows of a tile's columns stay in L1 for all lines.
template <int R, int C>
inline void sum_columns(const Sums& job, int64_t first, int64_t last, int64_t column) {
    for (; column + C * LANES <= job.columns; column += C * LANES) {
        for (int64_t r = first; r < last; r += R) sum_tile<R, C, true>(job, r, column);
    }
    if constexpr (C > 1) {
        sum_columns<R, C / 2>(job, first, last, column);
    } else if (column < job.columns) {
        for (int64_t r = first; r < last; r += R) sum_tile<R, 1, false>(job, r, column);
    }
}

// All lines from `first` on, at most R at a time.
template <int R = kSums / 2>
inline void sum_lines(const Sums& job, int64_t first = 0) {
    int64_t whole = first + (job.lines - first) / R * R;
    if (first < whole) sum_columns<R, std::min(8, kSums / R)>(job, first, whole, 0);
    if constexpr (R > 1) sum_lines<R / 2>(job, whole);
}

// Rows of a step whose sums begin with the same state: consecutive rows of one sequence.
struct Since {
    int64_t row, count;  // in the step
    int64_t index;       // of the first one, since the position of the state
    int64_t read, write, seat;

    bool last() const { return index + count == kPeriod; }
};

class DeltaOf {
   public:
    explicit DeltaOf(const moesaic::Delta& job)
        : job_(job), shared_(job.value_heads / job.key_heads), packed_width_(padded(job.key_width)) {}

    void run() const {
        int64_t products = job_.n * job_.value_heads * job_.key_width * job_.value_width * 2;
        parallel(job_.sequences.count * job_.key_heads, products, [&](int64_t task, int worker) {
            sequence(task / job_.key_heads, task % job_.key_heads, worker);
        });
    }

   private:
    static constexpr int64_t kRowsOfDots = 16;  // rows whose products with keys are computed together
    static constexpr int64_t kRowsOfSums = 8;   // rows whose sums over earlier rows are computed together

    struct Room {  // two lines for each row: its key and its query
        float *packed, *dots;                // [lines, packed width], [lines, kPeriod]
        float *factors, *sums, *old, *beta;  // [lines, kPeriod], [lines, value_width], [lines], [kPeriod]
        float* faded;                        // [kPeriod, value_width]
    };

    Room room(const Since& since, int worker) const {
        int64_t lines = 2 * since.count, faded = since.last() ? kPeriod * job_.value_width : 0;
        int64_t line = packed_width_ + 2 * kPeriod + job_.value_width + 1;
        float* memory = worker_scratch(worker, lines * line + kPeriod + faded);
        Room made;
        made.packed = memory;
        made.dots = made.packed + lines * packed_width_;
        made.factors = made.dots + lines * kPeriod;
        made.beta = made.factors + lines * kPeriod;
        made.sums = made.beta + kPeriod;
        made.faded = made.sums + lines * job_.value_width;
        made.old = made.faded + faded;
        return made;
    }

    void sequence(int64_t s, int64_t head, int worker) const {
        const moesaic::Sequences& all = job_.sequences;
        int64_t row = all.query_starts[s], stop = all.query_starts[s + 1];
        int64_t position = all.context_lens[s] - (stop - row);
        const int64_t* states = all.states + 4 * s;
        while (row < stop) {
            int64_t index = position % kPeriod, count = std::min(stop - row, kPeriod - index);
            int64_t read = position - index == states[1] ? states[0] : states[2];
            rows({row, count, index, read, states[2], states[3]}, head, worker);
            row += count, position += count;
        }
    }

    void rows(const Since& since, int64_t head, int worker) const {
        Room memory = room(since, worker);
        float* keys = job_.keys + (since.seat * job_.key_heads + head) * kPeriod * job_.key_width;
        normalise(since, head, memory.packed, keys);
        const float* lines[2 * kPeriod];
        for (int64_t r = 0; r < 2 * since.count; r++) lines[r] = memory.packed + r * packed_width_;
        for (int64_t r = 0; r < since.count; r += kRowsOfDots) {
            int64_t some = std::min(kRowsOfDots, since.count - r);
            multiply<float>(lines + 2 * r, 2 * some, keys, job_.key_width, since.index + r + some, job_.key_width,
                            memory.dots + 2 * r * kPeriod, kPeriod);
        }
        for (int64_t v = head * shared_; v < (head + 1) * shared_; v++) value_head(since, v, memory, keys);
    }

    // Makes keys and queries of length one, and the queries shorter by the root of their width. Writes the keys also to
    // the seat.
    void normalise(const Since& since, int64_t head, float* packed, float* keys) const {
        int64_t width = job_.key_width;
        float shorter = 1.0f / std::sqrt(float(width));
        for (int64_t r = 0; r < since.count; r++) {
            const float* query = job_.mixed + (since.row + r) * job_.mixed_stride + head * width;
            float* key_line = packed + 2 * r * packed_width_;
            unit(query + job_.key_heads * width, 1.0f, key_line);
            unit(query, shorter, key_line + packed_width_);
            std::memcpy(keys + (since.index + r) * width, key_line, size_t(width) * 4);
        }
    }

    // x, of length `length` -> out, padded with zeros.
    void unit(const float* x, float length, float* out) const {
        constexpr float kEpsilon = 1e-6f;
        Vec squares = zero();
        for (int64_t i = 0; i < packed_width_; i += LANES) {
            Vec some = i < job_.key_width ? load_some(x + i, job_.key_width - i) : zero();
            squares = fma(some, some, squares);
            store(out + i, some);
        }
        Vec scale = set1(length / std::sqrt(total(squares) + kEpsilon));
        for (int64_t i = 0; i < packed_width_; i += LANES) store(out + i, mul(load(out + i), scale));
    }

    void value_head(const Since& since, int64_t v, const Room& memory, const float* keys) const {
        int64_t width = job_.value_width, lines = 2 * since.count, matrix = job_.key_width * width;
        float* updates = job_.updates + (since.seat * job_.value_heads + v) * kPeriod * width;
        float* decays = job_.decays + (since.seat * job_.value_heads + v) * kPeriod;
        const float* read = job_.pages + (since.read * job_.value_heads + v) * matrix;
        weigh(since, v, memory, decays);
        sum_lines({memory.packed, packed_width_, 1, read, job_.key_width, nullptr, nullptr, 0, memory.sums, lines,
                   width});
        for (int64_t r = 0; r < since.count; r += kRowsOfSums) {
            finish(since, v, r, std::min(r + kRowsOfSums, since.count), memory, updates);
        }
        if (!since.last()) return;
        for (int64_t i = 0; i < kPeriod; i++) {
            Vec factor = set1(decayed1(decays[kPeriod - 1] - decays[i]));
            for (int64_t c = i * width; c < (i + 1) * width; c += LANES) {
                int64_t rest = (i + 1) * width - c;
                store_some(memory.faded + c, mul(factor, load_some(updates + c, rest)), rest);
            }
        }
        float old = decayed1(decays[kPeriod - 1]);
        sum_lines({keys, 1, job_.key_width, memory.faded, kPeriod, read, &old, 0,
                   job_.pages + (since.write * job_.value_heads + v) * matrix, job_.key_width, width});
    }

    // Computes beta, the decays since the state, and how much of the state and of each earlier row is left.
    void weigh(const Since& since, int64_t v, const Room& memory, float* decays) const {
        float logs[kPeriod] = {}, betas[kPeriod] = {};
        for (int64_t r = 0; r < since.count; r++) {
            const float* gates = job_.gates + (since.row + r) * job_.gates_stride;
            betas[r] = gates[v], logs[r] = gates[job_.value_heads + v] + job_.bias[v];
        }
        for (int64_t r = 0; r < since.count; r += LANES) {
            store(memory.beta + r, sigmoid(load(betas + r)));
            store(logs + r, mul(set1(job_.decay[v]), softplus(load(logs + r))));
        }
        for (int64_t r = 0; r < since.count; r++) {
            int64_t here = since.index + r;
            decays[here] = here == 0 ? logs[r] : decays[here - 1] + logs[r];
            memory.old[2 * r] = memory.old[2 * r + 1] = decayed1(decays[here]);
            const float* dots = memory.dots + 2 * r * kPeriod;
            float* factors = memory.factors + 2 * r * kPeriod;
            for (int64_t i = 0; i <= here; i += LANES) {  // numbers after `here` are not used
                Vec left = decayed(sub(set1(decays[here]), load(decays + i)));
                store(factors + i, mul(load(dots + i), left));
                store(factors + kPeriod + i, mul(load(dots + kPeriod + i), left));
            }
        }
    }

    // Adds what rows since the state contribute to rows [begin, end), and makes these rows' updates and results.
    void finish(const Since& since, int64_t v, int64_t begin, int64_t end, const Room& memory, float* updates) const {
        const float one = 1;
        int64_t width = job_.value_width, before = since.index + begin;
        float* sums = memory.sums + 2 * begin * width;
        sum_lines({memory.factors + 2 * begin * kPeriod, kPeriod, 1, updates, before, sums, memory.old + 2 * begin, 1,
                   sums, 2 * (end - begin), width});
        for (int64_t r = begin; r < end; r++, sums += 2 * width) {
            const float* factors = memory.factors + 2 * r * kPeriod + before;
            const float* of_block = updates + before * width;
            if (r > begin) {
                sum_lines({factors, 0, 1, of_block, r - begin, sums, &one, 0, sums, 1, width});
            }
            const float* value = job_.mixed + (since.row + r) * job_.mixed_stride +
                                 2 * job_.key_heads * job_.key_width + v * width;
            float* update = updates + (since.index + r) * width;
            for (int64_t c = 0; c < width; c += LANES) {
                Vec missing = sub(load_some(value + c, width - c), load_some(sums + c, width - c));
                store_some(update + c, mul(set1(memory.beta[r]), missing), width - c);
            }
            sum_lines({factors + kPeriod, 0, 1, of_block, r - begin + 1, sums + width, &one, 0,
                       job_.out + ((since.row + r) * job_.value_heads + v) * width, 1, width});
        }
    }

    const moesaic::Delta& job_;
    int64_t shared_, packed_width_;
};

inline void delta(const moesaic::Delta& job) { DeltaOf(job).run(); }

constexpr int64_t MOST_TAPS = 8;

class ConvolveOf {
   public:
    static constexpr int64_t kBlock = 512;  // channels of a task
    static constexpr int64_t kSilu = 12;    // multiply-adds that take as long as a silu

    explicit ConvolveOf(const moesaic::Convolve& job) : job_(job), kept_(job.taps - 1) {}

    void run() const {
        int64_t blocks = (job_.channels + kBlock - 1) / kBlock;
        int64_t products = job_.n * job_.channels * (job_.taps + (job_.activate ? kSilu : 0));
        parallel(job_.sequences.count * blocks, products, [&](int64_t task, int worker) {
            sequence(task / blocks, task % blocks * kBlock, worker);
        });
    }

   private:
    void sequence(int64_t s, int64_t channel, int worker) const {
        const moesaic::Sequences& all = job_.sequences;
        int64_t start = all.query_starts[s], count = all.query_starts[s + 1] - start;
        if (count == 0) return;
        int64_t position = all.context_lens[s] - count, index = position % kPeriod;
        const int64_t* states = all.states + 4 * s;
        float* seat = job_.tails + states[3] * job_.ring * job_.channels + channel;
        // Where the row of position `position + r` lies in the seat. Rows before the first token have places, too.
        auto kept = [&](int64_t r) { return seat + (position + r + job_.ring) % job_.ring * job_.channels; };
        float* written = tail_of(job_.page_tails, states[2], channel);
        float* read = position - index == states[1] ? tail_of(job_.page_tails, states[0], channel) : written;
        int64_t width = std::min(kBlock, job_.channels - channel);
        float* before = worker_scratch(worker, (kept_ + job_.taps) * kBlock);
        for (int64_t i = 0; i < kept_; i++) {
            copy(index == 0 ? read + i * job_.channels : kept(i - kept_), width, before + i * kBlock);
        }
        // Row r of the sequence in this step. Rows before it are negative.
        auto row = [&](int64_t r) {
            return r < 0 ? before + (kept_ + r) * kBlock : job_.rows + (start + r) * job_.row_stride + channel;
        };
        const float* weights[MOST_TAPS];
        weights_of(channel, width, before + kept_ * kBlock, weights);
        for (int64_t r = 0; r < count; r++) {
            const float* taps[MOST_TAPS];
            for (int64_t tap = 0; tap < job_.taps; tap++) taps[tap] = row(r - kept_ + tap);
            mix(taps, weights, width, job_.out + (start + r) * job_.channels + channel);
        }
        for (int64_t r = std::max(-kept_, count - job_.ring); r < count; r++) copy(row(r), width, kept(r));
        if (index + count < kPeriod) return;
        int64_t passed = (position + count) / kPeriod * kPeriod - position;  // rows up to the last multiple
        for (int64_t i = 0; i < kept_; i++) copy(row(passed - kept_ + i), width, written + i * job_.channels);
    }

    float* tail_of(float* tails, int64_t which, int64_t channel) const {
        return tails + which * kept_ * job_.channels + channel;
    }

    static void copy(const float* from, int64_t width, float* to) { std::memcpy(to, from, size_t(width) * 4); }

    // The weights of some channels: for each tap, where its numbers lie together.
    void weights_of(int64_t channel, int64_t width, float* memory, const float** weights) const {
        const float* own = job_.weight + channel * job_.weight_channel;
        for (int64_t tap = 0; tap < job_.taps; tap++) {
            weights[tap] = job_.weight_channel == 1 ? own + tap * job_.weight_tap : memory + tap * kBlock;
        }
        if (job_.weight_channel == 1) return;
        for (int64_t c = 0; c < width; c++, own += job_.weight_channel) {
            for (int64_t tap = 0; tap < job_.taps; tap++) memory[tap * kBlock + c] = own[tap * job_.weight_tap];
        }
    }

    void mix(const float* const* rows, const float* const* weights, int64_t width, float* out) const {
        for (int64_t c = 0; c < width; c += LANES) {
            int64_t rest = width - c;
            Vec sum = mul(load_some(rows[0] + c, rest), load_some(weights[0] + c, rest));
            for (int64_t tap = 1; tap < job_.taps; tap++) {
                sum = fma(load_some(rows[tap] + c, rest), load_some(weights[tap] + c, rest), sum);
            }
            store_some(out + c, job_.activate ? silu(sum) : sum, rest);
        }
    }

    const moesaic::Convolve& job_;
    int64_t kept_;
};

inline void convolve(const moesaic::Convolve& job) { ConvolveOf(job).run(); }

inline void gated_norm(const moesaic::GatedNorm& job) {
    parallel_rows(job.n, job.heads * job.width * 8, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            for (int64_t head = 0; head < job.heads; head++) {
                int64_t at = (r * job.heads + head) * job.width;
                const float* gate = job.gate + r * job.gate_stride + head * job.width;
                norm_row(job.rows + at, job.weight, job.width, job.epsilon, job.out + at);
                for (int64_t i = 0; i < job.width; i += LANES) {
                    int64_t rest = job.width - i;
                    Vec normed = load_some(job.out + at + i, rest);
                    store_some(job.out + at + i, mul(normed, silu(load_some(gate + i, rest))), rest);
                }
            }
        }
    });
}

inline void sigmoid_times(const moesaic::SigmoidTimes& job) {
    parallel_rows(job.n, job.heads * job.width * 8, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            for (int64_t head = 0; head < job.heads; head++) {
                int64_t at = (r * job.heads + head) * job.width;
                const float* gate = job.gate + r * job.gate_row + head * job.gate_head;
                for (int64_t i = 0; i < job.width; i += LANES) {
                    int64_t rest = job.width - i;
                    Vec opening = load_some(gate + i, rest);
                    if (job.activate) opening = sigmoid(opening);
                    store_some(job.out + at + i, mul(load_some(job.rows + at + i, rest), opening), rest);
                }
            }
        }
    });
}

}  // namespace MOESAIC_ISA
