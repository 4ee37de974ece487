// The tile instructions in plain C++, in place of amx_instructions.h: tests run the code of tiles_amx.h and
// integer_tiles.h with them on CPUs without AMX. The build option MOESAIC_EMULATE_AMX takes them.
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

// The registers of a thread. Using them unconfigured, or with shapes that do not fit together, ends the process, as the
// instructions would.
struct TileRegisters {
    Tile tiles[8];
    Shapes shapes;
    bool configured = false;
    Tile& at(int number) {
        must(configured);
        return tiles[number];
    }
    static void must(bool fits) {
        if (!fits) std::abort();
    }
};

inline TileRegisters& tile_registers() {
    static thread_local TileRegisters registers;
    return registers;
}

inline void configure_tiles(const Shapes& shapes) {
    tile_registers() = {};
    tile_registers().shapes = shapes;
    tile_registers().configured = true;
}
inline void release_tiles() { tile_registers().configured = false; }

template <int N>
inline void clear_tile() {
    std::memset(&tile_registers().at(N), 0, sizeof(Tile));
}
template <int N, class U>
inline void load_tile(const U* from, int64_t ld) {
    clear_tile<N>();
    TileRegisters& all = tile_registers();
    for (int row = 0; row < all.shapes.rows[N]; row++) {
        std::memcpy(all.at(N).rows[row], from + row * ld, all.shapes.bytes_a_row[N]);
    }
}
template <int N, class U>
inline void store_tile(U* to, int64_t stride) {
    static_assert(sizeof(U) == 4);
    TileRegisters& all = tile_registers();
    for (int row = 0; row < all.shapes.rows[N]; row++) {
        std::memcpy(to + row * stride, all.at(N).rows[row], all.shapes.bytes_a_row[N]);
    }
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
    for (int tile : {kSum, kLeft, kRight}) {
        all.must(all.shapes.rows[tile] == 16 && all.shapes.bytes_a_row[tile] == 64);
    }
    add_pairs(all.at(kSum), all.at(kLeft), all.at(kRight));
}

// TDPBSUD: sums[m][n] += products of four bytes left[m][k], with a sign, and right[k][n], without one, over `count` k.
inline void add_fours(Tile& sums, const Tile& left, const Tile& right, int count) {
    int32_t c[16][16];
    std::memcpy(c, &sums, sizeof c);
    for (int m = 0; m < 16; m++) {
        for (int k = 0; k < count; k++) {
            for (int n = 0; n < 16; n++) {
                for (int i = 4 * k; i < 4 * k + 4; i++) {
                    c[m][n] += int32_t(int8_t(left.rows[m][i])) * right.rows[k][4 * n + i % 4];
                }
            }
        }
    }
    std::memcpy(&sums, c, sizeof c);
}

template <int kSum, int kLeft, int kRight>
inline void add_integer_products() {
    TileRegisters& all = tile_registers();
    const Shapes& of = all.shapes;
    all.must(of.rows[kSum] == of.rows[kLeft] && of.bytes_a_row[kSum] == of.bytes_a_row[kRight] &&
             of.bytes_a_row[kLeft] == 4 * of.rows[kRight]);
    add_fours(all.at(kSum), all.at(kLeft), all.at(kRight), of.rows[kRight]);
}

}  // namespace MOESAIC_ISA
