"""The results in training/README.md, from files that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import write_results
from write_results import BEGIN, END

RUN = {
    "seconds": 5100.0,
    "steps": 3210,
    "text_tokens": 5_000_000,
    "skill_tokens": 9_000_000,
    "shape": {"positions": 2048},
    "settings": {"length": 512, "long_share": 0.15},
    "texts": {"python": {"train_sha256": "aa", "heldout_sha256": "bb"}},
}
MEASURED = {
    "domains": {"python": {"bytes": 1000, "tokens": 400, "bits_per_byte": 1.25, "xz_bits_per_byte": 2.0}},
    "routing": {"idle_experts": 1, "distances": {"maths/python": [0.25]}},
    "skills": {
        "sums": {"questions": 40, "exact": 39, "share": 0.975, "experts": [[1.0, 0.0]]},
        "calls": {"questions": 40, "exact": 40, "share": 1.0, "experts": [[0.0, 1.0]]},
    },
}


def test_results_stand_between_the_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps(RUN))
    (tmp_path / "evaluation.json").write_text(json.dumps(MEASURED))
    page = f"Before.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n"
    text = write_results.replace_results(page, tmp_path)
    assert text.startswith(f"Before.\n\n{BEGIN}\n") and text.endswith(f"\n{END}\n\nAfter.\n")
    assert "85 minutes on two CPU cores, 3,210 steps." in text and "old" not in text
    assert "| sums | 40 | 39 | 97.5 % |" in text and "| two skills | 1.000 |" in text
    assert "| maths/Python | 0.250 |" in text and "1 of the 2 experts" in text
    assert "| Python | 1,000 | 400 | 1.250 | 2.000 |" in text and "| Python | `aa` | `bb` |" in text
    assert write_results.replace_results(text, tmp_path) == text
    with pytest.raises(SystemExit, match="got no place for results"):
        write_results.replace_results("Text.", tmp_path)
