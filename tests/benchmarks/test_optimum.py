"""Small layers whose best placement is known."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import optimum
import pytest
from rich.console import Console


@pytest.mark.slow
def test_ours_is_below_the_optimum_and_that_below_the_bound() -> None:
    arguments = Namespace(seconds=60.0, bound_rounds=50)
    layers = optimum.small(6, 2, 12, 0)
    assert [len(counts.known_tokens) for counts in layers] == [12] * optimum.LAYERS
    found = optimum.solved(layers[0], 6, 2, arguments)
    assert found is not None
    assert 0.5 < found.ours <= found.optimum + 1e-6 <= found.bound + 1e-6
    arguments.seconds = 0.0
    assert optimum.solved(layers[0], 6, 2, arguments) is None


def test_a_row_for_each_shape(tmp_path: Path) -> None:
    rows = [optimum.Found(8, 2, 0.8, bound, 0.8, 1.0) for bound in (0.8, 0.88)]
    with (tmp_path / "shown").open("w+") as file:
        optimum.show(rows, {(8, 2): 1, (8, 4): 2}, Console(file=file, width=140))
        file.seek(0)
        text = file.read()
    assert all(part in text for part in ("2 of 3", "0 of 2", "1.050", "1.100", "1.000", "0.955"))
