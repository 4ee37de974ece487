"""Semantic Parallelism (Sem-MoE), tables 2 to 6, figures 4 and 5: `python benchmarks/papers/sem_moe.py`.

    latency     table 2, by prices: time to the first token and to the last
    throughput  figure 4, simulated: attention of each GPU for requests of its own
    locality    figure 5: local activation rates and balance of our solvers, and what they save of a layer
    transfer    tables 3 and 4: placements measured on other domains than they were solved on
    moonlight   tables 5 and 6: as `throughput`, for Moonlight-16B

`latency`. Paper: attention by tensor parallelism and experts by expert parallelism on 8 GPUs, 1 request/s.
The table has the p99 of the time to the first token, and the median time to the last one. Here: one prompt
on 8 H100s by their roofline, so nothing waits. A layer takes the projections and attention of one rank, a
reduce-scatter and an all-gather of the rows, the experts, and two all-to-alls of the (row, expert) pairs that
are not local. Vanilla has 1/8 of the pairs local, and Sem-MoE 37 and 43 points more, as in the paper. A GPU
sends 400 GB/s, as in the paper. "roofline" is that sum for vanilla, and "gain" what the local pairs save of
it. What would have to be true for the paper's times: "host_ms" for each layer beside the roofline; and for
its gains: "exchange_ms" of each layer that the two all-to-alls take in vanilla, if they save in proportion.

`locality` and `transfer` run our solvers on made-up routing: routed.py says how it was fitted. Domains of
`transfer` are thirds of its topics, whose token ids have other frequencies. Rates are means over layers; the
paper has medians.

`throughput` and `moonlight`: serving.py has the set-up.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import routed
import serving
from figures import Figure, Row, main
from placements import by_topic, carried_over
from prices import RANKS, Layer, Links, layer, prompts

from moesaic.core.profile import Profile
from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import PUBLISHED_MODELS, ModelSizes

LINKS = Links(400e9)
LOCAL = {"deepseek-v2-lite": 0.37, "qwen3-30b-a3b": 0.43}
"""Model -> local pairs of Sem-MoE above vanilla's, as a share of all (figure 5a)."""
SAVED = {"deepseek-v2-lite": 0.418, "qwen3-30b-a3b": 0.466}
"""Model -> share of the latency that they save, in figure 5a."""
TABLE = (
    ("deepseek-v2-lite", 256, 84.87, 75.63),
    ("deepseek-v2-lite", 512, 98.10, 88.69),
    ("deepseek-v2-lite", 1024, 111.19, 100.74),
    ("qwen3-30b-a3b", 256, 85.72, 74.46),
    ("qwen3-30b-a3b", 512, 104.76, 83.87),
    ("qwen3-30b-a3b", 1024, 107.73, 103.69),
)
"""(model, tokens of a prompt, p99 of the milliseconds to the first token with SGLang, with Sem-MoE)."""
DOMAINS = ("first", "second", "third")
TRANSFERS = {
    "deepseek-v2-lite": {"same": (0.4649, 0.4719), "other": (0.4068, 0.4125), "mmlu": (0.4155, 0.4140)},
    "qwen3-30b-a3b": {"same": (0.4688, 0.4361), "other": (0.3657, 0.3928), "mmlu": (0.3530, 0.3337)},
}
"""Model -> rates of tables 3 and 4, on ShareGPT and on Lmsys-Chat-1M: of the placement that was solved on the
same data, and of the other one; and of both on MMLU, for which the paper solves none."""
PAPER_RANKS = 4
"""Ranks of tables 3 and 4: SGLang's rate of 0.25 is that of 4."""


def prefill(model: ModelSizes, rows: int, local: float) -> Layer:
    """A layer for one prompt of `rows` tokens."""
    return layer(model, rows, prompts(model, 1, rows), MACHINES["h100"].fast, LINKS, "shuffled", local)


def latency(options: argparse.Namespace) -> Iterator[Row]:
    """Table 2."""
    del options
    for name, rows, theirs, semantic in TABLE:
        model, vanilla, more = PUBLISHED_MODELS[name], 1 / RANKS, LOCAL[name]
        before, after = (prefill(model, rows, local) for local in (vanilla, vanilla + more))
        saved = 1e-3 * (theirs - semantic) / model.layers
        yield {
            "model": name,
            "prompt": rows,
            "roofline_ms": round(1e3 * model.layers * before.whole, 2),
            "gain": round(1 - after.whole / before.whole, 3),
            "paper_ms": theirs,
            "paper_gain": round(1 - semantic / theirs, 3),
            "host_ms": round(theirs / model.layers - 1e3 * before.whole, 2),
            "exchange_ms": round(1e3 * saved / (more / (1 - vanilla)), 2),
            "roofline_exchange_ms": round(1e3 * before.exchanges, 3),
        }


def locality(options: argparse.Namespace) -> Iterator[Row]:
    """Figure 5: first (a), then (b)."""
    for name, solver in product(LOCAL, options.solvers):
        found, model = routed.solved(solver, routed.EXPERTS[name], RANKS), PUBLISHED_MODELS[name]
        vanilla, local = found["unshuffled"], found["token"]
        before, after = (prefill(model, 1024, one) for one in (vanilla, local))
        own = solver == "sem-moe"
        yield {
            "figure": "5a",
            "model": name,
            "solver": solver,
            "ranks": RANKS,
            "local": local,
            "more_than_vanilla": local - vanilla,
            "paper_more": LOCAL[name] if own else None,
            "exchange_saves": 1 - after.exchanges / before.exchanges,
            "bytes_save": (local - vanilla) / (1 - vanilla),
            "paper_saves": SAVED[name] if own else None,
            "paper_bytes_save": LOCAL[name] / (1 - 1 / RANKS) if own else None,
        }
    for ranks, solver in product((2, 4, 8), options.solvers):
        found = routed.solved(solver, 64, ranks)
        rates = {"local": found["token"], "by_request": found["rounds"]}
        row = {"figure": "5b", "model": "deepseek-v2-lite", "solver": solver, "ranks": ranks}
        yield row | rates | {"max_over_median": found["max_over_median"]}


def transfer(options: argparse.Namespace) -> Iterator[Row]:
    """Tables 3 and 4."""
    for name in TRANSFERS:
        whole = routed.routing(routed.EXPERTS[name], requests=2400)
        parts = by_topic(_in_domains(whole), routed.SHARE, 0, lambda profile: profile)
        tests = {domain: others for domain, (_, others) in parts.items()}
        for solver, domain in product(options.solvers, parts):
            learned = parts[domain][0]
            rates = carried_over(solver, learned, tests, PAPER_RANKS, 0)["on"]
            same, others = rates.pop(domain), list(rates.values())
            pairs = zip(TRANSFERS[name]["other"], TRANSFERS[name]["same"], strict=True)
            kept = [other / same for other, same in pairs]
            yield {
                "model": name,
                "solver": solver,
                "solved_on": domain,
                "same": same["token"],
                "other": float(np.mean([one["token"] for one in others])),
                "kept": float(np.mean([one["token"] for one in others])) / same["token"],
                "paper_kept": round(float(np.mean(kept)), 3),
                "paper_mmlu": round(float(np.mean(TRANSFERS[name]["mmlu"])), 3),
                "by_request_same": same["request"],
                "by_request_other": float(np.mean([one["request"] for one in others])),
                "unshuffled": routed.unshuffled(solver, learned, tests[domain], PAPER_RANKS),
            }


def _in_domains(profile: Profile) -> Profile:
    """The profile with thirds of its topics as topics."""
    third = -(-len(profile.topics) // len(DOMAINS))
    topics = (profile.routes.topics // third).astype(profile.routes.topics.dtype)
    return replace(profile, topics=DOMAINS, routes=replace(profile.routes, topics=topics))


FIGURES = {
    "latency": Figure(
        "table 2",
        latency,
        "the columns paper_ms and paper_gain.",
        "The host's time is not modelled: host_ms for each layer would have to come on top. By roofline the "
        "exchanges are too short to matter: they would have to take exchange_ms.",
    ),
    "throughput": Figure(
        "figure 4",
        serving.throughput,
        "Sem-MoE has 1.31 times SGLang's throughput under an objective for the first token and 3.21 times "
        "under one for the whole answer (DeepSeek-V2-Lite), 1.98 and 1.11 times (Qwen3-30B-A3B).",
        serving.DIFFERS,
    ),
    "locality": Figure(
        "figure 5",
        locality,
        "(a) 37 and 43 points more local pairs save 41.8 and 46.6 % of the latency. (b) Sem-MoE's rate is "
        "15.4 % above the best baseline's on 8 ranks, and its imbalance 36.7 % better.",
        "paper_bytes_save is what the paper's points save of the pairs sent: nearly what it measured, so its "
        "latency is that of the exchanges, and they take hardly more than their bytes. Solvers differ less "
        "here: vanilla has its tokens on their best rank, too, and `more_than_vanilla` compares with tokens "
        "on any rank.",
    ),
    "transfer": Figure(
        "tables 3 and 4",
        transfer,
        "a placement of the other data set keeps paper_kept of the rate of the one that was solved there. "
        "MMLU has no such rate in the paper, so paper_mmlu stands alone.",
        "Domains are topics of one made-up routing: they differ in the frequencies of ids and not in the "
        "language. So transfer is easier here than between data sets.",
    ),
    "moonlight": Figure(
        "tables 5 and 6",
        serving.moonlight,
        "on average 1.12 times SGLang's and 1.22 times MoETuner's throughput under an objective for the "
        "first token, 1.10 and 1.14 times under one for the whole answer.",
        serving.DIFFERS,
    ),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--solvers", nargs="+", default=["vanilla", "moetuner", "sem-moe"])
    serving.add(parser)


if __name__ == "__main__":
    main(__doc__, FIGURES, add)
