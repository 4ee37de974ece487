#include "isa.h"

namespace portable {
extern const moesaic::Table kTable;
}
#if defined(MOESAIC_X86)
namespace avx2 {
extern const moesaic::Table kTable;
}
namespace avx512 {
extern const moesaic::Table kTable;
}
#endif

namespace moesaic {

std::vector<const Table*> available() {
    std::vector<const Table*> tables;
#if defined(MOESAIC_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) tables.push_back(&avx512::kTable);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2::kTable);
#endif
    tables.push_back(&portable::kTable);
    return tables;
}

const Table* find(const std::string& name) {
    for (const Table* table : available()) {
        if (name == table->name) return table;
    }
    return nullptr;
}

}  // namespace moesaic
