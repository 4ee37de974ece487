"""`moesaic profile` as a user types it."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from moesaic import LLM
from moesaic.commands import cli
from moesaic.commands.program import program
from moesaic.commands.progress import RemainingTime, progress
from moesaic.core.profile import Profile
from moesaic.jobs.profiling import run
from moesaic.models import files
from moesaic.models.registry import routed_model

TEXTS = {
    "code": ["def add(a, b):\n    return a + b", "for i in range(10):", "import numpy as np"],
    "prose": ["Once upon a time there was a king.", "The weather", "It was raining, and nobody came."],
}


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    """Files of prompts, one for each topic."""
    made = []
    for topic, texts in TEXTS.items():
        path = tmp_path / f"{topic}.jsonl"
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        made.append(str(path))
    return made


def profile(*flags: str) -> int:
    return cli.main(["profile", "demo", "--threads", "1", *flags])


@pytest.mark.slow
def test_prompts_become_a_profile(
    prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.npz"
    assert profile("--prompts", *prompts, "-o", str(out), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    made = Profile.load(out)
    tokenizer = LLM("demo", threads=1).tokenizer
    encoded = [tokenizer.encode(text) for texts in TEXTS.values() for text in texts]
    spans = zip(made.routes.starts.tolist(), made.routes.starts[1:].tolist(), strict=False)
    assert [made.routes.tokens[a:b].tolist() for a, b in spans] == encoded
    assert made.routes.prompts.tolist() == [len(tokens) for tokens in encoded]
    assert [made.topics[topic] for topic in made.routes.topics] == ["code"] * 3 + ["prose"] * 3
    assert made.model == routed_model(files.resolve("demo")).model
    assert (made.vocab_size, made.num_experts, made.top_k, made.layers) == (4096, 24, 4, tuple(range(6)))
    assert made.tokens == report["prompt_tokens"] == sum(map(len, encoded))
    known = np.unique(np.concatenate(encoded))
    assert made.nearest is not None
    assert (made.nearest[known] == known).all() and set(made.nearest.tolist()) == set(known.tolist())
    assert (report["prompts"], report["topics"], report["routes_kept"]) == (6, 2, 6)
    assert (report["generated_tokens"], report["shortened"], report["not_counted"]) == (0, 0, 0)


def test_generated_tokens_and_the_table(
    prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The memory has room for counts only, and the context is short."""
    out = tmp_path / "p.npz"
    flags = ("--max-tokens", "5", "--max-model-len", "12", "--max-prompts", "2", "--max-memory", "400KB")
    assert profile("--prompts", *prompts, "-o", str(out), *flags) == 0
    shown = capsys.readouterr().out
    made = Profile.load(out)
    lengths, total = made.routes.prompts, np.diff(made.routes.starts)
    assert made.routes.requests == 4
    assert (lengths <= 6).all() and (total <= lengths + 5).all() and (total > lengths).any()
    assert f"{lengths.sum()} / {(total - lengths).sum()}" in shown
    for line in ("6, 24, 4", "4 / 2", "prompts with routes kept", "cut to the context length"):
        assert line in shown


@pytest.mark.slow
def test_the_same_command_gives_the_same_profile(prompts: list[str], tmp_path: Path) -> None:
    made = []
    for name in ("a.npz", "b.npz"):
        assert profile("--prompts", prompts[0], "-o", str(tmp_path / name), "--max-tokens", "3") == 0
        made.append(Profile.load(tmp_path / name))
    assert (made[0].routes.tokens == made[1].routes.tokens).all()
    assert (made[0].routes.experts == made[1].routes.experts).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-o x.npz", "--prompts: got nothing"),
        ("--prompts nowhere.jsonl -o x.npz", "--prompts: got 'nowhere.jsonl'; allowed: an existing"),
        ("--prompts {} ", "--output-file: got nothing"),
        (
            "--prompts {} -o no/such/folder/x.npz",
            "--output-file: got 'no/such/folder/x.npz'; allowed: a file",
        ),
        ("--prompts {} -o x.npz --max-tokens -1", "--max-tokens: got -1; allowed: an integer of at least 0"),
        ("--prompts {} -o x.npz --max-prompts 0", "--max-prompts: got 0; allowed: an integer of at least 1"),
        ("--prompts {} -o x.npz --max-memory much", "--max-memory: got 'much'; allowed: a positive size"),
        ("--prompts {} -o x.npz --max-memory 99KB", "--max-memory: got '99KB'; allowed: more"),
        ("--prompts {} -o x.npz --max-tokens 5000", "--max-tokens: got 5000; allowed: at most 2046"),
    ],
)
def test_mistakes_are_one_line(
    prompts: list[str],
    tmp_path: Path,
    flags: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert profile(*flags.format(prompts[0]).split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert not (tmp_path / "x.npz").exists()


BAD_PROMPTS = [
    ('{"prompt": [7, 99999]}', "prompt: got token id 99999; allowed: 0 to 4095"),
    ('{"prompt": [-1]}', "prompt: got token id -1; allowed: 0 to 4095"),
    ('{"prompt": "\\ud800"}', "prompt: not valid Unicode text"),
    ('{"prompt": []}', "prompt: got '[]'; allowed: text that is not empty"),
    ('{"prompt": ' + "[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_PROMPTS, ids=[message for _, message in BAD_PROMPTS])
def test_a_bad_prompt_is_named_before_anything_runs(
    prompts: list[str],
    tmp_path: Path,
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bad prompt comes after good ones, in the second file."""
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    monkeypatch.setattr(run, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    assert profile("--prompts", prompts[0], str(file), "-o", str(tmp_path / "x.npz")) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"moesaic: --prompts: {file}, line 3: {message}") and err.count("\n") == 1
    assert not (tmp_path / "x.npz").exists()


def test_progress_where_nobody_sees_a_bar() -> None:
    now = [0.0]
    written = io.StringIO()
    console = Console(file=written, width=200)
    with progress(console, lambda: now[0]) as show:
        show("loading", 0, 0)
        show("tokens", 0, 1000)
        for now[0], done in ((10.0, 100), (40.0, 400), (50.0, 500), (80.0, 800)):
            show("tokens", done, 1000)
        for now[0], done in ((120.0, 500), (160.0, 700)):
            show("reported late", done, 1000)
    assert written.getvalue().splitlines() == [
        "tokens: 400/1000, 10 tok/s, 60 s left",
        "tokens: 800/1000, 10 tok/s, 20 s left",
        "reported late: 700/1000, 5 tok/s, 60 s left",
    ]


def test_progress_as_a_bar() -> None:
    written = io.StringIO()
    console = Console(file=written, width=100, force_terminal=True)
    now = [0.0]
    with progress(console, lambda: now[0]) as show:
        show("tokens", 0, 1000)
        now[0] = 10.0
        show("tokens", 500, 1000)
    shown = written.getvalue()
    assert "tokens" in shown and "50 tok/s" in shown


def test_a_rate_needs_time_and_units_that_are_alike() -> None:
    for unit, seconds, expected in (("tok/s", 1e-6, ""), ("tok/s", 1.0, "3 tok/s"), (None, 1e-6, "3/9")):
        written, now = io.StringIO(), [0.0]
        console = Console(file=written, width=100, force_terminal=True)
        with progress(console, lambda now=now: now[0], unit) as show:
            show("speeds", 0, 9)
            now[0] = seconds
            show("speeds", 3, 9)
        last = [line for line in written.getvalue().splitlines() if "speeds" in line][-1]
        assert ("tok/s" in last) == ("tok/s" in expected) and expected in last


def test_the_time_left_counts_down_and_is_not_kept() -> None:
    now = [0.0]
    bars = Progress(RemainingTime(), get_time=lambda: now[0])
    task = bars.add_task("", total=4)
    shown = []
    for now[0], done in ((0.0, 0), (10.0, 1), (25.0, 1), (50.0, 1), (60.0, 3), (61.0, 4)):
        bars.update(task, completed=done)
        shown.append(RemainingTime.render(bars.columns[0], bars.tasks[0]).plain)
    assert shown == ["", "00:30", "00:15", "", "00:20", ""]


def test_help_names_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--prompts" in shown and "--max-memory" in shown and " show " in shown
    assert "--empty-prompts" not in shown
    assert cli.main(["profile", "show", "--help"]) == 0
    assert "FILE" in capsys.readouterr().out


@pytest.mark.slow
def test_the_statistics_of_what_was_recorded(
    prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.npz"
    assert profile("--prompts", *prompts, "-o", str(out)) == 0
    capsys.readouterr()
    assert cli.main(["profile", "show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topics"] == ["code", "prose"]


def said_by_a_server(*flags: str) -> str:
    """What `moesaic serve demo` prints on stderr when it answers two requests and ends well."""
    flags = ("--port", "0", "--threads", "1", "--max-model-len", "256", *flags)
    command = [sys.executable, "-m", "moesaic", "serve", "demo", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = next(line for line in process.stdout if line.startswith("Serving "))
        [url] = re.findall(r"http\S+", line)
        for count in (3, 5):
            body = {"model": "demo", "prompt": [7] * 20, "max_tokens": count, "ignore_eos": True}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            urllib.request.urlopen(request, timeout=60).close()
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=120)[1]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    return err


@pytest.mark.slow
def test_what_is_served_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "live.npz"
    record = ("--record-routing", str(out), "--record-routing-share", "1")
    err = said_by_a_server("--attention-workers", "2", *record)
    assert err == f"moesaic: the routing is in {out}: print it with {program()} profile show {out}\n"
    made = Profile.load(out)
    assert sorted(np.diff(made.routes.starts).tolist())[-1] in (22, 24)
    assert set(np.diff(made.routes.starts) - made.routes.prompts) == {2, 4}
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
def test_a_live_profile_of_no_request_is_told(tmp_path: Path) -> None:
    """With the default share, none of the first eight requests is recorded."""
    out = tmp_path / "live.npz"
    err = said_by_a_server("--record-routing", str(out))
    assert f": no request was recorded, {out} was not written: --record-routing-share 0.05" in err
    assert err.count("\n") == 1 and list(tmp_path.iterdir()) == []


WITHOUT = "without --expert-servers"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--record-routing-memory", "10"),
            "--record-routing-memory: got '10'; allowed: more: the empty counts of this model need it",
        ),
        (
            ("--tensor-parallel-size", "2"),
            f"--record-routing: got '{{}}'; allowed: nothing with --tensor-parallel-size 2 {WITHOUT}",
        ),
    ],
)
def test_a_live_profile_that_cannot_be_made(
    tmp_path: Path, flags: tuple[str, ...], told: str, quick_workers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.npz"
    command = ["serve", "demo", "--port", "0", "--threads", "1", "--record-routing", str(file), *flags]
    assert cli.main(command) == 2
    assert capsys.readouterr().err == f"moesaic: {told.format(file)}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_live_profile_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nowhere" / "p.npz"
    assert cli.main(["serve", "demo", "--port", "0", "--record-routing", str(file)]) == 2
    told = f"--record-routing: got '{file}'; allowed: a file to write into (No such file or directory)\n"
    assert capsys.readouterr().err == f"moesaic: {told}"
