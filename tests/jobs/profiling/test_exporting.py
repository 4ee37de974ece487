"""Hot experts in the forms of other engines: what is written is read again with the same loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesaic.commands import cli
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.runtime.hot_list import open_list

LENGTHS, PROMPTS = np.array([4, 3]), np.array([2, 3])


@pytest.fixture
def profile() -> Profile:
    """Two requests with made-up experts. The first one has two generated tokens."""
    model = registry.routed_model(files.resolve("demo"))
    rng = np.random.default_rng(0)
    shape = (LENGTHS.sum(), len(model.layers))
    experts = rng.random((*shape, model.num_experts)).argsort(axis=2)[:, :, : model.top_k]
    routes = Routes(
        np.arange(LENGTHS.sum(), dtype=np.int32),
        np.array([0, *np.cumsum(LENGTHS)]),
        PROMPTS,
        np.full(2, NO_TOPIC, dtype=np.int16),
        experts.astype(np.int16),
    )
    return Profile.from_routes(model.model, model.vocab_size, model.num_experts, model.layers, routes)


@pytest.fixture
def file(profile: Profile, tmp_path: Path) -> Path:
    profile.save(tmp_path / "profile.npz")
    return tmp_path / "profile.npz"


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["profile", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_a_trace_has_prompts_at_negative_positions(profile: Profile, file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    assert cli.main(["profile", "export", str(file), "--to", "llama-moe-trace", "-o", str(trace)]) == 0
    rows = [[int(number) for number in line.split(",")] for line in trace.read_text().splitlines()]
    layers = len(profile.layers)
    assert [row[0] for row in rows[::layers]] == [-2, -1, 0, 1, -3, -2, -1]
    assert [row[1] for row in rows] == [*profile.layers] * 7
    assert np.array_equal([row[2:] for row in rows], profile.routes.experts.reshape(7 * layers, -1))


def test_a_trace_is_read_again(profile: Profile, file: Path, tmp_path: Path) -> None:
    trace, again = tmp_path / "trace.csv", tmp_path / "again.npz"
    assert cli.main(["profile", "export", str(file), "--to", "llama-moe-trace", "-o", str(trace)]) == 0
    trace.write_text(2 * trace.read_text())  # traces are joined by appending
    words = ["profile", "import", str(trace), "--from", "llama-moe-trace", "--model", "demo"]
    assert cli.main([*words, "-o", str(again)]) == 0
    read = Profile.load(again)
    assert np.array_equal(read.loads, 2 * profile.loads) and not read.token_ids


def test_a_list_stays_first_in_memory(profile: Profile, file: Path, tmp_path: Path) -> None:
    output = tmp_path / "hot.json"
    words = ["profile", "export", str(file), "--to", "hot-experts", "--model", "demo", "-o", str(output)]
    assert cli.main(words) == 0
    path = files.resolve("demo")
    counts = open_list(str(output), path, registry.expert_layout(path, table.REFERENCE)).counts
    assert counts == dict(zip(profile.layers, profile.loads.tolist(), strict=True))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "line 2: got ''; allowed: position,layer,expert"),
        ("1,0", "line 2: got '1,0'"),
        ("1,0,x", "line 2: got '1,0,x'"),
        ("1,0,-1", "line 2: got '1,0,-1'"),
        ("1,77,0", "line 2: layer: got 77; allowed: one with routed experts: 0, 1"),
        ("1,0,24", "line 2: expert: got 24; allowed: 0 to 23"),
    ],
)
def test_lines_that_are_no_trace(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"0,0,1,2\n{line}\n0,0,1,2\n")
    words = ("import", trace, "--from", "llama-moe-trace", "--model", "demo", "-o", tmp_path / "p.npz")
    assert said in refused(capsys, *words)
    assert not (tmp_path / "p.npz").exists()


def test_what_cannot_be_exported(
    profile: Profile, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ("export", file, "-o", output, "--to")
    assert "--model: got None" in refused(capsys, *words, "hot-experts")
    assert "--model: got 'demo'; allowed: nothing" in refused(
        capsys, *words, "llama-moe-trace", "--model", "demo"
    )
    data = dict(np.load(file))
    other = tmp_path / "other.npz"
    data["model"] = np.array("moe-123456789abc")
    np.savez(other, **data)
    words = ("export", other, "-o", output, "--to", "hot-experts", "--model", "demo")
    assert "model: got 'moe-123456789abc'; allowed: this model's" in refused(capsys, *words)
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["other.npz", "profile.npz"]'
