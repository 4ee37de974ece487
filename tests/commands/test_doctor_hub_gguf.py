"""`moesaic doctor org/name:Q4_K_M`: only the headers of GGUF files on a hub are read."""

from __future__ import annotations

import doctest
import json
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.commands.test_doctor_model import REPOSITORY, a_machine, examined
from tests.models.test_gguf import MIXES, WIDE
from tests.support import gguf_files, pairs, tiny_models
from tests.support.fake_hub import hub

from moesaic.commands import doctor_model
from moesaic.commands.plan import find_hardware
from moesaic.cost.hardware import Hardware
from moesaic.models import files
from moesaic.models.files import FoundModel
from moesaic.models.gguf import header
from moesaic.models.gguf.hub import FIRST_RANGE, LARGEST_RANGE

MIB = 1 << 20
WEIGHTS = 256 * MIB
"""Bytes that are put at the end of files. They are holes, and cost time only where they are sent."""
SCRIPT = """
import sys, tempfile
from pathlib import Path
from moesaic.core.errors import MoesaicError
from moesaic.models import files
for name in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            print("found", files.find(name, Path(folder)).name)
        except MoesaicError as error:
            print(error)
"""
DOCTOR = """
import json, sys
from moesaic.commands import cli
raise SystemExit(max(cli.main(["doctor", *words, "--json"]) for words in json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(
        tiny_models.build(*WIDE[MIXES["as Q4_K_M"][0]]), tmp_path_factory.mktemp("source")
    )


def on_the_hub(file: Path, to: Path, described: int) -> int:
    """A file with a description of that many bytes and with many more weights. Returns its header's bytes."""
    to.parent.mkdir(parents=True, exist_ok=True)
    data, key = file.read_bytes(), b"general.description"
    text = b"x" * (described - described % 32 - len(key) - 20)
    (count,) = struct.unpack_from("<Q", data, 16)
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(text)) + text
    assert len(entry) % 32 == 0, "tensors stay at multiples of the alignment"
    to.write_bytes(data[:16] + struct.pack("<Q", count + 1) + entry + data[24:])
    size = to.stat().st_size
    os.truncate(to, size + WEIGHTS)
    return header.length(to.read_bytes()[:size], size + WEIGHTS)


def run(endpoint: str, home: Path, *words: object) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def doctor(endpoint: str, home: Path, *each: list[object]) -> list[dict[str, Any]]:
    """Asks for several reports in one process. each: the words of each report."""
    done = run(endpoint, home, "-c", DOCTOR, json.dumps(each, default=str))
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("parts", pairs.some((1, 2), (2,)))
def test_it_says_what_it_says_of_a_local_file(source: Path, tmp_path: Path, parts: int) -> None:
    first, _ = gguf_files.write(source, tmp_path / "made", MIXES["as Q4_K_M"][1], files=parts)
    repository, home, machine = tmp_path / "hub", tmp_path / "home", a_machine(tmp_path / "machine.toml")
    names = [file.name for file in header.files(first)]
    shown = ["Tiny-Q4_K_M.gguf"] if parts == 1 else [f"UD/Tiny-Q4_K_M-0000{n}-of-00002.gguf" for n in (1, 2)]
    lengths = {}
    for name, to, described in zip(names, shown, (5 * MIB, 1024), strict=False):
        lengths[to] = on_the_hub(first.with_name(name), repository / to, described)
    sent: Counter[str] = Counter()
    model = f"{REPOSITORY}:q4_k_m"
    with hub(REPOSITORY, repository, sent, **{shown[0]: "redirect"}) as (endpoint, seen):
        of_machine: list[object] = ["--hardware", machine]
        found, plain, local = doctor(
            endpoint, home, [model, *of_machine], [REPOSITORY, "--hardware", "none"],
            [repository / shown[0], *of_machine],
        )  # fmt: skip
    assert found["command"].endswith(f"moesaic serve {model}") and found["problems"] == []
    assert found["stored"]["download"] == found["stored"]["bytes"] > parts * WEIGHTS
    assert plain["command"].endswith(f"moesaic serve {REPOSITORY}:{shown[0]}")
    for report in (found, local):
        for one in (report, report["stored"]):
            for key in ("model", "name", "command", "download", "verdict"):  # they name the place
                one.pop(key, None)
    assert found == local
    for name, length in lengths.items():
        assert 0 <= sent[name] / 2 - length <= max(FIRST_RANGE, LARGEST_RANGE), "two reports"
    assert not list(home.rglob("*.gguf")) and not any("HEAD" in line for line in seen)


def test_weights_that_are_not_here_are_not_measured(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctest.testmod(doctor_model, verbose=False).failed == 0
    file, _ = gguf_files.write(source, tmp_path / "weights")
    cpu = find_hardware(str(a_machine(tmp_path / "machine.toml")))
    measured: list[str] = []

    def now(directory: str) -> Hardware:
        measured.append(directory)
        return cpu

    monkeypatch.setattr("moesaic.commands.hardware.now", now)
    sizes = {file.name: file.stat().st_size}
    for found in (FoundModel(file, file), FoundModel(file, file, sizes, f"{REPOSITORY}:{file.name}")):
        monkeypatch.setattr(files, "find", lambda *_, found=found: found)
        examined(capsys, "a/b:c")
    assert measured[0] == str(file.parent) and measured[1] != str(file.parent)


@pytest.mark.slow
def test_what_a_hub_lacks_and_refuses(source: Path, tmp_path: Path) -> None:
    made, _ = gguf_files.write(source, tmp_path / "made")
    repository, sent = tmp_path / "hub", Counter[str]()
    faults = {
        "A-whole.gguf": ("no ranges", "its header cannot be read alone: the server does not send ranges"),
        "A-moved.gguf": ("another range", "got bytes 1 to 1048576 of "),
        "A-endless.gguf": ("endless", "got another number of bytes than 1048576 from byte 0"),
        "A-grows.gguf": ("grows", "it changed while its header was read"),
        "A-gone.gguf": ("EntryNotFound", "no A-gone.gguf in this repository"),
        "A-gated.gguf": ("GatedRepo", "is gated: accept its licence and log in to the hub"),
        "A-private.gguf": ("RepoNotFound", "is neither a directory nor a model on the hub"),
    }
    for name in faults:
        on_the_hub(made, repository / name, 2 * MIB)
    damaged = {
        "A-empty.gguf": (b"", "not a GGUF file (it is empty)"),
        "A-pickle.gguf": (b"PK\3\4" + bytes(3 * MIB), "not a GGUF file (it begins with b'PK"),
        "A-cut.gguf": (made.read_bytes()[:3000], "truncated or corrupt: "),
        "A-short.gguf": (made.read_bytes()[:-1], "truncated or corrupt: tensor "),
    }
    for name, (data, _) in damaged.items():
        (repository / name).write_bytes(data)
    every = {name: says for name, (_, says) in (faults | damaged).items()}  # type: ignore[operator]
    names = [f"{REPOSITORY}:{name}" for name in every]
    told = {name: fault for name, (fault, _) in faults.items()}
    with hub(REPOSITORY, repository, sent, **told) as (endpoint, _):
        done = run(endpoint, tmp_path / "home", "-c", SCRIPT, *names, REPOSITORY, f"{REPOSITORY}:Q9")
    lines = done.stdout.splitlines()
    assert len(lines) == len(every) + 2, done.stderr
    for (name, says), line in zip(every.items(), lines, strict=False):
        assert says in line and name in line, line
    listed = f"allowed: one of its files as {REPOSITORY}:FILE: A-cut.gguf, A-empty.gguf"
    assert lines[-2].startswith(f"model: got '{REPOSITORY}'; {listed}")
    assert lines[-1].startswith(f"model: got '{REPOSITORY}:Q9'; allowed: one of its files: A-cut.gguf")
    assert sent["A-whole.gguf"] < WEIGHTS / 4 and sent["A-endless.gguf"] < WEIGHTS / 4
    done = run("http://127.0.0.1:9", tmp_path / "home", "-c", SCRIPT, names[0], REPOSITORY)
    reach = "is not in the local cache and the hub is out of reach"
    assert done.stdout.splitlines() == [f"model: {name!r} {reach}" for name in (names[0], REPOSITORY)]


@pytest.mark.slow
def test_a_problem_names_the_file_on_the_hub(source: Path, tmp_path: Path) -> None:
    made, _ = gguf_files.write(source, tmp_path / "made")
    repository = tmp_path / "hub"
    repository.mkdir()
    whole = made.read_bytes()
    (repository / "A.gguf").write_bytes(whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_X.weight"))
    (repository / "B.gguf").write_bytes(whole.replace(b"qwen3moe", b"qwen9moe"))
    with hub(REPOSITORY, repository) as (endpoint, _):
        [found] = doctor(endpoint, tmp_path / "home", [f"{REPOSITORY}:A.gguf", "--hardware", "none"])
        words = ("-m", "moesaic", "doctor", f"{REPOSITORY}:B.gguf", "--hardware", "none")
        done = run(endpoint, tmp_path / "home", *words)
    missing = "tensor model.layers.0.self_attn.k_proj.weight is missing"
    assert found["problems"] == [f"{REPOSITORY}:A.gguf: {missing}"]
    assert done.returncode == 2 and done.stdout == ""
    assert f"{REPOSITORY}:B.gguf: general.architecture: got 'qwen9moe'; allowed: " in done.stderr
