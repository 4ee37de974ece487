from __future__ import annotations

import io
import json
import random

import pytest
from rich.console import Console
from tests.support.fake_batch_server import FakeServer, completion, line, refusal, results, write_input

from moesaic.core.errors import ConfigError, EngineDeadError
from moesaic.jobs.batch.options import RunBatch
from moesaic.jobs.batch.run import run_with
from moesaic.jobs.batch.show import print_summary
from moesaic.jobs.batch.window import retry_delay


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def run(fake, files, window=4, model="fake", **settings):
    console = Console(file=io.StringIO(), force_terminal=False)
    return run_with(fake.serving(), model, RunBatch(*files, **settings), window, console)


def test_every_line_gets_its_result(files):
    ids = write_input(files[0], 50)
    fake = FakeServer()
    summary = run(fake, files)
    found = results(files[1])
    assert sorted(result["custom_id"] for result in found) == sorted(ids)
    for result in found:
        assert result["response"]["status_code"] == 200
        assert result["response"]["request_id"] == "req-1"
        assert result["response"]["body"]["choices"][0]["text"] == f"<p-{result['custom_id']}>"
        assert result["error"] is None
    assert len({result["id"] for result in found}) == 50
    assert (summary.total, summary.completed, summary.failed, summary.unfinished) == (50, 50, 0, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (150, 250)
    assert summary.exit_code() == 0


def test_results_come_as_they_finish_and_the_window_is_kept(files):
    files[0].write_text(line("slow", after=10) + "\n" + "".join(line(f"{n}") + "\n" for n in range(10)))
    fake = FakeServer(delay=0.01)
    run(fake, files, window=3)
    assert results(files[1])[-1]["custom_id"] == "slow"
    assert fake.peak == 3


def test_the_option_sets_the_window(files):
    write_input(files[0], 10)
    fake = FakeServer(delay=0.001)
    run(fake, files, window=8, max_in_flight=2)
    assert fake.peak == 2


def test_bad_lines_are_reported_and_the_rest_is_run(files):
    bad = ["{", line("a"), line("x", url="/v1/embeddings"), line("s", stream=True)]
    files[0].write_text("\n".join([line("a"), *bad, line("b")]))
    summary = run(FakeServer(), files)
    found = {result["error"]["line"]: result for result in results(files[1]) if result["error"]}
    assert {number: result["custom_id"] for number, result in found.items()} == {
        2: None,
        3: None,
        4: "x",
        5: "s",
    }
    assert all(result["response"] is None for result in found.values())
    assert (summary.completed, summary.failed) == (2, 4)
    again = run(FakeServer(), files)
    assert (again.done_before, again.failed_before, again.completed, again.failed) == (6, 4, 0, 0)


def test_a_refused_request_is_a_result(files):
    write_input(files[0], 3)
    fake = FakeServer(lambda body: refusal(400, "bad") if body["prompt"] == "p-id-1" else completion(body))
    summary = run(fake, files)
    failed = [result for result in results(files[1]) if result["error"]]
    assert [result["custom_id"] for result in failed] == ["id-1"]
    assert failed[0]["response"]["status_code"] == 400
    assert failed[0]["error"] == {"code": "bad", "message": "line 2: refused with bad", "line": 2}
    assert summary.exit_code() == 1


def test_when_a_line_failed_the_exit_code_says_so_also_later(files):
    write_input(files[0], 3)
    fake = FakeServer(lambda body: refusal(404, "x") if body["prompt"] == "p-id-1" else completion(body))
    assert run(fake, files).exit_code() == 1
    assert len(results(files[1])) == 3
    assert run(FakeServer(), files).exit_code() == 1
    empty = files[0].with_name("empty")
    empty.touch()
    assert run(FakeServer(), (empty, files[1].with_name("out2"))).exit_code() == 0


def test_a_busy_server_is_asked_again(files):
    write_input(files[0], 4)
    fake = FakeServer()
    fake.answer = lambda body: refusal(429, "busy") if fake.seen[body["prompt"]] == 1 else completion(body)
    summary = run(fake, files)
    assert summary.completed == 4
    assert set(fake.seen.values()) == {2}


def test_how_long_a_busy_server_is_left_alone():
    assert [retry_delay(n, None) for n in range(3)] == [0.1, 0.2, 0.4]
    assert retry_delay(0, 2.0) == 2.0
    assert retry_delay(50, 1.0) == 30.0


def test_the_death_of_the_worker_ends_the_run_and_keeps_what_was_done(files):
    ids = write_input(files[0], 20)
    fake = FakeServer(delay=0.001)
    dead = refusal(503, "engine_dead")
    fake.answer = lambda body: dead if len(fake.seen) > 10 else completion(body)
    with pytest.raises(
        EngineDeadError, match="refused with engine_dead; .* of 20 results are in .*to continue"
    ):
        run(fake, files)
    before = results(files[1])
    assert 0 < len(before) < 20
    assert all(result["error"] is None for result in before)
    summary = run(FakeServer(), files)
    assert (summary.done_before, summary.completed) == (len(before), 20 - len(before))
    assert sorted(result["custom_id"] for result in results(files[1])) == sorted(ids)


def test_a_finished_run_starts_nothing(files):
    write_input(files[0], 3)
    run(FakeServer(), files)
    before = files[1].read_bytes()
    fake = FakeServer()
    assert run(fake, files).done_before == 3
    assert fake.started == 0
    assert files[1].read_bytes() == before


def test_lines_added_to_the_input_are_run(files):
    write_input(files[0], 3)
    run(FakeServer(), files)
    write_input(files[0], 5)
    fake = FakeServer()
    assert run(fake, files).completed == 2
    assert set(fake.seen) == {"p-id-3", "p-id-4"}


def test_the_output_of_another_input_is_refused(files):
    write_input(files[0], 3)
    run(FakeServer(), files)
    before = files[1].read_bytes()
    files[0].write_text(line("id-0") + "\n")
    with pytest.raises(ConfigError, match=r"holds a result of 'id-\d', which .* does not have"):
        run(FakeServer(), files)
    assert files[1].read_bytes() == before


def test_the_answers_of_another_model_are_refused(files):
    write_input(files[0], 3)
    run(FakeServer(), files)
    with pytest.raises(ConfigError, match="answers of model 'fake', not of 'other'"):
        run(FakeServer(), files, model="other")


def test_bad_settings_are_one_line(files):
    with pytest.raises(ConfigError, match="--input-file: got .*allowed: an existing regular file"):
        RunBatch(*files)
    write_input(files[0], 1)
    with pytest.raises(ConfigError, match="--output-file: got .*another file than the input"):
        RunBatch(files[0], files[0])
    with pytest.raises(ConfigError, match="--max-in-flight: got 0"):
        RunBatch(*files, max_in_flight=0)


def test_any_sequence_of_torn_runs_ends_with_one_result_each(files):
    ids = write_input(files[0], 30)
    rng = random.Random(5)
    for _ in range(10):
        run(FakeServer(), files, window=rng.randint(1, 8))
        raw = files[1].read_bytes()
        files[1].write_bytes(raw[: rng.randrange(len(raw))])
    run(FakeServer(), files)
    assert sorted(result["custom_id"] for result in results(files[1])) == sorted(ids)


def test_the_summary_for_people_and_machines(files):
    write_input(files[0], 3)
    summary = run(FakeServer(), files)
    console = Console(file=io.StringIO(), width=200)
    print_summary(summary, console)
    assert "3 completed, 0 failed; 15 tokens" in console.file.getvalue()
    assert json.loads(summary.to_json())["completed"] == 3
