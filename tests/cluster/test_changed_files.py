"""Files of the checkpoint that somebody changes while real processes serve them.

The law: an answer has the bits of the files of the start. A process that computes from a file which somebody
wrote to ends within seconds, and says which file it was. No process starts from other files.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.core.errors import CheckpointError
from moesaic.kernels import table
from moesaic.models.files import resolve
from moesaic.models.headers import Headers
from tests.cluster.test_identity import alone, workload
from tests.cluster.test_join_workers import worker
from tests.cluster.test_supervisor import failures
from tests.commands.test_run_batch_offload import MACHINE
from tests.support.cluster_driver import Answer, Cluster, cluster
from tests.test_serve import start

pytestmark = pytest.mark.slow
COUNT, TOKENS = 4, 48
SHAPE: dict[str, Any] = {"attention_workers": 2, "expert_servers": 2, "min_replicas": 2}
STREAMED = pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    return alone(*workload(COUNT, TOKENS))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(resolve("demo"), tmp_path / "model")


def overwrite(model: Path) -> None:
    """Changes the experts in place, as `rsync --inplace` does. What the attention workers read stays."""
    places = Headers(model).list_tensors()
    with (model / WEIGHTS).open("r+b") as file:
        for name, place in places.items():
            if "experts" in name:
                file.seek(place.offset)
                file.write(os.urandom(place.size))


def put_back(model: Path) -> None:
    """Writes the old bytes over the new ones."""
    with (model / WEIGHTS).open("r+b") as file:
        file.write((resolve("demo") / WEIGHTS).read_bytes())


def cut(model: Path) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size // 3)


def replace_by_rename(model: Path) -> None:
    other = model / "new"
    shutil.copy(model / WEIGHTS, other)
    with other.open("r+b") as file:
        file.seek(other.stat().st_size // 2)
        file.write(os.urandom(1 << 12))
    other.replace(model / WEIGHTS)


def health(served: Cluster) -> str:
    return served.supervisor.report().health


def kill(served: Cluster, name: str) -> None:
    os.kill(served.pid(name), signal.SIGKILL)


def all_serve(served: Cluster) -> bool:
    return {member.stage for member in served.supervisor.status()} == {"serving"}


def has_joined(served: Cluster, role: str) -> bool:
    """Whether a process of this role that joined serves."""
    return any(
        bool(member.host) and member.role == role and member.stage == "serving"
        for member in served.supervisor.status()
    )


def ask(served: Cluster) -> list[Answer]:
    """The answers to a new workload."""
    before = len(served.running.answers)
    served.submit(*workload(COUNT, TOKENS))
    return served.finish()[before:]


@pytest.mark.parametrize("change", [overwrite, cut])
def test_every_process_ends_by_name_and_starts_again_from_the_old_bytes(
    change: Callable[[Path], None], model: Path, expected: list[Answer]
) -> None:
    with cluster(str(model), **SHAPE) as served:
        assert ask(served) == expected
        change(model)
        served.until(lambda: f"{model / WEIGHTS}: " in served.supervisor.report().outage)
        assert health(served) == "unavailable"
        served.until(lambda: all(member.deaths for member in served.supervisor.status()))
        reasons = [what for what in failures(served) if f"{model / WEIGHTS}: this file changed while" in what]
        if change is overwrite:
            names = {"attention worker 0", "attention worker 1", "expert server 0", "expert server 1"}
            assert {reason.partition(":")[0] for reason in reasons} >= names
        put_back(model)
        served.until(lambda: all_serve(served))
        assert health(served) == "serving" and ask(served) == expected


def test_a_process_that_reads_behind_a_cut_names_the_file(model: Path, expected: list[Answer]) -> None:
    """Requests that run meanwhile wait for the old bytes."""
    with cluster(str(model), **SHAPE) as served:

        def disturb(tokens: int) -> None:
            if tokens >= COUNT * 8 and not changed:
                changed.append(True)
                cut(model)
                served.until(lambda: health(served) == "unavailable")
                put_back(model)

        changed: list[bool] = []
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(disturb) == expected and changed
        endings = [what for what in failures(served) if "killed by signal 7 (SIGBUS)" in what]
        assert endings and all(f"{model / WEIGHTS}: " in ending for ending in endings)


def test_other_bytes_are_never_loaded(model: Path) -> None:
    with cluster(str(model), **SHAPE) as served:
        overwrite(model)
        served.until(lambda: "it has other bytes of tensors" in served.supervisor.report().outage)
        assert health(served) == "unavailable"
        incarnations = [member.incarnation for member in served.supervisor.status()]
        assert max(incarnations) <= 3, "a refused start is not repeated while the file is another one"


def test_a_new_mode_or_link_ends_nothing_and_refuses_no_restart(model: Path, expected: list[Answer]) -> None:
    with cluster(str(model), **SHAPE) as served:
        (model / WEIGHTS).chmod(0o600)
        (model / "link").hardlink_to(model / WEIGHTS)
        kill(served, "attention worker 1")
        kill(served, "expert server 0")
        served.until(lambda: [m.incarnation for m in served.supervisor.status()] == [1, 2, 2, 1])
        served.until(lambda: all_serve(served))
        assert ask(served) == expected
        assert not any("this file changed" in what for what in failures(served))


def test_a_rename_over_the_name_ends_nothing_and_is_never_loaded(model: Path, expected: list[Answer]) -> None:
    with cluster(str(model), **SHAPE) as served:
        replace_by_rename(model)
        served.until(lambda: any("it has other bytes of tensors" in what for what in failures(served)))
        kill(served, "expert server 1")
        assert ask(served) == expected and health(served) == "serving"
        assert [member.incarnation for member in served.supervisor.status()] == [1, 1, 1, 1]


@STREAMED
def test_no_streamed_read_mixes_old_and_new_bytes(model: Path, expected: list[Answer]) -> None:
    """Requests that run while the file changes get the old bits, or wait."""
    with cluster(str(model), expert_servers=2, min_replicas=2, server_memory=1 << 20) as served:
        assert ask(served) == expected
        begun = served.running.tokens

        def disturb(tokens: int) -> None:
            if tokens >= begun + COUNT * 8 and not changed:
                changed.append(True)
                overwrite(model)
                served.until(lambda: health(served) == "unavailable")
                put_back(model)

        changed: list[bool] = []
        served.submit(*workload(COUNT, TOKENS))
        assert served.finish(disturb)[COUNT:] == expected and changed
        assert any(f"{model / WEIGHTS}: this file changed while" in what for what in failures(served))


@pytest.mark.parametrize("is_streamed", [False, pytest.param(True, marks=STREAMED)])
def test_a_server_of_one_process_ends_by_name(
    is_streamed: bool, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hardware = model.parent / "this.toml"
    hardware.write_text(MACHINE)
    flags = ("--fast-memory", "11MiB", "--max-model-len", "64", "--hardware", str(hardware))
    server = start(*(flags if is_streamed else ()), model=str(model))
    overwrite(model)
    assert server.process.wait(60) == 2
    assert server.process.stdout is not None
    server.process.stdout.close()
    said = capfd.readouterr().err
    assert f"{model / WEIGHTS}: this file changed while it was served: it was written over in place" in said


@pytest.mark.parametrize("role", ["expert-server", "attention-worker"])
def test_a_process_that_joined_looks_at_its_own_files(
    role: str, model: Path, expected: list[Answer], door: dict[str, Any]
) -> None:
    """The cluster's own files stay as they are, so it goes on."""
    with cluster(**door) as served, worker(served, door, role, "--model", str(model)) as process:
        served.until(lambda: has_joined(served, role.replace("-", " ")))
        overwrite(model)
        # A worker joins again by itself, and is compared with the cluster. A service manager starts a server.
        assert process.wait(60) == (2 if role == "attention-worker" else 1)
        assert process.stderr is not None
        said = process.stderr.read()
        assert f"{model / WEIGHTS}: this file changed while it was served" in said
        assert ("this one has other bytes of tensors" in said) == (role == "attention-worker")
        served.until(lambda: all_serve(served))
        assert ask(served) == expected


def test_an_llm_raises_before_it_computes_from_a_changed_file(model: Path) -> None:
    llm, params = LLM(str(model), threads=1), SamplingParams(max_tokens=4, temperature=0)
    before = llm.generate(["a"], params)[0].text
    (model / WEIGHTS).chmod(0o600)
    assert llm.generate(["a"], params)[0].text == before
    overwrite(model)
    llm._next_look = 0.0
    with pytest.raises(CheckpointError, match="this file changed while it was served"):
        llm.generate(["a"], params)


def test_a_group_of_ranks_ends_by_name(model: Path, expected: list[Answer]) -> None:
    with cluster(str(model), attention_workers=1, tensor_parallel_size=2) as served:
        overwrite(model)
        reason = f"attention worker 0: {model / WEIGHTS}: "
        served.until(lambda: any(what.startswith(reason) for what in failures(served)))
        served.until(lambda: health(served) == "unavailable")
        put_back(model)
        served.until(lambda: all_serve(served))
        assert health(served) == "serving"
