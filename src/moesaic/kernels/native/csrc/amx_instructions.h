// The tile instructions of AMX, which tiles_amx.h and integer_tiles.h use. A tile register has at most 16 rows of 64 bytes.
#pragma once

namespace MOESAIC_ISA {

MOESAIC_INLINE void configure_tiles(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
MOESAIC_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

// GCC's intrinsics do not tell the compiler that a tile load reads memory. ld, stride: in numbers, from row to row.
template <int N>
MOESAIC_INLINE void load_tile(const bf16* from, int64_t ld) {
    asm volatile("tileloadd (%0,%1,2), %%tmm%c2" ::"r"(from), "r"(ld), "i"(N) : "memory");
}
template <int N>
MOESAIC_INLINE void load_tile(const uint8_t* from, int64_t ld) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(ld), "i"(N) : "memory");
}
template <int N>
MOESAIC_INLINE void load_tile(const float* from, int64_t ld) {
    asm volatile("tileloadd (%0,%1,4), %%tmm%c2" ::"r"(from), "r"(ld), "i"(N) : "memory");
}
template <int N>
MOESAIC_INLINE void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(to), "r"(stride), "i"(N) : "memory");
}
template <int N>
MOESAIC_INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(N));
}
// Adds the products of the rows of one tile and the pairs of another to a third.
template <int kSum, int kWeights, int kRows>
MOESAIC_INLINE void add_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kWeights), "i"(kRows));
}
// The same for bytes, in fours: those of the rows have a sign, those of the weights do not.
template <int kSum, int kRows, int kWeights>
MOESAIC_INLINE void add_integer_products() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kWeights));
}

}  // namespace MOESAIC_ISA
