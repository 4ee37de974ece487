"""Each step of deploy/Dockerfile is read: files exist, versions are the project's, and commands parse.

What a step does in an image is tried by deploy/build_image and scripts/check_image.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from scripts import check_image

from moesaic.commands import cli, serve

ROOT = Path(__file__).parent.parent
FILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
KNOWN = ("ARG", "FROM", "COPY", "RUN", "USER", "ENV", "EXPOSE", "ENTRYPOINT", "CMD")
WHEELS = ("moesaic-1.whl",)
"""What `pip wheel` leaves, in place of the real name."""


def stages(text: str) -> list[list[tuple[str, str]]]:
    """The instructions before the first stage, and those of each stage, as (name, rest)."""
    whole = re.sub(r"\s*\\\n\s*", " ", text)
    lines = [line for line in whole.splitlines() if line.strip() and not line.startswith("#")]
    steps = [tuple(line.split(maxsplit=1)) for line in lines]
    found: list[list[tuple[str, str]]] = [[]]
    for name, rest in steps:
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


HEAD, BUILD, FINAL = stages(FILE.read_text())


def of(stage: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for step, rest in stage if step == name]


def programs(stage: list[tuple[str, str]]) -> list[list[str]]:
    """The words of each command of the RUN steps."""
    return [
        shlex.split(part, comments=False) for step in of(stage, "RUN") for part in re.split(r"\s&&\s", step)
    ]


def test_it_has_known_instructions_only() -> None:
    assert {name for stage in (HEAD, BUILD, FINAL) for name, _ in stage} <= set(KNOWN)
    assert of(BUILD, "FROM")[0].endswith(" AS build")


def test_both_stages_have_a_python_that_the_package_supports() -> None:
    assert (of(BUILD, "FROM"), of(FINAL, "FROM")) == (["${BASE} AS build"], ["${BASE}"])
    [base] = of(HEAD, "ARG")
    [version] = re.findall(r"^BASE=python:(3\.\d+)-slim$", base)
    project = PROJECT["project"]
    assert version in SpecifierSet(project["requires-python"])
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]


def test_what_it_copies_exists() -> None:
    assert of(BUILD, "COPY") == [". /source"]
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    needed = {"src", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "constraints.txt"}
    assert all((ROOT / name).exists() for name in needed) and not needed & set(ignored)
    [constraints, wheels] = of(FINAL, "COPY")
    source, target = constraints.split()
    assert (ROOT / source).is_file() and target == "/wheels/"
    assert wheels == "--from=build /wheels/*.whl /wheels/"
    built = [words for words in programs(BUILD) if words[:2] == ["pip", "wheel"]]
    assert built == [["pip", "wheel", "--no-deps", "--wheel-dir", "/wheels", "/source"]]
    assert ["ls", "/wheels/*-linux_*.whl"] in programs(BUILD), "a wheel without kernels ends the build"


def test_it_installs_the_pinned_versions(tmp_path: Path) -> None:
    """The shell's own words of both commands, with this project's constraints."""
    (tmp_path / "constraints.txt").write_bytes((ROOT / "constraints.txt").read_bytes())
    for name in WHEELS:
        (tmp_path / name).touch()
    found = []
    for step in of(FINAL, "RUN"):
        if step.startswith("pip "):
            line = step.replace("/wheels", str(tmp_path)).replace("pip ", "printf '%s\\n' pip ", 1)
            found.append(
                subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
            )
    torch, package = (text.split() for text in found)
    [pinned] = re.findall(r"(?m)^torch==.*$", (ROOT / "constraints.txt").read_text())
    assert torch[-3] == f"{pinned}+cpu" and "--no-deps" in torch
    assert torch[-2:] == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    assert pinned in (ROOT / "constraints.txt").read_text()
    assert package[-3:-1] == ["--constraint", str(tmp_path / "constraints.txt")]
    assert package[-1] == f"{tmp_path / WHEELS[0]}[otel]"
    assert "otel" in PROJECT["project"]["optional-dependencies"]


def test_its_user_is_not_root() -> None:
    [user] = of(FINAL, "USER")
    made = [words for words in programs(FINAL) if words[0] == "useradd"]
    assert made == [["useradd", "--uid", user.partition(":")[0], "--create-home", "moesaic"]]
    assert user == "1000:1000", "Kubernetes wants a number to know that it is not root"
    order = [name for name, _ in FINAL]
    assert order.index("USER") > max(place for place, name in enumerate(order) if name == "RUN")
    environment = dict(pair.split("=", 1) for pair in of(FINAL, "ENV")[0].split())
    assert ["mkdir", environment["HF_HOME"]] in programs(FINAL)
    assert ["chown", "moesaic", environment["HF_HOME"]] in programs(FINAL)


def test_its_command_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    [entry] = map(json.loads, of(FINAL, "ENTRYPOINT"))
    assert entry == list(PROJECT["project"]["scripts"])
    [command] = map(json.loads, of(FINAL, "CMD"))
    for pair in of(FINAL, "ENV")[0].split():
        monkeypatch.setenv(*pair.split("=", 1))
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(serve, "run", lambda *settings: found.append(settings) or 0)
    settings = str(ROOT / "deploy" / "server.yaml")
    assert cli.main([settings if word == "/etc/moesaic/server.yaml" else word for word in command]) == 0
    assert "ignored" not in capsys.readouterr().err
    assert (found[0][2].host, str(found[0][2].port)) == ("0.0.0.0", *of(FINAL, "EXPOSE"))


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "mmdebstrap"))),
    reason="needs root, buildah and mmdebstrap",
)
def test_the_image_of_build_image_serves() -> None:
    name = "localhost/moesaic-test"
    subprocess.run([ROOT / "deploy" / "build_image", name], check=True)
    try:
        assert check_image.main([name]) == 0
    finally:
        subprocess.run(["buildah", "rmi", name], check=True)


def test_a_missing_buildah_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert check_image.main([]) == 2
    assert capsys.readouterr().err == "check_image: buildah is missing (Debian: apt install buildah)\n"


def test_steps_are_read_over_several_lines() -> None:
    text = "# a comment\nFROM a AS build\nRUN one \\\n    two && three\n\nFROM b\nUSER 1\n"
    assert stages(text) == [
        [],
        [("FROM", "a AS build"), ("RUN", "one two && three")],
        [("FROM", "b"), ("USER", "1")],
    ]
    assert programs(stages(text)[1]) == [["one", "two"], ["three"]]
