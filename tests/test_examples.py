"""The programs of examples/ run, and print what the model answers in this process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from tests.support.hosts import missing

FOLDER = Path(__file__).parent.parent / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo")


def greedy(llm: LLM, questions: list[str], tokens: int) -> list[str]:
    """The greedy answers to questions, each of which begins a chat."""
    chats: list[Any] = [[{"role": "user", "content": question}] for question in questions]
    return [answer.text for answer in llm.chat(chats, SamplingParams(max_tokens=tokens, temperature=0.0))]


def run(name: str, folder: Path, typed: str = "") -> str:
    """What the program prints, with its own files in `folder`."""
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, FOLDER / name]
    done = subprocess.run(
        command, cwd=folder, env=environment, input=typed, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_each_is_short_and_stands_in_the_list(program: Path) -> None:
    assert len(program.read_text().splitlines()) <= 45
    assert f"[{program.name}]({program.name})" in (FOLDER / "README.md").read_text()


def test_each_is_run_here() -> None:
    assert {path.name for path in PROGRAMS} == set(
        re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text())
    )


@pytest.mark.slow
def test_a_chat_remembers(tmp_path: Path, llm: LLM) -> None:
    questions = ["Tom has 3 apples and buys 4 more. How many apples does he have?", "Thank you!"]
    printed = run("chat.py", tmp_path, typed="\n".join(questions))
    messages: list[dict[str, str]] = []
    wanted = ""
    for question in questions:
        messages.append({"role": "user", "content": question})
        [answer] = llm.chat([messages], SamplingParams(max_tokens=64, temperature=0.0))
        messages.append({"role": "assistant", "content": answer.text})
        wanted += answer.text + "\n"
    assert printed == wanted


@pytest.mark.slow
def test_a_batch_is_answered(tmp_path: Path, llm: LLM) -> None:
    printed = run("batch.py", tmp_path).splitlines()
    answers = greedy(llm, [f"What is {number} + {number}?" for number in range(8)], 24)
    assert sorted(line for line in printed if line.startswith("sum-")) == [
        f"sum-{number} {answer!r}" for number, answer in enumerate(answers)
    ]


@pytest.mark.slow
def test_a_server_is_killed_and_the_answer_stays(tmp_path: Path, llm: LLM) -> None:
    printed = run("kill_a_server.py", tmp_path)
    answer, said = printed.rsplit("\n", 2)[:2]
    assert said == "the same answer as without the kill: True"
    assert "[killed expert server 0]" in answer
    # A server takes the checkpoint's own sampling where a request says nothing.
    params = replace(llm.default_sampling, max_tokens=256, seed=1, ignore_eos=True)
    [wanted] = llm.generate(["def add(a, b):"], params)
    assert answer.replace("[killed expert server 0]", "") == wanted.text


@pytest.mark.slow
def test_what_was_profiled_is_placed_and_served(tmp_path: Path, llm: LLM) -> None:
    printed = run("profile_place_serve.py", tmp_path)
    asked = "Tom has 5 apples and buys 4 more. How many apples does he have?"
    assert f"answer: {greedy(llm, [asked], 48)[0]!r}" in printed
    held = re.findall(r"^expert server \d holds, of layer 0, experts (.*)$", printed, flags=re.MULTILINE)
    numbers = [number for text in held for part in text.split(", ") for number in expanded(part)]
    assert len(held) == 2 and sorted(numbers) == list(range(24))


def expanded(part: str) -> range:
    """The numbers of "4" or "7-9"."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


@pytest.mark.slow
def test_a_model_larger_than_its_memory_answers(tmp_path: Path, llm: LLM) -> None:
    printed = run("larger_than_memory.py", tmp_path)
    assert printed.endswith("the same answers as with the model in memory: True\n")
    asked = "Tom has {} apples and buys 4 more. How many apples does he have?"
    answers = greedy(llm, [asked.format(number) for number in range(3, 7)], 48)
    for number, answer in enumerate(answers, 3):
        assert f"{number} {answer!r}" in printed


@pytest.mark.slow
def test_tools_are_called_and_their_results_said(tmp_path: Path) -> None:
    assert run("tools.py", tmp_path).splitlines() == [
        'get_weather {"city": "Oslo"}',
        "It is 12 degrees and sunny in Oslo.",
        'book_table {"people": 4, "day": "Friday"}',
        "The table for 4 people is booked for Friday.",
        "None of my tools can do that.",
    ]


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_two_hosts_answer_alike_while_their_link_is_cut(tmp_path: Path) -> None:
    """As root. Neither a namespace nor a file is left."""
    places = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PATH": os.pathsep.join(places)}
    command = ["bash", str(FOLDER / "two_hosts.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": True\n") == 2 and "given up: 3 processes" in done.stdout
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "two-hosts" not in names and not list(tmp_path.iterdir())
