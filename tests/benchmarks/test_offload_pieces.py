"""What the offload benchmark's parts make of files, lines and times."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from offloading import groups, report
from offloading.accelerated import Way, Work, devices
from offloading.watching import Outcome, drop_cache, watch
from offloading.workload import prompts, questions
from rich.console import Console

LIMIT = 1 << 30


def step(seconds: float, *new: tuple[int, int]) -> dict[str, Any]:
    return {"event": "step", "seconds": seconds, "new": list(new), "read": 100, "resident": 200}


def heard(*said: dict[str, Any], new: int = 5) -> Outcome:
    outcome = Outcome(prompts=2, new=new)
    for line in ({"event": "begin", "known": {}}, *said):
        outcome.hear(line)
    return outcome


def test_questions_are_repeated_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"turns": ["abc", "no"]}\n{"prompt": "abcdefghi"}\n{"question": "z"}\n')
    texts = questions(file)
    assert texts == ["abc", "abcdefghi", "z"]
    found = prompts(texts[:2], lambda text: list(text.encode()), count=3, length=4)
    assert found == [[97, 98, 99], [97, 98, 99, 100], [97, 98, 99]]


def test_a_whole_run_counts_prefill_and_decode() -> None:
    steps = [step(4.0, (0, 1), (1, 1)), *(step(4.0 + i, (0, i), (1, i)) for i in range(1, 5))]
    outcome = heard(*steps, {"event": "end", "seconds": 10.0, "read": 7, "resident": 9, "measured": {}})
    assert (outcome.ended, outcome.generated, outcome.read, outcome.resident) == ("done", 10, 7, 9)
    assert (outcome.prefill_seconds, outcome.decode_seconds) == (4.0, 6.0)
    assert outcome.throughput == outcome.projected == 1.0


def test_of_a_run_that_was_ended_counts_what_was_reached() -> None:
    outcome = heard(step(4.0, (0, 1), (1, 1)), step(6.0, (0, 2), (1, 2), (0, 3), (1, 3)))
    assert (outcome.generated, outcome.throughput) == (6, 1.0)
    assert outcome.projected == 1.25


def test_without_a_decode_step_nothing_is_projected() -> None:
    assert heard(step(4.0, (0, 1), (1, 1))).projected is None
    assert heard(step(4.0, (0, 1)), step(5.0, (0, 2))).projected is None, "prompt 1 has no token yet"
    assert heard().throughput == 0.0


def test_what_is_done_before_each_has_a_token_is_no_decoding() -> None:
    outcome = heard(step(2.0, (0, 1), (0, 2), (0, 3)), step(4.0, (1, 1)), step(6.0, (1, 2), (1, 3)), new=3)
    assert outcome.at_first == 4
    assert outcome.projected == 1.0


def test_answers_are_compared_as_far_as_both_go() -> None:
    assert report.agreement({0: [1, 2, 3], 1: [4, 5]}, {0: [1, 2], 1: [4, 6]}) == (1, [1])
    assert report.agreement({0: [1]}, {1: [1]}) == (0, [])


def test_the_table_marks_what_was_ended() -> None:
    whole = heard(step(1.0, (0, 1), (1, 1)), step(2.0, (0, 2), (1, 2)), new=2)
    whole.ended = "done"
    part = heard(step(4.0, (0, 1), (1, 1)), step(6.0, (0, 9), (1, 2)), new=3)
    part.ended = "time limit"
    none = Outcome(2, 2, ended="out of memory", why="killed")
    cases = (("a", whole), ("b", part), ("c", none))
    rows = [report.summarise(name, 2, [run], whole) for name, run in cases]
    assert [(row["equal"], row["compared"], row["parts_at"]) for row in rows[:2]] == [(2, 2, None), (1, 2, 1)]
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(rows, {"no_limit": "False", "cap": "1GiB", "libraries": "2MiB"}, console)
    text = console.export_text()
    assert "2.00 │ 1.00x" in text and "<0.67 ~0.75 │ 2.67x" in text
    assert "c at 2: out of memory, 0 tokens (killed)" in text


def test_predictions_have_a_table_of_their_own() -> None:
    phase = {"predicted_seconds": 12.0, "predicted_at_link_seconds": 6.0, "measured_seconds": 8.0}
    priced = heard(step(4.0, (0, 1), (1, 1)), step(5.0, (0, 2), (1, 2)))
    priced.measured = {"decode": phase | {"link_bytes_per_s": 2.0**30}, "prefill_seconds": 1.0}
    rows = [report.summarise(name, 2, [run], run) for name, run in (("ours", priced), ("theirs", heard()))]
    told = io.StringIO()
    report.show(rows, {"no_limit": "True"}, Console(file=told, width=200))
    [line] = [line for line in told.getvalue().splitlines() if "decode " in line and "ours" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["2", "ours", "decode", "12.0", "6.0", "8.0", "1.50, 0.75", "1.00"]
    plain = io.StringIO()
    report.show(rows[1:], {"no_limit": "True"}, Console(file=plain, width=200))
    assert "predicted" not in plain.getvalue()


def test_medians_are_of_rounds_and_peaks_the_largest() -> None:
    runs = [Outcome(1, 1, ended="done", seconds=s, tokens={0: [1]}, resident=int(s)) for s in (1.0, 4.0, 2.0)]
    row = report.summarise("a", 1, runs, runs[0])
    assert (row["tokens_per_s"], row["seconds"], row["resident_bytes"]) == (0.5, 2.0, 4)
    assert row["charged_bytes"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ended", "why"),
    [
        ("print('nothing more'); sys.exit(3)", "died", "nothing more"),
        ("say(event='refused', why='no')", "refused", "no"),
        ("say(event='begin', known={}); import time; time.sleep(60)", "time limit", ""),
        ("import time; time.sleep(60)", "time limit", "while it loaded"),
    ],
)
def test_every_end_of_a_process_is_told(script: str, ended: str, why: str) -> None:
    start = "import json, sys, os\nanswers = os.fdopen(os.dup(1), 'w'); os.dup2(2, 1)\n"
    say = "def say(**said):\n    print(json.dumps(said), file=answers, flush=True)\n"
    order = {"prompts": [[1]], "new": 1}
    limit = 60.0 if ended != "time limit" else 3.0  # to load, and again to run
    found = watch([sys.executable, "-c", start + say + script], {}, order, None, limit, lambda *_: None)
    assert (found.ended, found.why) == (ended, why)


def test_a_group_of_version_1_is_made_inside_ones_own(tmp_path: Path) -> None:
    own, inside = tmp_path / "own", tmp_path / "mount/memory/user"
    inside.mkdir(parents=True)
    own.write_text("5:cpu,cpuacct:/other\n4:memory:/user\n0::/\n")
    assert groups.candidates(tmp_path / "mount", own) == (1, [inside])
    own.write_text("4:memory:/not/seen/from/here\n")
    assert groups.candidates(tmp_path / "mount", own) == (1, [tmp_path / "mount/memory"])


def test_a_group_of_version_2_may_be_beside_ones_own(tmp_path: Path) -> None:
    own, mount = tmp_path / "own", tmp_path / "mount"
    (mount / "slice/scope").mkdir(parents=True)
    own.write_text("0::/slice/scope\n")
    assert groups.candidates(mount, own) == (0, [])
    (mount / "cgroup.controllers").write_text("memory")
    assert groups.candidates(mount, own) == (2, [mount / "slice/scope", mount / "slice"])
    with pytest.raises(groups.NoGroup, match=r"no memory limit can be set here .*--no-limit"):
        groups.create(LIMIT, "mine", mount, own)  # a folder without the kernel's files
    assert not list(mount.glob("**/mine"))


def test_a_group_tells_its_peak_and_who_was_killed(tmp_path: Path) -> None:
    first = groups.Group(tmp_path, 1)
    assert (first.peak(), first.killed()) == (None, False)
    (tmp_path / "memory.max_usage_in_bytes").write_text("4096\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert (first.peak(), first.killed()) == (4096, True)
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 0\n")
    assert groups.Group(tmp_path, 2).killed() is False


def test_a_command_enters_its_group_first(tmp_path: Path) -> None:
    order = {"prompts": [[1]], "new": 1}
    script = f"import sys; sys.stderr.write(open({str(tmp_path / 'cgroup.procs')!r}).read())"
    (tmp_path / "cgroup.procs").touch()
    found = watch([sys.executable, "-c", script], {}, order, groups.Group(tmp_path, 2), 60, lambda *_: None)
    assert found.why.isdigit()


def test_pages_of_files_and_folders_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/file").write_bytes(b"a" * 8192)
    drop_cache([tmp_path, tmp_path / "in/file"])
    assert (tmp_path / "in/file").read_bytes() == b"a" * 8192


def test_accelerate_gets_the_way_with_the_fewest_reads() -> None:
    work = Work(prompts=4, longest=10, new=3, layers=8, layer=100, token=1, row=10)
    assert work.best(840) == Way(size=4, rows=28, resident=0)
    assert work.best(1202) == Way(size=4, rows=25, resident=4), "4 passes over 4 layers, not 3 over 6"
    assert work.best(10) == Way(size=1, rows=1, resident=0), "it is tried all the same"


def test_accelerate_keeps_all_but_later_experts() -> None:
    found = devices(layers=3, resident=1)
    assert [name for name, where in found.items() if where == "disk"] == [
        *("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")
    ]
    assert json.dumps(found)
