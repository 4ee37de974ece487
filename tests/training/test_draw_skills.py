"""The map of skills and experts, on shares that are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import draw_skills

SVG = "{http://www.w3.org/2000/svg}"
APART = {"sums": [[0.5, 0.0, 0.5]], "calls & more": [[0.0, 1.0, 0.0]]}


def write(path: Path, skills: dict[str, list[list[float]]]) -> Path:
    rows = {name: {"experts": layers} for name, layers in skills.items()}
    path.write_text(json.dumps({"skills": rows} if skills else {}))
    return path


def test_skills_with_experts_of_their_own_lie_on_the_diagonal() -> None:
    assert draw_skills.sort_experts([[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]) == [0, 2, 1]
    assert draw_skills.sort_experts([[0.2, 0.8], [0.9, 0.1]]) == [1, 0]
    assert draw_skills.mean_distances(APART) == pytest.approx([1.0])
    assert draw_skills.mean_distances({"a": [[0.3, 0.7]], "b": [[0.3, 0.7]]}) == pytest.approx([0.0])
    text = draw_skills.draw("a < b", APART)
    cells = re.findall(r'<path class="cell" fill-opacity="([\d.]+)" d="([^"]*)"', text)
    assert cells == [("0.5", "M0,0h1v1h-1zM1,0h1v1h-1z"), ("1", "M2,1h1v1h-1z")]
    names = [one.text for one in ET.fromstring(text).iter(f"{SVG}text")]
    assert {"layer 0", "sums", "calls & more", "mean distance of two skills: 1.00"} <= set(names)


def test_conversations_are_left_out_and_files_without_skills_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "evaluation.json", {**APART, "conversations": [[1.0, 0.0, 0.0]]})
    assert draw_skills.main([str(file), str(tmp_path / "map.svg")]) == 0
    assert "2 skills; mean distance of two by layer 1.000" in capsys.readouterr().out
    assert "conversations" not in (tmp_path / "map.svg").read_text()
    with pytest.raises(SystemExit, match="got no skills; allowed: what training/evaluate_demo"):
        draw_skills.read_shares(write(tmp_path / "empty.json", {}))
