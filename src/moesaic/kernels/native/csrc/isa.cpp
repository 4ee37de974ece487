#include "isa.h"

#if defined(MOESAIC_X86)
#include <cpuid.h>
#endif
#if defined(MOESAIC_HAS_AMX_BF16) || defined(MOESAIC_HAS_AMX_INT8)
#define MOESAIC_HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
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
#if defined(MOESAIC_X86)
namespace avx2_int8 {
extern const moesaic::IntegerProducts kProducts;
}
#endif
#if defined(MOESAIC_HAS_AVX512_INT8)
namespace avx512_int8 {
extern const moesaic::IntegerProducts kProducts;
}
namespace avx512vl_vnni_int8 {
extern const moesaic::IntegerProducts kProducts;
}
#endif
#if defined(MOESAIC_HAS_AVX_VNNI)
namespace avx2_vnni_int8 {
extern const moesaic::IntegerProducts kProducts;
}
#endif
#if defined(MOESAIC_HAS_AMX_INT8)
namespace amx_int8 {
extern const moesaic::IntegerProducts kProducts;
}
#endif
#if defined(MOESAIC_HAS_AVX512_BF16)
namespace avx512_bf16 {
extern const moesaic::Products kProducts;
}
#endif
#if defined(MOESAIC_HAS_AMX_BF16)
namespace amx_bf16 {
extern const moesaic::Products kProducts;
}
namespace amx_bf16x2 {
extern const moesaic::Products kProducts;
}
namespace amx_bf16x3 {
extern const moesaic::Products kProducts;
}
#endif

namespace moesaic {
namespace {

#if defined(MOESAIC_X86)
// `table` with integer products for weights that are integers: of experts and dense MLPs, whose matrices must all be
// so, and of each matrix of a projection.
template <const Table& kTable, const IntegerProducts& kIntegers>
Table with_integers(const char* name) {
    Table table = kTable;
    table.name = name;
    table.peak = kIntegers.peak;
    table.experts = [](const Experts& job) {
        bool all = is_integer(job.stored) && is_integer(job.down_stored);
        return all ? kIntegers.experts(job) : kTable.experts(job);
    };
    table.gated_mlp = [](const GatedMlp& job) {
        bool all = is_integer(job.stored) && is_integer(job.down_stored);
        all ? kIntegers.gated_mlp(job) : kTable.gated_mlp(job);
    };
    table.linear = [](const Linear& job) {
        Linear integers{job.rows, job.n, job.k, {}, 0}, others = integers;
        for (int64_t p = 0; p < job.num_parts; p++) {
            Linear& mine = is_integer(job.parts[p].stored) ? integers : others;
            mine.parts[mine.num_parts++] = job.parts[p];
        }
        if (integers.num_parts > 0) kIntegers.linear(integers);
        if (others.num_parts > 0) kTable.linear(others);
    };
    return table;
}

// Bit `bit` of a register (0 to 3: EAX to EDX) of CPUID leaf 7.
bool has_bit(unsigned subleaf, int number, int bit) {
    unsigned of[4] = {};
    return __get_cpuid_count(7, subleaf, &of[0], &of[1], &of[2], &of[3]) && (of[number] >> bit & 1);
}

const Table kAvx2Int8 = with_integers<avx2::kTable, avx2_int8::kProducts>("avx2_int8");
#if defined(MOESAIC_HAS_AVX512_INT8)
const Table kAvx512Int8 = with_integers<avx512::kTable, avx512_int8::kProducts>("avx512_int8");
const Table kAvx512VlInt8 = with_integers<avx2::kTable, avx512vl_vnni_int8::kProducts>("avx2_vnni_int8");
bool multiplies_int8() { return has_bit(0, 2, 11); }
#endif
#if defined(MOESAIC_HAS_AVX_VNNI)
const Table kAvx2VnniInt8 = with_integers<avx2::kTable, avx2_vnni_int8::kProducts>("avx2_vnni_int8");
#endif
#if defined(MOESAIC_HAS_AMX_INT8)
const Table kAmxInt8 = with_integers<avx512::kTable, amx_int8::kProducts>("amx_int8");
#endif

// The kernels whose VPDPBUSD has 256 bits: of AVX-VNNI if the CPU has it, else those of AVX-512. Null without both.
const Table* vnni_of_256() {
#if defined(MOESAIC_HAS_AVX_VNNI)
    if (has_bit(1, 0, 4)) return &kAvx2VnniInt8;
#endif
#if defined(MOESAIC_HAS_AVX512_INT8)
    if (multiplies_int8() && __builtin_cpu_supports("avx512vl")) return &kAvx512VlInt8;
#endif
    return nullptr;
}
#endif

#if defined(MOESAIC_HAS_AVX512_BF16)
// avx512 with other products. Attention over a cache that is not bf16 stays, and all of it where they have none.
template <const Products& kProducts>
Table beside_avx512() {
    Table table = avx512::kTable;
    static_cast<Products&>(table) = kProducts;
    table.attention = [](const Attention& job) {
        bool rounds = job.item == 2 && kProducts.attention != nullptr;
        rounds ? kProducts.attention(job) : avx512::kTable.attention(job);
    };
    return table;
}

const Table kAvx512Bf16 = beside_avx512<avx512_bf16::kProducts>();
#if defined(MOESAIC_HAS_AMX_BF16)
const Table kTiled[] = {beside_avx512<amx_bf16::kProducts>(), beside_avx512<amx_bf16x2::kProducts>(),
                        beside_avx512<amx_bf16x3::kProducts>()};
#endif

// Compilers before GCC 11 have no name for it.
bool multiplies_bf16() { return has_bit(1, 0, 5); }
#endif

#if defined(MOESAIC_HAS_TILES)
constexpr int kTilesOfBf16 = 22, kTilesOfInt8 = 25;  // bits of EDX
#if defined(MOESAIC_EMULATE_AMX)
// Only tests ask for emulated tiles, in the environment: processes that they start see it too.
bool has_tiles(int) { return std::getenv("_MOESAIC_EMULATE_AMX") != nullptr; }
bool gives_tiles() { return true; }
#else
constexpr int kTileData = 18;  // number of the state component
constexpr int kSupported = 0x1021, kRequest = 0x1023;  // ARCH_GET_XCOMP_SUPP, ARCH_REQ_XCOMP_PERM

// Whether the CPU has tiles (EDX, bit 24) and their products, and whether the kernel saves tile registers.
bool has_tiles(int products) {
    unsigned long states = 0;
    return has_bit(0, 3, products) && has_bit(0, 3, 24) && syscall(SYS_arch_prctl, kSupported, &states) == 0 &&
           (states >> kTileData & 1);
}
bool gives_tiles() { return syscall(SYS_arch_prctl, kRequest, kTileData) == 0; }
#endif
#endif

}  // namespace

std::vector<const Table*> available() {
    std::vector<const Table*> tables;
#if defined(MOESAIC_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) tables.push_back(&avx512::kTable);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2::kTable);
#endif
    tables.push_back(&portable::kTable);
#if defined(MOESAIC_HAS_AVX512_BF16)
    bool rounds = tables.front() == &avx512::kTable && multiplies_bf16();
    if (rounds) tables.push_back(&kAvx512Bf16);
#endif
#if defined(MOESAIC_HAS_AMX_BF16)
    for (const Table& table : kTiled) {
        if (rounds && has_tiles(kTilesOfBf16)) tables.push_back(&table);
    }
#endif
#if defined(MOESAIC_HAS_AVX512_INT8)
    bool integers = tables.front() == &avx512::kTable && multiplies_int8();
    if (integers) tables.push_back(&kAvx512Int8);
#if defined(MOESAIC_HAS_AMX_INT8)
    if (integers && has_tiles(kTilesOfInt8)) tables.push_back(&kAmxInt8);
#endif
#endif
#if defined(MOESAIC_X86)
    if (tables.front() != &portable::kTable) {
        if (const Table* table = vnni_of_256()) tables.push_back(table);
        tables.push_back(&kAvx2Int8);
    }
#endif
    return tables;
}

const Table* find(const std::string& name) {
    for (const Table* table : available()) {
        if (name == table->name) return table;
    }
    return nullptr;
}

bool permitted([[maybe_unused]] const Table* table) {
#if defined(MOESAIC_HAS_AMX_INT8)
    if (table == &kAmxInt8) return gives_tiles();
#endif
#if defined(MOESAIC_HAS_AMX_BF16)
    for (const Table& tiled : kTiled) {
        if (table == &tiled) return gives_tiles();
    }
#endif
    return true;
}

}  // namespace moesaic
