"""The CPU time of the recorder, counted."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import recording
from rich.console import Console


@pytest.mark.slow
def test_each_round_counts_its_steps() -> None:
    arguments = Namespace(model="demo", rounds=1, requests=4, concurrency=4, new=5, share=1.0)
    rounds, profiles = recording.cpu(arguments)
    assert len(rounds) == len(profiles) == 1
    seconds, recorded, steps = rounds[0]
    assert 0 < recorded < seconds
    assert steps == 5
    assert recording.recorded(arguments) == 1.0


def test_the_table_has_the_recorders_share(tmp_path: Path) -> None:
    rounds = [(0.4, 0.004, 100), (0.6, 0.012, 100), (1.0, 0.005, 100)]
    with (tmp_path / "shown").open("w+") as file:
        recording.show_cpu(rounds, [0.006, 0.003], 0.04, Console(file=file, width=140))
        file.seek(0)
        text = file.read()
    assert all(part in text for part in ("300", "6667", "70.0", "1.05%", "4.0%", "4.5", "0.01%"))
