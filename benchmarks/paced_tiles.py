"""What is around the products of AMX tiles costs, on a CPU with AVX-512 and without AMX.

    python benchmarks/paced_tiles.py                          this tree
    python benchmarks/paced_tiles.py --before /tmp/before     and an earlier one, which takes turns with it
    python benchmarks/paced_tiles.py --rows 64 512 --shapes 1024:8192 --json

The code of `--kernels amx_bf16` and `amx_bf16x3` is compiled with other instructions (benchmarks/paced).
A tile load reads its lines, a tile store writes as many, and a product of two tiles takes the cycles of
TDPBF16PS. So it computes nothing, and shows what it waits for beside the products: lines that are not in L1,
copies, transposing. A CPU with AMX has other caches and latencies, so read the times as ratios.

`ns` is the time of a product of two tiles on one thread, the least of nine rounds, the median of the turns.
A product alone takes 16 cycles: 4 ns at 4 GHz. Shapes are numbers of a row, and columns of the matrix.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

TREE = Path(__file__).parents[1]
SOURCES = "src/moesaic/kernels/native/csrc"
FLAGS = [
    "-std=c++20",
    "-O3",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512bf16",
    "-mfma",
    "-ffp-contract=off",
    "-pthread",
]
MACROS = ["X86", "AVX512", "AVX512_BF16", "AMX_BF16", "EMULATE_AMX", "ISA=paced"]
PARTS = {"amx_bf16": 1, "amx_bf16x3": 3}


def compiled(tree: Path, kernels: str, folder: Path) -> Path:
    """A program that times the tiles of a tree."""
    sources = folder / "csrc"
    shutil.copytree(tree / SOURCES, sources)
    shutil.copy(TREE / "benchmarks/paced/paced_amx.h", sources / "amx_emulated.h")
    macros = [f"-DMOESAIC_{name}" for name in [*MACROS, f"AMX_PARTS={PARTS[kernels]}"]]
    program = folder / "tiles"
    files = [str(TREE / "benchmarks/paced/paced_tiles.cpp"), str(sources / "pool.cpp")]
    subprocess.run(["g++", *FLAGS, *macros, f"-I{sources}", *files, "-o", str(program)], check=True)
    return program


def measured(program: Path, rows: int, shape: str) -> float:
    """Nanoseconds of a product."""
    done = subprocess.run(
        [str(program), str(rows), *shape.split(":")], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--before", type=Path, help="an earlier tree of moesaic")
    parser.add_argument("--kernels", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 32, 64, 96, 128, 256, 512])
    parser.add_argument(
        "--shapes", nargs="+", default=["384:1024", "1024:8192", "4096:2048"], help="default: %(default)s"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print lines of JSON")
    args = parser.parse_args()
    trees = {"this tree": TREE} | ({"before": args.before} if args.before else {})
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kernels in args.kernels:
            programs = {
                name: compiled(tree, kernels, Path(folder, kernels, name)) for name, tree in trees.items()
            }
            for shape in args.shapes:
                for rows in args.rows:
                    turns = [
                        {name: measured(one, rows, shape) for name, one in programs.items()}
                        for _ in range(args.turns)
                    ]
                    ns = {name: statistics.median(turn[name] for turn in turns) for name in trees}
                    found.append({"kernels": kernels, "shape": shape, "rows": rows, "ns": ns})
                    if args.json:
                        print(json.dumps(found[-1]), flush=True)
    if args.json:
        return
    table = Table(
        "kernels",
        "shape",
        "rows",
        *(f"ns, {name}" for name in trees),
        *(["before / this"] if args.before else []),
    )
    for one in found:
        ns = one["ns"]
        ratio = [f"{ns['before'] / ns['this tree']:.2f}"] if args.before else []
        table.add_row(
            one["kernels"], one["shape"], str(one["rows"]), *(f"{ns[name]:.2f}" for name in trees), *ratio
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
