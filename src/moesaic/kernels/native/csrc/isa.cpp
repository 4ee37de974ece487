#include "isa.h"

#if defined(MOESAIC_HAS_AVX512_BF16)
#include <cpuid.h>
#endif

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
#if defined(MOESAIC_HAS_AVX512_BF16)
namespace avx512_bf16 {
extern const moesaic::Table kTable;
}
#endif

namespace moesaic {

#if defined(MOESAIC_HAS_AVX512_BF16)
static bool multiplies_bf16() {  // CPUID leaf 7, subleaf 1, EAX bit 5; compilers know no name for it before GCC 11
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif

std::vector<const Table*> available() {
    std::vector<const Table*> tables;
#if defined(MOESAIC_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) tables.push_back(&avx512::kTable);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2::kTable);
#endif
    tables.push_back(&portable::kTable);
#if defined(MOESAIC_HAS_AVX512_BF16)
    if (tables.front() == &avx512::kTable && multiplies_bf16()) tables.push_back(&avx512_bf16::kTable);
#endif
    return tables;
}

const Table* find(const std::string& name) {
    for (const Table* table : available()) {
        if (name == table->name) return table;
    }
    return nullptr;
}

}  // namespace moesaic
