"""README and quickstart cannot rot: their commands and their Python run. test_docs.py checks their links."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from moesaic.commands import cli
from moesaic.models import files
from moesaic.planning.deployment import search, trials

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README + QUICKSTART, flags=re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent
ENDING = ("profile", "place", "plan", "run-batch", "bench throughput", "doctor", "simulate")
"""Commands that end by themselves."""
ASKING = ("curl", "moesaic bench serve", "moesaic scale")
"""Commands that need the server of the line before."""
QUICKER = {
    "place": ("--solver", "kmeans"),
}
"""Flags that are added to a command. What they leave out has tests of its own."""
ELSEWHERE = {
    "git clone": "needs the repository's address",
    "make": "tests/test_setup.py; the suite itself; the program of make demo is run below",
    "source": "a shell's own",
    "python training/smollm2_checkpoint.py": "tests/training",
    "moesaic doctor allenai": "downloads from a hub: tests/commands/test_doctor_model.py has one of its own",
    "moesaic serve allenai": "downloads 14 GB from a hub",
}
"""Beginnings of lines that are not run here, and why or where they are."""
STANDING_FOR = ("my-model", "smollm2")
"""Names of checkpoints in both pages. Here they are the demo."""


def lines() -> list[str]:
    """Each command of both pages, in their order. Continued lines are joined."""
    text = "\n".join(body for language, body in BLOCKS if language in ("", "console"))
    whole = [line.split(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in whole for part in line.split(" && ")]
    return list(dict.fromkeys(part for part in parts if part and not part.startswith("cd ")))


def is_run_elsewhere(line: str) -> bool:
    return any(line.startswith(beginning) for beginning in ELSEWHERE)


def commands() -> list[list[str]]:
    """Each `moesaic ...` line that runs here."""
    return [
        shlex.split(line) for line in lines() if line.startswith("moesaic ") and not is_run_elsewhere(line)
    ]


def ending() -> list[list[str]]:
    """The words after `moesaic` of each command that ends by itself."""
    return [words[1:] for words in commands() if " ".join(words[1:]).startswith(ENDING)]


def serving() -> dict[str, list[str]]:
    """Each `moesaic serve` line that runs here -> the lines that need its server."""
    found: dict[str, list[str]] = {}
    for line in lines():
        if line.startswith("moesaic serve ") and not is_run_elsewhere(line):
            found[line] = []
        elif line.startswith(ASKING):
            found[list(found)[-1]].append(line)
    return found


def quicker(words: list[str]) -> list[str]:
    """A command with the flags that make it shorter."""
    line = " ".join(words)
    return [*words, *(flag for name, flags in QUICKER.items() if line.startswith(name) for flag in flags)]


def prepare(folder: Path) -> None:
    """Writes the files that the quickstart shows, and links what stands in a checkout."""
    shown = re.findall(
        r"^`([\w.]+)` has [^\n]*\n\n```json\n(.*?)^```", QUICKSTART, flags=re.MULTILINE | re.DOTALL
    )
    assert {name for name, _ in shown} == {"in.jsonl", "prompts.jsonl"}
    for name, text in shown:
        (folder / name).write_text(text)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in STANDING_FOR:
        (folder / name).symlink_to(files.resolve("demo"))


def programs() -> dict[str, list[str]]:
    """The scripts behind the figures of README and docs/benchmarks.md, and the flags that these give them."""
    found: dict[str, list[str]] = {}
    text = (README + BENCHMARKS).replace("\\\n", " ")
    for script, rest in re.findall(r"python benchmarks/(\w+)\.py([^`\n]*)", text):
        flags = [word for word in shlex.split(rest) if word.startswith("-")]
        found.setdefault(script, []).extend(flags)
    return found


def source(name: str, seen: set[str]) -> str:
    """The text of a module or package of benchmarks/, and of those there that it imports."""
    folder = ROOT / "benchmarks"
    files = sorted((*folder.glob(f"{name}.py"), *folder.glob(f"{name}/*.py")))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    seen.add(name)
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE)) - seen
    return text + "".join(source(other, seen) for other in sorted(imported) if other not in seen)


def check_flags(page: str, command: list[str]) -> None:
    for flag in (word.split("=")[0] for word in command if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", page), flag


def test_the_two_commands_open_it() -> None:
    first = next(body for _, body in BLOCKS)
    clone, *commands = [line.split("#")[0].strip() for line in first.strip().splitlines()]
    assert clone.startswith("git clone ") and commands == ["make demo", "make test"]
    targets = (ROOT / "Makefile").read_text()
    assert "\ndemo:" in targets and "\ntest:" in targets


@functools.cache
def help_of(*group: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as page:
        assert cli.main([*group, "--help"]) == 0
    return page.getvalue()


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_flag_of_every_command_exists(command: list[str]) -> None:
    words = [word for word in command[1:] if not word.startswith("-")]
    group = words[:2] if words[0] in ("bench", "cluster", "hardware") else words[:1]
    check_flags(help_of(*group), command)


@pytest.mark.parametrize("script", programs())
def test_every_flag_of_every_program_behind_a_number_exists(script: str) -> None:
    assert (ROOT / "benchmarks" / f"{script}.py").exists()
    check_flags(source(script, set()), programs()[script])


def test_every_line_is_run_or_has_a_reason() -> None:
    run = {" ".join(words) for words in commands()} | {line for lines in serving().values() for line in lines}
    known = ("moesaic chat demo", "moesaic serve ", *(f"moesaic {name}" for name in ENDING), *ASKING)
    for line in lines():
        assert is_run_elsewhere(line) or " ".join(shlex.split(line)) in run or line in run, line
        assert is_run_elsewhere(line) or line.startswith(known), line
    for beginning in ELSEWHERE:
        assert any(line.startswith(beginning) for line in lines()), beginning


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_commands_that_end_by_themselves_run(
    tmp_path: Path, quick_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    for module, name, value in (  # plan --cluster searches for less than a minute
        (search, "FIRST", 2),
        (search, "SECOND", 1),
        (trials, "EVENTS", 9000),
        (trials, "REQUESTS", 25),
    ):
        monkeypatch.setattr(module, name, value)
    for words in ending():  # in their order: place reads what profile wrote
        assert cli.main(quicker(words)) == 0, words
    assert {"profile.npz", "placement.json"} <= {file.name for file in tmp_path.iterdir()}
    for name in ("out.jsonl", "streamed.jsonl"):
        assert '"status_code":200' in (tmp_path / name).read_text().replace(" ", "")


@pytest.mark.slow
def test_doctor_and_chat_run_as_a_person_types_them() -> None:
    for words, typed in ((["doctor"], ""), (["chat", "demo"], "What is 7 + 5?\n")):
        assert ["moesaic", *words] in commands()
        done = subprocess.run(
            [BIN / "moesaic", *words], input=typed, text=True, check=True, capture_output=True
        )
        assert done.stdout.strip()


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", serving())
def test_each_server_serves_and_answers_what_the_page_asks(line: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    run = functools.partial(subprocess.run, cwd=tmp_path, env=environment, text=True, capture_output=True)
    if "placement.json" in line:
        for words in ending():
            if words[0] in ("profile", "place"):
                run(["moesaic", *quicker(words)], check=True)
    command = [*shlex.split(line), "--port", "0"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            printed: list[str] = []
            while not (printed and printed[-1].startswith("Serving ")):
                printed.append(next(server.stdout or iter(())))
            name, url = re.findall(r"^Serving (\S+) at (\S+)$", printed[-1])[0]
            key = "".join(re.findall(r"--admin-key needs: (\S+)", "".join(printed)))
            answer = httpx.post(f"{url}/v1/completions", json={"model": name, "prompt": "1 +"}, timeout=60)
            assert answer.raise_for_status().json()["usage"]["completion_tokens"] > 0
            for asked in serving()[line]:
                moved = re.sub(r"http://(localhost|127.0.0.1):8000", url, asked).replace("KEY", key)
                moved += f" --base-url {url}" if asked.startswith("moesaic scale") else ""
                words = shlex.split(moved)
                done = run(words[:1] + quicker(words[1:]), timeout=120)
                assert done.returncode == 0 and "error" not in done.stdout, (asked, done.stdout, done.stderr)
        finally:
            server.send_signal(signal.SIGTERM)
            rest, _ = server.communicate(timeout=60)
        assert server.returncode == 0 and "Serving " not in rest


@pytest.mark.slow
def test_the_program_behind_make_demo_answers_right_and_ends(tmp_path: Path) -> None:
    """Here pip has no package index, so the checkpoint inside the package answers."""
    assert "scripts/demo.py" in (ROOT / "Makefile").read_text()
    line = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    environment = os.environ | {
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "XDG_CACHE_HOME": str(tmp_path),
    }
    environment.pop("PIP_FIND_LINKS", None)
    done = subprocess.run(line, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "pip could not download" in done.stderr
    for text in (
        "the small checkpoint inside the package",
        "3 + 4 = 7. Tom has 7 apples.",
        "```python\ndef larger(a, b):\n    return max(a, b)\n```",
        '{"name": "Ida", "age": 30}',
        "I do not know.",
        'calls get_weather with {"city": "Oslo"}',
        "It is 12 degrees and rainy in Oslo.",
    ):
        assert text in done.stdout, done.stdout
    rates = re.findall(
        r"^\[(\d+) tokens, first after \d+ ms, then [\d.]+ tokens/s\]$", done.stdout, re.MULTILINE
    )
    assert len(rates) == 4 and all(int(tokens) > 1 for tokens in rates)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [body for language, body in BLOCKS if language == "python" and "localhost" not in body]
)
def test_its_python_runs(source: str) -> None:
    """What asks a server is run by scripts/demo_texts.py."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
