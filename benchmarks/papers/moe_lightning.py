"""MoE-Lightning, figures 7 to 9, by the planner's prices: `python benchmarks/papers/moe_lightning.py`.

    throughput  figures 7 and 8 (MTBench): generated tokens/s of the published policy. "peaks" prices it with
                data sheets. "fitted" prices it with the link and the prefill speed that were fitted to the
                paper's own results (machines t4-measured and l4-measured). "ours" is the policy that
                moesaic plan chooses on the fitted machine. S1 and S2 also have FlexGen's policy, without CPU
                attention, and what the paper measured for it.
    latency     figure 9: milliseconds of one layer on an L4, by micro-batch and context: moving the keys and
                values to the GPU, attention on the CPU, and the experts on the GPU.

Where prices and paper differ:

- S1 and S2 padded: "fitted" is 0.87 to 1.03 of the measured rates, at all lengths. By peaks they are 1.7 to
  4.2 times as high, since the link then has 16 GiB/s. The paper's results need 6.5 to 8.6 GiB/s, and a
  prefill at a tenth of the T4's peak.
- S2 without padding: 0.91 to 1.24. S1 without padding: 1.2 to 1.5, where the published policy is known only
  for two of four lengths. There the planner's own policy is priced.
- S6 and S7: 0.8 to 0.9 and 0.5 to 0.75. So four GPUs are about twice as fast as two here; the paper measured
  2.8 to 3.4 times. Its hosts would need a faster link for four GPUs than for two. Here all share one.
- S8 and S9 (DBRX): 1.5 to 2.3 times. Only the batch is published, so the planner's own policy is priced.
- FlexGen's own policy: 12.9 to 14.9 tokens/s against 9.5 to 12.3 measured on S1. On S2 prices are 0.3 to 0.7
  of what was measured: its search then puts the cache behind a link slower than the one it assumed.
- Figure 9: the KV transfer takes 0.7 of the measured time (it would need 12 GB/s in place of 17), attention
  0.4 (44 GB/s of RAM in place of 107), and the experts 0.75 (72 to 75 % of the L4's bandwidth).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from moesaic.core.errors import ConfigError
from moesaic.cost import ops, roofline
from moesaic.cost.hardware import Hardware
from moesaic.cost.machines import MACHINES
from moesaic.cost.sizes import KNOWN
from moesaic.papers.moe_lightning_settings import LENGTHS, Published, settings
from moesaic.policy.offloading import planner
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.pricing import Pricing

FLEXGEN = {"S1": (12.1, 12.3, 9.5, 9.6), "S2": (29.2, 34.9, 37.2, 28.8)}
"""Setting -> FlexGen's measured tokens/s for answers of LENGTHS tokens (figure 7)."""
MIXTRAL = KNOWN["mixtral-8x7b"]
LAYER = {(32, 128): (1.41, 0.44), (256, 2048): (173.9, 44.6)}
"""(micro-batch, context) -> milliseconds of KV transfer and CPU attention in figure 9, at its corners."""
EXPERTS = {32: 12.2, 64: 12.3, 128: 12.5, 256: 13.0}
"""Micro-batch -> milliseconds of the experts in figure 9."""


def fitted(hardware: Hardware) -> Hardware:
    """The machine with the speeds that were fitted to the paper's results, with the setting's RAM."""
    found = MACHINES[f"{hardware.name.partition('-')[0]}-measured"]
    return found.with_slow(hardware.slow.memory, hardware.slow.bandwidth)


def rate(one: Published, hardware: Hardware, workload: Workload) -> float | None:
    """Tokens/s of the published policy on this machine; of the planner's policy where none is published."""
    if one.micro_batch is None or one.micro_batches is None:
        return best(one, hardware, workload)
    policy = Policy("cgopipe", one.micro_batch, one.micro_batches, slow_attention=True)
    return Pricing(one.setting.model, hardware, workload).price(policy).throughput


def best(one: Published, hardware: Hardware, workload: Workload) -> float | None:
    """Tokens/s of the planner's own policy, or None if none fits."""
    try:
        return planner.search(one.setting.model, hardware, workload).throughput
    except ConfigError:
        return None


def throughputs() -> Iterator[dict[str, Any]]:
    """The lines of figures 7 and 8."""
    for one in settings():
        if "MTBench" not in one.name or one.measured is None:
            continue
        given = one.setting
        workload = Workload(given.prompt, given.generate)
        peaks = given.hardware.parallel(given.gpus)
        real = fitted(given.hardware).parallel(given.gpus)
        row: dict[str, Any] = {
            "setting": one.name,
            "paper": one.measured,
            "peaks": rate(one, peaks, workload),
            "fitted": rate(one, real, workload),
            "ours": best(one, real, workload),
        }
        flexgen = FLEXGEN.get(one.name.partition(" ")[0])
        if flexgen is not None and "padded" in one.name and "unpadded" not in one.name:
            price, _ = planner.by_flexgen(given.model, real, workload)
            row["flexgen_paper"] = flexgen[LENGTHS.index(given.generate)]
            row["flexgen_fitted"] = price.throughput
        yield row


def latencies() -> Iterator[dict[str, Any]]:
    """The lines of figure 9."""
    machine = MACHINES["l4"]
    for rows in EXPERTS:
        experts = roofline.seconds(ops.routed(MIXTRAL, rows), machine.fast)
        for context in (128, 512, 2048):
            moved = MIXTRAL.cache(rows * context, 2.0) / machine.link.down
            attended = ops.attention(MIXTRAL, rows, context, 2.0)
            kv, attention = LAYER.get((rows, context), (None, None))
            yield {
                "micro_batch": rows,
                "context": context,
                "kv_transfer_ms": 1e3 * moved,
                "kv_transfer_paper": kv,
                "cpu_attention_ms": 1e3 * roofline.attention_seconds(attended, machine.slow),
                "cpu_attention_paper": attention,
                "experts_ms": 1e3 * experts,
                "experts_paper": EXPERTS[rows],
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", choices=["throughput", "latency"])
    options = parser.parse_args()
    for row in throughputs() if options.figure == "throughput" else latencies():
        shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()}
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
