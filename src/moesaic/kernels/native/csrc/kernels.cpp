// Compiled once per instruction set. MOESAIC_ISA is the name of the namespace and of the table. The sets that round
// rows to bf16 or int8 only contain matrix products; isa.cpp takes the other operations from avx512 or avx2.
#if !defined(MOESAIC_AVX512_BF16) && !defined(MOESAIC_INT8)
#include "delta.h"
#endif
#include "experts.h"
#if !defined(MOESAIC_INT8) && (!defined(MOESAIC_AMX_PARTS) || MOESAIC_AMX_PARTS == 1)
#include "attention.h"
#define MOESAIC_ATTENTION attention
#else
#define MOESAIC_ATTENTION nullptr
#endif
#if !defined(MOESAIC_INT8)
#include "heads.h"
#endif
#include "peak.h"

namespace MOESAIC_ISA {

#define MOESAIC_TEXT2(x) #x
#define MOESAIC_TEXT(x) MOESAIC_TEXT2(x)
#define MOESAIC_PRODUCTS {MOESAIC_TEXT(MOESAIC_ISA), kPacked, linear, head_linear, experts, gated_mlp, MOESAIC_ATTENTION, peak}

#if defined(MOESAIC_INT8)
extern const moesaic::IntegerProducts kProducts;
const moesaic::IntegerProducts kProducts = {rounded_linear, experts, gated_mlp, peak};
#elif defined(MOESAIC_AVX512_BF16)
extern const moesaic::Products kProducts;
const moesaic::Products kProducts = MOESAIC_PRODUCTS;
#else
extern const moesaic::Table kTable;
const moesaic::Table kTable = {
    MOESAIC_PRODUCTS, float_peak, store_rows, norm, rope, gate, merge, embed, join_rows, sigmoid_gate, clip,
    mask_tokens, convolve, delta, gated_norm, sigmoid_times,
};
#endif

}  // namespace MOESAIC_ISA
