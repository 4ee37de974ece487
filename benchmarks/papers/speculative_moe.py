"""Speculative MoE, figures 4 to 7: `python benchmarks/papers/speculative_moe.py`.

Paper: attention by tensor parallelism and experts by expert parallelism on 8 GPUs. DeepSpeed-MoE (DS-MoE) has
an all-reduce, two all-to-alls and an all-gather in each layer. s-MoE puts rows on the rank of their predicted
experts (shuffled reduce-scatter and all-gather; s-TS), and experts of the same tokens together (s-EG). An
objective is 5 times the latency under the lightest load. The GPUs are not named. Server A has 900 GB/s
between GPUs, server B a PCIe switch (63 GB/s) for each half of the GPUs, and 20.8 GB/s between the halves.

    throughput  figure 4: throughput under objectives, by prices
    layer       figure 5: the two all-to-alls of a layer by local activation rate, by prices
    solvers     figure 6: local activation rate and balance of our solvers on 2, 4 and 8 ranks
    sglang      figure 7: as `throughput`, beside experts that are split by tensor parallelism (SGLang)

Prices (prices.py): a step is one layer's work on an H100 by roofline, and its collectives, times the layers.
Both servers have the same GPU here, so they differ by their links alone. The simulation has no tensor
parallelism, so nothing waits and a batch is one step: whole prompts for the time to the first token (TTFT),
one token of each request for the time per token (TPOT). The batch is the largest one within the objective.
The time between tokens at p90 (TBT) is that of a step with prompts beside the answers, if a tenth of the
steps have some. How many tokens of prompts is not stated, so --beside has several. The lightest load has one
answer and no prompt.

Local activation rates: of our solvers on made-up routing of 64 experts (routed.py), since no routing of
DeepSeek-V2's 160 experts is public. s-TS has consecutive experts, s-TS + s-EG the solver speculative.
For Mixtral's 8 experts there is no fitted routing, so its rates are the paper's (figure 5).

Columns: "ratio" to the baseline of the same step; "links" is the baseline's share of a step in collectives.
"links_needed" is the share that they would have to take for the stated ratio at equal batches, if they save
in proportion to the bytes of their rows; above 1 they cannot give it alone. "by_figure_1" is the ratio if the
all-to-alls take 47.1 % of the baseline's step, as figure 1 states for DeepSeek-V2 on server A.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product

import routed
from figures import Figure, Row, main
from prices import RANKS, Form, Layer, Links, answers, layer, prompts

from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import PUBLISHED_MODELS, ModelSizes

LEVEL = MACHINES["h100"].fast
SERVERS = {"A": Links(900e9), "B": Links(63.01e9, 20.8e9)}
PROMPT = 1024
"""Tokens of a prompt. Assumed: the paper has lengths of two traces."""
OBJECTIVE = 5
MOST = 4096
"""Maximum requests of a batch."""
FIGURE_1 = 0.471
MODELS = ("deepseek-v2", "mixtral-8x7b")
STATED = {
    ("deepseek-v2", "A"): {"ttft": 1.72, "tpot": 1.15, "tbt": 1.49},
    ("deepseek-v2", "B"): {"ttft": 1.89, "tpot": 2.35, "tbt": 4.3},
    ("mixtral-8x7b", "A"): {"ttft": 1.72, "tpot": 1.72, "tbt": 1.49},
    ("mixtral-8x7b", "B"): {"ttft": 2.34, "tpot": 2.70, "tbt": 2.92},
}
"""(model, server) -> times DS-MoE's throughput, by latency (section 5.4)."""
SGLANG = {"ttft": 1.68, "tpot": 1.96, "tbt": 1.97}
"""Times SGLang's throughput on server A (section 5.6)."""
LAYERS = {"deepseek-v2": (0.12, 0.54, 0.404), "mixtral-8x7b": (0.21, 0.82, 0.688)}
"""Model -> DS-MoE's and s-MoE's rates, and the latency saved, in figure 5."""
ROWS = 8192
"""Rows of `layer`: one of the four batches of figure 1."""


def one_layer(
    model: ModelSizes, what: str, count: int, links: Links, form: Form, local: float, beside: int = 0
) -> tuple[Layer, int]:
    """A layer of a step for `count` requests, and the tokens of the step. beside: tokens of a prompt."""
    if what == "ttft":
        rows = count * PROMPT
        return layer(model, rows, prompts(model, count, PROMPT), LEVEL, links, form, local), rows
    attended = answers(model, count, PROMPT) + prompts(model, 1, beside)
    return layer(model, count + beside, attended, LEVEL, links, form, local), count


def best(
    model: ModelSizes, what: str, links: Links, form: Form, local: float, objective: float, beside: int = 0
) -> tuple[float, int]:
    """Tokens per second and requests of the largest batch whose layer takes at most `objective` seconds."""
    rate, found = 0.0, 0
    for count in range(1, MOST + 1):
        one, tokens = one_layer(model, what, count, links, form, local, beside)
        if one.whole > objective:
            break
        rate, found = tokens / (one.whole * model.layers), count
    return rate, found


def local_rates(model: str) -> dict[str, float]:
    """Local activation rates of DS-MoE, of s-TS, and of s-TS with s-EG."""
    if model == "mixtral-8x7b":
        return {"ds-moe": LAYERS[model][0], "s-TS + s-EG": LAYERS[model][1]}
    ours = routed.solved("speculative", 64, RANKS)
    return {
        "ds-moe": 1 / RANKS,
        "s-TS": routed.solved("vanilla", 64, RANKS)["token"],
        "s-TS + s-EG": ours["token"],
    }


def compared(
    name: str, server: str, base: Form, stated: dict[str, float], options: argparse.Namespace
) -> Iterator[Row]:
    """s-MoE beside a baseline."""
    model, links = PUBLISHED_MODELS[name], SERVERS[server]
    rates = local_rates(name)
    vanilla = rates.pop("ds-moe")
    cases = [(what, beside) for what in stated for beside in (options.beside if what == "tbt" else [0])]
    for (what, beside), (system, local) in product(cases, rates.items()):
        light, _ = one_layer(model, what, 1, links, base, vanilla)
        price = partial(best, model, what, links, objective=OBJECTIVE * light.whole, beside=beside)
        theirs, batch = price(form=base, local=vanilla)
        ours, larger = price(form="shuffled", local=local)
        before, _ = one_layer(model, what, batch or 1, links, base, vanilla, beside)
        after, _ = one_layer(model, what, batch or 1, links, "shuffled", local, beside)
        saved = 1 - after.links / before.links
        less = 1 - after.exchanges / before.exchanges if before.exchanges else 0.0
        gain = stated[what] if system == "s-TS + s-EG" else None
        yield {
            "model": name,
            "server": server,
            "latency": f"{what}, {beside} beside" if beside else what,
            "system": system,
            "local": local,
            "batch": batch,
            "batch_s-moe": larger,
            "ratio": round(ours / theirs, 2) if theirs else None,
            "stated": gain,
            "links": round(before.links / before.whole, 2),
            "links_saved": round(saved, 2),
            "links_needed": None if gain is None else round((1 - 1 / gain) / saved, 2),
            "by_figure_1": round(1 / (1 - FIGURE_1 * less), 2),
        }


def throughput(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 4."""
    for (name, server), stated in STATED.items():
        yield from compared(name, server, "ds-moe", stated, options)


def sglang(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 7."""
    yield from compared("deepseek-v2", "A", "tp", SGLANG, options)


def exchanges(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 5."""
    del options
    links = SERVERS["A"]
    for name, (before, after, stated) in LAYERS.items():
        model = PUBLISHED_MODELS[name]
        seconds = {
            local: 2 * links.exchange(ROWS, model.hidden * 2.0, model.top_k, local)
            for local in sorted({before, after, *(tenth / 10 for tenth in range(1, 11))})
        }
        by_bytes = (after - before) / (1 - before)
        for local, took in seconds.items():
            row = {"model": name, "local": local, "exchange_ms": 1e3 * took}
            row["saved"] = 1 - took / seconds[before]
            if local == after:
                row |= {"stated": stated, "by_bytes": by_bytes, "fixed_needed": 1 - stated / by_bytes}
            yield row


def solvers(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 6."""
    for ranks in (2, 4, 8):
        found = {name: routed.solved(name, 64, ranks) for name in options.solvers}
        others = [one for name, one in found.items() if name != "speculative"]
        for name, one in found.items():
            row = {
                "ranks": ranks,
                "solver": name,
                "local": one["token"],
                "max_over_mean": 1 / one["mean_over_max"],
                "seconds": one["seconds"],
            }
            if name == "speculative" and others:
                row["local_of_best"] = one["token"] / max(other["token"] for other in others)
                row["stated"] = 1.142 if ranks == RANKS else None
            yield row


FIGURES = {
    "throughput": Figure(
        "figure 4",
        throughput,
        "the column stated. s-TS gives 73 % and s-EG 27 % of the gain with DeepSeek-V2.",
        "Without a ratio no batch meets the objective with that prompt beside it. Launches and hosts are "
        "not modelled, so on server A collectives take a small part of a step. links_needed says which part "
        "they would have to take; the paper's figure 1 has 0.471 of the model.",
    ),
    "layer": Figure(
        "figure 5",
        exchanges,
        "s-MoE's rates save 40.4 % (DeepSeek-V2) and 68.8 % (Mixtral) of the two all-to-alls.",
        "By bytes they would save by_bytes. So fixed_needed of the paper's all-to-alls does not depend on "
        "what is sent; here that is 10 us.",
    ),
    "solvers": Figure(
        "figure 6",
        solvers,
        "s-MoE's rate is 14.2 % above the best baseline's, and its imbalance 10.2 % better.",
        "The routing is made up, and its fit holds METIS and k-means at 0.47 on 8 ranks. Cross-entropy finds "
        "hardly more than METIS there. It would need routing whose clusters METIS does not find.",
    ),
    "sglang": Figure(
        "figure 7",
        sglang,
        "the column stated.",
        "As for figure 4. SGLang has two all-reduces of all rows, and reads a part of every expert.",
    ),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beside", nargs="+", type=int, default=[64, 256, 1024], help="tokens, of TBT")
    parser.add_argument("--solvers", nargs="+", default=["vanilla", "kmeans", "metis", "speculative"])


if __name__ == "__main__":
    main(__doc__, FIGURES, add)
