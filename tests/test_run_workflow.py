"""scripts/run_workflow.py reads jobs, matrices and steps, and runs scripts until one fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from scripts.run_workflow import (
    WORKFLOW,
    Step,
    WorkflowError,
    choose_values,
    job_of,
    main,
    matrix_of,
    run_steps,
    steps_of,
)

TEXT = """
jobs:
  build:
    container: an/image
    strategy:
      matrix:
        python: ["3.11", "3.12"]
        arch: [x86_64, aarch64]
        include: [{arch: aarch64, runner: arm}]
    steps:
      - uses: actions/checkout@v4
      - name: Build
        run: build${{matrix.python}} --arch ${{ matrix.arch }}
      - run: |
          echo one
          echo two
"""
BUILD = job_of(yaml.safe_load(TEXT), "build")


def test_values_of_the_matrix_stand_in_scripts() -> None:
    values = choose_values(matrix_of(BUILD), ["arch=aarch64"])
    assert steps_of(BUILD, values) == [
        Step("actions/checkout@v4", None),
        Step("Build", "build3.11 --arch aarch64"),
        Step("echo one", "echo one\necho two\n"),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["python=3.9"], "python: got 3.9; allowed: 3.11, 3.12"),
        (["runner=arm"], "matrix: got runner=arm; allowed: python, arch"),
    ],
)
def test_a_wrong_value_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(WorkflowError, match=says):
        choose_values(matrix_of(BUILD), words)


def test_another_expression_is_refused() -> None:
    job = {"steps": [{"run": "echo ${{ secrets.TOKEN }}"}]}
    with pytest.raises(
        WorkflowError, match=r"step: got \$\{\{ secrets.TOKEN \}\}; allowed: matrix.NAME of nothing"
    ):
        steps_of(job, {})


def test_an_unknown_job_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = ", ".join(yaml.safe_load(WORKFLOW.read_text())["jobs"])
    assert main(["deploy"]) == 2
    assert capsys.readouterr().err == f"run_workflow: job: got deploy; allowed: {jobs}\n"


def test_steps_run_until_one_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps = [
        Step("a/b@v1", None),
        Step("first", "touch here"),
        Step("fails", "false\nexit 0"),
        Step("last", "touch last"),
    ]
    assert run_steps(steps, tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert capfd.readouterr().out.startswith("run_workflow: skipped: a/b@v1\nrun_workflow: first\n")


def test_every_job_of_the_workflow_can_be_read() -> None:
    for job in yaml.safe_load(WORKFLOW.read_text())["jobs"].values():
        assert any(step.script for step in steps_of(job, choose_values(matrix_of(job), [])))
