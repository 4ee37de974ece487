// Stands in for amx_instructions.h on a CPU without AMX, to time what is around the products. A tile load reads its
// lines, and a tile store writes as many. A product takes PACED_FMAS dependent multiply-adds, each of four cycles on the
// CPUs that this is for: sixteen cycles, as TDPBF16PS. Nothing is computed.
#pragma once

#ifndef PACED_FMAS
#define PACED_FMAS 4
#endif
#define FOUR_LINES(OP) OP("(%0)") OP("(%0,%1)") OP("(%0,%1,2)") OP("(%0,%2)")
#define SIXTEEN_LINES(OP)                                                                \
    FOUR_LINES(OP) "lea (%0,%1,4), %0\n" FOUR_LINES(OP) "lea (%0,%1,4), %0\n" FOUR_LINES(OP) \
        "lea (%0,%1,4), %0\n" FOUR_LINES(OP)
#define READ_LINE(AT) "vmovups " AT ", %%zmm30\n"
#define WRITE_LINE(AT) "vmovups %%zmm29, " AT "\n"

namespace MOESAIC_ISA {

MOESAIC_INLINE void configure_tiles(const Shapes& shapes) { asm volatile("" ::"m"(shapes)); }
MOESAIC_INLINE void release_tiles() {}

template <int, class U>
MOESAIC_INLINE void load_tile(const U* from, int64_t ld) {
    int64_t apart = ld * int64_t(sizeof(U)), thrice = 3 * apart;
    asm volatile(SIXTEEN_LINES(READ_LINE) : "+r"(from) : "r"(apart), "r"(thrice) : "memory", "xmm30");
}
template <int, class U>
MOESAIC_INLINE void store_tile(U* to, int64_t stride) {
    int64_t apart = stride * int64_t(sizeof(U)), thrice = 3 * apart;
    asm volatile("vpxord %%zmm29, %%zmm29, %%zmm29\n" SIXTEEN_LINES(WRITE_LINE)
                 : "+r"(to) : "r"(apart), "r"(thrice) : "memory", "xmm29");
}
template <int>
MOESAIC_INLINE void clear_tile() {}
// zmm31 chains all products, as they share one unit.
template <int, int, int>
MOESAIC_INLINE void add_products() {
    for (int i = 0; i < PACED_FMAS; i++) asm volatile("vfmadd231ps %%zmm31, %%zmm31, %%zmm31" ::: "xmm31");
}

}  // namespace MOESAIC_ISA
