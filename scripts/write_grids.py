"""Writes the grids of GGUF's IQ types for the kernels, from the library `gguf`.

`python -m scripts.write_grids` writes two files. With --check it compares them with the library instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import quants

ROOT = Path(__file__).resolve().parent.parent / "src/moesaic/kernels"
GRIDS = {
    "IQ1": quants.IQ1_S,
    "IQ2_XXS": quants.IQ2_XXS,
    "IQ2_XS": quants.IQ2_XS,
    "IQ2_S": quants.IQ2_S,
    "IQ3_XXS": quants.IQ3_XXS,
    "IQ3_S": quants.IQ3_S,
}
"""Name of a grid -> the library's class that has it. IQ1_S and IQ1_M have the same."""
SCRIPT = "python -m scripts.write_grids"


def pack_entries(name: str) -> list[int]:
    """Each entry as an integer: the index of number i among the grid's values, in bits 2i or 3i on."""
    kind = GRIDS[name]
    kind.init_grid()
    numbers = np.asarray(kind.grid).reshape(kind.grid_shape)
    indexes = np.searchsorted(np.array(kind.grid_map), numbers)
    bits = 2 if len(kind.grid_map) <= 4 else 3
    return [int(entry) for entry in (indexes << bits * np.arange(kind.grid_shape[1])).sum(axis=1)]


def format_lines(words: Sequence[str], indent: str, separator: str, width: int) -> str:
    """Lines of at most `width` characters with the words."""
    some = (width - len(indent)) // (len(words[0]) + len(separator))
    lines = [words[i : i + some] for i in range(0, len(words), some)]
    return "\n".join(indent + separator.join(line) + separator.rstrip() for line in lines)


def format_header() -> str:
    """csrc/grids.h."""
    parts = []
    for name, kind in GRIDS.items():
        words = [f"0x{entry:04x}" for entry in pack_entries(name)]
        values = ", ".join(str(8 * value if name == "IQ1" else value) for value in kind.grid_map)
        size, count = kind.grid_shape
        title = name.title().replace("_", "")
        lines = format_lines(words, "    ", ", ", 125)
        parts.append(
            f"inline constexpr uint16_t kPacked{title}[{size}] = {{\n{lines}\n}};\n"
            f"inline constexpr Grid<{count}, {size}> k{title}Grid(kPacked{title}, {{{values}}});\n"
        )
    return (
        f"// The grids of GGUF's IQ types. `{SCRIPT}` writes this file from the library `gguf`.\n"
        "//\n"
        "// An entry is some numbers of a block, without their signs. Those of IQ1 are times eight.\n"
        "#pragma once\n\n#include <cstdint>\n#include <type_traits>\n\nnamespace moesaic {\n\n"
        "// The entries as words whose bytes are the numbers.\n"
        "// packed: two or three bits for each number, an index into `values`.\n"
        "template <int kCount, int kSize>\nstruct Grid {\n"
        "    using Word = std::conditional_t<kCount == 8, uint64_t, uint32_t>;\n"
        "    Word entries[kSize] = {};\n"
        "    constexpr Grid(const uint16_t (&packed)[kSize], const int8_t (&values)[kCount == 8 ? 3 : 8]) {\n"
        "        constexpr int kBits = kCount == 8 ? 2 : 3;\n"
        "        for (int i = 0; i < kSize; i++) {\n"
        "            for (int j = 0; j < kCount; j++) {\n"
        "                int value = values[packed[i] >> kBits * j & ((1 << kBits) - 1)];\n"
        "                entries[i] |= Word(uint8_t(value)) << 8 * j;\n"
        "            }\n        }\n    }\n"
        "    const Word& operator[](uint32_t i) const { return entries[i]; }\n};\n\n"
        + "\n".join(parts)
        + "\n}  // namespace moesaic\n"
    )


def format_module() -> str:
    """kernels/grids.py."""
    parts = []
    for name, kind in GRIDS.items():
        digits = "".join(f"{entry:04x}" for entry in pack_entries(name))
        lines = "\n".join(f'        "{digits[i : i + 96]}"' for i in range(0, len(digits), 96))
        values = ", ".join(str(int(value)) for value in kind.grid_map)
        parts.append(f'    "{name}": _unpack_grid(\n        ({values}),\n{lines},\n    ),\n')
    return (
        f'"""The grids of GGUF\'s IQ types. `{SCRIPT}` writes this file from the library `gguf`."""\n\n'
        "from __future__ import annotations\n\nfrom collections.abc import Sequence\n\n"
        "import numpy as np\nimport numpy.typing as npt\n\n\n"
        "def _unpack_grid(values: Sequence[int], digits: str) -> npt.NDArray[np.int8]:\n"
        '    """The entries [n, 8] or [n, 4]. digits: four an entry, two or three bits a number."""\n'
        '    entries = np.frombuffer(bytes.fromhex(digits), ">u2").astype(np.int64)\n'
        "    bits, count = (2, 8) if len(values) == 3 else (3, 4)\n"
        "    indexes = entries[:, None] >> bits * np.arange(count) & (1 << bits) - 1\n"
        "    grid: npt.NDArray[np.int8] = np.array(values, dtype=np.int8)[indexes]\n    return grid\n\n\n"
        "GRIDS = {\n" + "".join(parts) + "}\n"
        '"""Name of a grid -> its entries, each some numbers of a block without their signs."""\n'
    )


def write_grids(arguments: Sequence[str]) -> int:
    """Writes the files, or compares them. Returns the exit status."""
    texts = {ROOT / "native/csrc/grids.h": format_header(), ROOT / "grids.py": format_module()}
    if "--check" not in arguments:
        for path, text in texts.items():
            path.write_text(text)
        return 0
    differing = [path for path, text in texts.items() if path.read_text() != text]
    for path in differing:
        print(f"{path}: differs from the library `gguf`; run: {SCRIPT}", file=sys.stderr)
    return len(differing) > 0


if __name__ == "__main__":
    sys.exit(write_grids(sys.argv[1:]))
