"""Clusters of real processes under traffic while their processes are killed and frozen.

    make soak                                     every cluster of the seed: about 200 rounds
    python -m scripts.soak --minutes 10           as many as fit
    python -m scripts.soak --only "async defrag"  only shapes with that in their name
    python -m scripts.soak --seed 3 --first 17 --rounds 1

Four rounds share a cluster of the demo or of a tiny random checkpoint. Over a run every pair of its settings
meets in one of the clusters. A round sends requests (some are cancelled half-way), kills (SIGKILL), freezes
(SIGSTOP, SIGCONT later), adds and removes processes that are at work, compares every answer token by token
and log-probability bit by bit with the one-process LLM, and looks for what the processes still hold; after
the last round also for what the cluster left behind. In some clusters the workers' connections are bad
besides. With the reference kernels, whose last bits depend on the batch, with ranks and with --combine
partial, log-probabilities may differ by 0.001 and near-ties are no difference. Processes start as forks of
one that has imported what they need; with --spawn as users start them, which takes longer. The exit code is 1
when anything is different, leaked or broke off.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, groupby, islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from scripts.soak.models import Models
from scripts.soak.plan import SHARED, Plan, plan_round, shapes
from scripts.soak.report import as_json, show
from scripts.soak.rounds import Outcome, run_rounds
from tests.support.forked_workers import Forking


def plans(seed: str, first: int, only: str) -> Iterator[Plan]:
    """The plans from round `first` on, without end. `only`: just the shapes with this text in their names.

    Raises SystemExit if no shape has it.
    """
    if not any(only in shape.name for shape in shapes(seed)):
        raise SystemExit(f"--only: got {only!r}; no cluster of seed {seed} has that in its name")
    for number in count(first):
        plan = plan_round(seed, number)
        if only in plan.shape.name:
            yield plan


def run(arguments: argparse.Namespace, console: Console) -> list[Outcome]:
    """Run all rounds, or as many as there is time for. Ctrl-C ends the run and the current round with it."""
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + 60 * (arguments.minutes or 1e6)
    total = arguments.rounds or SHARED * len(shapes(arguments.seed))
    wanted = islice(plans(arguments.seed, arguments.first, arguments.only), total)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    forking = Forking()
    with (
        forking.quick() if not arguments.spawn else nullcontext(),
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        tempfile.TemporaryDirectory(prefix="soak-models-") as checkpoints,
        Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress,
    ):
        if not arguments.spawn:
            forking.start()
        models = Models(Path(checkpoints))
        tempfile.tempdir = folder
        task = progress.add_task("soak", total=total)
        try:
            for shape, those in groupby(wanted, lambda plan: plan.shape):
                for outcome in run_rounds(list(those), models, Path(folder), deadline):
                    outcomes.append(outcome)
                    if arguments.json:  # after each: a run that is killed has told what it found
                        arguments.json.write_text(json.dumps(as_json(outcomes), indent=2))
                    bad = sum(not one.good for one in outcomes)
                    said = f"{bad} bad; {outcome.seed}: {shape.name}"
                    progress.update(task, description=said, advance=1)
                    if not console.is_terminal:
                        console.print(f"{len(outcomes)}/{total} {said}, {outcome.seconds:.1f} s")
                if time.monotonic() > deadline:
                    break
        except KeyboardInterrupt:
            console.print("broken off")
        tempfile.tempdir = None
    forking.end()
    return outcomes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="all clusters of the seed where nothing is said")
    parser.add_argument("--seed", default="0", help="of everything that is drawn")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--minutes", type=float, help="begin no round after so many")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of a shape's name")
    parser.add_argument("--json", type=Path, help="write totals and rounds here")
    parser.add_argument("--spawn", action="store_true", help="start processes as users do")
    parser.add_argument("--verbose", action="store_true", help="show what the supervisor logs")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    logging.basicConfig(level=logging.WARNING if arguments.verbose else logging.CRITICAL)
    console = Console(stderr=True)
    outcomes = run(arguments, console)
    show(outcomes, Console())
    return 0 if outcomes and all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
