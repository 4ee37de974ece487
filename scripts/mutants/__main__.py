"""How many small mistakes in the package do the tests notice?

    python -m scripts.mutants --count 30                 thirty mutants, the tests of `make check`
    python -m scripts.mutants --count 30 --tier test     the tests of `make test`; hours
    python -m scripts.mutants --count 30 --list          what would be changed
    python -m scripts.mutants --only src/moesaic/models/kvcache mutants of these files
    python -m scripts.mutants --root ../older            another tree's package with that tree's tests
    python -m scripts.mutants --near --tier test         only tests in the files nearest to each mutant
    python -m scripts.mutants --also-in ../older         mutants that can be made in the other tree too
    python -m scripts.mutants --survivors-of a.json      survivors of an earlier run, also of another tree

Each mutant is one change of one line: a comparison, an operator, a constant, a condition or a default is
another, a statement is gone, or two arguments change places. Lines are drawn with equal chances. The work is
done in a copy of the tree. One run without a change records which tests enter which function. Those that
enter the changed function run, and those whose processes do. If the change is outside of functions, or in one
that runs during imports, the nearest test files run, and all tests that enter any function of the file or of
one that imports it. The nearest run first.
A test that fails has to fail again by itself. A mutant survives when all of them pass, and one with which
they take too long is caught.
Some mutants change nothing that can be observed, so not every survivor is a gap.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scripts.mutants import entered, mutations, reach, tree

TIERS = {"check": "not slow and not full", "test": "not full"}
SPARE = 120.0
"""Seconds that tests may take beyond three times their duration before the change."""


@dataclass(frozen=True)
class Outcome:
    """What happened to one mutant."""

    mutation: mutations.Mutation
    caught: bool
    by: str
    """The test that failed, or why the run ended. If it survived, nothing or why no test ran."""
    seconds: float


@dataclass
class Trial:
    """Runs the tests of one tier against mutants."""

    copied: tree.Tree
    graph: reach.Reach
    marks: str
    workers: int
    limit: float = SPARE
    functions: entered.Functions = field(default_factory=entered.Functions)
    near_only: bool = False
    """Whether only the test files nearest to a mutant count."""

    def measure(self, mutants: list[mutations.Mutation]) -> tree.Run:
        """Run the tests once without a change. Tests that fail already are left out afterwards."""
        files = sorted({file for one in mutants for file in self._near(one)}) if self.near_only else []
        with self.copied.recording() as self.functions:
            done = self.copied.pytest(files, self.marks, self.workers, 3 * 3600)
        if done.code not in (0, 1):
            how = f"pytest -m {self.marks!r} ended with {done.code}: {done.last_line}"
            raise SystemExit(f"the tests do not run in a copy of the tree: {how}")
        self.copied.deselected = done.failed
        self.limit = 3 * done.seconds + SPARE
        return done

    def judge(self, mutation: mutations.Mutation) -> Outcome:
        start = time.monotonic()
        near = self._near(mutation)
        tests = near if self.near_only else self.graph.tests_of(mutation.path)
        only = self._only(mutation)
        files = {name.partition("::")[0] for name in only}
        near, tests = ([one for one in some if str(one) in files] for some in (near, tests))
        with self.copied.mutated(mutation):
            for part, workers in ((near, 1), ([one for one in tests if one not in near], self.workers)):
                if part and (by := self._failure(part, workers, only)):
                    return Outcome(mutation, True, by, time.monotonic() - start)
        by = "" if only else "no test enters the function"
        return Outcome(mutation, False, by, time.monotonic() - start)

    def _near(self, mutation: mutations.Mutation) -> list[Path]:
        tests = self.graph.tests_of(mutation.path)
        return reach.nearest(mutation.path, self.copied.package, tests)

    def _only(self, mutation: mutations.Mutation) -> set[str]:
        """Names of the tests, and of files, that can notice the change."""
        source = (self.copied.root / mutation.path).read_text("utf-8")
        key = entered.key_of(mutation.path, source, mutation.line)
        if key is None or self.functions.during_imports(key):
            users = self.functions.of_files(self.graph.users_of(mutation.path))
            return users.union(map(str, self._near(mutation)))
        return self.functions.of(key)

    def _failure(self, tests: list[Path], workers: int, only: Collection[str]) -> str:
        """The first test that also fails alone. A test that fails only with others was disturbed by them."""
        disturbed: list[str] = []
        while True:
            left_out = [word for one in disturbed for word in ("--deselect", one)]
            done = self.copied.pytest(tests, self.marks, workers, self.limit, "-x", *left_out, only=only)
            if done.good:
                return ""
            if done.code is None:
                return "took too long"
            if not done.failed:
                return f"pytest ended with {done.code}: {done.last_line}"
            if not self.copied.pytest(done.failed[:1], self.marks, 1, self.limit).good:
                return done.failed[0]
            disturbed.append(done.failed[0])


def found(root: Path, package: str, only: str) -> list[mutations.Mutation]:
    """Every mutation of the package, or of the files whose paths begin with `only`."""
    files = sorted((root / "src" / package).rglob("*.py"))
    paths = [str(file.relative_to(root)) for file in files]
    return [
        one
        for path in paths
        if path.startswith(only)
        for one in mutations.find(path, (root / path).read_text("utf-8"))
    ]


def chosen(arguments: argparse.Namespace) -> list[mutations.Mutation]:
    """The mutations to judge."""
    every = found(arguments.root, arguments.package, arguments.only)
    if arguments.survivors_of:
        outcomes = json.loads(arguments.survivors_of.read_text("utf-8"))["outcomes"]
        survivors = [mutations.Mutation(**one["mutation"]) for one in outcomes if not one["caught"]]
        return mutations.standing_in(survivors, every)
    if arguments.also_in:
        other = {one.change for one in found(arguments.also_in, arguments.package, arguments.only)}
        every = [one for one in every if one.change in other]
    return mutations.choose(every, arguments.seed, arguments.count)


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> Iterator[Outcome]:
    mutants = chosen(arguments)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copied = tree.copy(arguments.root, Path(folder), arguments.package)
        marks = arguments.marks or TIERS[arguments.tier]
        graph = reach.read(copied.root, arguments.package)
        trial = Trial(copied, graph, marks, arguments.workers, near_only=arguments.near)
        before = trial.measure(mutants)
        say(f"unchanged: {before.seconds:.0f} s; left out since they fail in the copy: {before.failed}")
        for number, mutation in enumerate(mutants, start=1):
            outcome = trial.judge(mutation)
            verdict = f"caught by {outcome.by}" if outcome.caught else f"survived {outcome.by}".strip()
            where = f"{mutation.path}:{mutation.line}"
            say(f"{number}/{len(mutants)} {where} {mutation}: {verdict} ({outcome.seconds:.0f} s)")
            yield outcome


def table(outcomes: list[Outcome]) -> Table:
    caught = sum(one.caught for one in outcomes)
    shown = Table(title=f"{caught} of {len(outcomes)} mutants caught")
    for name in ("file", "line", "mutation", "caught by"):
        shown.add_column(name, overflow="fold")
    for one in outcomes:
        result = one.by if one.caught else "survived"
        shown.add_row(one.mutation.path, str(one.mutation.line), str(one.mutation), result)
    return shown


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; %(default)s by default")
    parser.add_argument("--count", type=int, default=30, help="mutants; %(default)s by default")
    parser.add_argument("--tier", choices=TIERS, default="check", help="whose tests run")
    parser.add_argument("--marks", help="tests by marks, as pytest's -m, in place of a tier")
    parser.add_argument("--only", default="", help="beginning of the paths of files, as in src/moesaic/core")
    parser.add_argument("--also-in", type=Path, help="a tree in which the same lines have to stand")
    parser.add_argument("--survivors-of", type=Path, help="a file of --json, whose survivors are judged")
    parser.add_argument("--near", action="store_true", help="run only tests in the files nearest to a mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file as they come")
    parser.add_argument("--workers", type=int, default=2, help="processes of tests; %(default)s by default")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the tree; this folder by default")
    parser.add_argument("--package", default="moesaic", help="below ROOT/src; %(default)s by default")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments, console = parse(words), Console(soft_wrap=True)
    if arguments.list:
        for one in chosen(arguments):
            console.print(f"{one.path}:{one.line} {one}", markup=False, highlight=False)
        return 0
    outcomes: list[Outcome] = []
    for outcome in run(arguments, lambda text: console.print(text, markup=False, highlight=False)):
        outcomes.append(outcome)
        if arguments.json:
            settings = {"seed": arguments.seed, "tier": arguments.marks or arguments.tier}
            arguments.json.write_text(
                json.dumps({**settings, "outcomes": [asdict(one) for one in outcomes]}, indent=2)
            )
    console.print(table(outcomes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
