// Gate, up and activation with AMX tiles. The results are stored as the panels that the down projection reads, so numbers
// only move between lanes to form pairs.
#pragma once

namespace MOESAIC_ISA {

// Interleaves bf16 numbers of each of 16 rows with the numbers after them: the two halves.
inline __m512i paired(__m512i halves) {
    alignas(64) static constexpr uint16_t kOrder[2 * LANES] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

// Computes the activation of blocks [columns][P * SIDE], stored as P panels padded with zeros. first: their first column
// in the strip.
template <int P, class Act>
inline void activated_panels(const Act& activation, const float* gate, const float* up, int64_t columns, int64_t panel,
                             Parts* inner, int64_t first = 0) {
    for (int64_t row = 0; row < P * SIDE; row += SIDE) {
        auto number = [&](int64_t column) {
            int64_t at = column * P * SIDE + row;
            return column < columns ? activation.of_column(load(gate + at), load(up + at), first + column) : zero();
        };
        for (int64_t column = 0; column < padded(columns); column += 2) {
            __m512i parts[PARTS];
            split(number(column), number(column + 1), parts);
            int64_t in = column % CHUNK;
            for (int p = 0; p < PARTS; p++) {
                bf16* to = tile_of(inner + row / SIDE * panel, column - in, p) + in * SIDE;
                _mm512_storeu_si512(to, paired(parts[p]));
            }
        }
    }
}

template <int P, class Act>
inline void inner_panels(const Act& activation, const Strip& gate, const Strip& up, const Parts* hidden, int64_t panel,
                         Parts* inner) {
    alignas(64) float left[INNER_COLUMNS * P * SIDE], right[INNER_COLUMNS * P * SIDE];
    products_of<P>(gate, hidden, ToBlocks<P>{left});
    products_of<P>(up, hidden, ToBlocks<P>{right});
    activated_panels<P>(activation, left, right, gate.columns, panel, inner);
}

// The same for `blocks` times ROWS rows.
template <class Act>
MOESAIC_APART void inner_blocks(const Act& activation, const Strip& gate, const Strip& up, const Parts* hidden, int64_t blocks,
                  int64_t panel, Parts* inner) {
    static_assert(INNER_COLUMNS <= STRIP);
    KeptSums left, right;
    kept_products(gate, hidden, blocks, left);
    kept_products(up, hidden, blocks, right);
    for (int64_t c = 0; c < gate.columns; c += KEPT_COLUMNS) {
        const auto &of_gate = left.of[c / KEPT_COLUMNS], &of_up = right.of[c / KEPT_COLUMNS];
        int64_t columns = std::min(gate.columns - c, KEPT_COLUMNS);
        for (int64_t b = 0; b < blocks; b++) {
            Parts* to = inner + b * PANELS * panel + c * SIDE;
            activated_panels<PANELS>(activation, of_gate[b], of_up[b], columns, panel, to, c);
        }
    }
}

// The same for few rows: vectors hold columns of a row instead of mostly absent rows.
template <class Act>
void inner_rows(const Act& activation, const Strip& gate, const Strip& up, const Parts* hidden, int64_t n, Parts* inner) {
    float left[FEW * INNER_COLUMNS] = {}, right[FEW * INNER_COLUMNS] = {};
    products_of<1>(gate, hidden, ToRows<1>(left, INNER_COLUMNS, n));
    products_of<1>(up, hidden, ToRows<1>(right, INNER_COLUMNS, n));
    const float* rows[SIDE] = {};
    for (int64_t i = 0; i < n; i++) {
        rows[i] = left + i * INNER_COLUMNS;
        float *row = left + i * INNER_COLUMNS, *other = right + i * INNER_COLUMNS;
        for (int64_t c = 0; c < gate.columns; c += LANES) {
            store(row + c, activation.of_row(load(row + c), load(other + c), c));
        }
    }
    pack_set<Tiled>(rows, gate.columns, inner);
}

template <class Act>
void tiled_strip(const moesaic::Experts& job, const Group& group, int64_t begin, int64_t end, const Parts* hidden,
                 Parts* inner, const After& after) {
    int64_t columns = std::min(INNER_COLUMNS, end - begin), n = group.end - group.begin;
    const Tiled* gate = reinterpret_cast<const Tiled*>(job.gate[group.expert]) + begin * job.h;
    const Tiled* up = reinterpret_cast<const Tiled*>(job.up[group.expert]) + begin * job.h;
    const Act activation(job, group.expert, begin, columns);
    auto following = [&] {
        return begin + columns < end ? gate + columns * job.h : static_cast<const Tiled*>(after());
    };
    int64_t row = 0, panel = SIDE * padded(job.w);
    for (int64_t blocks; (blocks = kept_blocks(n - row)) > 0; row += blocks * ROWS) {
        const Strip left{gate, up, job.h, columns, job.h, false}, right{up, following(), job.h, columns, job.h, false};
        Parts* to = inner + (group.room + row) * padded(job.w) + begin * SIDE;
        inner_blocks(activation, left, right, hidden + (group.place + row) * padded(job.h), blocks, panel, to);
    }
    for (; row < n; row += ROWS) {
        bool fresh = row == 0, last = n - row <= ROWS;
        const Tiled* next = last ? following() : nullptr;
        Strip left{gate, fresh ? up : nullptr, job.h, columns, job.h, fresh};
        Strip right{up, next, job.h, columns, job.h, fresh};
        const Parts* from = hidden + (group.place + row) * padded(job.h);
        Parts* to = inner + (group.room + row) * padded(job.w) + begin * SIDE;
        if (PANELS > 1 && n - row > SIDE) {
            inner_panels<PANELS>(activation, left, right, from, panel, to);
        } else if (n - row > FEW) {
            inner_panels<1>(activation, left, right, from, panel, to);
        } else {
            inner_rows(activation, left, right, from, n - row, to);
        }
    }
}

template <>
inline void inner_strip<Tiled, Silu>(const moesaic::Experts& job, const Group& group, int64_t begin, int64_t end,
                                     const int64_t*, const Parts* hidden, Parts* inner, const After& after) {
    tiled_strip<Silu>(job, group, begin, end, hidden, inner, after);
}

template <>
inline void inner_strip<Tiled, Biased>(const moesaic::Experts& job, const Group& group, int64_t begin, int64_t end,
                                       const int64_t*, const Parts* hidden, Parts* inner, const After& after) {
    tiled_strip<Biased>(job, group, begin, end, hidden, inner, after);
}

}  // namespace MOESAIC_ISA
