from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

from moesaic.commands import cli
from moesaic.commands.options import Place, SolverName
from moesaic.commands.place_formats import save
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import NO_TOPIC, Profile, Routes
from moesaic.core.tables import Tables
from moesaic.models import files
from moesaic.models.embedding import nearest_known
from moesaic.models.registry import routed_model
from moesaic.policy.placement.solvers import SOLVERS, metis

LAYERS, E, K, V = (1, 2, 4), 8, 2, 40
SVG = "{http://www.w3.org/2000/svg}"


def profile(requests: int = 100, hidden: int = 16) -> Profile:
    """Token t mostly chooses experts t and t + 4 modulo 8, numbered differently in each layer. A request has
    tokens of one of four kinds."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 12, requests)
    kinds = np.repeat(rng.integers(0, 4, requests), lengths)
    tokens = kinds + 4 * rng.integers(0, V // 4, len(kinds))
    experts = np.empty((len(tokens), len(LAYERS), K), dtype=np.int16)
    for layer in range(len(LAYERS)):
        names = rng.permutation(E)
        experts[:, layer, 0], experts[:, layer, 1] = names[tokens % 4], names[tokens % 4 + 4]
        odd = rng.random(len(tokens)) < 0.1
        experts[odd, layer, 1] = (experts[odd, layer, 0] + 1) % E
    routes = Routes(
        tokens.astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        lengths.astype(np.int64),
        np.full(requests, NO_TOPIC, dtype=np.int16),
        experts,
    )
    return replace(Profile.from_routes("moe-5b1e", V, E, LAYERS, routes), hidden=hidden)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the real solver, which takes seconds for each layer and has tests of its own."""
    monkeypatch.setitem(SOLVERS, "ours", SOLVERS["speculative"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.npz"
    profile().save(path)
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The answer of `moesaic place` with --json."""
    assert cli.main(["place", *map(str, words), "--json"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["place", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_the_names_on_the_command_line_are_the_solvers() -> None:
    assert set(get_args(SolverName)) == set(SOLVERS)


def test_a_placement_and_its_tables(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "placement.json"
    found = answer(capsys, file, "--ranks", 4, "-o", path)
    placement = Placement.read(str(path), 4)
    placement.check("moe-5b1e", LAYERS, E)
    assert all(
        len(experts) == E // 4 for layer in LAYERS for experts in placement.experts_by_layer[layer].values()
    )
    tables = Tables.load(tmp_path / placement.tables)
    tables.check(placement, "tables")
    assert (tables.ranks, tables.vocab_size, tables.layers) == (4, V, LAYERS)
    assert found["written"]["placement"] == str(path) and found["written"]["solver"] == "ours"
    assert found["written"]["tables"] == str(tmp_path / "placement.tables.npz")
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        *("placement.json", "placement.tables.npz", "profile.npz")
    ]
    assert (found["learned_requests"], found["held_out_requests"]) == (20, 80)
    vanilla, ours = found["solvers"]
    assert (vanilla["solver"], ours["solver"]) == ("vanilla", "ours")
    assert (
        ours["token_level"]["local_activation_rate"] > 0.8 > vanilla["token_level"]["local_activation_rate"]
    )
    assert ours["request_level"]["local_activation_rate"] <= ours["token_level"]["local_activation_rate"]


def test_it_is_solved_on_everything(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The placement is measured on a share of the requests but solved on all. So another share gives the same
    one."""
    texts = []
    for share in (0.1, 0.6):
        answer(capsys, file, "--ranks", 2, "--solver", "kmeans", "--share", share, "-o", tmp_path / "p.json")
        texts.append((tmp_path / "p.json").read_text())
    assert texts[0] == texts[1]
    clusters = SOLVERS["kmeans"](profile(), 2, 0)
    assert json.loads(texts[0])["layers"]["1"]["0"] == np.flatnonzero(clusters.experts[0] == 0).tolist()


def test_bytes_are_those_of_the_rows(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pair that is not local sends a row of 16 numbers of four bytes and gets one back. k = 2, and there
    are three layers."""
    [level, _] = [
        answer(capsys, file, "--ranks", 2, "--solver", name, "-o", tmp_path / "p.json")["solvers"][-1][
            "token_level"
        ]
        for name in ("vanilla", "eplb")
    ]
    remote = K * sum(1 - rate for rate in level["local_activation_rate_of_layers"])
    assert level["remote_rows_per_token"]["pairs"] == pytest.approx(2 * remote)
    assert level["remote_bytes_per_token"]["pairs"] == pytest.approx(2 * remote * 16 * 4)
    assert level["remote_rows_per_token"]["deduplicated"] <= level["remote_rows_per_token"]["pairs"]
    profile(hidden=0).save(file)
    found = answer(capsys, file, "--ranks", 2, "--solver", "eplb", "-o", tmp_path / "p.json")
    assert found["solvers"][-1]["token_level"]["remote_bytes_per_token"] is None


def test_more_copies_make_more_local(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    rates = []
    for copies in (0, 4, 8):
        words = [file, "--ranks", 2, "--solver", "vanilla", "--redundant-experts", copies, "-o", path]
        found = answer(capsys, *words)["solvers"][-1]
        rates.append([found[level]["local_activation_rate"] for level in ("token_level", "request_level")])
        placement = Placement.read(str(path), 2)
        placement.check("moe-5b1e", LAYERS, E)
        assert [int(placement.replicas(layer).sum()) for layer in LAYERS] == [E + copies] * 3
        Tables.load(tmp_path / placement.tables).check(placement, "tables")
    assert rates[0] < rates[1] < rates[2] == [1.0, 1.0]
    assert "--redundant-experts: got 9" in refused(capsys, *words[:-3], 9, "-o", path)


def test_compare_measures_all_and_writes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    found = answer(capsys, file, "--ranks", 2, "--compare")
    assert {trial["solver"] for trial in found["solvers"]} == set(SOLVERS) - {"metis"}
    [line] = found["skipped"]
    assert "metis" in line and "\n" not in line
    assert found["written"] is None and list(tmp_path.iterdir()) == [file]
    assert "--solver: got 'metis'" in refused(
        capsys, file, "--ranks", 2, "--solver", "metis", "-o", tmp_path / "p.json"
    )


def test_tables_for_people(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    assert cli.main(["place", str(file), "--ranks", "2", "--solver", "eplb", "-o", str(path)]) == 0
    text = capsys.readouterr().out
    assert "measured on  80 requests" in text and "unseen ids" in text
    assert "is solved by eplb on the whole profile" in text
    rows = [line.split()[:2] for line in text.splitlines() if "%" in line and "unseen" not in line]
    assert [row[0] for row in rows] == ["vanilla", "request", "eplb", "request"]
    assert max(map(len, text.split(str(path))[0].splitlines())) <= 80


def demo_profile() -> Profile:
    """A profile as `serve demo --record-routing` writes it: a few known tokens, and no `nearest`."""
    routed = routed_model(files.resolve("demo"))
    rng = np.random.default_rng(1)
    tokens = np.tile(np.arange(300, 320, dtype=np.int32), 4)
    experts = np.argsort(rng.random((len(tokens), len(routed.layers), routed.num_experts)), axis=2)
    routes = Routes(
        tokens,
        np.arange(5, dtype=np.int64) * 20,
        np.full(4, 20, dtype=np.int64),
        np.full(4, NO_TOPIC, dtype=np.int16),
        experts[:, :, : routed.top_k].astype(np.int16),
    )
    vocab = routed.vocab_size
    return Profile.from_routes(routed.model, vocab, routed.num_experts, routed.layers, routes)


def test_unseen_tokens_of_a_live_recording_take_the_nearest_known_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, words = tmp_path / "live.npz", ("--ranks", 2, "--solver", "kmeans", "-o", tmp_path / "p.json")
    made = demo_profile()
    made.save(file)
    nearest = nearest_known(files.resolve("demo"), np.arange(300, 320, dtype=np.int32))
    assert cli.main(["place", *map(str, (file, *words))]) == 0
    assert "--model MODEL finds their nearest known ids" in capsys.readouterr().out
    without = Tables.load(tmp_path / "p.tables.npz")
    unseen = np.setdiff1d(np.arange(made.vocab_size), made.counts[0].known_tokens)
    assert (without.scores[unseen] == without.scores[0]).all(), "an average token's"
    assert answer(capsys, file, *words, "--model", "demo")["nearest_known"]
    found = Tables.load(tmp_path / "p.tables.npz")
    assert (found.scores == without.scores[nearest]).all() and len(np.unique(nearest)) == 20
    profile().save(file)
    assert "model: got 'moe-5b1e'; allowed: this model's" in refused(capsys, file, *words, "--model", "demo")


def test_a_picture_of_one_layer_before_and_after(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "map.svg"
    words = (file, "--ranks", 2, "--solver", "kmeans", "-o", tmp_path / "p.json", "--plot", plot)
    answer(capsys, *words)
    text = plot.read_text()
    panels = ET.fromstring(text).findall(f"{SVG}g")
    names = [panel.findtext(f"{SVG}text[@class='title']") for panel in panels]
    assert names == [
        "vanilla placement, ids in their order",
        "vanilla placement, ids on their best rank",
        "placed by kmeans, ids on their best rank",
    ]
    assert "layer 2: how often the 40 most common token ids" in text
    dealt_out, vanilla, placed = (
        float(share) for share in re.findall(r">([\d.]+)% of the choices stay", text)
    )
    assert dealt_out < 60 and dealt_out <= vanilla < placed and placed > 80
    answer(capsys, *words, "--plot-layer", 4)
    assert "layer 4: how often" in plot.read_text() and plot.read_text() != text
    plot.unlink()
    plot.symlink_to(tmp_path / "nowhere" / "map.svg")
    said = f"--plot: got '{plot}'; allowed: a file to write into (No such file or directory)"
    assert said in refused(capsys, *words)


def test_what_is_refused(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = ("-o", tmp_path / "p.json")
    for words, message in (
        ((file, "--ranks", 2), "--output-file: give a file for the placement"),
        ((file, "--ranks", 2, "--compare", *to), "give --solver to choose the written placement"),
        ((file, "--ranks", 9, *to), "--ranks: got 9; allowed: 1 to 8"),
        ((file, "--ranks", 0, *to), "--ranks: got 0"),
        ((file, "--ranks", 2, "--share", 0, *to), "--share: got 0"),
        ((file, "--ranks", 2, "--share", 0.9999, *to), "--share: got 0.9999"),
        ((file, "--ranks", 2, "--seed", -1, *to), "--seed: got -1"),
        ((file, "--ranks", 2, "--redundant-experts", -1, *to), "--redundant-experts: got -1"),
        ((file, "--ranks", 2, "-o", tmp_path / "p.txt"), "ends in .json"),
        ((file, "--ranks", 2, "-o", tmp_path / "nowhere" / "p.json"), "an existing directory"),
        ((tmp_path / "none.npz", "--ranks", 2, *to), "No such file"),
        ((file, "--ranks", 2, *to, "--plot", tmp_path / "p.png"), "ends in .svg"),
        ((file, "--ranks", 2, *to, "--plot", tmp_path / "nowhere" / "p.svg"), "an existing directory"),
        (
            (file, "--ranks", 2, "--compare", "--plot", tmp_path / "p.svg"),
            "--plot: draws the written placement",
        ),
        ((file, "--ranks", 2, *to, "--plot-layer", 2), "--plot-layer: allowed only with --plot"),
        (
            (file, "--ranks", 2, *to, "--plot", tmp_path / "p.svg", "--plot-layer", 3),
            "--plot-layer: got 3; allowed: one with routed experts: 1, 2, 4",
        ),
    ):
        assert message in refused(capsys, *words)
    profile(requests=1).save(file)
    said = refused(capsys, file, "--ranks", 2, *to)
    assert "requests with recorded routes: got 1" in said and "raise --max-memory" in said
    made = profile()
    replace(made, routes=made.routes.select([])).save(file)
    assert "requests with recorded routes: got 0" in refused(capsys, file, "--ranks", 2, *to)
    profile(requests=0).save(file)
    assert "counts no tokens" in refused(capsys, file, "--ranks", 2, *to)
    assert list(tmp_path.iterdir()) == [file]


def test_both_files_or_neither(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    answer(capsys, file, "--ranks", 2, "--solver", "vanilla", "-o", path)
    placement, tables = Placement.read(str(path), 2), Tables.load(tmp_path / "p.tables.npz")
    before = {one: one.read_bytes() for one in tmp_path.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        save(replace(placement, version=1), replace(tables, model="other"), path)
    assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_sglangs_map_and_back(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The map has a row for each layer of the model, and measured again it has the placement's figures."""
    words = (file, "--ranks", 4, "--solver", "kmeans", "--redundant-experts", 4)
    answer(capsys, *words, "-o", tmp_path / "own.json")
    made = answer(capsys, *words, "-o", tmp_path / "sglang.json", "--format", "sglang")
    assert made["written"]["tables"] is None
    data = json.loads((tmp_path / "sglang.json").read_text())
    assert list(data) == ["physical_to_logical_map"], "SGLang passes on every field as an argument"
    rows = data["physical_to_logical_map"]
    assert np.array(rows).shape == (max(LAYERS) + 1, E + 4)
    assert rows[0] == rows[3] == [*range(E), 0, 1, 2, 3], "these layers have no routed experts"
    own = Placement.read(str(tmp_path / "own.json"), 4)
    for layer, by_server in own.experts_by_layer.items():
        assert rows[layer] == [expert for rank in range(4) for expert in by_server[rank]]
    assert not (tmp_path / "sglang.tables.npz").exists()
    levels = []
    for name in ("own.json", "sglang.json"):
        found = answer(capsys, *words, "--compare", "--from", tmp_path / name)["solvers"][0]
        assert found["solver"] == f"from {name}"
        levels.append((found["token_level"], found["request_level"]))
    assert levels[0] == levels[1]


def test_a_map_as_torch_saves_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = torch.arange(E).repeat(max(LAYERS) + 1, 1)
    torch.save({"physical_to_logical_map": rows}, tmp_path / "map.pt")
    found = answer(capsys, file, "--ranks", 4, "--compare", "--from", tmp_path / "map.pt")["solvers"]
    by_name = {trial["solver"]: trial for trial in found}
    assert by_name["from map.pt"]["token_level"] == by_name["vanilla"]["token_level"]


def test_the_command_for_sglang(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["place", str(file), "--ranks", "4", "--redundant-experts", "4", "--format", "sglang", "-o"]
    assert cli.main([*words, str(tmp_path / "map.json")]) == 0
    flags = f"--ep-size 4 --init-expert-location {tmp_path}/map.json --ep-num-redundant-experts 4"
    assert flags in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "got 'list'; allowed: a placement, or SGLang's physical_to_logical_map"),
        ('{"logical_count": []}', "got ['logical_count']"),
        ("{", "map.json: not JSON"),
        ('{"physical_to_logical_map": 3}', "got 'int'; allowed: a list with a row for each layer up to 4"),
        ('{"physical_to_logical_map": [[0], [1]]}', "got '2 rows'"),
        (json.dumps({"physical_to_logical_map": [[*range(7)]] * 5}), "layer 1: got '7 experts'"),
        (json.dumps({"physical_to_logical_map": [[*range(7), 8]] * 5}), "got 8; allowed: experts 0 to 7"),
        (json.dumps({"physical_to_logical_map": [[0] * 8] * 5}), "layer 1: got 'no expert 1'"),
    ],
)
def test_a_map_that_cannot_be_measured(
    text: str, said: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.json").write_text(text)
    assert said in refused(capsys, file, "--ranks", 4, "--compare", "--from", tmp_path / "map.json")


def test_ranks_that_sglang_cannot_have(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (file, "--ranks", 3, "--solver", "vanilla", "--format", "sglang", "-o", tmp_path / "map.json")
    assert "--format: got 'sglang'; allowed: experts, and redundant ones" in refused(capsys, *words)
    assert not (tmp_path / "map.json").exists()


@pytest.mark.slow
def test_settings_come_without_torch() -> None:
    code = "import sys, moesaic.commands.place; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_settings_from_python(file: Path) -> None:
    with pytest.raises(ConfigError, match="--solver: got 'best'"):
        Place(file, ranks=2, solver="best", compare=True)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_solved(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(*_: object) -> None:
        raise AssertionError("a solver ran")

    monkeypatch.setitem(SOLVERS, "ours", solve)
    monkeypatch.setitem(SOLVERS, "vanilla", solve)
    said = refused(capsys, file, "--ranks", 2, "-o", "/proc/placement.json")
    assert "--output-file: got '/proc/placement.json'; allowed: a file to write into (" in said
    out = tmp_path / "placement.json"
    said = refused(capsys, file, "--ranks", 2, "-o", out, "--plot", "/proc/x.svg")
    assert "--plot: got '/proc/x.svg'; allowed: a file to write into (" in said
    assert list(tmp_path.iterdir()) == [file]
