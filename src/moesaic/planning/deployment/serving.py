"""The commands that start a planned deployment: `serve` on the first host, `join` on the others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from moesaic.planning.deployment.hosts import topology
from moesaic.planning.deployment.search import Deployments
from moesaic.planning.deployment.trials import Candidate

PORT = 7000
SECRET = "cluster.secret"
PLACEMENT = "placement.json"


def commands(plan: Deployments, candidate: Candidate, model: str) -> list[str]:
    """The commands of a candidate, in their order. model: as the user named it."""
    return [" ".join(_serve(plan, candidate, model)), *_joins(candidate)]


def per_host(plan: Deployments, candidate: Candidate, model: str) -> list[tuple[str, list[str]]]:
    """The commands of each host: (its name, its commands in their order)."""
    serve, *joins = commands(plan, candidate, model)
    found: list[tuple[str, list[str]]] = []
    for host in topology(candidate.layout, plan.spec).hosts:
        own = (len(host.workers) + len(host.servers)) if found else 0
        found.append((host.name, joins[:own] if found else [serve]))
        joins = joins[own:]
    return found


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
        yield f"--attention-workers {layout.workers_here} --expert-servers {layout.servers_here}"
    if layout.ranks > 1:
        yield f"--tensor-parallel-size {layout.ranks}"
    if candidate.schedule != "lockstep":
        yield f"--schedule {candidate.schedule}"
    if candidate.inflight > 1:
        yield f"--inflight-batches {candidate.inflight}"
    if candidate.redundant:
        yield f"--redundant-experts {candidate.redundant}"
    if candidate.copies > 1:
        yield f"--min-replicas {min(candidate.copies, layout.servers_here)}"
    if candidate.relay != "auto":
        yield f"--relay {candidate.relay}"
    if candidate.solver:
        yield f"--placement {PLACEMENT}"
    if wanted.ttft_ms is not None:
        yield f"--slo-ttft {wanted.ttft_ms:g}"
    if wanted.itl_ms is not None:
        yield f"--slo-itl {wanted.itl_ms:g}"
    here = layout.workers_here * layout.ranks + (0 if layout.beside else layout.servers_here)
    if layout.pool.on_gpu and here > 1:
        yield f"--devices {','.join(map(str, range(here)))}"
    if layout.hosts > 1:
        yield f"--cluster-address tcp:{_door(candidate)} --cluster-secret-file {SECRET}"


def _joins(candidate: Candidate) -> Iterator[str]:
    """The command that each further process needs, host by host."""
    layout, join = candidate.layout, f"moesaic join {_door(candidate)} --secret-file {SECRET}"
    if layout.spread == 1:
        yield from [join] * (layout.servers - layout.servers_here)
    for _ in range(layout.spread - 1):
        yield from [f"{join} --role attention-worker"] * layout.workers_here
        yield from [join] * layout.servers_here


def _door(candidate: Candidate) -> str:
    """HOST:PORT at which processes join."""
    return f"{candidate.layout.pool.names[0]}:{PORT}"


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
            "A process that joins uses the first GPU that it sees: give each its own CUDA_VISIBLE_DEVICES."
        )
    return found
