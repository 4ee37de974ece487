// AMX with INT8: one instruction multiplies a group of 16 rows by the columns of a panel (integers.h). Sums of integers
// are exact, and what follows has the same order as for few rows. So the bits are the same too.
//
// Rows take tiles where at least FEWEST_TILED are left for one; the others are multiplied as in avx512_int8.
#pragma once

#include "amx.h"

namespace MOESAIC_ISA {

constexpr int64_t SIDE = 16;          // rows, or columns, of a tile
constexpr int64_t FEWEST_TILED = 9;   // rows of a tile. It is a guess: there was no AMX to measure with
constexpr int64_t GROUPS = 4;         // groups whose sums have a tile register each
static_assert(PANEL_COLUMNS == SIDE);

// Registers 0 to 3 are sums, 4 and 5 groups of rows, 6 and 7 the codes of weights: four of a column lie together.
template <class T>
constexpr Shapes shapes_of() {
    Shapes shapes;
    for (int i = 4; i < 6; i++) shapes.bytes_a_row[i] = T::kGroup, shapes.rows[i + 2] = T::kGroup / 4;
    return shapes;
}

struct LineTile {  // the codes of a Line of each of 16 rows
    alignas(64) uint8_t codes[SIDE][kLine];
};

// Memory of this thread, whose content the next call replaces.
inline LineTile* line_tiles(int64_t count) {
    struct Room {
        LineTile* data = nullptr;
        int64_t size = 0;
        ~Room() { delete[] data; }
    };
    static thread_local Room room;
    if (room.size < count) {
        delete[] room.data;
        room.data = nullptr, room.size = 0;
        room.data = new LineTile[size_t(count)];
        room.size = count;
    }
    return room.data;
}

// sums[i] = codes of 16 rows times those of a panel, for N groups in turn.
template <class T, int N, int i = 0>
MOESAIC_INLINE void multiply_groups(const LineTile* lines, int64_t group, const uint8_t* weights) {
    if constexpr (i < N) {
        int64_t number = (group + i) * T::kGroup;
        clear_tile<i>();
        load_tile<4 + i % 2>(lines[number / kLine].codes[0] + number % kLine, kLine);
        load_tile<6 + i % 2>(weights + number * SIDE, 4 * SIDE);
        add_integer_products<i, 4 + i % 2, 6 + i % 2>();
        multiply_groups<T, N, i + 1>(lines, group, weights);
    }
}

template <int N, int i = 0>
MOESAIC_INLINE void store_groups(int32_t (&sums)[GROUPS][SIDE][SIDE]) {
    if constexpr (i < N) store_tile<i>(sums[i][0], SIDE), store_groups<N, i + 1>(sums);
}

// Adds a group to the sums of 16 rows. integers: [SIDE][SIDE], the products of codes.
template <class T>
MOESAIC_INLINE void add_group(const int32_t (*integers)[SIDE], const Line* const* lines, const IntegerPanel& panel,
                              int64_t group, Vec (&sums)[SIDE]) {
    int64_t first = group * T::kGroup % kLine, line = group * T::kGroup / kLine * 2;  // a line takes half of its place
    Vec scale = load(reinterpret_cast<const float*>(panel.scales) + group * LANES);
    MOESAIC_UNROLL for (int r = 0; r < SIDE; r++) {
        const Line& of = lines[r][line];
        Bytes whole = aligned_bytes(integers[r]);
        if constexpr (T::kZero != 0) whole = add_integers(whole, every(-T::kZero * sum_of<T>(of, first)));
        sums[r] = fma(mul(floats(whole), set1(of.scale)), scale, sums[r]);
    }
    if constexpr (T::kHasOffset) {
        Vec offset = load(reinterpret_cast<const float*>(panel.offsets) + group * LANES);
        MOESAIC_UNROLL for (int r = 0; r < SIDE; r++) sums[r] = fma(set1(total_of<T>(lines[r][line], first)), offset, sums[r]);
    }
}

// 16 rows times the columns of a panel, over `groups` groups: one vector of columns a row.
template <class T>
MOESAIC_INLINE void tile_products(const LineTile* tiles, const Line* const* lines, const IntegerPanel& panel,
                                  int64_t groups, Stream& stream, Vec (&sums)[SIDE]) {
    Stream mine = stream;
    alignas(64) int32_t integers[GROUPS][SIDE][SIDE];
    for (int r = 0; r < SIDE; r++) sums[r] = zero();
    int64_t g = 0;
    for (; g + GROUPS <= groups; g += GROUPS) {
        multiply_groups<T, GROUPS>(tiles, g, panel.codes);
        store_groups<GROUPS>(integers);
        for (int64_t i = 0; i < GROUPS; i++) {
            mine.fetch(mine.bytes / 4);
            add_group<T>(integers[i], lines, panel, g + i, sums);
        }
    }
    for (; g < groups; g++) {
        mine.fetch(mine.bytes / 4);
        multiply_groups<T, 1>(tiles, g, panel.codes);
        store_groups<1>(integers);
        add_group<T>(integers[0], lines, panel, g, sums);
    }
    stream = mine;
}

// The rows that take tiles: the first n of all. Their codes are laid out as tiles once for all columns.
template <class T>
struct TiledRows {
    const float* const* rows;
    int64_t n, tiles, lines;  // lines: of a row
    LineTile* codes = nullptr;

    TiledRows(const float* const* rows, int64_t all, int64_t k)
        : rows(rows), n(all % SIDE < FEWEST_TILED ? all - all % SIDE : all), tiles((n + SIDE - 1) / SIDE),
          lines((k + kLine - 1) / kLine) {
        if (n == 0) return;
        codes = line_tiles(tiles * lines);
        for (int64_t r = 0; r < tiles * SIDE; r++) {
            LineTile* to = codes + r / SIDE * lines;
            const Line* from = r < n ? reinterpret_cast<const Line*>(rows[r]) : nullptr;
            for (int64_t i = 0; i < lines; i++) {
                if (from != nullptr) std::memcpy(to[i].codes[r % SIDE], from[2 * i].codes, kLine);
                else std::memset(to[i].codes[r % SIDE], 0, kLine);
            }
        }
        static constexpr Shapes kShapes = shapes_of<T>();
        configure_tiles(kShapes);
    }
    ~TiledRows() {
        if (n > 0) release_tiles();
    }
    TiledRows(const TiledRows&) = delete;
    TiledRows& operator=(const TiledRows&) = delete;

    // Multiplies by a panel: `some` columns of the block of numbers that begins at `begin`.
    void multiply(const IntegerPanel& panel, int64_t begin, int64_t groups, Stream& stream, float* out, int64_t stride,
                  int64_t some) const {
        for (int64_t r = 0; r < n; r += SIDE) {
            const Line* of[SIDE];  // absent rows stand for the last one
            for (int64_t i = 0; i < SIDE; i++) {
                of[i] = reinterpret_cast<const Line*>(rows[std::min(r + i, n - 1)] + begin);
            }
            Vec sums[SIDE];
            tile_products<T>(codes + r / SIDE * lines + begin / kLine, of, panel, groups, stream, sums);
            MOESAIC_UNROLL for (int i = 0; i < SIDE; i++) {
                if (r + i < n) put_sums(sums[i], begin == 0, out + (r + i) * stride, some);
            }
        }
    }
};

}  // namespace MOESAIC_ISA
