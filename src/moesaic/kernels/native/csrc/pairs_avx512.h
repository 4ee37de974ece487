// AVX-512 with BF16. Rows that are multiplied by bf16 weights are rounded to bf16 too, and two products at a time are
// added to a float32 sum. Nothing is converted to float. Numbers below 2^-126 count as zero.
#pragma once

namespace MOESAIC_ISA {

struct Paired : bf16 {};  // a bf16 weight whose rows are rounded
using Narrow = Paired;    // the type of bf16 weights in products

using Pairs = __m512bh;  // a chunk in natural order

inline Vec fma(Pairs a, Pairs b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }

template <>
struct Form<Paired> {
    using Row = bf16;
    using Operand = Pairs;
    static constexpr int kVectors = 1;
    static Operand row(const bf16* p, int) { return Pairs(_mm512_loadu_si512(p)); }
    static Operand stored(const Paired* p, int) { return Pairs(_mm512_loadu_si512(p)); }
};

inline void round_chunk(const float* p, bf16* out) { _mm512_storeu_si512(out, rounded(load(p), load(p + LANES))); }

template <>
inline void pack<Paired>(const float* row, int64_t count, bf16* out) {
    int64_t whole = count / CHUNK * CHUNK;
    for (int64_t i = 0; i < whole; i += CHUNK) round_chunk(row + i, out + i);
    if (whole == count) return;
    float rest[CHUNK] = {};
    std::memcpy(rest, row + whole, size_t(count - whole) * 4);
    round_chunk(rest, out + whole);
}

}  // namespace MOESAIC_ISA
