"""The commands that start a planned deployment: `serve` on the first host, `join` on the others."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from moesaic.planning.deployment.hosts import build_topology
from moesaic.planning.deployment.search import Deployments
from moesaic.planning.deployment.trials import Candidate

PORT = 7000
SECRET = "cluster.secret"
PLACEMENT = "placement.json"


def list_commands(plan: Deployments, candidate: Candidate, model: str) -> list[str]:
    """The commands of a candidate, in their order. model: as the user named it."""
    return [" ".join(_serve(plan, candidate, model)), *_joins(candidate)]


def list_host_commands(plan: Deployments, candidate: Candidate, model: str) -> list[tuple[str, list[str]]]:
    """The commands of each host: (its name, its commands in their order)."""
    serve, *joins = list_commands(plan, candidate, model)
    commands_by_host: list[tuple[str, list[str]]] = []
    for host in build_topology(candidate.layout, plan.spec).hosts:
        num_joins = (len(host.workers) + len(host.servers)) if commands_by_host else 0
        commands_by_host.append((host.name, joins[:num_joins] if commands_by_host else [serve]))
        joins = joins[num_joins:]
    return commands_by_host


def _serve(plan: Deployments, candidate: Candidate, model: str) -> Iterator[str]:
    layout = candidate.layout
    yield f"moesaic serve {shlex.quote(model)}"
    if layout.pool.on_gpu:
        yield "--device cuda"
    if not is_single_process(candidate):
        yield from _processes(plan, candidate)
    yield f"--max-num-seqs {candidate.max_num_seqs}"
    yield f"--max-num-batched-tokens {candidate.max_num_batched_tokens}"
    yield f"--max-model-len {plan.demand.longest}"


def is_single_process(candidate: Candidate) -> bool:
    """Whether one process has everything. Then most flags of clusters are refused, and none is needed."""
    return candidate.layout.is_colocated and candidate.layout.workers == 1


def _processes(plan: Deployments, candidate: Candidate) -> Iterator[str]:
    """The flags that say which processes run, and how they work together."""
    layout, objectives = candidate.layout, plan.objectives
    if layout.is_colocated:
        yield f"--data-parallel-size {layout.workers} --enable-expert-parallel"
    else:
        yield f"--attention-workers {layout.first_host_workers} --expert-servers {layout.first_host_servers}"
    if layout.ranks > 1:
        yield f"--tensor-parallel-size {layout.ranks}"
    if candidate.schedule != "lockstep":
        yield f"--schedule {candidate.schedule}"
    if candidate.inflight_batches > 1:
        yield f"--inflight-batches {candidate.inflight_batches}"
    if candidate.redundant_experts:
        yield f"--redundant-experts {candidate.redundant_experts}"
    if candidate.copies > 1:
        # The flag counts the servers of the first host: the others have not joined when serve starts.
        yield f"--min-replicas {min(candidate.copies, layout.first_host_servers)}"
    if candidate.relay != "auto":
        yield f"--relay {candidate.relay}"
    if candidate.solver:
        yield f"--placement {PLACEMENT}"
    if objectives.ttft_ms is not None:
        yield f"--slo-ttft {objectives.ttft_ms:g}"
    if objectives.itl_ms is not None:
        yield f"--slo-itl {objectives.itl_ms:g}"
    num_devices = layout.first_host_workers * layout.ranks + (
        0 if layout.is_colocated else layout.first_host_servers
    )
    if layout.pool.on_gpu and num_devices > 1:
        yield f"--devices {','.join(map(str, range(num_devices)))}"
    if layout.hosts > 1:
        yield f"--cluster-address tcp:{_join_address(candidate)} --cluster-secret-file {SECRET}"


def _joins(candidate: Candidate) -> Iterator[str]:
    """The command that each further process needs, host by host."""
    layout, join = candidate.layout, f"moesaic join {_join_address(candidate)} --secret-file {SECRET}"
    if layout.attention_hosts == 1:
        yield from [join] * (layout.servers - layout.first_host_servers)
    for _ in range(layout.attention_hosts - 1):
        yield from [f"{join} --role attention-worker"] * layout.first_host_workers
        yield from [join] * layout.first_host_servers


def _join_address(candidate: Candidate) -> str:
    """HOST:PORT at which processes join."""
    return f"{candidate.layout.pool.names[0]}:{PORT}"


def list_notes(plan: Deployments, candidate: Candidate) -> list[str]:
    """What has to be known before the commands are used, one sentence or two each."""
    layout, sentences = candidate.layout, []
    if candidate.solver:
        file = plan.demand.routing.file
        sentences.append(
            f"Write {PLACEMENT} first: moesaic place {file} --ranks {layout.servers} "
            f"--solver {candidate.solver} -o {PLACEMENT}"
        )
    if layout.hosts > 1 and layout.pool.on_gpu:
        sentences.append(
            "A process that joins uses the first GPU that it sees: give each its own CUDA_VISIBLE_DEVICES."
        )
    return sentences
