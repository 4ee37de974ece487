// Integer products of quantised weights: rows are rounded to int8, and products of integers are exact.
//
// Each group of 32 numbers of a row has a scale of its own (int8.h). For each group of a row of weights
//
//   sum = sum + scale of the weights * (scale of the row * integer)      one product, then one multiply-add
//
// where `integer` is the sum of code times code. If the weights have an offset, the offset times (scale of the row * sum
// of its codes) is added next. The groups of a block of BLOCK numbers are added in order, the blocks of a longer row too.
// A lane of a vector is a column, so every instruction set has the same order.
#pragma once

#include "byte_vectors.h"
#include "dot.h"
#include "integer_lines.h"

namespace MOESAIC_ISA {

// The sum of the codes from `first` on that meet one group of weights.
template <class T>
MOESAIC_INLINE int32_t sum_of(const Line& line, int64_t first) {
    return T::kGroup == kLine ? line.sums[0] + line.sums[1] : line.sums[first / 16];
}

// The same times the scale of the row, which the offset of the group is multiplied by.
template <class T>
MOESAIC_INLINE float total_of(const Line& line, int64_t first) {
    return T::kGroup == kLine ? line.total : line.scale * float(line.sums[first / 16]);
}

// Weights of type Q whose rows are rounded.
template <class Q>
struct Integer : Q {
    using Exact = Q;
    static constexpr bool kSigned = Q::kValues == Values::kInt8;  // codes are int8; else they are not negative
    static constexpr bool kE2M1 = Q::kValues == Values::kE2M1;      // codes stand for numbers of a table, -12 to 12
    // What must be subtracted from a code that is not negative, or from one of int8 plus 128, or from a number plus 12.
    static constexpr int32_t kZero =
        Q::kValues == Values::kInt8 ? 128 : Q::kValues == Values::kInt4 ? 8 : kE2M1 ? 12 : 0;
};

template <class Q>
constexpr bool kQuantized<Integer<Q>> = true;
template <class Q>
constexpr bool kBlocks<Integer<Q>> = kBlocks<Q>;
template <class Q>
constexpr bool kInteger<Integer<Q>> = true;
template <class Q>
constexpr bool kInOrder<Integer<Q>> = false;

// How blocks become integers.
template <class Q>
struct IntegerBlocks {
    using Type = Q;
};
template <>
struct IntegerBlocks<Mxfp4Blocks> {
    using Type = Mxfp4Integers;
};

// The columns that are multiplied together, and the bytes of a column that are brought into that order at a time.
constexpr int64_t PANEL_COLUMNS = LANES, PANEL_BYTES = 4 * LANES;

// Some columns of a block of weights: four codes of each column, then the next four of each. Codes of 4 bits take a
// byte. The scales and offsets of a group are neighbours too.
struct IntegerPanel {
    alignas(64) uint8_t codes[PANEL_COLUMNS * BLOCK];
    alignas(64) uint8_t scales[PANEL_COLUMNS * BLOCK / 16 * 4], offsets[PANEL_COLUMNS * BLOCK / 16 * 4];
};

#if defined(MOESAIC_AVX512)
MOESAIC_INLINE Bytes load_bytes(const uint8_t* p, int64_t count) {
    __mmask64 some = count < 64 ? (uint64_t(1) << count) - 1 : ~uint64_t(0);
    return _mm512_maskz_loadu_epi8(some, p);
}
MOESAIC_INLINE void store_bytes(uint8_t* p, Bytes x) { _mm512_store_si512(p, x); }
MOESAIC_INLINE Bytes flip(Bytes x) { return _mm512_xor_si512(x, _mm512_set1_epi8(char(0x80))); }

// x [16][16] of 32 bits each, transposed.
MOESAIC_INLINE void transpose(Bytes (&x)[16]) {
    Bytes y[16];
    MOESAIC_UNROLL for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    MOESAIC_UNROLL for (int i = 0; i < 16; i += 4) {
        MOESAIC_UNROLL for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    }
    MOESAIC_UNROLL for (int i = 0; i < 16; i += 8) {
        MOESAIC_UNROLL for (int j = 0; j < 4; j++) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    }
    MOESAIC_UNROLL for (int j = 0; j < 8; j++) {
        x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88), x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd);
    }
}
#else
MOESAIC_INLINE Bytes load_bytes(const uint8_t* p, int64_t count) {
    alignas(32) uint8_t some[32] = {};
    if (count < 32) std::memcpy(some, p, size_t(count)), p = some;
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
MOESAIC_INLINE void store_bytes(uint8_t* p, Bytes x) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), x); }
MOESAIC_INLINE Bytes flip(Bytes x) { return _mm256_xor_si256(x, _mm256_set1_epi8(char(0x80))); }

// x [8][8] of 32 bits each, transposed.
MOESAIC_INLINE void transpose(Bytes (&x)[8]) {
    Bytes y[8];
    MOESAIC_UNROLL for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
    }
    MOESAIC_UNROLL for (int i = 0; i < 8; i += 4) {
        MOESAIC_UNROLL for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm256_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm256_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    }
    MOESAIC_UNROLL for (int j = 0; j < 4; j++) {
        y[j] = _mm256_permute2x128_si256(x[j], x[j + 4], 0x20);
        y[j + 4] = _mm256_permute2x128_si256(x[j], x[j + 4], 0x31);
    }
    MOESAIC_UNROLL for (int j = 0; j < 8; j++) x[j] = y[j];
}
#endif

// How codes of weights and rows are multiplied: `IntegerSums` are the sums of one group, a column a lane. They begin with
// what codes without a sign have too much.
#if defined(MOESAIC_AVX512)
constexpr int INTEGER_ROWS = 8;
MOESAIC_INLINE Bytes aligned_bytes(const void* p) { return _mm512_load_si512(p); }
MOESAIC_INLINE Bytes add_integers(Bytes x, Bytes y) { return _mm512_add_epi32(x, y); }
MOESAIC_INLINE Bytes subtract_integers(Bytes x, Bytes y) { return _mm512_sub_epi32(x, y); }
MOESAIC_INLINE Vec floats(Bytes x) { return _mm512_cvtepi32_ps(x); }
#else
constexpr int INTEGER_ROWS = 4;
MOESAIC_INLINE Bytes aligned_bytes(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }
MOESAIC_INLINE Bytes add_integers(Bytes x, Bytes y) { return _mm256_add_epi32(x, y); }
MOESAIC_INLINE Bytes subtract_integers(Bytes x, Bytes y) { return _mm256_sub_epi32(x, y); }
MOESAIC_INLINE Vec floats(Bytes x) { return _mm256_cvtepi32_ps(x); }
#endif

#if defined(MOESAIC_VNNI)
constexpr bool kSignedProducts = false;  // VPDPBUSD takes weights without a sign

// To each sum the products of four codes of weights and of a row.
MOESAIC_INLINE Bytes add_fours(Bytes sums, Bytes weights, Bytes row) {
#if defined(MOESAIC_AVX512)
    return _mm512_dpbusd_epi32(sums, weights, row);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, weights, row);
#else
    return _mm256_dpbusd_epi32(sums, weights, row);
#endif
}

template <class T>
struct IntegerWeights {
    Bytes codes;
    IntegerWeights() = default;
    MOESAIC_INLINE explicit IntegerWeights(Bytes of) : codes(of) {}
};

template <class T>
struct IntegerSums {
    static constexpr int32_t kMissing = -T::kZero;
    Bytes sums;
    IntegerSums() = default;
    MOESAIC_INLINE explicit IntegerSums(int32_t sum) : sums(every(kMissing * sum)) {}  // sum: of the row's codes
    MOESAIC_INLINE void add(const IntegerWeights<T>& w, Bytes row) { sums = add_fours(sums, w.codes, row); }
    MOESAIC_INLINE Bytes products() const { return sums; }
    MOESAIC_INLINE Vec number() const { return floats(sums); }
};
#else
constexpr bool kSignedProducts = true;

// VPMADDUBSW adds two products in 16 bits. With codes of 4 bits, the products of a group of 32 do not overflow them: 16 of
// them are added at most. Numbers of E2M1 are multiplied by magnitude, since 16 * 12 * 127 fits while 16 * 24 * 127 does
// not; and codes of 8 bits too, since 2 * 128 * 127 fits while 2 * 255 * 127 does not.
template <class T>
struct IntegerWeights {
    Bytes codes, magnitudes;
    IntegerWeights() = default;
    MOESAIC_INLINE explicit IntegerWeights(Bytes of) : codes(of), magnitudes(_mm256_abs_epi8(of)) {}
};

template <class T>
struct IntegerSums {
    static constexpr bool kByMagnitude = T::kE2M1 || !T::kNibbles;
    static constexpr int32_t kMissing = !kByMagnitude ? -T::kZero : T::kSigned || T::kE2M1 ? 0 : 128;
    Bytes sums;
    int32_t sum;
    IntegerSums() = default;
    MOESAIC_INLINE explicit IntegerSums(int32_t of) : sums(_mm256_setzero_si256()), sum(of) {}
    MOESAIC_INLINE void add(const IntegerWeights<T>& w, Bytes row) {
        Bytes pairs = kByMagnitude ? _mm256_maddubs_epi16(w.magnitudes, _mm256_sign_epi8(row, w.codes))
                                   : _mm256_maddubs_epi16(w.codes, row);
        if constexpr (T::kNibbles) sums = _mm256_add_epi16(sums, pairs);
        else sums = add_integers(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    MOESAIC_INLINE Bytes products() const {  // without what is missing
        return T::kNibbles ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums;
    }
    MOESAIC_INLINE Vec number() const {
        return floats(kMissing == 0 ? products() : add_integers(products(), every(kMissing * sum)));
    }
};
#endif

// Calls use(index, vector) for each 32 bits of `size` bytes of all columns. The first column is at `from`, and there are
// `some`; lanes of other columns have any numbers.
template <class Use>
MOESAIC_INLINE void in_turn(const uint8_t* from, int64_t ld, int64_t some, int64_t size, const Use& use) {
    for (int64_t at = 0; at < size; at += PANEL_BYTES) {
        Bytes x[PANEL_COLUMNS];
        if (some == PANEL_COLUMNS && size - at >= PANEL_BYTES) {
            MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) x[c] = load_bytes(from + c * ld + at, PANEL_BYTES);
        } else {
            for (int64_t c = 0; c < PANEL_COLUMNS; c++) {
                x[c] = load_bytes(from + (c < some ? c : 0) * ld + at, size - at);
            }
        }
        transpose(x);
        MOESAIC_UNROLL for (int64_t c = 0; c < PANEL_COLUMNS; c++) use(at / 4 + c, x[c]);
    }
}

// Codes of eight bits with the sign that products take.
template <class T>
MOESAIC_INLINE Bytes ordered(Bytes codes) { return T::kSigned == kSignedProducts ? codes : flip(codes); }

// Codes of four bits as products take them. Numbers of a table are made positive where weights must not be negative.
template <class T>
MOESAIC_INLINE Bytes as_integers(Bytes halves) {
    if constexpr (!T::kE2M1) return halves;
    __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(Nibble<Values::kE2M1>::kTable));
    return look_up(_mm_add_epi8(numbers, _mm_set1_epi8(kSignedProducts ? 0 : T::kZero)), halves);
}

// Brings the scales and offsets of a block of some columns into the order of a panel.
template <class T>
inline void fill_heads(const BlockOf<T>& of, int64_t ld, int64_t some, IntegerPanel& panel) {
    auto put = [](uint8_t* to) {
        return [=](int64_t i, Bytes x) MOESAIC_INLINE_LAMBDA { store_bytes(to + i * int64_t(sizeof x), x); };
    };
    in_turn(of.head, ld, some, 4 * of.groups, put(panel.scales));
    if constexpr (T::kHasOffset) in_turn(of.head + 4 * of.groups, ld, some, 4 * of.groups, put(panel.offsets));
}

// Brings the codes of a block of some columns into the order of a panel.
template <class T>
inline void fill(const BlockOf<T>& of, int64_t ld, int64_t some, IntegerPanel& panel, Stream& stream) {
    constexpr int64_t kVector = sizeof(Bytes);
    in_turn(of.codes, ld, some, of.groups * T::kCodes, [&](int64_t i, Bytes x) MOESAIC_INLINE_LAMBDA {
        if (i % PANEL_COLUMNS == 0) stream.step();
        if constexpr (T::kNibbles) {  // the low halves of 16 bytes, then the high ones
            uint8_t* to = panel.codes + (i / 4 * 8 + i % 4) * kVector;
            store_bytes(to, as_integers<T>(low_half(x))), store_bytes(to + 4 * kVector, as_integers<T>(high_half(x)));
        } else {
            store_bytes(panel.codes + i * kVector, ordered<T>(x));
        }
    });
}

// Four codes of a row for all columns.
MOESAIC_INLINE Bytes four_codes(const int8_t* row) {
    int32_t four;
    std::memcpy(&four, row, 4);
    return every(four);
}

// The scales and offsets of a group of a panel's columns.
template <class T>
struct Scales {
    Vec scale, offset;
    MOESAIC_INLINE Scales(const IntegerPanel& panel, int64_t group)
        : scale(load(reinterpret_cast<const float*>(panel.scales) + group * LANES)) {
        if constexpr (T::kHasOffset) offset = load(reinterpret_cast<const float*>(panel.offsets) + group * LANES);
    }
    // sums plus the group of a row whose products are `integers`.
    // first: code of the line at which it begins.
    MOESAIC_INLINE Vec add(Vec integers, const Line& line, int64_t first, Vec sums) const {
        sums = fma(mul(integers, set1(line.scale)), scale, sums);
        if constexpr (T::kHasOffset) sums = fma(set1(total_of<T>(line, first)), offset, sums);
        return sums;
    }
};

// rows [R] times the columns of a panel, over `groups` groups: one vector of columns a row.
template <class T, int R>
MOESAIC_INLINE void panel_products(const float* const* rows, const IntegerPanel& panel, int64_t groups, Stream& stream,
                                   Vec (&sums)[R]) {
    Stream mine = stream;
    constexpr int64_t kSteps = T::kGroup / 4, kVector = sizeof(Bytes);
    const Line* lines[R];
    for (int r = 0; r < R; r++) lines[r] = reinterpret_cast<const Line*>(rows[r]), sums[r] = zero();
    const uint8_t* codes = panel.codes;
    for (int64_t g = 0; g < groups; g++, codes += kSteps * kVector) {
        mine.fetch(mine.bytes / 4);
        int64_t first = g * T::kGroup % kLine, line = g * T::kGroup / kLine * 2;  // a line takes half of its place
        IntegerSums<T> total[R];
        MOESAIC_UNROLL for (int r = 0; r < R; r++) {
            total[r] = IntegerSums<T>(sum_of<T>(lines[r][line], first));
        }
        MOESAIC_UNROLL for (int64_t i = 0; i < kSteps; i++) {
            IntegerWeights<T> w(aligned_bytes(codes + i * kVector));
            MOESAIC_UNROLL for (int r = 0; r < R; r++) total[r].add(w, four_codes(lines[r][line].codes + first + 4 * i));
        }
        Scales<T> scales(panel, g);
        MOESAIC_UNROLL for (int r = 0; r < R; r++) sums[r] = scales.add(total[r].number(), lines[r][line], first, sums[r]);
    }
    stream = mine;
}

// Writes the sums of `some` columns. first: false adds to what is there.
MOESAIC_INLINE void put_sums(Vec sums, bool first, float* out, int64_t some) {
    if (some == LANES) return store(out, first ? sums : add(load(out), sums));
    float lanes[LANES];
    store(lanes, sums);
    for (int64_t c = 0; c < some; c++) out[c] = first ? lanes[c] : out[c] + lanes[c];
}

// The same for n rows, at most R -> out [n, stride], `some` columns of it.
template <class T, int R = INTEGER_ROWS>
void panel_rows(int64_t n, const float* const* rows, const IntegerPanel& panel, int64_t groups, Stream& stream, bool first,
                float* out, int64_t stride, int64_t some) {
    if constexpr (R > 1) {
        if (n < R) return panel_rows<T, R - 1>(n, rows, panel, groups, stream, first, out, stride, some);
    }
    Vec sums[R];
    panel_products<T, R>(rows, panel, groups, stream, sums);
    for (int r = 0; r < R; r++) put_sums(sums[r], first, out + r * stride, some);
}

}  // namespace MOESAIC_ISA

#include "few_integers.h"
#include "direct_integers.h"
#if defined(MOESAIC_AMX_INT8)
#include "integer_tiles.h"
#else
namespace MOESAIC_ISA {
template <class T>
struct TiledRows {  // no rows
    static constexpr int64_t n = 0, tiles = 0;
    TiledRows(const float* const*, int64_t, int64_t) {}
    void multiply(const IntegerPanel&, int64_t, int64_t, Stream&, float*, int64_t, int64_t) const {}
};
}  // namespace MOESAIC_ISA
#endif

namespace MOESAIC_ISA {

// As `multiply` in dot.h. Weights are prefetched a panel ahead, since all its columns are read together. Blocks: the type of
// blocks that a panel is filled from as they are stored.
template <class T, class Blocks = T>
void multiply_panels(const float* const* rows, int64_t n, const Columns<T>& weights, int64_t columns, int64_t k,
                     float* out, int64_t stride, const void* then) {
    int64_t size = columns * weights.ld, lead = std::min(size, PANEL_COLUMNS * weights.ld + LEAD);
    TiledRows<T> tiled(rows, n, k);
    int64_t rest = n - tiled.n, few = (rest + INTEGER_ROWS - 1) / INTEGER_ROWS, tiles = tiled.tiles + few;
    int64_t groups = std::min(k, BLOCK) / T::kGroup, steps = groups / GROUPS_AT_ONCE;
    // Four groups of a tile of rows take about as long as the 64 bytes of each column that `fill` transposes.
    if (n > FEW_INTEGER_ROWS) steps = groups * (T::kCodes + PANEL_BYTES * tiles / 4) / PANEL_BYTES;
    if constexpr (StoredIntegers<Blocks>::kIsDefined) steps = std::min(k, BLOCK) / STEP_NUMBERS + groups * tiles / 4;
    int64_t panel_bytes = PANEL_COLUMNS * groups * weights.of_group;
    // Unpacking takes about as long as `fill`, or as the products of few rows.
    bool unpacks = weights.unpack != nullptr && !StoredIntegers<Blocks>::kIsDefined;
    int64_t unpacking = !unpacks ? 0 : n > FEW_INTEGER_ROWS ? groups * T::kCodes / PANEL_BYTES : steps;
    int64_t step = panel_bytes / std::max<int64_t>(1, steps + unpacking) + 1;
    int64_t of_group = step * unpacking / (PANEL_COLUMNS * std::max<int64_t>(1, groups));
    Stream stream(weights.first + lead, size - lead, step);
    if (then != nullptr) stream.then = static_cast<const char*>(then), stream.then_size = lead;
    IntegerPanel panel;
    alignas(64) uint8_t room[PANEL_COLUMNS * Columns<T>::kStride];
    for (int64_t c = 0; c < columns; c += PANEL_COLUMNS) {
        int64_t some = std::min(PANEL_COLUMNS, columns - c);
        for (int64_t begin = 0; begin < k; begin += BLOCK) {
            int64_t count = std::min(k - begin, BLOCK);
            int64_t block_groups = (count + T::kGroup - 1) / T::kGroup;
            if constexpr (StoredIntegers<Blocks>::kIsDefined) {
                const uint8_t* from = weights.first + c * weights.ld + Blocks::bytes(begin);
                fill_stored<Blocks>(from, weights.ld, some, count, panel, stream);
            } else {
                auto from = weights.at(c, some, begin, count, room, stream, of_group);
                BlockOf<T> of(from.first, count);
                fill_heads(of, from.ld, some, panel);
                if (n <= FEW_INTEGER_ROWS) {
                    const float* x[] = {rows[0] + begin, rows[n - 1] + begin};
                    few_rows<T>(n, x, of.codes, from.ld, some, panel, of.groups, stream, begin == 0, out + c, stride);
                    continue;
                }
                fill(of, from.ld, some, panel, stream);
            }
            tiled.multiply(panel, begin, block_groups, stream, out + c, stride, some);
            for (int64_t t = 0; t < few; t++) {
                int64_t r = tiled.n + rest * t / few, more = tiled.n + rest * (t + 1) / few - r;
                const float* x[INTEGER_ROWS];
                for (int64_t i = 0; i < more; i++) x[i] = rows[r + i] + begin;
                panel_rows<T>(more, x, panel, block_groups, stream, begin == 0, out + r * stride + c, stride, some);
            }
        }
    }
}

template <class T, std::enable_if_t<kInteger<T>, int> = 0>
inline void multiply(const float* const* rows, int64_t n, const T* weights, int64_t ld, int64_t columns, int64_t k,
                     float* out, int64_t stride, const T* then = nullptr) {
    if constexpr (kBlocks<T>) {
        using Blocks = typename IntegerBlocks<typename T::Exact>::Type;
        using As = Integer<typename Blocks::As>;
        auto blocks = reinterpret_cast<const Blocks*>(weights);
        if constexpr (StoredIntegers<Blocks>::kIsDefined) {
            if (n <= FEW_STORED_ROWS) {
                int64_t whole = columns / PANEL_COLUMNS * PANEL_COLUMNS;
                const void* rest = &blocks->byte + whole * ld;
                multiply_stored(rows, n, blocks, ld, whole, k, out, stride, whole < columns ? rest : then);
                if (whole == columns) return;
                blocks = static_cast<const Blocks*>(rest), columns -= whole, out += whole;
            }
        }
        using Source = std::conditional_t<StoredIntegers<Blocks>::kIsDefined, Blocks, As>;  // one function for the others
        multiply_panels<As, Source>(rows, n, Columns<As>::of_blocks(blocks, ld), columns, k, out, stride, then);
    } else {
        multiply_panels(rows, n, Columns<T>(weights, ld), columns, k, out, stride, then);
    }
}

}  // namespace MOESAIC_ISA
