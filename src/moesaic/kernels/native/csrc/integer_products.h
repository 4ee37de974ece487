// Experts and projections with integer products. Weights of other types have the products of the set without rounding.
#pragma once

#include "integers.h"

namespace MOESAIC_ISA {

// Weights whose codes are integers. Rows are packed alike for all of them.
struct Rounded {
    using Rows = Integer<Int8>;
    template <class Use>
    static auto with(moesaic::Stored stored, const Use& use) {
        switch (stored) {
            case moesaic::Stored::kInt8: return use(static_cast<Integer<Int8>*>(nullptr));
            case moesaic::Stored::kInt8Offset: return use(static_cast<Integer<Int8Offset>*>(nullptr));
            case moesaic::Stored::kInt4: return use(static_cast<Integer<Int4>*>(nullptr));
            case moesaic::Stored::kInt4Offset: return use(static_cast<Integer<Int4Offset>*>(nullptr));
            case moesaic::Stored::kInt8Of16Offset: return use(static_cast<Integer<Int8Of16Offset>*>(nullptr));
#define MOESAIC_CASE(T) \
    case moesaic::Stored::k##T: return use(static_cast<Integer<T>*>(nullptr));
            MOESAIC_BLOCKS(MOESAIC_CASE)
#undef MOESAIC_CASE
            default: return use(static_cast<Integer<Int8Of16>*>(nullptr));
        }
    }
};

inline void rounded_linear(const moesaic::Linear& job) { linear_of<Rounded>(job); }

inline int64_t experts(const moesaic::Experts& job) {
    bool plain = job.activation.is_silu() && job.biases.gate == nullptr;
    return plain ? experts_by<Mixed<Silu, Rounded>>(job) : experts_by<Mixed<Biased, Rounded>>(job);
}

}  // namespace MOESAIC_ISA
