"""Features in pairs, as `moesaic run-batch` starts them: the same answers, or one line that says why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import SamplingParams
from moesaic.cluster.joining import standby
from moesaic.cluster.supervisor import Supervisor
from moesaic.commands import cli
from moesaic.core.errors import ConfigError
from moesaic.gpu.nvshmem import package as nvshmem_package
from moesaic.testing import byte_tokenizer
from tests.commands.test_run_batch_offload import MACHINE, SIZES, answers, ask
from tests.support import model_configs, pairs, quantizers, ray_nodes, tiny_models
from tests.support.composed_hosts import OtherHosts
from tests.support.composition import (
    AT_THE_DOOR,
    BY_NVSHMEM,
    FEATURES,
    HOSTS,
    NOT_BY_NVSHMEM,
    REASONS,
    SERVERS,
    groups,
    in_words,
    merged,
)
from tests.support.group_placements import recorded, write

pytestmark = [
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]

LENGTHS = (3, 16, 30, 45)
APART = """
links = { latency_us = 100, gb_per_s = 1, inside_latency_us = 5, inside_gb_per_s = 10 }
hosts = [{ name = "a", workers = [0, 1] }, { name = "b", servers = [0, 1] }]
"""
"""Workers on one host, and servers on another one, so that a relay is of use."""


class Workshop:
    """Checkpoints of each model, with a placement, and batches that they answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self._runs = 0

    def path(self, model: str) -> Path:
        if model not in self._paths:
            home = self._folder / model
            home.mkdir()
            self._paths[model] = self._saved(model, home / "model")
            (home / "this.toml").write_text(MACHINE)
            (home / "hosts.toml").write_text(APART)
            params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
            prompts = [tiny_models.prompt(20, model_configs.VOCAB, seed=seed) for seed in range(2)]
            made = write(home, recorded(str(self._paths[model]), prompts, params)[1], units=2)
            Path(made).rename(home / "placement.json")
        return self._paths[model]

    def _saved(self, model: str, to: Path) -> Path:
        case = (
            model_configs.CASES["qwen3-next"]
            if model == "states"
            else ("qwen3_moe", model_configs.qwen3(**SIZES))
        )
        to.mkdir()
        tiny_models.save(tiny_models.build(*case), to, torch.bfloat16)
        byte_tokenizer(to)
        if model != "quantised":
            return to
        return quantizers.quantize(to, to.parent / "both", quantizers.FORMATS["fp8 blocks"])[0]

    def command(self, names: Sequence[str]) -> tuple[Path, list[str]]:
        """The model's path, and the flags of these features as words."""
        found = merged(names)
        assert found is not None
        flags, model = found
        path, home = self.path(model), str(self._folder / model)
        return path, [word.replace("{}", home) for pair in flags.items() for word in pair if word]

    def run(self, names: Sequence[str]) -> tuple[int, Path]:
        """The exit code, and the file of results."""
        return self.run_words(*self.command(names))

    def run_words(self, path: Path, words: list[str]) -> tuple[int, Path]:
        self._runs += 1
        asked, out = self._folder / "in.jsonl", self._folder / f"out{self._runs}.jsonl"
        asked.write_text("".join(ask(f"r{length}", length) + "\n" for length in LENGTHS))
        command = ["run-batch", "-i", str(asked), "-o", str(out), "--model", str(path), "--threads", "1"]
        return cli.main([*command, "--served-model-name", "tiny", *words]), out

    def answers(self, names: Sequence[str]) -> dict[str, str]:
        code, out = self.run(names)
        assert code == 0, names
        return _texts(out)

    def answers_of_hosts(self, names: Sequence[str]) -> tuple[dict[str, str], OtherHosts]:
        """The same with processes of other hosts, and what became of these.

        `run-batch` has no --standby-for. So the cluster gets it once the settings were read.
        """
        watched = FEATURES["`--standby-for`"].flags["--standby-for"] if "`--standby-for`" in names else None
        joins = [role for name in names for role in FEATURES[name].joins]
        path, words = self.command(names)
        if watched is not None:
            place = words.index("--standby-for")
            del words[place : place + 2]
        hosts = OtherHosts(self._folder / merged(names)[1], joins, watched)  # type: ignore[index]
        with hosts.around():
            code, out = self.run_words(path, words)
        assert code == 0, (names, hosts.ended)
        return _texts(out), hosts

    def alone(self, names: Sequence[str]) -> dict[str, str]:
        """What the model of these features answers without any other one."""
        model, cache = merged(names)[1], "`--kv-cache-dtype int8`"  # type: ignore[index]
        key = [name for name in FEATURES if FEATURES[name].model == model and model != "plain"][:1]
        key += [cache] if cache in names else []
        if str(key) not in self._known:
            self._known[str(key)] = self.answers(key)
        return self._known[str(key)]


def _texts(out: Path) -> dict[str, str]:
    return {name: choices[0]["text"] for name, choices in answers(out).items()}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """Two nodes of a Ray cluster."""
    pytest.importorskip("ray", reason="the extra moesaic[ray] is missing")
    with ray_nodes.running([16, 16]):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("names", groups(several_hosts=False), ids=" ".join)
def test_what_goes_together_gives_the_same_answers(names: tuple[str, ...], workshop: Workshop) -> None:
    assert workshop.answers(names) == workshop.alone(names)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["a model with states", "`--tensor-parallel-size`", "quantised experts"])
def test_drafts_are_checked_over_streamed_experts(other: str, workshop: Workshop) -> None:
    """The groups above have expert servers beside the two."""
    names = ("`--fast-memory`", "`--speculative-config`", other)
    assert workshop.answers(names) == workshop.alone(names)


@pytest.mark.full
@pytest.mark.parametrize("names", groups(several_hosts=True), ids=" ".join)
def test_what_goes_together_on_several_hosts_gives_the_same_answers(
    names: tuple[str, ...], workshop: Workshop, request: pytest.FixtureRequest
) -> None:
    if "Ray" in names:
        request.getfixturevalue("ray")
    found, hosts = workshop.answers_of_hosts(names)
    assert found == workshop.alone(names)
    assert not any(code for code, _ in hosts.ended), hosts.ended


REFUSALS = [(one, other) for one, others, _ in REASONS for other in others]


@pytest.mark.parametrize(
    ("feature", "other"), pairs.some(REFUSALS, [(one, others[-1]) for one, others, _ in REASONS])
)
def test_what_is_refused_is_one_line(
    feature: str,
    other: str,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(standby, "watch", _watched)
    path, words = workshop.command((feature, other))
    if "`--standby-for`" in (feature, other):
        code = cli.main(["serve", str(path), "--threads", "1", "--port", "0", *words])
    else:
        code, out = workshop.run_words(path, words)
        assert not (out.exists() and out.read_text())
    _refused(code, capsys.readouterr().err)


@pytest.mark.full
@pytest.mark.parametrize("feature", sorted(set(HOSTS) - {"`join --role expert-server`"}))
def test_without_servers_a_fast_memory_is_that_of_one_process(
    feature: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {**FEATURES["`--fast-memory`"].flags, **FEATURES[feature].flags}
    path = workshop.path("plain")
    words = [word.replace("{}", str(path.parent)) for pair in flags.items() for word in pair]
    code, _ = workshop.run_words(path, words)
    _refused(code, capsys.readouterr().err)


@pytest.mark.parametrize("name", FEATURES)
def test_nvshmem_goes_with_a_feature_or_is_refused_in_one_line(
    name: str,
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No process is started."""

    def start(*_: object) -> None:
        raise ConfigError("--started: the settings go together")

    monkeypatch.setattr(Supervisor, "start", start)
    monkeypatch.setattr(nvshmem_package, "MODULE", "json")
    path, words = workshop.command([name])
    apart = {"--expert-servers", "--enable-expert-parallel"} & set(words)
    flags = BY_NVSHMEM if apart else BY_NVSHMEM | SERVERS
    if (watched := "--standby-for") in words:  # run-batch has none
        del words[(place := words.index(watched)) : place + 2]
    code, _ = workshop.run_words(path, [*words, *(word for pair in flags.items() for word in pair)])
    said = capsys.readouterr().err
    assert ("--started: " in said) == (name not in NOT_BY_NVSHMEM), said
    if name in NOT_BY_NVSHMEM:
        _refused(code, said)


def _refused(code: int, said: str) -> None:
    """Whether a command ended with one line that names a flag and what is allowed."""
    assert code == 2
    assert [line for line in said.splitlines() if line.startswith("moesaic: --") and "; allowed: " in line]
    assert "Traceback" not in said


def _watched(*_: object) -> None:
    raise AssertionError("a standby begins to watch with settings that are refused later")


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "other"), [(one, other) for one, others, _ in AT_THE_DOOR for other in others]
)
def test_who_is_refused_at_the_door_gets_one_line(role: str, other: str, workshop: Workshop) -> None:
    found, hosts = workshop.answers_of_hosts((role, other))
    assert found == workshop.alone((role, other))
    [(code, said)] = [one for one in hosts.ended if one[0]]
    assert code == 1 and said.count("\n") == 1 and f"{role.strip('`').removeprefix('join ')}: " in said


@pytest.mark.slow
def test_the_table_in_the_docs_is_this_one() -> None:
    page = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text()
    assert in_words() in page
