"""Semantic Parallelism (Sem-MoE), Table 2, by prices: `python benchmarks/papers/sem_moe.py`.

Paper: attention by tensor parallelism and experts by expert parallelism on 8 GPUs, 1 request/s. Table 2 has
the p99 of the time to the first token, and the median time to the last one. Sem-MoE's rows meet 37 and 43
more points of their experts on their own GPU than the vanilla placement's.

Here: one prompt on 8 H100s by their roofline, so nothing waits. A layer takes the projections and attention
of one rank, a reduce-scatter and an all-gather of the rows, the experts, and two all-to-alls of the (row,
expert) pairs that are not local. Vanilla has 1/8 of the pairs local. A GPU sends 400 GB/s, as in the paper.
The simulation has no collectives, so this is a sum and not a run.

Columns: "roofline" is that sum for vanilla, and "gain" what Sem-MoE's local pairs save of it. "paper" and
"paper_gain" are SGLang's time and Sem-MoE's saving in Table 2. What would have to be true for the paper's
times: "host_ms" for each layer beside the roofline; and for its gains: "exchange_ms" of each layer that the
two all-to-alls take in vanilla, if they save in proportion to the pairs that are no longer sent.
"""

from __future__ import annotations

import json
from typing import Any

from moesaic.cost import ops, roofline
from moesaic.cost.hardware import Level
from moesaic.cost.machines import MACHINES
from moesaic.cost.ranks import model_of_rank
from moesaic.cost.sizes import KNOWN, ModelSizes

RANKS = 8
SENDS = 400e9
"""Bytes/s that a GPU sends."""
LATENCY = 5e-6
"""Seconds of a collective beside its bytes. Assumed."""
LOCAL = {"deepseek-v2-lite": 0.37, "qwen3-30b-a3b": 0.43}
"""Model -> local pairs of Sem-MoE above vanilla's, as a share of all."""
TABLE = (
    ("deepseek-v2-lite", 256, 84.87, 75.63),
    ("deepseek-v2-lite", 512, 98.10, 88.69),
    ("deepseek-v2-lite", 1024, 111.19, 100.74),
    ("qwen3-30b-a3b", 256, 85.72, 74.46),
    ("qwen3-30b-a3b", 512, 104.76, 83.87),
    ("qwen3-30b-a3b", 1024, 107.73, 103.69),
)
"""(model, tokens of a prompt, p99 of the milliseconds to the first token with SGLang, with Sem-MoE)."""


def layer(model: ModelSizes, rows: int, local: float, level: Level) -> tuple[float, float]:
    """Seconds of a layer for a prompt of `rows` tokens, and those of them for the two all-to-alls."""
    rank = model_of_rank(model, RANKS, model.experts // RANKS)
    work = ops.query_key_value(rank, rows) + ops.output_projection(rank, rows)
    work += ops.causal_attention(rank, 1, rows, 2.0) + ops.gate(rank, rows / RANKS)
    work += ops.shared(rank, rows / RANKS) + ops.routed(rank, rows)
    row = model.hidden * 2
    gathered = 2 * (LATENCY + (RANKS - 1) / RANKS * rows * row / SENDS)
    pairs = rows / RANKS * model.top_k * (1 - local)
    exchanged = 2 * (LATENCY + pairs * row / SENDS)
    return roofline.seconds(work, level) + gathered + exchanged, exchanged


def line(name: str, rows: int, theirs: float, semantic: float) -> dict[str, Any]:
    """One line of the table."""
    model, level = KNOWN[name], MACHINES["h100"].fast
    vanilla, more = 1 / RANKS, LOCAL[name]
    whole, _ = layer(model, rows, vanilla, level)
    better, _ = layer(model, rows, vanilla + more, level)
    saved = 1e-3 * (theirs - semantic) / model.layers
    return {
        "model": name,
        "prompt": rows,
        "roofline_ms": round(1e3 * model.layers * whole, 2),
        "gain": round(1 - better / whole, 3),
        "paper_ms": theirs,
        "paper_gain": round(1 - semantic / theirs, 3),
        "host_ms": round(theirs / model.layers - 1e3 * whole, 2),
        "exchange_ms": round(1e3 * saved / (more / (1 - vanilla)), 2),
        "roofline_exchange_ms": round(1e3 * layer(model, rows, vanilla, level)[1], 3),
    }


def main() -> None:
    for row in TABLE:
        print(json.dumps(line(*row)), flush=True)


if __name__ == "__main__":
    main()
