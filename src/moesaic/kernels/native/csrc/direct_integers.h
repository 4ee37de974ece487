// Integer products with blocks as they are stored, for the types of most files.
//
// Unpacking a stretch of codes takes several times as long as the products of one row. Here codes stay in vectors: for few
// rows they are multiplied so, and for more they are brought into the order of a panel (integers.h). Sums of integers are
// exact, and what follows has the order of a panel, so the bits are those of unpacked codes.
#pragma once

#include "stored_codes.h"
#include "stored_scales.h"

namespace MOESAIC_ISA {

constexpr int FEW_STORED_ROWS = 2;  // with more, it is faster to order the codes once for all rows

// sums[r][i] = codes of row r times those of a panel's columns in a group of a step.
template <class S, int R, class Step>
MOESAIC_INLINE void step_of_columns(const Bytes (&rows)[R][2], const uint8_t* blocks, int64_t ld, Step step, int64_t left,
                                    Bytes (&sums)[R][S::kSums][PIECES]) {
    constexpr int kPairs = 2 * S::kPairs;
    MOESAIC_UNROLL for (int64_t v = 0; v < S::kSums; v++) {
#if !defined(MOESAIC_AVX512)
        asm("" : "+r"(blocks));  // what the vectors share is loaded anew, as 16 registers have no room for it
#endif
        MOESAIC_UNROLL for (int64_t four = 0; four < PANEL_COLUMNS / 4; four++) {
            Bytes of[R][4];
            MOESAIC_UNROLL for (int64_t i = 0; i < 4; i++) {
                Bytes codes[2];
                S::load(blocks + (4 * four + i) * ld, step, left, codes);
                MOESAIC_UNROLL for (int r = 0; r < R; r++) of[r][i] = S::template sums_of<S>(v, codes, rows[r]);
            }
            MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                auto& x = of[r];
                Bytes a = add_sums<S, kPairs>(low_pairs(x[0], x[1]), high_pairs(x[0], x[1]));
                Bytes b = add_sums<S, kPairs>(low_pairs(x[2], x[3]), high_pairs(x[2], x[3]));
                Bytes all = add_sums<S, 2 * kPairs>(low_fours(a, b), high_fours(a, b));
                sums[r][v][four] = whole_sums<S, 2 * kPairs>(all);
            }
        }
    }
    MOESAIC_UNROLL for (int r = 0; r < R; r++) {
        MOESAIC_UNROLL for (int64_t v = 0; v < S::kSums; v++) transpose_pieces(sums[r][v]);
    }
}

// `integers` without what `zero` times the sum of a line's codes from `first` on is in it.
template <class T, int32_t zero>
MOESAIC_INLINE Bytes without_zero(Bytes integers, const Line& line, int64_t first) {
    if constexpr (zero == 0) {
        return integers;
    } else if constexpr (T::kGroup == kLine) {
        return add_integers(integers, every(-zero * sum_of<T>(line, first)));
    } else {  // multiplied in a vector, since a sum is loaded into all lanes at once
        static_assert((zero & (zero - 1)) == 0);
        return subtract_integers(integers, multiplied<zero>(every(line.sums[first / 16])));
    }
}

// Calls use(number, block, step) for each step of `count` numbers from a block on.
template <class S, class B, class Use>
MOESAIC_INLINE void steps_of(const uint8_t* blocks, int64_t count, const Use& use) {
    constexpr int64_t kNumbers = S::kSteps > 1 ? B::kNumbers : STEP_NUMBERS;
    for (int64_t at = 0; at < count; at += kNumbers) {
        const uint8_t* block = blocks + at / B::kNumbers * B::kBytes;
        if constexpr (S::kSteps == 1) use(at, block, at % B::kNumbers / STEP_NUMBERS);
        else unroll<S::kSteps>([&](auto step) MOESAIC_INLINE_LAMBDA { use(at + step * STEP_NUMBERS, block, step); });
    }
}

// rows [R] times the columns of a panel, over `count` numbers. The panel has scales and offsets only.
template <class S, class B, int R>
void stored_products(const float* const* rows, const uint8_t* blocks, int64_t ld, const IntegerPanel& panel, int64_t count,
                     Stream& stream, bool first, float* out, int64_t stride) {
    using T = typename S::T;
    constexpr int64_t kGroups = STEP_NUMBERS / T::kGroup;  // of a step
    constexpr bool kWhole = B::kNumbers % STEP_NUMBERS == 0;
    Stream mine = stream;
    Vec sums[R];
    const Line* lines[R];
    for (int r = 0; r < R; r++) lines[r] = reinterpret_cast<const Line*>(rows[r]), sums[r] = zero();
    steps_of<S, B>(blocks, count, [&](int64_t at, const uint8_t* block, auto step) MOESAIC_INLINE_LAMBDA {
        mine.step();
        int64_t left = kWhole ? STEP_LINES : std::min(STEP_LINES, (count - at) / kLine);
        Bytes codes[R][2], integers[R][S::kSums][PIECES];
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            const Line* of_step[STEP_LINES];
            MOESAIC_UNROLL for (int64_t i = 0; i < STEP_LINES; i++) {
                of_step[i] = lines[r] + (at / kLine + std::min(i, left - 1)) * 2;
            }
            S::load_row(of_step, codes[r]);
        }
        bool whole = kWhole || left == STEP_LINES;
        if (whole) step_of_columns<S, R>(codes, block, ld, step, STEP_LINES, integers);
        else step_of_columns<S, R>(codes, block, ld, step, left, integers);
        MOESAIC_UNROLL for (int64_t i = 0; i < kGroups; i++) {
            if (!whole && i * T::kGroup >= left * kLine) break;
            int64_t group = at / T::kGroup + i, place = S::kPlaces[i];
            Scales<T> scales(panel, group);
            MOESAIC_UNROLL for (int r = 0; r < R; r++) {
                const Line& line = lines[r][group * T::kGroup / kLine * 2];
                int64_t from = group * T::kGroup % kLine;
                Bytes integer = without_zero<T, S::kZero>(integers[r][place / PIECES][place % PIECES], line, from);
                sums[r] = scales.add(floats(integer), line, from, sums[r]);
            }
        }
    });
    stream = mine;
    for (int r = 0; r < R; r++) put_sums(sums[r], first, out + r * stride, PANEL_COLUMNS);
}

// As `multiply` in dot.h, for n rows, at most FEW_STORED_ROWS, and whole panels.
template <class B>
void multiply_stored(const float* const* rows, int64_t n, const B* weights, int64_t ld, int64_t columns, int64_t k, float* out,
                     int64_t stride, const void* then) {
    using S = StoredIntegers<B>;
    const uint8_t* blocks = &weights->byte;
    int64_t size = columns * ld, lead = std::min(size, PANEL_COLUMNS * ld + LEAD);
    Stream stream(blocks + lead, size - lead, PANEL_COLUMNS * B::kBytes * STEP_NUMBERS / B::kNumbers + 1);
    if (then != nullptr) stream.then = static_cast<const char*>(then), stream.then_size = lead;
    IntegerPanel panel;
    for (int64_t c = 0; c < columns; c += PANEL_COLUMNS) {
        for (int64_t begin = 0; begin < k; begin += BLOCK) {
            int64_t count = std::min(k - begin, BLOCK);
            const uint8_t* from = blocks + c * ld + B::bytes(begin);
            put_stored_scales<B>(from, ld, PANEL_COLUMNS, count, panel);
            const float* x[] = {rows[0] + begin, rows[n - 1] + begin};
            static_assert(FEW_STORED_ROWS == 2);
            auto products = n == 1 ? stored_products<S, B, 1> : stored_products<S, B, 2>;
            products(x, from, ld, panel, count, stream, begin == 0, out + c, stride);
        }
    }
}

// What codes of a panel are more than the numbers that they stand for.
template <class T>
constexpr int32_t kOfPanel = !kSignedProducts || (T::kNibbles && !T::kE2M1) ? T::kZero : T::kSigned || T::kE2M1 ? 0 : -128;

// Brings `count` numbers of some columns into the order of a panel.
template <class B>
void fill_stored(const uint8_t* blocks, int64_t ld, int64_t some, int64_t count, IntegerPanel& panel, Stream& stream) {
    using S = StoredIntegers<B>;
    constexpr int32_t kMore = kOfPanel<typename S::T> - S::kZero;
    put_stored_scales<B>(blocks, ld, some, count, panel);
    steps_of<S, B>(blocks, count, [&](int64_t at, const uint8_t* block, auto step) MOESAIC_INLINE_LAMBDA {
        stream.step();
        int64_t left = (count - at) / kLine;
        MOESAIC_UNROLL for (int64_t v = 0; v < 2; v++) {
            Bytes x[PANEL_COLUMNS];
            MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) {
                Bytes codes[2];
                S::load(block + (c < some ? c : 0) * ld, step, left, codes);
                x[c] = kMore == 0 ? codes[v] : add_bytes(codes[v], every_byte(kMore));
            }
            transpose(x);
            uint8_t* to = panel.codes + at * PANEL_COLUMNS;
            MOESAIC_UNROLL for (int64_t j = 0; j < PANEL_COLUMNS; j++) {
                store_bytes(to + S::place(v, j) * int64_t(sizeof(Bytes)), x[j]);
            }
        }
    });
}

}  // namespace MOESAIC_ISA
