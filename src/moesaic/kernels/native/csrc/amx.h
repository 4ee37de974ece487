// Tile registers of AMX: their shapes, and the instructions or their emulation.
#pragma once

#include <cstdint>

namespace MOESAIC_ISA {

struct alignas(64) Shapes {  // shapes of the eight tile registers, in the format of the instruction
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

}  // namespace MOESAIC_ISA

#if defined(MOESAIC_EMULATE_AMX)
#include "amx_emulated.h"
#else
#include "amx_instructions.h"
#endif
