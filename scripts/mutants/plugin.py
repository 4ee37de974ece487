"""The pytest plugin that notes which functions each test enters, or runs only some of the tests.

What the setup of a fixture enters belongs to every test that uses it. Like `recorder` this stands in the
copy's site-packages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

try:
    import mutants_recorder as recorder
except ImportError:  # outside of a copy
    from scripts.mutants import recorder

ONLY = "MUTANTS_ONLY"
"""Environment variable: a file with names of tests, or of their files, one a line. Others do not run."""
_tests: dict[str, set[str]] = {}
_fixtures: dict[object, set[str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not recorder.entered.taken:
        recorder.entered.take()  # by imports
        recorder.entered.taken = True
    try:
        return (yield)
    finally:
        found = recorder.entered.take()
        for definitions in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
            found.update(*(_fixtures.get(one, ()) for one in definitions))
        _tests[item.nodeid] = found


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: object) -> Generator[None, object, object]:
    before = recorder.entered.take()
    try:
        return (yield)
    finally:
        made = recorder.entered.take()
        _fixtures.setdefault(fixturedef, set()).update(made)
        recorder.entered.update(dict.fromkeys(before | made))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ONLY in os.environ:
        chosen = set(Path(os.environ[ONLY]).read_text("utf-8").splitlines())
        kept = [one for one in items if not chosen.isdisjoint((one.nodeid, one.nodeid.partition("::")[0]))]
        config.hook.pytest_deselected(items=list(set(items).difference(kept)))
        items[:] = kept


def pytest_sessionfinish() -> None:
    """Write the functions of each test: {key: [number of a test]} and the tests' names."""
    if _tests and recorder.FOLDER.is_dir():
        numbers: dict[str, list[int]] = {}
        for number, keys in enumerate(_tests.values()):
            for key in keys:
                numbers.setdefault(key, []).append(number)
        found = {"tests": list(_tests), "entered": numbers}
        (recorder.FOLDER / f"{os.getpid()}.json").write_text(json.dumps(found), "utf-8")
