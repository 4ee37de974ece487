// How a KV cache stores a row, the key or the value of one token and head: as float32, as bf16, or as int8. In int8
// the numbers are multiples, -127 to 127, of a float32 scale that is stored after them.
#pragma once

#include "int8.h"
#include "rows.h"

namespace MOESAIC_ISA {

// Elements of T from one row to the next.
template <class T>
constexpr int64_t stored(int64_t width) {
    return width + (sizeof(T) == 1 ? 4 : 0);
}

inline float scale_of(const int8_t* row, int64_t width) {
    float scale;
    std::memcpy(&scale, row + width, 4);
    return scale;
}

template <class T>
inline void keep(const float* row, int64_t width, T* out) {
    for (int64_t i = 0; i < width; i++) narrow(row[i], out + i);
}
inline void keep(const float* row, int64_t width, int8_t* out) {
    float scale = scale_for(peak_of(row, width));
    std::memset(out, 0, size_t(width));
    std::memcpy(out + width, &scale, 4);
    if (!(scale > 0)) return;
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t count = width - i < LANES ? width - i : LANES;
        float lanes[LANES];
        store(lanes, nearest(divide(load_some(row + i, count), set1(scale))));
        for (int64_t c = 0; c < count; c++) out[i + c] = int8_t(lanes[c]);
    }
}

template <class T>
void store_of(const moesaic::Store& job) {
    parallel_rows(job.n, job.heads * job.width, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            const float* from = job.rows + r * job.heads * job.width;
            T* to = static_cast<T*>(job.cache) + job.slots[r] * job.heads * stored<T>(job.width);
            for (int64_t head = 0; head < job.heads; head++) {
                keep(from + head * job.width, job.width, to + head * stored<T>(job.width));
            }
        }
    });
}

inline void store_rows(const moesaic::Store& job) {
    if (job.item == 1) return store_of<int8_t>(job);
    job.item == 2 ? store_of<bf16>(job) : store_of<float>(job);
}

}  // namespace MOESAIC_ISA
