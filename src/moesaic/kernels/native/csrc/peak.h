// How fast an instruction set multiplies and adds at most: its products of numbers that stay in registers.
#pragma once

#include "linear.h"

namespace MOESAIC_ISA {

// x, which the compiler takes for new: otherwise it would compute a product of the same numbers once.
template <class X>
MOESAIC_INLINE X renewed(X x) {
#if defined(MOESAIC_AVX512) || defined(MOESAIC_AVX2)
    asm volatile("" : "+v"(x));
#else
    asm volatile("" : "+m"(x));
#endif
    return x;
}

// Runs `rounds` rounds on each thread. A Round makes `kProducts` multiply-adds. Returns how many there were.
template <class Round>
int64_t run_rounds(int64_t rounds) {
    int64_t tasks = moesaic::pool().threads(), products = tasks * rounds * Round::kProducts;
    parallel(tasks, products, [&](int64_t, int) {
        Round round;
        for (int64_t i = 0; i < rounds; i++) round.run();
        round.end();
    });
    return products;
}

// Sums that do not wait for each other. Two units, each with a result after up to five cycles, are busy with ten.
// A Step is a multiply-add of vectors: its sum, its operands, and `add`.
template <class Step>
struct IndependentSums {
    static constexpr int kSums = 10;
    static constexpr int64_t kProducts = kSums * Step::kProducts;
    typename Step::Sum sums[kSums] = {};
    typename Step::Operand weights = renewed(typename Step::Operand{}), row = weights;
    MOESAIC_INLINE void run() {
        MOESAIC_UNROLL for (int i = 0; i < kSums; i++) Step::add(sums[i], weights, renewed(row));
    }
    MOESAIC_INLINE void end() {
        MOESAIC_UNROLL for (int i = 0; i < kSums; i++) Step::use(sums[i]);
    }
};

struct FloatStep {
    using Sum = Vec;
    using Operand = Vec;
    static constexpr int64_t kProducts = LANES;
    static MOESAIC_INLINE void add(Vec& sum, Vec weights, Vec row) { sum = fma(weights, row, sum); }
    static MOESAIC_INLINE void use(Vec sum) { renewed(sum); }
};

inline int64_t float_peak(int64_t rounds) { return run_rounds<IndependentSums<FloatStep>>(rounds); }

#if defined(MOESAIC_AMX_INT8) || defined(MOESAIC_AMX_BF16)
// Four sums, whose tiles of weights and rows are full.
struct TileSums {
#if defined(MOESAIC_AMX_INT8)
    static constexpr int64_t kNumbers = 64, kParts = 1;
#else
    static constexpr int64_t kNumbers = 32, kParts = PARTS;
#endif
    static constexpr int64_t kProducts = 4 * SIDE * SIDE * kNumbers / kParts;
    TileSums() {
        static constexpr Shapes kShapes;
        configure_tiles(kShapes);
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
        clear_tile<4>(), clear_tile<5>(), clear_tile<6>(), clear_tile<7>();
    }
    MOESAIC_INLINE void run() {
#if defined(MOESAIC_AMX_INT8)
        add_integer_products<0, 4, 6>(), add_integer_products<1, 4, 7>();
        add_integer_products<2, 5, 6>(), add_integer_products<3, 5, 7>();
#else
        add_products<0, 4, 6>(), add_products<1, 4, 7>();
        add_products<2, 5, 6>(), add_products<3, 5, 7>();
#endif
    }
    void end() { release_tiles(); }
};
inline int64_t peak(int64_t rounds) { return run_rounds<TileSums>(rounds); }
#elif defined(MOESAIC_INT8)
struct IntegerStep {
    using Weights = Integer<Int8>;
    using Sum = IntegerSums<Weights>;
    using Operand = Bytes;
    static constexpr int64_t kProducts = sizeof(Bytes);
    static MOESAIC_INLINE void add(Sum& sum, Bytes weights, Bytes row) { sum.add(IntegerWeights<Weights>(weights), row); }
    static MOESAIC_INLINE void use(const Sum& sum) { renewed(sum.sums); }
};
inline int64_t peak(int64_t rounds) { return run_rounds<IndependentSums<IntegerStep>>(rounds); }
#elif defined(MOESAIC_AVX512_BF16)
struct PairStep : FloatStep {
    using Operand = Pairs;
    static constexpr int64_t kProducts = CHUNK;
    static MOESAIC_INLINE void add(Vec& sum, Pairs weights, Pairs row) { sum = fma(weights, row, sum); }
};
inline int64_t peak(int64_t rounds) { return run_rounds<IndependentSums<PairStep>>(rounds); }
#else
inline int64_t peak(int64_t rounds) { return float_peak(rounds); }
#endif

}  // namespace MOESAIC_ISA
