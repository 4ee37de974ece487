"""The mutants that `scripts/mutants` makes are valid, the same each time, and judged by the tests."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from scripts.mutants import __main__ as program
from scripts.mutants import entered, mutations, reach, tree

ROOT = Path(__file__).parent.parent

SOURCE = '''"""Text + 1."""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from x import Y
LOG = logging.getLogger("x" * 1)
Key = tuple[int, ...] | None


def clamp(value: "int < 3", low=0, mode="soft"):
    """Not 1 < 2."""
    LOG.info("%d", 1 + 1)
    é = f"é{value + 1}" if not value else 'é'; low -= 1
    if value < low and low is not None:
        raise ValueError(value, low)
    return max(value, low)
'''
WANTED = {
    ("constant", "0", "(1)"), ("constant", "0", "(-1)"), ("default", '"soft"', "'softx'"),
    ("negation", "not value", "(value)"), ("negation", "not value", "(not (not value))"),
    ("operator", "low -= 1", "low += 1"), ("removed", "low -= 1", "pass"),
    ("constant", "1", "(2)"), ("constant", "1", "(0)"),
    ("comparison", "value < low", "(value <= low)"), ("comparison", "low is not None", "(low is None)"),
    ("and/or", "value < low and low is not None", "(value < low or low is not None)"),
    ("negation", "value < low and low is not None", "(not (value < low and low is not None))"),
    ("removed", "raise ValueError(value, low)", "pass"),
    ("arguments", "ValueError(value, low)", "ValueError(low, value)"),
}  # fmt: skip


def test_what_runs_is_mutated_and_nothing_else() -> None:
    found = {(one.kind, one.before, one.after) for one in mutations.find("x.py", SOURCE)}
    assert found == WANTED


def test_a_mutant_differs_from_its_source_in_that_place_only() -> None:
    for one in mutations.find("x.py", SOURCE):
        lines = one.apply(SOURCE).splitlines()
        assert [
            number for number, line in enumerate(SOURCE.splitlines(), 1) if line != lines[number - 1]
        ] == [one.line]


def test_a_number_that_one_does_not_change_is_left_alone() -> None:
    found = mutations.find("x.py", "most, least = 1e30, 1e-9\n")
    assert [(one.before, one.after) for one in found] == [
        ("1e-9", "(1.000000001)"),
        ("1e-9", "(-0.999999999)"),
    ]


@pytest.mark.slow
def test_mutants_of_the_package_are_valid() -> None:
    chosen = mutations.choose(program.found(ROOT, "moesaic", "src/moesaic/core/"), 0, 60)
    assert len({(one.path, one.line) for one in chosen}) == 60
    for one in chosen:
        source = (ROOT / one.path).read_text("utf-8")
        assert ast.dump(ast.parse(one.apply(source))) != ast.dump(ast.parse(source)), str(one)


def test_a_seed_draws_the_same_mutants_again() -> None:
    every = mutations.find("x.py", SOURCE)
    one, again, other = (mutations.choose(reversed(every), seed, 5) for seed in (1, 1, 2))
    assert one == again != other
    assert mutations.choose(reversed(every), 1, 3) == one[:3]
    assert {len({m.line for m in mutations.choose(every, seed, 9)}) for seed in range(9)} == {4}


def test_the_same_change_is_found_in_another_tree() -> None:
    one, other = (
        [one for one in mutations.find("x.py", text) if one.after == "(0)"]
        for text in ("a = 1\nb = 1\na = 1\n", "c = 3\nc = 3\na = 1\n\na = 1\n")
    )
    assert [found.line for found in mutations.standing_in(one, other)] == [3, 3]
    assert [found.line for found in mutations.standing_in(other, one)] == [3, 3]


NESTED = """a = 1

class B:
    b = 2
    def c(
        self, d=4,
    ):
        async def e(f=5):

            return f
        return e
g = 6
"""


@pytest.mark.parametrize(
    ("line", "key"),
    [(1, None), (4, None), (6, None), (8, "x.py:5"), (10, "x.py:8"), (11, "x.py:5"), (12, None)],
)
def test_a_line_belongs_to_the_innermost_function_with_it(line: int, key: str | None) -> None:
    assert entered.key_of("x.py", NESTED, line) == key


LARGER = "def larger(a, b):\n    return a if a > b else b\n"
HALF = "from sample import numbers\n\n\ndef half(n):\n    return n // 2\n"
ONE = """
from pathlib import Path

from sample import numbers

ran = []


def test_it():
    ran.append(1)
    assert numbers.larger(2, 1) == 2


def test_that_its_neighbour_disturbs():
    assert not ran or ">=" not in Path(numbers.__file__).read_text()
"""
OTHERS = """
from tests.help import half


def test_it():
    assert half(8) == 4


def test_that_fails_already():
    raise AssertionError
"""
FILES = {
    "src/sample/__init__.py": "",
    "src/sample/numbers.py": LARGER,
    "src/sample/texts.py": HALF,
    "src/sample/more/__init__.py": "from sample.more.deep import DEEP\n",
    "src/sample/more/deep.py": "DEEP = 1\n",
    "src/sample/user.py": "from sample.more import DEEP\n",
    "src/sample/alone.py": "while 0 > 0:\n    pass\n",
    "tests/__init__.py": "",
    "tests/help.py": "from sample.texts import half\n",
    "tests/test_numbers.py": ONE,
    "tests/test_others.py": OTHERS,
    "tests/test_programs.py": "import subprocess\n\nfrom sample import alone\n",
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
}
ENDLESS = "(0 >= 0)"
VERDICTS = {
    "(a >= b)": (False, ""),  # whichever of two equal numbers is returned
    "(not (a > b))": (True, "tests/test_numbers.py::test_it"),
    "(n * 2)": (True, "tests/test_others.py::test_it"),
    ENDLESS: (True, "took too long"),
}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_tests_are_found_by_what_they_import(sample: Path) -> None:
    graph = reach.read(sample, "sample")

    def names(path: str) -> list[str]:
        return [file.name for file in graph.tests_of(path)]

    assert names("src/sample/numbers.py") == ["test_numbers.py", "test_others.py", "test_programs.py"]
    assert names("src/sample/texts.py") == ["test_others.py", "test_programs.py"]
    assert names("src/sample/alone.py") == ["test_programs.py"]


def test_users_of_a_file_import_it_or_an_init_that_does(sample: Path) -> None:
    graph = reach.read(sample, "sample")
    one, other = "src/sample/numbers.py", "src/sample/texts.py"
    assert graph.users_of(one) == {one, other} and graph.users_of(other) == {other}
    deep = {f"src/sample/{name}.py" for name in ("more/__init__", "more/deep", "user")}
    assert graph.users_of("src/sample/more/deep.py") == deep


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("a/b.py", ["tests/a/test_b.py", "tests/a/test_b_more.py"]),
        ("a/__init__.py", ["tests/a/test_a.py"]),
        ("a/other/d.py", ["tests/a/test_d.py"]),
        ("c/e.py", ["tests/test_c.py"]),
        ("f.py", []),
    ],
)
def test_tests_with_the_name_come_first_and_then_the_nearest(path: str, first: list[str]) -> None:
    far = [f"x/test_{number}.py" for number in range(reach.FEW)]
    names = [
        *far,
        "a/test_b.py",
        "a/test_b_more.py",
        "a/test_a.py",
        "a/test_d.py",
        "test_c.py",
        "x/test_b.py",
    ]
    tests = [Path("tests") / name for name in names]
    found = reach.nearest(f"src/sample/{path}", "sample", tests)
    assert found == [*(Path(one) for one in first), *tests[: reach.FEW]]


@pytest.mark.slow
def test_a_mistake_is_caught_and_what_changes_nothing_survives(sample: Path, tmp_path_factory: Any) -> None:
    copied = tree.copy(sample, tmp_path_factory.mktemp("copy"), "sample")
    trial = program.Trial(copied, reach.read(copied.root, "sample"), "", workers=1)
    assert trial.measure([]).failed == ["tests/test_others.py::test_that_fails_already"]
    found = {one.after: one for one in program.found(sample, "sample", "")}
    for after, verdict in VERDICTS.items():
        trial.limit = 2 if after == ENDLESS else 120
        outcome = trial.judge(found[after])
        assert (outcome.caught, outcome.by) == verdict
    assert (copied.root / "src/sample/numbers.py").read_text() == LARGER


@pytest.mark.slow
def test_on_request_only_the_nearest_files_run(
    sample: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "FEW", 1)
    copied = tree.copy(sample, tmp_path_factory.mktemp("copy"), "sample")
    trial = program.Trial(copied, reach.read(copied.root, "sample"), "", workers=1, near_only=True)
    [mutation] = [one for one in program.found(sample, "sample", "") if one.after == "(n * 2)"]
    trial.measure([mutation])
    assert set().union(*trial.functions.tests.values()) == {"tests/test_others.py::test_it"}
    assert trial.judge(mutation).by == "tests/test_others.py::test_it"


RECORDED = """
import subprocess
import sys
import threading

import pytest
from sample import numbers

numbers.at_import()


@pytest.fixture(scope="module")
def made():
    return numbers.in_a_fixture()


def test_first(made):
    pass


def test_second(made):
    numbers.outer()


def test_thread():
    thread = threading.Thread(target=numbers.in_a_thread)
    thread.start()
    thread.join()


def test_program():
    subprocess.run([sys.executable, "-c", "from sample import numbers; numbers.in_a_program()"], check=True)
"""
ENTERED = {
    "at_import": [],
    "in_a_fixture": ["test_first", "test_second"],
    "outer": ["test_second"],
    "inner": [],
    "in_a_thread": ["test_thread"],
    "in_a_program": [""],
    "unused": [],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_which_tests_enter_a_function(tmp_path: Path, tmp_path_factory: Any, workers: int) -> None:
    names = [name for name in ENTERED if name != "inner"]
    source = "".join(f'def {name}():\n    """Text."""\n' for name in names)
    source = source.replace("def outer():\n", "def outer():\n    def inner():\n        return 1\n")
    for name, text in {"src/sample/numbers.py": source, "tests/test_x.py": RECORDED}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).with_name("__init__.py").touch()
    copied = tree.copy(tmp_path, tmp_path_factory.mktemp("copy"), "sample")
    with copied.recording() as functions:
        assert copied.pytest([], "", workers, 120).good
    lines = {
        line[:-3].split()[-1]: number for number, line in enumerate(source.splitlines(), 1) if "def" in line
    }
    for name, tests in ENTERED.items():
        key = f"src/sample/numbers.py:{lines[name]}"
        assert functions.of(key) == {f"tests/test_x.py::{one}".removesuffix("::") for one in tests}, name
        assert functions.during_imports(key) is (name == "at_import")
    assert functions.of_files(["src/sample/numbers.py"]) == set().union(
        *map(functions.of, functions.tests)
    ) | {"tests/test_x.py"}
    assert not list((copied.root / "src").rglob("*.pyc")) and copied.pytest([], "", 1, 120).good


@pytest.mark.slow
def test_the_program_reports_each_mutant(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--root", str(sample), "--package", "sample", "--only", "src/sample/texts.py", "--workers", "1"]
    assert program.main([*words, "--list"]) == 0
    assert capsys.readouterr().out.startswith("src/sample/texts.py:5 ")
    report = sample / "report.json"
    assert program.main([*words, "--json", str(report)]) == 0
    assert "1 of 1 mutants caught" in capsys.readouterr().out
    (only,) = json.loads(report.read_text())["outcomes"]
    assert only["caught"] and only["by"] == "tests/test_others.py::test_it"
