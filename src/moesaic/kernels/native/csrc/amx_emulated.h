// The tile instructions in plain C++, in place of amx_instructions.h: tests run the code of tiles_amx.h with them on CPUs
// without AMX. The build option MOESAIC_EMULATE_AMX takes them.
//
// The order and the rounding of TDPBF16PS are those of its operation in Intel 64 and IA-32 Architectures Software
// Developer's Manual, volume 2: FMAs to nearest even whose inputs and results below 2^-126 are zero, whatever MXCSR
// says. Only a result that rounds up to 2^-126 may be that number here where the instruction has zero.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdlib>

namespace MOESAIC_ISA {

struct Tile {
    alignas(64) unsigned char rows[16][64];
};

// The registers of a thread. Using them unconfigured ends the process, as the instructions would.
struct TileRegisters {
    Tile tiles[8];
    bool configured = false;
    Tile& at(int number) {
        if (!configured) std::abort();
        return tiles[number];
    }
};

inline TileRegisters& tile_registers() {
    static thread_local TileRegisters registers;
    return registers;
}

inline void configure_tiles() {
    tile_registers() = {};
    tile_registers().configured = true;
}
inline void release_tiles() { tile_registers().configured = false; }

template <int N>
inline void load_tile(const bf16* from, int64_t ld) {
    for (int row = 0; row < 16; row++) std::memcpy(tile_registers().at(N).rows[row], from + row * ld, 64);
}
template <int N>
inline void store_tile(float* to, int64_t stride) {
    for (int row = 0; row < 16; row++) std::memcpy(to + row * stride, tile_registers().at(N).rows[row], 64);
}
template <int N>
inline void clear_tile() {
    std::memset(&tile_registers().at(N), 0, sizeof(Tile));
}

inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

// sums[m][n] += products of the pairs left[m][k] and right[k][n] over k.
inline void add_pairs(Tile& sums, const Tile& left, const Tile& right) {
    bf16 a[16][32], b[16][32];
    float c[16][16], wide[2][16][16];  // of b: even numbers, then odd ones
    std::memcpy(a, &left, sizeof a), std::memcpy(b, &right, sizeof b), std::memcpy(c, &sums, sizeof c);
    for (int k = 0; k < 16; k++) {
        for (int i = 0; i < 32; i++) wide[i % 2][k][i / 2] = flushed(widen(b[k][i]));
    }
    for (int m = 0; m < 16; m++) {
        float halves[2][16] = {};
        for (int i = 0; i < 32; i++) {
            float factor = flushed(widen(a[m][i]));
            float* half = halves[i % 2];
            const float* row = wide[i % 2][i / 2];
            for (int n = 0; n < 16; n++) half[n] = flushed(std::fma(factor, row[n], half[n]));
        }
        for (int n = 0; n < 16; n++) c[m][n] = flushed(flushed(c[m][n]) + flushed(halves[0][n] + halves[1][n]));
    }
    std::memcpy(&sums, c, sizeof c);
}

template <int kSum, int kLeft, int kRight>
inline void add_products() {
    TileRegisters& all = tile_registers();
    add_pairs(all.at(kSum), all.at(kLeft), all.at(kRight));
}

}  // namespace MOESAIC_ISA
