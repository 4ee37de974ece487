"""Groups whose ranks page their shards: the floats of the group in memory, and the tokens of one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM
from moesaic.config import ModelConfig, ParallelConfig, WorkerConfig
from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.core.offload import Offload
from moesaic.core.placement import Placement
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.headers import Headers
from moesaic.offload.arena import Arena
from moesaic.offload.operations import Operations
from moesaic.offload.reading import ALIGNMENT
from moesaic.policy.offloading.tasks import Task
from moesaic.runtime import memory_levels
from moesaic.runtime.group import offloaded_group
from moesaic.runtime.group.owners import read_owners
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.testing import byte_tokenizer
from moesaic.transport.peers import HALF_BYTES
from tests.support import model_configs, pairs, tiny_models
from tests.support.group_placements import recorded, write
from tests.support.processes import children, gone
from tests.support.thread_groups import group_of_threads
from tests.test_llm_offload import floats, params, prompts

pytestmark = [
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("mixtral", model_configs.mixtral(num_attention_heads=8, num_key_value_heads=2), "float32"),
    "qwen3": (
        "qwen3_moe",
        model_configs.qwen3(
            num_attention_heads=4, num_key_value_heads=4, mlp_only_layers=[1], num_hidden_layers=4,
            attention_bias=True,
        ),
        "bfloat16",
    ),
    "deepseek": ("deepseek_v2", model_configs.deepseek(n_shared_experts=2), "bfloat16"),
}  # fmt: skip
"""And the type of weights and cache. Mixtral has 5 experts, an odd number; the others a layer without."""
MORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "olmoe": ("olmoe", model_configs.olmoe(num_attention_heads=4, num_key_value_heads=2), "bfloat16"),
    "qwen2": ("qwen2_moe", model_configs.qwen2(num_key_value_heads=2, mlp_only_layers=[1]), "float32"),
}
"""Families that are tried once."""
DISK = Offload(1 << 30, "cgopipe", micro_batch=2, micro_batches=4, prefill_rows=19)
POLICIES = {
    "pages": DISK,
    "rows one by one": replace(DISK, micro_batch=1, micro_batches=8, prefill_rows=1),
    "one micro-batch": replace(DISK, micro_batch=8, micro_batches=1, prefill_rows=200),
    "some experts stay": replace(DISK, micro_batch=3, micro_batches=2, static_experts=2),
    "all experts stay": replace(DISK, static_experts=12),
    "serial": replace(DISK, schedule="serial"),
    "s4": replace(DISK, schedule="s4", static_experts=1),
    "padded": replace(DISK, padded_prompt_len=84, prefill_rows=2 * 84),
}
FORMS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class Case:
    path: Path
    dtype: str
    known: dict[tuple[str, int], list[Any]] = field(default_factory=dict)

    def settings(self, offload: Offload | None = None, **settings: Any) -> dict[str, Any]:
        if offload is not None:
            settings |= {"offload": offload, "max_num_seqs": offload.batch, "max_num_batched_tokens": 70}
        return {"kv_cache_dtype": self.dtype, "max_model_len": 128} | settings

    def group(self, offload: Offload | None = None, ranks: int = 2, **settings: Any) -> LLM:
        """Of real processes."""
        return LLM(
            str(self.path), threads=1, tensor_parallel_size=ranks, **self.settings(offload, **settings)
        )

    def threads(self, form: str, ranks: int) -> list[Any]:
        """Answers of a group in memory whose ranks are threads."""
        if (form, ranks) in self.known:
            return self.known[form, ranks]
        settings = self.settings(tensor_parallel_size=ranks, moe_collectives=form)
        with group_of_threads(str(self.path), **settings) as (made, _, _):
            found = answers(made)
        assert tokens(found) == tokens(self.alone)
        self.known[form, ranks] = found
        return found

    @cached_property
    def alone(self) -> list[Any]:
        """Answers of one process with all of it in memory."""
        return answers(LLM(str(self.path), threads=1, **self.settings()))


def answers(made: LLM) -> list[Any]:
    results = made.generate(prompts(), [params(i) for i in range(len(prompts()))])
    return [floats(result.outputs[0]) for result in results]


def tokens(found: list[Any]) -> list[Any]:
    return [each for each, _ in found]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Case]:
    made = {}
    for name, (kind, options, dtype) in (MODELS | MORE).items():
        path = tiny_models.save(
            tiny_models.build(kind, options), tmp_path_factory.mktemp(name), getattr(torch, dtype)
        )
        byte_tokenizer(path)
        made[name] = Case(path, dtype)
    return made


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("mixtral", "reduce-scatter"), ("qwen3", "reduce-scatter"), ("deepseek", "all-reduce"),
        pytest.param("mixtral", "all-reduce", marks=pairs.REST),
        pytest.param("qwen3", "all-reduce", marks=pairs.REST),
        pytest.param("deepseek", "reduce-scatter", marks=pairs.REST),
    ],
)  # fmt: skip
def test_two_processes_have_the_floats_of_the_group_in_memory(
    checkpoints: Mapping[str, Case], name: str, form: str
) -> None:
    case = checkpoints[name]
    wanted = answers(case.group(moe_collectives=form))
    assert tokens(wanted) == tokens(case.alone)
    for policy in ("pages", "some experts stay") if name == "qwen3" else ("pages",):
        assert answers(case.group(POLICIES[policy], moe_collectives=form)) == wanted, policy


@pairs.REST  # threads as four ranks are in test_every_policy_in_every_form
def test_four_processes(checkpoints: Mapping[str, Case]) -> None:
    """Mixtral: two ranks to a key-value head, and of five experts two on the first, one on the others."""
    case = checkpoints["mixtral"]
    offload = POLICIES["s4"]
    assert answers(case.group(offload, ranks=4)) == answers(case.group(ranks=4))


def alike(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """A model counts as what it keeps in its cache, and a form as whether each rank has all rows."""
    name, form, *rest = case
    return name == "deepseek", form == "all-reduce", *rest


@pytest.mark.parametrize(
    ("name", "form", "ranks", "policy"),
    [
        *pairs.params(MODELS, [*FORMS, "deepspeed"], (2, 4), POLICIES, key=alike),
        ("olmoe", "reduce-scatter", 2, "pages"),
        ("qwen2", "all-reduce", 2, "pages"),
    ],
)
def test_every_policy_in_every_form(
    checkpoints: Mapping[str, Case], name: str, form: str, ranks: int, policy: str
) -> None:
    """Ranks that are threads: many groups in little time."""
    case, offload = checkpoints[name], POLICIES[policy]
    settings = case.settings(offload, tensor_parallel_size=ranks, moe_collectives=form)
    with group_of_threads(str(case.path), **settings) as (made, _, _):
        assert answers(made) == case.threads(form, ranks)
        passes = made.stats().experts.passes
    most = -(-registry.read_spec(case.path).num_experts // ranks)
    assert {one.prefill for one in passes} == {True, False}
    assert any(one.loaded_bytes for one in passes) == (offload.static_experts < most)


@pytest.mark.parametrize("align", ["move", "variable"])
def test_shuffled_rows_and_experts_anywhere(
    checkpoints: Mapping[str, Case], tmp_path: Path, align: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch has its own past, and so has each piece of one that takes several rounds."""
    case = checkpoints["deepseek"]
    profile = recorded(str(case.path), prompts()[:4], [params(i) for i in range(4)])[1]
    settings: dict[str, Any] = {
        "tensor_parallel_size": 2, "placement": write(tmp_path, profile, 2, copies=1),
        "moe_collectives": "shuffled", "shuffle_align": align,
    }  # fmt: skip
    with group_of_threads(str(case.path), **case.settings(**settings)) as (made, _, _):
        wanted = answers(made)
    for rows in (10000, 7):
        monkeypatch.setattr(offloaded_group, "rows_of_round", lambda model, rows=rows: rows)
        for policy in ("pages", "some experts stay"):
            with group_of_threads(str(case.path), **case.settings(POLICIES[policy], **settings)) as made_:
                assert answers(made_[0]) == wanted, (policy, rows)
                assert made_[0].stats().experts.group.shuffled_rows > 0


def test_a_cache_in_int8(checkpoints: Mapping[str, Case]) -> None:
    case = replace(checkpoints["deepseek"], dtype="int8")
    settings: dict[str, Any] = {"tensor_parallel_size": 2}
    with group_of_threads(str(case.path), **case.settings(**settings)) as (made, _, _):
        wanted = answers(made)
    with group_of_threads(str(case.path), **case.settings(DISK, **settings)) as (made, _, _):
        assert answers(made) == wanted


def test_a_rank_without_experts_of_some_layer(checkpoints: Mapping[str, Case], tmp_path: Path) -> None:
    case = checkpoints["qwen3"]
    spec = registry.read_spec(case.path)
    every = list(range(spec.num_experts))
    held = {layer: {place % 2: every} for place, layer in enumerate(spec.moe_layers)}
    file = tmp_path / "placement.json"
    file.write_text(Placement(0, spec.num_experts, held, registry.routed_model(case.path).model).to_json())
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "placement": str(file)}
    with group_of_threads(str(case.path), **case.settings(**settings)) as (made, _, _):
        wanted = answers(made)
    with group_of_threads(str(case.path), **case.settings(DISK, **settings)) as (made, _, _):
        assert answers(made) == wanted


# ---- what each rank reads


def followers() -> list[int]:
    """Ranks of this process's groups, but the first ones."""
    return sorted(children(os.getpid(), "moesaic.runtime.group"))


def read_by(pid: int) -> int:
    """Bytes of all its reads so far."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"])


def blocks(case: Case, experts: Mapping[int, list[int]]) -> int:
    """Bytes of the blocks of files in which these experts of all layers lie."""
    layout = read_expert_layout(ModelConfig(str(case.path)))
    headers, size = Headers(case.path), 0
    for layer, mine in experts.items():
        places = [headers.find(*part) for expert in mine for part in layout.tensors(layer, expert)]
        size += ALIGNMENT * len(
            {
                (one.file, block)
                for one in places
                for block in range(one.offset // ALIGNMENT, -(-(one.offset + one.size) // ALIGNMENT))
            }
        )
    return size


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="Linux tells what was read")
@pytest.mark.parametrize("static", [0, 2])
def test_each_rank_reads_its_own_experts_and_nothing_else(tmp_path: Path, static: int) -> None:
    options = model_configs.qwen3(num_attention_heads=4, num_key_value_heads=4, hidden_size=64, num_experts=7)
    path = tiny_models.save(tiny_models.build("qwen3_moe", options | {"moe_intermediate_size": 64}), tmp_path)
    byte_tokenizer(path)
    case, config = Case(path, "float32"), WorkerConfig(ModelConfig(str(path)), parallel=ParallelConfig(2))
    before = set(followers())
    made = case.group(replace(DISK, static_experts=static))
    [rank] = set(followers()) - before
    answers(made)  # and with it all that Python reads once
    counted, told = read_by(rank), made.stats().experts.passes
    answers(made)
    passes = sum(one.passes for one in made.stats().experts.passes) - sum(one.passes for one in told)
    own = [read_owners(config).list_experts(each) for each in range(2)]
    streamed = [{layer: mine[static:] for layer, mine in each.items()} for each in own]
    assert [len(each[0]) for each in streamed] == [4 - static, 3 - static]
    first = sum(one.loaded_bytes for one in made.stats().experts.passes) - sum(
        one.loaded_bytes for one in told
    )
    assert first == passes * blocks(case, streamed[0])
    other = passes * blocks(case, streamed[1])
    assert other <= read_by(rank) - counted <= other + (1 << 16), "but for messages"


def test_arenas_hold_what_ranks_own(checkpoints: Mapping[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case, sizes = checkpoints["mixtral"], []
    layout = read_expert_layout(ModelConfig(str(case.path)))

    class Seen(Arena):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            sizes.append(self.size)

    monkeypatch.setattr(memory_levels, "Arena", Seen)
    settings = case.settings(replace(DISK, static_experts=1), tensor_parallel_size=2)
    with group_of_threads(str(case.path), **settings) as (made, _, _):
        answers(made)
    expert, around = layout.expert_bytes, 6 * ALIGNMENT
    layers = len(layout.layers)
    for size, owned in zip(sorted(sizes, reverse=True), (3, 2), strict=True):
        held = 1 * layers + 2 * (owned - 1)
        assert held * expert <= size <= held * (expert + around)


# ---- what ends it


@pytest.mark.parametrize("offload", [None, DISK], ids=["in memory", "paged"])
def test_a_rank_that_dies_ends_the_run(checkpoints: Mapping[str, Case], offload: Offload | None) -> None:
    before = set(followers())
    made = checkpoints["qwen3"].group(offload)
    [rank] = set(followers()) - before
    stream = made.stream(prompts()[1], params(0))
    next(stream)
    os.kill(rank, signal.SIGKILL)
    line = rf"^rank 1 of the group is gone: process {rank} killed by signal 9$"
    with pytest.raises(ConnectionLost, match=line):
        list(stream)
    with pytest.raises(ConnectionLost, match=line):
        answers(made)


def test_a_pass_that_breaks_off_ends_the_group(
    checkpoints: Mapping[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank stands in the middle of it: nobody waits for it, and it ends."""
    before = set(followers())
    made = checkpoints["qwen3"].group(DISK)
    [rank] = set(followers()) - before

    def broken(self: Operations, task: Task) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Operations, "__call__", broken)
        with pytest.raises(KeyboardInterrupt):
            answers(made)
    with pytest.raises(ConnectionLost, match="^this end of the group is closed$"):
        answers(made)
    while not gone(rank):  # the test's own time limit ends it
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("offload", "settings", "message"),
    [
        (
            replace(DISK, schedule="on-demand"),
            {},
            "--offload-schedule: got 'on-demand'; allowed: cgopipe, s4, ser",
        ),
        (
            replace(DISK, schedule="in-place"),
            {},
            "--offload-schedule: got 'in-place'; allowed: cgopipe, s4, ser",
        ),
        (replace(DISK, link=1e9), {}, "link: got 1000000000.0; allowed: None with --fast-memory and"),
        (replace(DISK, slow_attention=True), {}, "slow_attention: got True; allowed: False with"),
        (replace(DISK, slow_cache=0.5), {}, "slow_cache: got 0.5; allowed: 0 with --fast-memory"),
        (DISK, {"expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size: got 2; allowed: 1 with"),
        (DISK, {"kernels": "reference"}, "--fast-memory: the experts of .* as BF16.*reference"),
        (DISK, {"moe_collectives": "shuffled"}, "--placement: got None; allowed: a file with tables"),
    ],
)
def test_what_does_not_go_with_it_is_told_in_one_line(
    checkpoints: Mapping[str, Case], offload: Offload, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as told:
        checkpoints["qwen3"].group(offload, **settings)
    assert "\n" not in str(told.value)


def test_rows_of_a_round_fit_wherever_they_go(checkpoints: Mapping[str, Case]) -> None:
    """A round of so many rows, every answer of which is asked from one rank."""
    model = registry.load(checkpoints["mixtral"].path, table.REFERENCE)
    rows = offloaded_group.rows_of_round(model)
    spec = model.spec
    assert rows * spec.top_k * 4 * (spec.hidden_size + 2 * spec.top_k + 1) > 0.9 * HALF_BYTES
    assert rows * spec.top_k * 4 * spec.hidden_size <= HALF_BYTES
