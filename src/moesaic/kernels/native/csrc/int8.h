// The scale of numbers that are stored as int8: multiples, -127 to 127, of it.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace MOESAIC_ISA {

constexpr float kLeastPeak = 127 * 0x1p-126f;  // below it the scale would lose digits, so the numbers are stored as 0

// The largest magnitude of some numbers; not finite if one number is not finite. As integers the bits have the same order.
inline float peak_of(const float* row, int64_t width) {
    uint32_t most = 0;
    for (int64_t i = 0; i < width; i++) {
        uint32_t bits;
        std::memcpy(&bits, row + i, 4);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float peak;
    std::memcpy(&peak, &most, 4);
    return peak;
}

inline float scale_for(float peak) {
    if (peak < kLeastPeak) return 0;
    return peak <= std::numeric_limits<float>::max() ? peak / 127 : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace MOESAIC_ISA
