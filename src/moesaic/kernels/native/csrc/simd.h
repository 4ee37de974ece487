// Vectors of one instruction set: the same few functions for AVX-512, AVX2 and portable code, and how rows are packed
// for weights.
//
// Every operation is the same sequence of roundings for every caller, so the same sum has the same bits everywhere
// within one instruction set. The compiler must not contract or reorder: the build passes -ffp-contract=off, and
// multiply-adds are called by name.
#pragma once

// For loops over registers, since a call within would spill them all. And for prefetches: GCC assumes that a function
// which only prefetches has no effects, and drops its calls.
#define MOESAIC_INLINE __attribute__((always_inline)) inline
#define MOESAIC_APART __attribute__((noinline))  // for loops over registers that inlining would spill
#define MOESAIC_INLINE_LAMBDA __attribute__((always_inline))
// Unrolls a loop, so that the elements it indexes stay in registers.
#if defined(__clang__)
#define MOESAIC_UNROLL _Pragma("unroll")
#else
#define MOESAIC_UNROLL _Pragma("GCC unroll 32")
#endif

#if defined(MOESAIC_AVX512)
#include "simd_avx512.h"
#elif defined(MOESAIC_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

namespace MOESAIC_ISA {

// Weights are read CHUNK at a time, as two vectors. For bf16 these are the even and the odd numbers, which one shift
// and one mask convert to float. So rows for bf16 weights are stored in that order by `pack`.
constexpr int64_t CHUNK = 2 * LANES;

inline int64_t padded(int64_t count) { return (count + CHUNK - 1) / CHUNK * CHUNK; }

struct bf16 {
    uint16_t bits;
};

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float widen(float x) { return x; }
inline float widen(int8_t x) { return float(x); }

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {  // to nearest even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        out->bits = uint16_t((bits >> 16) | 0x40);
    } else {
        out->bits = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
    }
}

// The two vectors of a chunk of stored numbers.
inline Vec low(const float* p) { return load(p); }
inline Vec high(const float* p) { return load(p + LANES); }
inline Vec low(const bf16* p) { return widen_even(&p->bits); }
inline Vec high(const bf16* p) { return widen_odd(&p->bits); }
inline Vec low(const int8_t* p) { return widen_int8(p); }
inline Vec high(const int8_t* p) { return widen_int8(p + LANES); }

template <class T>
constexpr bool kInOrder = sizeof(T) != 2;  // the two vectors of a chunk are its halves

// Stores the sums of a chunk of columns, one vector for each vector above, in the order of the columns.
template <class T>
inline void store_chunk(float* to, Vec a, Vec b) {
    if constexpr (kInOrder<T>) {
        store(to, a), store(to + LANES, b);
    } else {
        store_in_turn(to, a, b);
    }
}

template <class T>
inline void load_chunk(const float* from, Vec& a, Vec& b) {  // what store_chunk stored
    if constexpr (kInOrder<T>) {
        a = load(from), b = load(from + LANES);
    } else {
        load_in_turn(from, a, b);
    }
}

constexpr int64_t BLOCK = 1024;  // maximum numbers of a row whose products are added to the same sums (dot.h)

template <class T>
constexpr bool kQuantized = false;  // see quantized.h
template <class T>
constexpr bool kInteger = false;  // see integers.h

template <class T>
constexpr bool kBlocks = false;  // see blocks.h

// Number of elements T that store this many numbers of a row, from its beginning.
template <class T>
constexpr int64_t span(int64_t numbers) {
    if constexpr (kQuantized<T>) return T::bytes(numbers);
    return numbers;
}

// How rows are multiplied by stored numbers of type T: the type that rows are packed in, and the vectors of a chunk
// that `fma` multiplies.
template <class T>
struct Form {
    using Row = float;
    using Operand = Vec;
    static constexpr int kVectors = 2;
    static Operand row(const float* p, int vector) { return load(p + vector * LANES); }
    static Operand stored(const T* p, int vector) { return vector ? high(p) : low(p); }
};

template <class T>
using RowOf = typename Form<T>::Row;

// Index of number i of a row that is packed for weights of type T.
template <class T>
inline int64_t place(int64_t i) {
    if (kInOrder<T>) return i;
    int64_t in = i % CHUNK;
    return i - in + in / 2 + (in & 1) * LANES;
}

// Whether T's numbers must be converted to float before they are multiplied.
template <class T>
constexpr bool kToWiden = false;
template <>
constexpr bool kToWiden<bf16> = true;

// stored [count] -> out [padded(count)] as float in the order of T's vectors, padded with zeros.
template <class T>
inline void widen(const T* stored, int64_t count, float* out) {
    int64_t whole = count / CHUNK * CHUNK;
    for (int64_t i = 0; i < whole; i += CHUNK) {
        store(out + i, low(stored + i)), store(out + i + LANES, high(stored + i));
    }
    if (whole < count) {
        T rest[CHUNK] = {};
        std::memcpy(rest, stored + whole, size_t(count - whole) * sizeof(T));
        store(out + whole, low(rest)), store(out + whole + LANES, high(rest));
    }
}

template <class T>
constexpr int64_t kTogether = 1;  // number of rows that are packed together as a set

// Register state that a thread needs while it multiplies by weights of type T.
template <class T>
struct Registers {
    Registers() {}
};

// Rounds a number of rows up to whole sets that are packed together.
template <class T>
inline int64_t in_sets(int64_t rows) {
    return (rows + kTogether<T> - 1) / kTogether<T> * kTogether<T>;
}

inline void pack_integers(const float* row, int64_t count, float* out);  // see integer_lines.h

// row [count] -> out [padded(count)] in the order of T's vectors, padded with zeros.
template <class T>
inline void pack(const float* row, int64_t count, RowOf<T>* out) {
    if constexpr (kInteger<T>) return pack_integers(row, count, out);
    int64_t whole = count / CHUNK * CHUNK;
    if (kInOrder<T>) {
        std::memcpy(out, row, size_t(whole) * 4);
    } else {
        for (int64_t base = 0; base < whole; base += CHUNK) {
            for (int64_t i = 0; i < LANES; i++) {
                out[base + i] = row[base + 2 * i];
                out[base + LANES + i] = row[base + 2 * i + 1];
            }
        }
    }
    if (whole < count) {
        std::memset(out + whole, 0, size_t(CHUNK) * 4);
        for (int64_t i = whole; i < count; i++) out[place<T>(i)] = row[i];
    }
}

// Packs the rows [count] of one set -> out [kTogether, padded(count)].
template <class T>
inline void pack_set(const float* const* rows, int64_t count, RowOf<T>* out) {
    pack<T>(rows[0], count, out);
}

}  // namespace MOESAIC_ISA

#if defined(MOESAIC_AMX_BF16)
#include "tiles_amx.h"
#elif defined(MOESAIC_AVX512_BF16)
#include "pairs_avx512.h"
#else
namespace MOESAIC_ISA {
using Narrow = bf16;  // the type of bf16 weights in products
}
#endif

namespace MOESAIC_ISA {


// exp(x) to about one unit in the last place. It is infinity above about 2^127.5, and exp(-87) for x below -87. NaN
// stays NaN, because vmin and vmax return their second argument if one is NaN.
inline Vec exponential(Vec x) {
    x = vmin(set1(89.0f), vmax(set1(-87.0f), x));
    Vec n = nearest(mul(x, set1(1.44269504088896341f)));
    Vec r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);  // minimax polynomial of Cephes' expf (Moshier)
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return scale2(p, n);
}

inline float exponential1(float x) { return first(exponential(set1(x))); }

// silu(gate) * up
inline Vec silu_times(Vec gate, Vec up) {
    Vec below = add(set1(1.0f), exponential(sub(zero(), gate)));
    return mul(divide(gate, below), up);
}

// Sums over lanes, always by halves, so that the order does not depend on where the vector came from.
inline float total(Vec x) {
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

inline float largest(Vec x) {
    float lanes[LANES];
    store(lanes, x);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    }
    return lanes[0];
}

}  // namespace MOESAIC_ISA
