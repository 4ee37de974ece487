// Compiled once per instruction set: MOESAIC_ISA names the namespace and the table.
#include "attention.h"
#include "experts.h"
#include "heads.h"

namespace MOESAIC_ISA {

#define MOESAIC_TEXT2(x) #x
#define MOESAIC_TEXT(x) MOESAIC_TEXT2(x)

extern const moesaic::Table kTable;
const moesaic::Table kTable = {
    MOESAIC_TEXT(MOESAIC_ISA),
    linear,
    head_linear,
    experts,
    gated_mlp,
    attention,
    store_rows,
    norm,
    rope,
    gate,
    merge,
    embed,
    join_rows,
};

}  // namespace MOESAIC_ISA
