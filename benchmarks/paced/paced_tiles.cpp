// Times rows [n, k] times weights [total, k] in tiles on one thread: paced_tiles N K TOTAL. Prints the least nanoseconds
// of all rounds for each product of two tiles. benchmarks/paced_tiles.py compiles it.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "experts.h"

using namespace MOESAIC_ISA;

int main(int, char** arguments) {
    int64_t n = std::atol(arguments[1]), k = std::atol(arguments[2]), total = std::atol(arguments[3]);
    int64_t width = padded(k), panels = in_sets<Tiled>(n) / SIDE;
    size_t bytes = size_t(total * k) * sizeof(Tiled), packed = size_t(panels * SIDE * width) * sizeof(Parts);
    auto* weights = static_cast<Tiled*>(std::aligned_alloc(4096, bytes));
    auto* rows = static_cast<Parts*>(std::aligned_alloc(4096, packed));
    std::memset(static_cast<void*>(weights), 0, bytes), std::memset(static_cast<void*>(rows), 0, packed);
    std::vector<float> out(size_t(n * COLUMNS));
    double least = 0;
    for (int round = 0; round < 9; round++) {
        auto begin = std::chrono::steady_clock::now();
        for (int64_t column = 0; column < total; column += COLUMNS) {
            const Tiled* strip = weights + column * k;
            for (int64_t row = 0; row < n; row += PANEL) {
                const Tiled* then = row + PANEL >= n && column + COLUMNS < total ? strip + COLUMNS * k : nullptr;
                multiply<Tiled>(rows + row * width, std::min(PANEL, n - row), strip, k, COLUMNS, k,
                                out.data() + row * COLUMNS, COLUMNS, then);
            }
        }
        double taken = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count();
        least = round == 0 ? taken : std::min(least, taken);
    }
    std::printf("%.3f\n", least / double(total / SIDE * panels * (width / CHUNK) * PARTS));
}
