"""Runs the steps of .github/workflows/ci.yml on this machine, in a clone of the last commit.

    python scripts/run_workflow.py                          the jobs, and what their matrices choose among
    python scripts/run_workflow.py wheels python=3.11       one job; every value not named is the first one

Each `run:` step is a bash script, as on GitHub. `uses:` steps and containers are skipped with a line that
says so, and the programs of this machine take their place. The exit code is that of the step that failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


class WorkflowError(Exception):
    """A job that is not in the workflow, or a step that this script cannot read."""


@dataclass(frozen=True)
class Step:
    """A step of a job: a script, or the reason why it is skipped."""

    name: str
    script: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", help="a job of the workflow")
    parser.add_argument("matrix", nargs="*", metavar="NAME=VALUE", help="values of the job's matrix")
    options = parser.parse_args(arguments)
    try:
        workflow = yaml.safe_load(WORKFLOW.read_text())
        if options.job is None:
            for name in workflow["jobs"]:
                choices = matrix_of(job_of(workflow, name))
                print(name, *(f"{key}={'|'.join(values)}" for key, values in choices.items()))
            return 0
        job = job_of(workflow, options.job)
        steps = steps_of(job, choose_values(matrix_of(job), options.matrix))
    except WorkflowError as error:
        print(f"run_workflow: {error}", file=sys.stderr)
        return 2
    if "container" in job:
        print(f"run_workflow: skipped: the container {job['container']}")
    with tempfile.TemporaryDirectory(prefix="moesaic-workflow-") as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        return run_steps(steps, Path(folder))


def job_of(workflow: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The job of this name. Raises WorkflowError for an unknown one."""
    jobs: dict[str, dict[str, Any]] = workflow["jobs"]
    if name not in jobs:
        raise WorkflowError(f"job: got {name}; allowed: {', '.join(jobs)}")
    return jobs[name]


def matrix_of(job: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of a job's matrix and their values. `include` and `exclude` are not read."""
    matrix = job.get("strategy", {}).get("matrix", {})
    return {
        name: [str(value) for value in values]
        for name, values in matrix.items()
        if name not in ("include", "exclude")
    }


def choose_values(choices: Mapping[str, Sequence[str]], words: Sequence[str]) -> dict[str, str]:
    """One value for each name of a matrix: what `words` say, or the first one."""
    values = {name: allowed[0] for name, allowed in choices.items()}
    for word in words:
        name, _, value = word.partition("=")
        if name not in choices:
            raise WorkflowError(f"matrix: got {word}; allowed: {', '.join(choices) or 'nothing'}")
        if value not in choices[name]:
            raise WorkflowError(f"{name}: got {value}; allowed: {', '.join(choices[name])}")
        values[name] = value
    return values


def steps_of(job: Mapping[str, Any], values: Mapping[str, str]) -> list[Step]:
    """The steps of a job, with the values of its matrix in their scripts."""
    steps = []
    for step in job["steps"]:
        script = substitute(step["run"], values) if "run" in step else None
        steps.append(Step(step.get("name") or step.get("uses") or step["run"].splitlines()[0], script))
    return steps


def substitute(script: str, values: Mapping[str, str]) -> str:
    """A script with values in place of `${{ matrix.NAME }}`. Raises WorkflowError for another expression."""

    def value_of(match: re.Match[str]) -> str:
        scope, _, name = match[1].partition(".")
        if scope != "matrix" or name not in values:
            raise WorkflowError(
                f"step: got {match[0]}; allowed: matrix.NAME of {', '.join(values) or 'nothing'}"
            )
        return values[name]

    return re.sub(r"\$\{\{\s*(\S+)\s*\}\}", value_of, script)


def run_steps(steps: Sequence[Step], folder: Path) -> int:
    """Run scripts one after another in `folder`. Returns the exit code of the first that fails, or 0."""
    for step in steps:
        if step.script is None:
            print(f"run_workflow: skipped: {step.name}", flush=True)
            continue
        print(f"run_workflow: {step.name}", flush=True)
        done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step.script], cwd=folder)
        if done.returncode:
            print(f"run_workflow: {step.name}: exit code {done.returncode}", file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
