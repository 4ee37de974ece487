"""Times the experts' kernel with weights of each stored type beside bf16, in turn, on random weights.

    python benchmarks/quantized_experts.py                    experts of Qwen3-30B-A3B, all types
    python benchmarks/quantized_experts.py --kernels avx2 --tokens 1 4
    python benchmarks/quantized_experts.py --model /tmp/qwen-gguf/qwen-q8_0.gguf

Prints milliseconds for each number of tokens, and how many times faster than bf16 that is. Types in integers
are timed twice, the second time with integer products (avx512_int8 beside avx512). Weights come from memory:
64 experts, of which each token chooses 8 at random. With --model it prints instead how many greedy tokens of
a quantised checkpoint are the same with both kinds of products, before the first that is another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from moesaic.core.weight_types import (
    COMPRESSED_DTYPE,
    NATIVE_DTYPES,
    QUANTIZATIONS,
    is_integer,
)
from moesaic.kernels import compressed_layout, quantized_layout
from moesaic.kernels.native import _native, plain

BF16 = "bfloat16"
INTEGER = ", integers"
"""After the name of a type: with integer products."""


def matrix(rng: np.random.Generator, dtype: str, rows: int, columns: int) -> npt.NDArray[Any]:
    """One matrix as the kernels read it."""
    wide = 0.02 * rng.standard_normal((rows, columns), dtype=np.float32)
    if dtype == "float32":
        return wide
    if dtype in (BF16, COMPRESSED_DTYPE):
        bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
        return bits if dtype == BF16 else compressed_layout.compress(bits)
    kind = QUANTIZATIONS[dtype]
    codes = rng.integers(0, 0x7F if kind.bits == 8 else 16, (rows, columns)).astype(np.uint8)
    scales = rng.random((rows, -(-columns // kind.group)), dtype=np.float32)
    return quantized_layout.pack(dtype, codes, scales, -scales if kind.offset else None)


class Experts:
    """The experts of one layer in one type."""

    def __init__(self, rng: np.random.Generator, dtype: str, experts: int, hidden: int, width: int) -> None:
        shapes = (width, hidden), (width, hidden), (hidden, width)
        parts = [[matrix(rng, dtype, *shape) for _ in range(experts)] for shape in shapes]
        self._parts, self._size, self._stored = parts, (hidden, width), NATIVE_DTYPES.index(dtype)
        self._table = np.array([[one.ctypes.data for one in part] for part in parts], dtype=np.uint64)

    def seconds(self, kernels: str, rows: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> float:
        """Computes rows [n, h] by their experts [n, k] once."""
        plain.use(kernels)
        pairs = np.arange(ids.size)
        out = np.empty((ids.size, rows.shape[1]), dtype=np.float32)
        part = (rows, pairs // ids.shape[1], ids.reshape(-1), out, pairs)
        began = time.perf_counter()
        plain.experts(self._table, self._size, self._stored, [part])
        return time.perf_counter() - began


def same_tokens(model: str, kernels: tuple[str, str], threads: int, answers: int, length: int) -> str:
    """How many greedy tokens of random prompts are the same with both kernels, until they differ."""
    from moesaic import LLM, SamplingParams

    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 256, 64).tolist() for _ in range(answers)]
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    found = []
    for name in kernels:
        results = LLM(model, kernels=name, threads=threads).generate(prompts, params)
        found.append([list(result.outputs[0].token_ids) for result in results])
    kept = [
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), length)
        for pair in zip(*found, strict=True)
    ]
    whole = sum(one == length for one in kept)
    return (
        f"{sum(kept)} of {answers * length} tokens are the same, and {whole} of {answers} answers as a whole"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=[*NATIVE_DTYPES], choices=NATIVE_DTYPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernels", help="an instruction set; the one that moesaic chooses if not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="a quantised checkpoint, whose greedy tokens are compared")
    parser.add_argument("--answers", type=int, default=20, help="with --model")
    parser.add_argument("--length", type=int, default=128, help="tokens of an answer, with --model")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Runs the benchmark."""
    given = parse()
    name = plain.use(given.kernels)
    if given.model:
        kernels = (name, f"{name}_int8")
        print(
            " and ".join(kernels),
            same_tokens(given.model, kernels, given.threads, given.answers, given.length),
            sep=": ",
        )
        return 0
    plain.set_threads(given.threads, False)
    rng = np.random.default_rng(0)
    types = dict.fromkeys((BF16, *given.types))
    stored = {dtype: Experts(rng, dtype, given.experts, given.hidden, given.width) for dtype in types}
    made = {}
    for dtype, experts in stored.items():
        made[dtype] = (name, experts)
        if is_integer(dtype) and f"{name}_int8" in _native.instruction_sets():
            made[dtype + INTEGER] = (f"{name}_int8", experts)
    found: dict[int, dict[str, float]] = {}
    for tokens in given.tokens:
        times: dict[str, list[float]] = {form: [] for form in made}
        for _ in range(given.rounds):
            rows = rng.standard_normal((tokens, given.hidden), dtype=np.float32)
            ids = np.array([rng.permutation(given.experts)[: given.top_k] for _ in range(tokens)])
            for form, (kernels_of, experts) in made.items():
                times[form].append(experts.seconds(kernels_of, rows, ids))
        found[tokens] = {form: median(each) for form, each in times.items()}
    if given.json:
        json.dump({"kernels": name, "threads": given.threads, "seconds": found}, sys.stdout)
        return 0
    table = Table("type", *(f"{tokens} tokens" for tokens in found), title=f"{name}, {given.threads} threads")
    for form in made:
        cells = [f"{one[form] * 1e3:.2f} ms  {one[BF16] / one[form]:.2f}x" for one in found.values()]
        table.add_row(form, *cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
