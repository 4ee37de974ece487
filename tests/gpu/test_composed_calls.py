"""Features in pairs, beside rows that stay on the sanitizer's device between workers and expert servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support import pairs
from tests.support.composition import NOT_ON_GPUS, ON_GPUS, SERVERS, groups
from tests.support.gpu_forks import forks
from tests.support.gpu_sanitizer import sanitized
from tests.test_composition import Workshop, _refused, _texts

FLOATS = ["--kernels", "reference", "--dtype", "float32"]
GROUPS = groups(several_hosts=False, but=NOT_ON_GPUS)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module", autouse=True)
def on_device() -> Iterator[None]:
    with forks():
        yield


def run(names: Sequence[str], workshop: Workshop) -> tuple[int, Path]:
    """The exit code, and the file of results."""
    path, asked = workshop.command(names)
    flags = ON_GPUS if "--expert-servers" in asked else ON_GPUS | SERVERS
    with sanitized():
        return workshop.run_words(path, [*asked, *FLOATS, *(word for pair in flags.items() for word in pair)])


@pytest.mark.parametrize("names", pairs.some([(one,) for one in GROUPS], [(GROUPS[1],)]), ids=" ".join)
def test_what_goes_together_gives_the_same_answers(names: tuple[str, ...], workshop: Workshop) -> None:
    """Answers are those of one process on the CPU."""
    code, found = run(names, workshop)
    assert code == 0
    path, asked = workshop.command(names)
    cache = ["--kv-cache-dtype", "int8"] if "int8" in asked else []
    code, wanted = workshop.run_words(path, ["--device", "cpu", *FLOATS, *cache])
    assert code == 0 and _texts(found) == _texts(wanted)


@pytest.mark.full
@pytest.mark.parametrize("name", NOT_ON_GPUS)
def test_what_is_refused_is_one_line(
    name: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run([name], workshop)
    _refused(code, capsys.readouterr().err)
