// The tile instructions of AMX with BF16, which tiles_amx.h uses. Each of the eight tile registers has 16 rows of 64 bytes.
#pragma once

namespace MOESAIC_ISA {

struct alignas(64) Shapes {  // shapes of the eight tile registers, in the format of the instruction
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

MOESAIC_INLINE void configure_tiles() {
    static constexpr Shapes kShapes;
    asm volatile("ldtilecfg %0" ::"m"(kShapes));
}
MOESAIC_INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

// GCC's intrinsics do not tell the compiler that a tile load reads memory.
template <int N>
MOESAIC_INLINE void load_tile(const bf16* from, int64_t ld) {
    asm volatile("tileloadd (%0,%1,2), %%tmm%c2" ::"r"(from), "r"(ld), "i"(N) : "memory");
}
template <int N>
MOESAIC_INLINE void store_tile(float* to, int64_t stride) {
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

}  // namespace MOESAIC_ISA
