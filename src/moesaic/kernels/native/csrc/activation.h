// What experts compute beside their products: biases, and the activation between inner products and down projection.
// The strips of experts.h take one of these as a policy.
#pragma once

#include "linear.h"

namespace MOESAIC_ISA {

constexpr int64_t INNER_COLUMNS = 64;  // of gate and of up, so that they stay in L2; a multiple of a chunk

// silu(gate) * up, without biases.
struct Silu {
    Silu(const moesaic::Experts&, int64_t, int64_t, int64_t) {}

    // A vector of a row, whose first column is column c of the strip.
    Vec of_row(Vec gate, Vec up, int64_t) const { return silu_times(gate, up); }
    // Column c of the strip, of several rows.
    Vec of_column(Vec gate, Vec up, int64_t) const { return silu_times(gate, up); }

    // sums [columns] of the down projection, from column `begin` on -> out.
    static void put(const moesaic::Experts&, int64_t, int64_t, const float* sums, int64_t columns, float* out) {
        std::memcpy(out, sums, size_t(columns) * 4);
    }
};

// moesaic::Activation with any numbers, and biases if the experts have them. It holds those of one strip of columns.
class Biased {
   public:
    Biased(const moesaic::Experts& job, int64_t expert, int64_t begin, int64_t columns)
        : most_(set1(job.activation.limit)), least_(set1(-job.activation.limit)), added_(set1(job.activation.added)),
          alpha_(set1(-job.activation.alpha)) {
        copy(job.biases.gate, expert, begin, columns, gate_);
        copy(job.biases.up, expert, begin, columns, up_);
    }

    Vec of_row(Vec gate, Vec up, int64_t c) const { return of(add(gate, load(gate_ + c)), add(up, load(up_ + c))); }
    Vec of_column(Vec gate, Vec up, int64_t c) const { return of(add(gate, set1(gate_[c])), add(up, set1(up_[c]))); }

    static void put(const moesaic::Experts& job, int64_t expert, int64_t begin, const float* sums, int64_t columns,
                    float* out) {
        if (job.biases.down == nullptr) return Silu::put(job, expert, begin, sums, columns, out);
        const float* bias = reinterpret_cast<const float*>(job.biases.down[expert]) + begin;
        for (int64_t c = 0; c < columns; c++) out[c] = sums[c] + bias[c];
    }

   private:
    Vec of(Vec gate, Vec up) const {  // NaN stays NaN, because vmin and vmax return their second argument then
        gate = vmin(most_, gate), up = vmax(least_, vmin(most_, up));
        Vec below = add(set1(1.0f), exponential(mul(alpha_, gate)));
        return mul(divide(gate, below), add(up, added_));
    }

    static void copy(const uint64_t* biases, int64_t expert, int64_t begin, int64_t columns, float* out) {
        std::memset(out, 0, INNER_COLUMNS * 4);
        if (biases == nullptr) return;
        std::memcpy(out, reinterpret_cast<const float*>(biases[expert]) + begin, size_t(columns) * 4);
    }

    Vec most_, least_, added_, alpha_;
    float gate_[INNER_COLUMNS], up_[INNER_COLUMNS];  // padded with zeros
};

}  // namespace MOESAIC_ISA
