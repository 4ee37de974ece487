"""The commit-msg hook: what it refuses, and where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts.commit_message import complaint, main

ROOT = Path(__file__).parent.parent
GOOD = (
    "Answer 503 while the model loads",
    "Seed the sampler from the request",
    "Bring back the portable kernels",
    "String together the two halves",
    "Process files in order\n\nBecause readers do.\n",
    "Merge two files that belong together",
    "Focus the error on the field",
    "x" * 72,
    "# a comment\n\nAdd a flag\n# Please enter the commit message\n",
    "Add a flag\n# ------------------------ >8 ------------------------\nthe diff\n",
    "",
    "# nothing but comments\n",
)
BY_GIT = (
    "Merge branch 'a-very-long-name-of-a-branch-that-somebody-chose' into another-one-that-is-long-too",
    "fixup! Added a thing that was worded like this before anybody looked, and far too long as well.",
    "squash! Adds.",
    'Revert "Added a flag."',
)
BAD = {
    "x" * 73: "got 73 characters; allowed: at most 72",
    "Add a flag.": "full stop",
    "Added a flag": "'Added', a form in -ed",
    "Adds a flag": "'Adds', a form in -s",
    "Adding a flag": "'Adding', a form in -ing",
    "`adding` a flag": "a form in -ing",
    "Measurements again": "'Measurements', a form in -s",
    "docs: add a page": "'docs:', a prefix",
    "The flag is new": "'The', which is no verb",
    "Why a rank ended": "which is no verb",
    "Add a flag\nand a page": "second line: got 'and a page'",
}


@pytest.mark.parametrize("message", [*GOOD, *BY_GIT])
def test_it_lets_pass(message: str) -> None:
    assert complaint(message) is None


@pytest.mark.parametrize(("message", "says"), BAD.items())
def test_it_refuses_in_one_line(
    message: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "message").write_text(message)
    assert main([str(tmp_path / "message")]) == 1
    printed = capsys.readouterr().err
    assert says in printed and printed.count("\n") == 1 and "allowed: " in printed


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """With the machine's and the user's own settings out of the way."""
    hidden = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
    return subprocess.run(command, cwd=folder, env=inherited | hidden, capture_output=True, text=True)


def install(folder: Path) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = [folder / "scripts" / "install_hooks"]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=True)
    return done.stdout


def scripts_in(folder: Path) -> Path:
    (folder / "scripts").mkdir(parents=True)
    for name in ("commit_message.py", "install_hooks"):
        shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
    shutil.copytree(ROOT / "scripts" / "hooks", folder / "scripts" / "hooks")
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = scripts_in(tmp_path / "checkout")
    git(folder, "init", "-q")
    return folder


def test_git_runs_it(checkout: Path) -> None:
    assert install(checkout) == ""
    refused = git(checkout, "commit", "--allow-empty", "-m", "Added a flag")
    assert refused.returncode != 0 and "a form in -ed" in refused.stderr
    assert git(checkout, "commit", "--allow-empty", "-m", "Add a flag").returncode == 0


@pytest.mark.slow
def test_it_serves_every_worktree_and_branches_from_before_it(checkout: Path) -> None:
    git(checkout, "commit", "--allow-empty", "-m", "Added, in days without a check")
    git(checkout, "worktree", "add", "-q", "-b", "old", "../old")
    git(checkout, "worktree", "add", "-q", "-b", "other", "../other")
    other, old = checkout.parent / "other", checkout.parent / "old"
    shutil.copytree(checkout / "scripts", other / "scripts")
    install(other)
    assert (checkout / ".git" / "hooks" / "commit-msg").exists()
    assert git(checkout, "commit", "--allow-empty", "-m", "Added a flag").returncode != 0
    assert git(other, "commit", "--allow-empty", "-m", "Added a flag").returncode != 0
    assert git(old, "commit", "--allow-empty", "-m", "Added a flag").returncode == 0


def test_it_replaces_its_own_hook_and_no_other(checkout: Path) -> None:
    hook = checkout / ".git" / "hooks" / "commit-msg"
    install(checkout)
    hook.write_text(hook.read_text() + "# of an older version\n")
    assert install(checkout) == "" and "of an older version" not in hook.read_text()
    hook.write_text("#!/bin/sh\nexit 0\n")
    assert "kept your own" in install(checkout)
    assert hook.read_text() == "#!/bin/sh\nexit 0\n"


def test_hooks_that_repositories_share_are_left_alone(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "config", "core.hooksPath", str(tmp_path / "shared"))
    assert "core.hooksPath" in install(checkout)
    assert not (tmp_path / "shared").exists() and not (checkout / ".git" / "hooks" / "commit-msg").exists()


@pytest.mark.parametrize("around", [False, True], ids=["no repository", "another repository"])
def test_outside_its_own_checkout_it_does_nothing(around: bool, tmp_path: Path) -> None:
    if around:
        git(tmp_path, "init", "-q")
    assert install(scripts_in(tmp_path / "unpacked")) == ""
    assert not (tmp_path / ".git" / "hooks" / "commit-msg").exists()
