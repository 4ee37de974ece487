"""The commands that start a planned deployment: `serve` on the first host, `join` on the others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from moesaic.planning.deployment.search import Deployments
from moesaic.planning.deployment.trials import Candidate

ADDRESS = "tcp:FIRST_HOST:7000"
SECRET = "cluster.secret"
PLACEMENT = "placement.json"


def commands(plan: Deployments, candidate: Candidate, model: str) -> list[str]:
    """The commands of a candidate, in their order. model: as the user named it."""
    return [" ".join(_serve(plan, candidate, model)), *_joins(candidate)]


def _serve(plan: Deployments, candidate: Candidate, model: str) -> Iterator[str]:
    layout = candidate.layout
    yield f"moesaic serve {shlex.quote(model)}"
    if layout.pool.on_gpu:
        yield "--device cuda"
    if not alone(candidate):
        yield from _processes(plan, candidate)
    yield f"--max-num-seqs {candidate.seqs} --max-num-batched-tokens {candidate.batched}"
    yield f"--max-model-len {plan.demand.longest}"


def alone(candidate: Candidate) -> bool:
    """Whether one process has everything. Then most flags of clusters are refused, and none is needed."""
    return candidate.layout.beside and candidate.layout.workers == 1


def _processes(plan: Deployments, candidate: Candidate) -> Iterator[str]:
    """The flags that say which processes run, and how they work together."""
    layout, wanted = candidate.layout, plan.objectives
    if layout.beside:
        yield f"--data-parallel-size {layout.workers} --enable-expert-parallel"
    else:
        yield f"--attention-workers {layout.workers} --expert-servers {layout.servers_here}"
    if layout.ranks > 1:
        yield f"--tensor-parallel-size {layout.ranks}"
    if candidate.schedule != "lockstep":
        yield f"--schedule {candidate.schedule}"
    if candidate.inflight > 1:
        yield f"--inflight-batches {candidate.inflight}"
    if candidate.redundant:
        yield f"--redundant-experts {candidate.redundant}"
    if candidate.min_replicas > 1:
        yield f"--min-replicas {min(candidate.min_replicas, layout.servers_here)}"
    if candidate.solver:
        yield f"--placement {PLACEMENT}"
    if wanted.ttft_ms is not None:
        yield f"--slo-ttft {wanted.ttft_ms:g}"
    if wanted.itl_ms is not None:
        yield f"--slo-itl {wanted.itl_ms:g}"
    here = layout.attention_devices + (0 if layout.beside else layout.servers_here)
    if layout.pool.on_gpu and here > 1:
        yield f"--devices {','.join(map(str, range(here)))}"
    if layout.hosts > 1:
        yield f"--cluster-address {ADDRESS} --cluster-secret-file {SECRET}"


def _joins(candidate: Candidate) -> Iterator[str]:
    """The command that each further server needs, on its host."""
    layout = candidate.layout
    for _ in range(layout.servers - layout.servers_here):
        yield f"moesaic join {ADDRESS.removeprefix('tcp:')} --secret-file {SECRET}"


def notes(plan: Deployments, candidate: Candidate) -> list[str]:
    """What has to be known before the commands are used, one sentence or two each."""
    layout, found = candidate.layout, []
    if candidate.solver:
        file = plan.demand.routing.file
        found.append(
            f"Write {PLACEMENT} first: moesaic place {file} --ranks {layout.servers} "
            f"--solver {candidate.solver} -o {PLACEMENT}"
        )
    if layout.hosts > 1 and layout.pool.on_gpu:
        found.append(
            "A server that joins uses the first GPU that it sees: give each its own CUDA_VISIBLE_DEVICES."
        )
    return found
