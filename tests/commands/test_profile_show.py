from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from cyclopts import App, Parameter
from tests.support import browser

from moesaic.commands.options import ShowProfile
from moesaic.commands.panels import Line, Panel, bars, dots, heat, lines, page, step
from moesaic.commands.profile_show import show
from moesaic.core.errors import ConfigError
from moesaic.core.profile import NO_TOPIC, Profile, Routes

LAYERS, E, K = 6, 8, 2
SVG = "{http://www.w3.org/2000/svg}"


def profile(requests: int = 12) -> Profile:
    rng = np.random.default_rng(0)
    lengths = np.full(requests, 20)
    tokens = rng.integers(0, 30, lengths.sum())
    experts = np.argsort(rng.random((len(tokens), LAYERS, E)) + 2 * np.eye(E)[tokens % E][:, None], axis=2)
    routes = Routes(
        tokens.astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]),
        lengths.astype(np.int32),
        (np.arange(requests) % 3 + NO_TOPIC).astype(np.int16),
        experts[:, :, ::-1][:, :, :K].astype(np.int16),
    )
    return Profile.from_routes("moe-5b1e", 50, E, range(1, LAYERS + 1), routes, ("code", "<prose> & verse"))


def without_routes(made: Profile) -> Profile:
    return replace(made, routes=made.routes.select([]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.npz"
    profile().save(path)
    return path


def test_tables_for_people(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(ShowProfile(file, ranks=4)) == 0
    text = capsys.readouterr().out
    assert "240, with 30 of 50 ids" in text and "10 requests, predicted from the other 2" in text
    assert "top 2 of 8 in 6 layers" in text and "4 ranks, vanilla placement" in text
    assert re.search(r"the same topic in \d+\.\d%, 42\.9% by chance", text)
    for title in ("hottest other", "kurtosis", "max / median", "partners", "precision", "by 5", "2-gram"):
        assert title in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n     6  ") == 5 and text.count("  mean  ") == 3


def test_json_for_machines(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(ShowProfile(file), as_json=True) == 0
    out = capsys.readouterr().out
    found = json.loads(out, parse_constant=pytest.fail)
    assert out.count("\n") == 1 and found["model"] == "moe-5b1e" and found["topics"][0] == "code"
    assert [layer["layer"] for layer in found["layers"]] == list(range(1, LAYERS + 1))
    assert set(found["layers"][0]["f1"]) == {"p25", "p50", "p75"}
    assert found["distances"][: len(found["layers"][0]["repeated"])] == [1, 2, 4, 8, 16]
    assert found["prediction"]["ranks"] == 8 and found["prediction"]["asked_requests"] == 10
    assert len(found["prediction"]["layers"][-1]["look_back"]) == 6
    assert len(found["requests_map"]["points"]) == 12


def test_an_infinite_skew_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only two of eight experts are ever chosen. The median load is 0, so the skew is infinite."""
    routes = Routes(
        np.zeros(2, dtype=np.int32),
        np.array([0, 1, 2]),
        np.ones(2, dtype=np.int32),
        np.full(2, NO_TOPIC, dtype=np.int16),
        np.array([[[0, 1]], [[1, 0]]], dtype=np.int16),
    )
    Profile.from_routes("moe", 1, E, [0], routes).save(tmp_path / "p.npz")
    assert show(ShowProfile(tmp_path / "p.npz"), as_json=True) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["layers"][0]["max_over_median"] is None
    assert show(ShowProfile(tmp_path / "p.npz", plot=tmp_path / "p.svg")) == 0
    ET.parse(tmp_path / "p.svg")


def test_counts_without_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_routes(profile()).save(tmp_path / "p.npz")
    assert show(ShowProfile(tmp_path / "p.npz", plot=tmp_path / "p.svg")) == 0
    out = capsys.readouterr().out
    assert "no predictions" in out and "240, with 30 of 50 ids" in out
    assert "not in this profile" in (tmp_path / "p.svg").read_text()


def test_picture(file: Path, tmp_path: Path) -> None:
    plot = tmp_path / "routing.svg"
    assert show(ShowProfile(file, plot=plot)) == 0
    root = ET.fromstring(plot.read_text(encoding="utf-8"))
    panels = root.findall(f"{SVG}g")
    titles = [panel.findtext(f"{SVG}text[@class='title']") for panel in panels]
    assert len(titles) == 11 and "Experts chosen together, layer 4" in titles
    assert "Local pairs on the predicted rank (8 ranks)" in titles
    names = {
        panel.findtext(f"{SVG}text[@class='title']"): [text.text for text in panel.iter(f"{SVG}text")]
        for panel in panels
    }
    for of_tokens in ("F1 of a token's experts and its id's top k", "Kurtosis of a token's counts"):
        assert {"p25", "p50", "p75"} <= set(names[of_tokens])
    for hotness in ("Hotness of an id's top k together", "Hotness of the hottest expert beside these"):
        assert {"p25", "p50", "p75"} <= set(names[hotness])
    static = names["Experts predicted from the token id (its top k)"]
    assert {"precision", "F1", "hits", "hits without the id"} <= set(static)
    back = names["Experts predicted by looking back some layers"]
    assert {f"by {layers}" for layers in range(6)} <= set(back)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"<prose> & verse", "no topic", "code", "2-gram"} <= set(texts)
    circles = list(root.iter(f"{SVG}circle"))
    assert len(circles) == 12 + 3 + 1, "requests, their topics, the last layer's only point of `5 back`"


def test_a_page_has_the_charts_and_the_tables(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "routing.html"
    assert show(ShowProfile(file, html=target)) == 0
    text = target.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.count("<svg") == 1 and "<script" not in text
    assert "Experts chosen together, layer 4" in text and "max / median" in text
    assert "&lt;prose&gt; &amp; verse" in text and "<prose>" not in text
    with pytest.raises(ConfigError, match="--html: cannot write"):
        show(ShowProfile(file, html=tmp_path / "nowhere" / "p.html"))


@pytest.mark.full
@pytest.mark.skipif(browser.program() is None, reason="there is no Chromium on this machine")
def test_the_charts_of_a_narrow_page_can_be_read(file: Path, tmp_path: Path) -> None:
    """They scroll sideways within their frame, and the page does not."""
    target = tmp_path / "routing.html"
    assert show(ShowProfile(file, html=target)) == 0
    with browser.browser() as opened:
        opened.size(420, 800)
        opened.open(target.as_uri())
        opened.until("document.querySelector('svg') && document.readyState == 'complete'")
        assert opened.run("document.querySelector('svg').getBoundingClientRect().width") >= 900
        assert opened.run("document.documentElement.scrollWidth") <= 420


def test_settings_that_are_wrong(file: Path, tmp_path: Path) -> None:
    for changes, words in (
        ({"plot": tmp_path / "p.png"}, "--plot: got .*p.png.*svg"),
        ({"ranks": 0}, "--ranks: got 0"),
        ({"profile_share": 1.0}, "--profile-share: got 1.0"),
        ({"tokens": 0}, "--tokens: got 0"),
        ({"seed": -1}, "--seed: got -1"),
    ):
        with pytest.raises(ConfigError, match=words):
            ShowProfile(file, **changes)
    with pytest.raises(ConfigError, match="cannot write .*nowhere"):
        show(ShowProfile(file, plot=tmp_path / "nowhere" / "p.svg"))
    with pytest.raises(ConfigError, match="missing.npz: No such file"):
        show(ShowProfile(tmp_path / "missing.npz"))


def test_a_profile_of_nothing(tmp_path: Path) -> None:
    routes = without_routes(profile()).routes
    Profile.from_routes("moe", 50, E, range(LAYERS), routes).save(tmp_path / "p.npz")
    with pytest.raises(ConfigError, match="counts no tokens"):
        show(ShowProfile(tmp_path / "p.npz"))


def test_the_seed_chooses_who_is_learned_from(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in (0, 0, 1):
        show(ShowProfile(file, seed=seed), as_json=True)
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[0]["layers"] == outputs[2]["layers"]


def test_flags_come_from_the_fields() -> None:
    app = App()
    found: list[ShowProfile] = []

    @app.default
    def command(options: Annotated[ShowProfile, Parameter(name="*")]) -> None:
        found.append(options)

    app(["p.npz", "--plot", "p.svg", "--ranks", "4"], result_action="return_value")
    assert found == [ShowProfile(Path("p.npz"), plot=Path("p.svg"), ranks=4)]


# ---- charts


def test_a_line_lies_where_its_numbers_say() -> None:
    panel = lines("t", "x", "y", [Line("a", [(0, 0), (10, 100)])])
    path = next(part for part in panel.parts if 'class="line c0"' in part)
    assert path.endswith('d="M62.0,286.0 L418.0,108.9"/>')


def test_shades_of_a_heat_map() -> None:
    panel = heat("t", "x", "y", [[0, 4], [2, 0.1]])
    cells = [part for part in panel.parts if '<path class="cell"' in part]
    assert [re.findall(r'fill-opacity="([\d.]+)" d="(.*)"', part)[0] for part in cells] == [
        ("0.5", "M0,1h1v1h-1z"),
        ("1", "M1,0h1v1h-1z"),
    ]


def test_labels_of_powers_of_ten() -> None:
    panel = lines("t", "x", "y", [Line("a", [(-1, 0), (3, 2)])], logarithmic=True)
    text = "".join(panel.parts)
    for label in ("0.1", "1", "10", "100", "1,000"):
        assert f">{label}</text>" in text
    assert ">-1</text>" not in text and ">3</text>" not in text


def test_the_scale_of_a_heat_map_has_its_largest_value_and_its_rows_have_names() -> None:
    panel = heat("t", "x", "y", [[0, 0.5], [0.25, 0]], ticks=(("top", "low"), ("a", "b")), form="{:.0%}")
    text = "".join(panel.parts)
    for label in ("50%", "0%", "top", "low", "a", "b"):
        assert f">{label}</text>" in text


def test_bars_stand_side_by_side_and_are_as_high_as_their_numbers() -> None:
    panel = bars("t", "x", "y", [Line("a", [(0, 50), (1, 100)]), Line("b", [(1, 25)])])
    found = [
        re.findall(r'(b\d)" x="([\d.]+)".*height="([\d.]+)"', part)
        for part in panel.parts
        if '"bar b' in part
    ]
    drawn = [(kind, float(x), float(tall)) for [(kind, x, tall)] in (one for one in found if one)][:3]
    assert [kind for kind, _, _ in drawn] == ["b0", "b0", "b1"]
    assert drawn[0][1] < drawn[1][1] < drawn[2][1]
    assert drawn[1][2] == pytest.approx(2 * drawn[0][2], abs=0.2)
    assert drawn[1][2] == pytest.approx(4 * drawn[2][2], abs=0.2)


def test_captions_are_wrapped() -> None:
    text = page("t", [Panel("p", [], "a caption of words " * 6)])
    assert text.count('class="caption"') == 2
    ET.fromstring(text)


def test_nothing_to_draw() -> None:
    for panel in (
        lines("t", "x", "y", [Line("a", [])]),
        dots("t", []),
        heat("t", "x", "y", []),
        bars("t", "x", "y", []),
    ):
        ET.fromstring(page("a < b & c", [panel]))
    ET.fromstring(page("t", [lines("t", "x", "y", [Line("a", [(1, 0), (1, 0)])])]))


def test_more_names_than_fit() -> None:
    panel = dots("t", [Line(f"a rather long name {i}", [(i, i)]) for i in range(9)])
    legend = [part for part in panel.parts if part.startswith("<text")]
    assert len(legend) < 9 and ">...<" in legend[-1]


def test_the_legend_of_dots_has_dots() -> None:
    panel = dots("t", [Line("a", [(0, 0), (1, 2)]), Line("b", [(2, 1)])])
    text = "".join(panel.parts)
    assert text.count("<circle") == 5 and 'class="line' not in text


def test_marks_of_an_axis() -> None:
    assert [step(13, 6), step(1.05, 5), step(100, 5)] == [2, 0.2, 20]
