"""Greedy tokens of copies of SmolLM2-135M-Instruct in every mode that the table of docs/cluster.md has.

A fixture compares the answers of one process with the dense model in transformers. Those of each mode must be
the same up to the first place where the reference's best logits are nearer than `measure.MARGIN`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import measure_smollm2 as measure
from moesaic import LLM, SamplingParams
from moesaic.commands import cli
from tests.commands.test_run_batch_offload import MACHINE
from tests.support import ray_nodes
from tests.support.cluster_driver import cluster
from tests.support.composed_hosts import OtherHosts
from tests.support.composition import FEATURES, HOSTS, NOBODY
from tests.support.group_placements import recorded, write
from tests.test_composition import APART

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]
COUNT, NEW_TOKENS = 24, 16
THREE = {"--tensor-parallel-size": "3", "--expert-tensor-parallel-size": "3"}
"""The model has 9 heads of queries and 3 of keys. 4 experts cannot be divided by 3, but their width can."""
OWN_FLAGS = {
    "`--tensor-parallel-size`": THREE,
    "`--moe-collectives`": THREE | {"--moe-collectives": "all-reduce"},
    "`--nnodes`": FEATURES["`--nnodes`"].flags | THREE | {"--nnodes": "3"},
    "`--fast-memory`": FEATURES["`--fast-memory`"].flags | {"--fast-memory": "320MiB"},
}
"""Flags in place of those for a tiny model."""
ROUNDED = "`--kv-cache-dtype int8`"
"""A mode whose answers are rounded."""
MODES = [name for name, feature in FEATURES.items() if feature.model == "plain"]
Expected = tuple[list[int], list[int]]
"""A prompt, and the greedy tokens that are certain."""


@pytest.fixture(scope="module")
def expected(published: Path, dense: PreTrainedModel, rows: list[tuple[str, bool]]) -> list[Expected]:
    """What one process answers to the shortest prompts, up to near ties of the reference."""
    llm = LLM(str(published / "copies"), threads=1)
    prompts = sorted((measure.encode(llm, text, is_chat) for text, is_chat in rows), key=len)[:COUNT]
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers = [completion.outputs[0].token_ids for completion in llm.generate(prompts, params)]
    agreements = [measure.compare_answer(dense, *pair) for pair in zip(prompts, answers, strict=True)]
    measure.show_agreement("one process", agreements)
    assert not any(agreement.is_different for agreement in agreements)
    return [
        (prompt, answer[: agreement.num_equal])
        for prompt, answer, agreement in zip(prompts, answers, agreements, strict=True)
    ]


@pytest.fixture(scope="module")
def home(published: Path, expected: list[Expected], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that flags name, and the batch."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "this.toml").write_text(MACHINE)
    (folder / "hosts.toml").write_text(APART)
    (folder / "secret").write_text("x" * 64)
    (folder / "secret").chmod(0o600)
    params = SamplingParams(max_tokens=4, temperature=0)
    profile = recorded(str(published / "copies"), [prompt for prompt, _ in expected[:2]], params)[1]
    Path(write(folder, profile, units=2)).rename(folder / "placement.json")
    fixed = {"model": "copies", "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    bodies = [fixed | {"prompt": prompt, "return_token_ids": True} for prompt, _ in expected]
    lines = [
        json.dumps({"custom_id": str(place), "method": "POST", "url": "/v1/completions", "body": body})
        for place, body in enumerate(bodies)
    ]
    (folder / "in.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """Two nodes of a Ray cluster."""
    pytest.importorskip("ray", reason="the extra moesaic[ray] is missing")
    with warnings.catch_warnings(), ray_nodes.running([16, 16]):
        yield


def read_tokens(out: Path) -> list[list[int]]:
    """The tokens of a file of results, in the order of the requests."""
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    lines.sort(key=lambda line: int(line["custom_id"]))
    return [line["response"]["body"]["choices"][0]["token_ids"] for line in lines]


def count_equal(expected: list[Expected], answers: list[list[int]]) -> int:
    """Answers that have all the certain tokens."""
    assert len(answers) == len(expected)
    return sum(
        tokens[: len(certain)] == certain for tokens, (_, certain) in zip(answers, expected, strict=True)
    )


@pytest.mark.parametrize("name", MODES)
def test_each_mode_answers_as_transformers(
    name: str, published: Path, expected: list[Expected], home: Path, request: pytest.FixtureRequest
) -> None:
    if name == "Ray":
        request.getfixturevalue("ray")
    feature = FEATURES[name]
    flags = dict(OWN_FLAGS.get(name, feature.flags))
    watched = flags.pop("--standby-for", None)
    hosts = OtherHosts(home, feature.joins, NOBODY if watched else None)
    words = [word.replace("{}", str(home)) for pair in flags.items() for word in pair if word]
    out = home / f"out-{MODES.index(name)}.jsonl"
    files = ["-i", str(home / "in.jsonl"), "-o", str(out), "--model", str(published / "copies")]
    fixed = ["--served-model-name", "copies", "--threads", "1", "--max-model-len", "1024"]
    with hosts.around() if name in HOSTS else contextlib.nullcontext():
        assert cli.main(["run-batch", *files, *fixed, *words]) == 0
    num_equal = count_equal(expected, read_tokens(out))
    measure.show(f"{name}: {num_equal} of {COUNT} answers are equal; {' '.join(words)}")
    assert not any(code for code, _ in hosts.ended), hosts.ended
    assert num_equal == COUNT or (name == ROUNDED and num_equal > COUNT // 2)


@pytest.mark.parametrize("role", ["expert server", "attention worker"])
def test_answers_go_on_after_a_kill(role: str, published: Path, expected: list[Expected]) -> None:
    path = str(published / "copies")
    killed: list[int] = []
    params = [SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)] * COUNT

    def kill(tokens: int) -> None:
        if not killed and tokens > COUNT * NEW_TOKENS // 3:
            killed.append(served.pid(f"{role} 0"))
            os.kill(killed[0], signal.SIGKILL)

    shape = {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2}
    with cluster(path, **shape, max_model_len=1024, kv_cache_memory="64MiB") as served:
        served.submit([prompt for prompt, _ in expected], params)
        answers = [tokens for tokens, _ in served.finish(kill)]
        deaths = served.supervisor.report().counters.process_deaths
    num_equal = count_equal(expected, answers)
    measure.show(f"a killed {role}: {num_equal} of {COUNT} answers are equal")
    assert killed and deaths and num_equal == COUNT
