"""The cover of what only a GPU runs, in `make test`."""

from __future__ import annotations

from pathlib import Path

from tests.gpu.conftest import COVER


def test_the_cover_names_tests_that_exist() -> None:
    for test in COVER.values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (Path(__file__).parent / file).read_text(), test
