from __future__ import annotations

import io
import json
from statistics import median

import pytest
from rich.console import Console
from tests.support.fake_streaming_server import FakeServer

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.jobs.bench.measure import is_good
from moesaic.jobs.bench.options import ServeBench
from moesaic.jobs.bench.report import WorkerRuns, print_report
from moesaic.jobs.bench.serve import BenchError, run


def quiet():
    return Console(file=io.StringIO(), width=200)


def bench(server, console=None, **settings):
    given = {"base_url": server.url, "num_prompts": 6}
    if not {"mix", "trace", "dataset_path"} & settings.keys():
        given |= {"random_input_len": 11, "random_output_len": 5}
    return run(ServeBench(**(given | settings)), console or quiet())


def test_what_is_measured_is_what_the_server_did():
    with FakeServer(first=0.1, step=0.03) as server:
        report = bench(server, max_concurrency=2)
    found = report.to_dict()
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (66, 30)
    assert found["max_concurrent_requests"] == 2
    gaps = [gap for outcome in report.outcomes for gap in outcome.gaps]
    assert found["median_ttft_ms"] == pytest.approx(1000 * median(one.ttft for one in report.outcomes))
    assert found["median_itl_ms"] == pytest.approx(1000 * median(gaps)) and len(gaps) == 6 * 4
    assert found["median_tpot_ms"] == pytest.approx(1000 * median(one.tpot for one in report.outcomes))
    # A busy machine sees tokens late, the first one too. Once at least it is seen before the others come.
    assert max(one.latency - one.ttft for one in report.outcomes) > 0.06
    for outcome in report.outcomes:
        assert outcome.ttft >= 0.1 and outcome.latency >= 0.22
        assert outcome.ttft + sum(outcome.gaps) == pytest.approx(outcome.latency)
        assert outcome.ttft + 4 * outcome.tpot == pytest.approx(outcome.latency)
    assert found["duration"] >= 3 * 0.22
    assert found["request_throughput"] == pytest.approx(6 / found["duration"])
    assert found["total_token_throughput"] == pytest.approx(96 / found["duration"])
    assert {"mean_ttft_ms", "std_itl_ms", "p50_tpot_ms", "p90_e2el_ms", "p99_ttft_ms"} <= set(found)


def test_what_is_sent():
    with FakeServer() as server:
        bench(server, ignore_eos=True, temperature=0.5, extra_body='{"top_k": 3}', api_key="k", num_warmups=2)
        assert len(server.bodies) == 8
        for body in server.bodies:
            assert len(body.pop("prompt")) == 11
            assert body == {
                "model": "fake",
                "max_tokens": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
                "temperature": 0.5,
                "top_k": 3,
            }
        assert all("Authorization: Bearer k" in head for head in server.headers)


def test_random_tokens_come_from_the_servers_tokenizer_or_below_the_given_size():
    with FakeServer() as server:
        bench(server)
        assert {token for body in server.bodies for token in body["prompt"]} == {1, 3, 4, 5}
        server.bodies.clear()
        bench(server, vocab_size=2)
        assert {token for body in server.bodies for token in body["prompt"]} == {0, 1}
        server.tokenize_status = 404
        with pytest.raises(ConfigError, match=r"--vocab-size: needed .* answers 404 \{"):
            bench(server)


def test_requests_are_sent_at_their_times():
    with FakeServer() as server:
        report = bench(server, arrivals="fixed", request_rate=20.0, num_warmups=0)
        starts = [outcome.send_time for outcome in report.outcomes]
    assert (starts[-1] - starts[0]) / 5 == pytest.approx(0.05, abs=0.02)


def test_chat_with_prompts_of_a_file(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text('{"turns": ["hello"]}\n')
    with FakeServer() as server:
        report = bench(server, endpoint="/v1/chat/completions", dataset_path=file, custom_output_len=3)
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert report.summary.total_output == 18
    assert report.summary.spreads["ttft"].mean >= 20.0


def test_partial_runs_are_those_of_the_load():
    """Other servers do not count them."""
    names = ('moesaic:{}_total{{model_name="m"}} {}', "vllm:{}_total {}")
    for name, other in (
        (names[0], "moesaic:other_runs_total 9.0"),
        (names[1], "# HELP moesaic:runs_total x"),
    ):
        pages = [
            "\n".join((other, name.format("runs", runs), name.format("partial_runs", partial), ""))
            for runs, partial in ((100.0, 3.0), (1437.0, 962.0))
        ]
        console = quiet()
        with FakeServer(metrics=pages) as server:
            report = bench(server, console)
        assert report.runs == WorkerRuns(1337, 959)
        print_report(report, console)
        assert "959 / 1337" in console.file.getvalue()
        assert report.to_dict()["partial_runs"] == 959
    with FakeServer() as server:
        report = bench(server)
    assert report.runs is None and report.to_dict()["partial_runs"] is None


def test_objectives_from_a_light_load():
    console = quiet()
    with FakeServer(first=0.05, step=0.01) as server:
        report = bench(server, console, slo="5x-light", light_requests=3)
        assert len(server.bodies) == 1 + 3 + 6
    assert report.light.num_completed == 3
    assert report.objectives["ttft"] == pytest.approx(5 * report.light.spreads["ttft"].mean)
    assert report.objectives["ttft"] >= 250
    good = sum(is_good(outcome, report.objectives) for outcome in report.outcomes)
    assert 0 < good == report.summary.num_good
    assert report.to_dict()["request_goodput"] == good / report.summary.duration
    assert "light load, 3 requests one at a time: mean ttft" in console.file.getvalue()


def test_objectives_that_are_given():
    with FakeServer(first=0.05) as server:
        report = bench(server, goodput=("ttft:10", "e2el:10000"))
    assert (report.summary.num_good, report.summary.request_goodput) == (0, 0.0)
    assert report.to_dict()["slo_ms"] == {"ttft": 10.0, "e2el": 10000.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"status": 400}, "HTTP 400: no thanks"),
        ({"cut_after": 2}, "127.0.0.1"),
        ({"fail_after": 2}, "the worker is gone"),
        ({"usage": False}, "sends no token counts"),
    ],
)
def test_failures_are_counted_and_told(settings, said):
    with FakeServer(**settings) as server:
        report = bench(server, num_warmups=0)
        with pytest.raises(BenchError, match="warm-up: .*" + said):
            bench(server)
    assert (report.summary.num_completed, report.summary.num_failed) == (0, 6)
    assert report.errors()[0][1] == 6
    assert said in report.errors()[0][0]
    console = quiet()
    print_report(report, console)
    assert f"6 x {report.errors()[0][0]}" in console.file.getvalue()


def test_a_server_that_is_not_there():
    with FakeServer() as server:
        url = server.url
    with pytest.raises(ConnectionLost, match=url):
        run(ServeBench(base_url=url), quiet())
    with pytest.raises(ConnectionLost):
        run(ServeBench(base_url="localhost:1"), quiet())
    with pytest.raises(ConnectionLost):
        run(ServeBench(base_url="http://[bad"), quiet())


def test_requests_that_are_too_long_are_refused_before_any_is_sent():
    with FakeServer(max_model_len=15) as server:
        with pytest.raises(ConfigError, match="the server's max_model_len"):
            bench(server)
        assert server.bodies == []
        server.max_model_len = None
        assert bench(server).summary.num_completed == 6


def test_bad_texts_are_refused_before_the_server_is_asked():
    for settings in ({"extra_body": "{"}, {"extra_body": "[]"}, {"slo": "x"}, {"goodput": ("x",)}):
        with pytest.raises(ConfigError):
            run(ServeBench(**settings), quiet())


def test_results_are_saved(tmp_path):
    with FakeServer() as server:
        report = bench(server, result_dir=tmp_path / "deep", result_filename="r.json", save_detailed=True)
        saved = json.loads((tmp_path / "deep" / "r.json").read_text())
        assert saved == json.loads(report.to_json(with_details=True))
        assert [len(gaps) for gaps in saved["itls"]] == [4] * 6
        bench(server, result_dir=tmp_path, save_result=True)
        assert len(list(tmp_path.glob("bench-serve-fake-*.json"))) == 1
        with pytest.raises(ConfigError, match="--result-filename"):
            bench(server, result_dir=tmp_path / "deep" / "r.json", save_result=True)


def test_the_table_for_people():
    with FakeServer() as server:
        report = bench(server, goodput=("ttft:1000",), percentile_metrics="ttft", metric_percentiles="99.9")
    console = quiet()
    print_report(report, console)
    text = console.file.getvalue()
    for part in ("output throughput", "requests within objectives", " of 6", "p99.9", "peak concurrent"):
        assert part in text
    assert "tpot" not in text
