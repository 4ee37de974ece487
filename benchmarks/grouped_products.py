"""How fast the routed experts' grouped products in Triton are, beside those of libraries.

    python benchmarks/grouped_products.py                                 Qwen3-30B-A3B's experts, on a GPU
    python benchmarks/grouped_products.py --products torch quack flashinfer --json
    TRITON_INTERPRET=1 python benchmarks/grouped_products.py --device cpu --experts 4 --top-k 2 \\
        --hidden 64 --width 32 --tokens 1 8 --repeats 1     without a GPU: shows only that it works

Experts in bf16, random weights and routing. `triton` is what `--kernels triton` computes. The others compute
the same with another grouped product: `torch` is torch.nn.functional.grouped_mm, `flashinfer` (package
flashinfer-python) and `quack` (quack-kernels) those of these libraries. `module:function` is any function of
rows [p, k] in the order of their experts, weights [e, n, k] and ends [e] int32, where each expert's rows end.
It returns [p, n].

Each call computes some layers, one after the other, so no weights stay in a GPU's cache. On a GPU it is
recorded as a CUDA graph, as decode steps are. Where that says no, the product waits for the GPU, and plain
calls are timed. `us` is of one layer, the median of the rounds; the products take turns. GB/s counts the
weights of the chosen experts, once. `alone` says whether the first token has the same bits in a batch of its
own. The difference is from float32 products, as a part of the largest number. Exit code 1: it is too large.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import grouped_mm, pad, silu

from moesaic.core.errors import ConfigError
from moesaic.kernels import table
from moesaic.kernels.table import REFERENCE, Experts, Kernels
from moesaic.kernels.weights import ExpertWeights

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LARGEST = 2**-5
"""Allowed difference. Rows, and with some products results, are rounded to bf16."""


def of_torch(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """In bf16. Compute capabilities other than 9 and 10 read `ends` on the host, and loop over experts."""
    return grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def of_flashinfer(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """In float32, from compute capability 8.0 on."""
    from flashinfer.grouped_mm import grouped_mm_bf16

    product: torch.Tensor = grouped_mm_bf16(rows, weights, pad(ends, (1, 0)), out_dtype=torch.float32)
    return product


def of_quack(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """In float32. The first call of each shape times the tiles that it chooses from."""
    from quack.gemm_interface import gemm

    product: torch.Tensor = gemm(rows, weights.mT, out_dtype=torch.float32, cu_seqlens_m=pad(ends, (1, 0)))
    return product


PRODUCTS: dict[str, Product] = {"torch": of_torch, "flashinfer": of_flashinfer, "quack": of_quack}


class Stacked:
    """The experts of one layer, which lie together as libraries want them."""

    def __init__(self, experts: int, hidden: int, width: int, device: str) -> None:
        self.gate_up = torch.randn(experts, 2 * width, hidden, dtype=torch.bfloat16, device=device)
        self.down = torch.randn(experts, hidden, width, dtype=torch.bfloat16, device=device)
        self.gate_up *= hidden**-0.5
        self.down *= width**-0.5
        parts = self.gate_up[:, :width], self.gate_up[:, width:], self.down
        self.weights = ExpertWeights(*(tuple(part) for part in parts))
        self._ids = torch.arange(experts, device=device)

    def experts(self, product: Product, hidden: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """As `Kernels.experts` [n, k, h], with another grouped product. Nothing is read back."""
        from moesaic.gpu.triton.experts import group_pairs  # Triton is there, or `table.pick` has refused

        ids, (tokens, top_k), width = expert_ids.reshape(-1), expert_ids.shape, self.down.shape[2]
        order = group_pairs(ids, len(self.down))[0].long()
        ends = torch.searchsorted(ids[order], self._ids, right=True, out_int32=True)
        wide = product(hidden.bfloat16()[order // top_k], self.gate_up, ends)
        activated = (silu(wide[:, :width]) * wide[:, width:]).bfloat16()
        rows = hidden.new_empty(len(order), self.down.shape[1])
        rows.index_copy_(0, order, product(activated, self.down, ends).float())
        return rows.view(tokens, top_k, -1)


@dataclass(frozen=True)
class Batch:
    """The layers, and what each computes for some tokens."""

    layers: list[Stacked]
    hidden: torch.Tensor
    """[n, h] float32."""
    ids: list[torch.Tensor]
    """[n, k] int64 for each layer."""

    def all(self, name: str, kernels: Kernels) -> Callable[[], list[torch.Tensor]]:
        """One call of all layers."""
        return lambda: [
            self.layer(name, kernels, index, len(self.hidden)) for index in range(len(self.layers))
        ]

    def layer(self, name: str, kernels: Kernels, index: int, tokens: int) -> torch.Tensor:
        """[tokens, k, h] of the first tokens."""
        layer, hidden, ids = self.layers[index], self.hidden[:tokens], self.ids[index][:tokens]
        if name == "triton":
            return kernels.experts(layer.weights, hidden, ids)
        return layer.experts(product_of(name), hidden, ids)

    @property
    def numbers(self) -> tuple[int, int]:
        """Weights of the experts that are chosen, and multiplications, of a layer on average."""
        expert = 3 * self.layers[0].down[0].numel()
        chosen = sum(len(ids.unique()) for ids in self.ids) / len(self.ids)
        return int(expert * chosen), expert * self.ids[0].numel()


@dataclass(frozen=True)
class Found:
    """One product with one number of tokens."""

    tokens: int
    product: str
    microseconds: float
    gb_per_s: float
    tflops: float
    recorded: bool
    alone: bool
    difference: float


def product_of(name: str) -> Product:
    """Raises ConfigError for a name that is none."""
    if name in PRODUCTS:
        return PRODUCTS[name]
    module, colon, function = name.partition(":")
    try:
        found: Product = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"{', '.join(PRODUCTS)}, module:function" if not colon else f"one that exists ({error})"
        raise ConfigError.field("--products", name, problem) from None
    return found


def prepared(call: Callable[[], object], kernels: Kernels) -> tuple[Callable[[], object], bool]:
    """The call as it is timed, and whether it is a CUDA graph. It has run once before."""
    call()  # compiles, and chooses what it computes with
    if kernels.recorder is None:
        return call, False
    torch.cuda.set_sync_debug_mode("error")  # a graph whose recording fails may spoil what comes later
    try:
        call()
    except RuntimeError:
        return call, False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return kernels.recorder()(call).run, True


def seconds(call: Callable[[], object], repeats: int, device: str) -> float:
    """Of one call, the mean of some without a pause."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - began) / repeats


def compared(batch: Batch, given: argparse.Namespace, kernels: Kernels) -> list[Found]:
    """All products with the tokens of `batch`."""
    names, tokens = ["triton", *given.products], len(batch.hidden)
    calls = {name: prepared(batch.all(name, kernels), kernels) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name, (call, _) in calls.items():
            times[name].append(seconds(call, given.repeats, given.device) / len(batch.layers))
    wanted = exact(REFERENCE.experts, batch)
    numbers, products = batch.numbers
    found = []
    for name in names:
        middle, whole = statistics.median(times[name]), batch.layer(name, kernels, 0, tokens)
        difference = float((whole - wanted).abs().max() / wanted.abs().max())
        rates = 2 * numbers / middle / 1e9, 2 * products / middle / 1e12
        alone = whole[:1].equal(batch.layer(name, kernels, 0, 1))
        found.append(Found(tokens, name, 1e6 * middle, *rates, calls[name][1], alone, difference))
    return found


def exact(experts: Experts, batch: Batch) -> torch.Tensor:
    """[n, k, h] of the first layer in float32."""
    weights = batch.layers[0].weights
    wide = weights.with_parts(
        [tuple(one.float() for one in part if one is not None) for part in weights.parts]
    )
    return experts(wide, batch.hidden, batch.ids[0])


def show(found: Sequence[Found], title: str, console: Console) -> None:
    shown = Table(title=title)
    for column in ("tokens", "product", "us", "times", "GB/s", "TFLOP/s", "graph", "alone", "difference"):
        shown.add_column(column, justify="right")
    first = {one.tokens: one.microseconds for one in found if one.product == "triton"}
    for one in found:
        shown.add_row(
            str(one.tokens),
            one.product,
            f"{one.microseconds:.1f}",
            f"{first[one.tokens] / one.microseconds:.2f}",
            f"{one.gb_per_s:.0f}",
            f"{one.tflops:.1f}",
            "yes" if one.recorded else "no",
            "same" if one.alone else "others",
            f"{one.difference:.1e}",
        )
    console.print(shown)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--products", nargs="+", default=["torch"], help=", ".join((*PRODUCTS, "module:function"))
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 4096])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=20, help="calls of a round without a pause")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device: got 'cuda'; allowed: cpu (torch {torch.__version__} sees no GPU)")
    for size in ("hidden", "width"):
        if vars(given)[size] % 8:
            parser.error(
                f"--{size}: got {vars(given)[size]}; allowed: multiples of 8, so rows begin at 16 bytes"
            )
    if given.top_k > given.experts:
        parser.error(f"--top-k: got {given.top_k}; allowed: at most --experts ({given.experts})")
    return given


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    given = parse(arguments)
    try:
        kernels = table.pick(given.device, "triton")
        for name in given.products:
            product_of(name)
    except ConfigError as error:
        print(f"grouped_products.py: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    shape = (given.experts, given.hidden, given.width)
    layers = [Stacked(*shape, given.device) for _ in range(given.layers)]
    found: list[Found] = []
    for tokens in given.tokens:
        hidden = torch.randn(tokens, given.hidden, device=given.device)
        scores = torch.rand(given.layers, tokens, given.experts, device=given.device)
        batch = Batch(layers, hidden, list(scores.topk(given.top_k).indices))
        found += compared(batch, given, kernels)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    if given.json:
        rows = [asdict(one) for one in found]
        json.dump({"device": name, "torch": torch.__version__, **vars(given), "found": rows}, sys.stdout)
    else:
        title = f"{name}, torch {torch.__version__}: {given.experts} experts, {given.hidden} x {given.width}"
        show(found, title, Console(width=110))
    wrong = {one.product for one in found if not one.difference <= LARGEST}
    for product in sorted(wrong):
        print(f"grouped_products.py: {product}: the difference is above {LARGEST}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
