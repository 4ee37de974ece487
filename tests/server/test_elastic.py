"""/v1/fault_tolerance/status, /scale_elastic_ep and the metrics of several processes."""

from __future__ import annotations

from concurrent.futures import Future

import httpx
import numpy as np
import pytest

from tests.support.fake_cluster import BROKEN, BUSY, WRONG, FakeCluster
from tests.support.raw_http import ask, head, post

from .conftest import NO_TLS, Launch, Live
from .test_status import samples


def test_the_status_tells_processes_counters_and_failures(launch: Launch) -> None:
    status = launch(cluster=FakeCluster()).get("/v1/fault_tolerance/status").json()
    assert [process["name"] for process in status["processes"]] == [
        "attention worker 0",
        "expert server 1",
        "expert server 2",
    ]
    assert (status["directory_version"], status["placement_version"], status["change"]) == (7, 3, None)
    assert status["counters"]["process_deaths"] == 4
    assert (status["counters"]["missed_ttft"], status["counters"]["missed_itl"]) == (5, 6)
    assert status["failures"] == [{"time": 1.5, "what": "expert server 0: killed by signal 9"}]
    assert [process["held"] for process in status["processes"]] == [{}, {"1": "0, 2-3"}, {"1": "0, 2-3"}]
    assert status["hosts"] == [
        {"name": "", "processes": ["attention worker 0", "expert server 1"]},
        {"name": "b", "processes": ["expert server 2"]},
    ]
    [link] = status["links"]
    assert (link["one"], link["other"], link["source"]) == ("", "b", "measured")
    assert status["replicas"][0]["copies"] == {"1": "1", "2": "0, 2-3"}


def test_scaling_is_answered_with_the_new_status(launch: Launch) -> None:
    cluster = FakeCluster()
    live = launch(cluster=cluster)
    status = live.post("/scale_elastic_ep", expert_servers=4).json()
    assert sum(process["role"] == "expert server" for process in status["processes"]) == 4
    live.post("/scale_elastic_ep", attention_workers=2, expert_servers=3)
    live.post("/scale_elastic_ep", prefill_workers=0)
    assert cluster.asked == [(4, None, None), (3, 2, None), (None, None, 0)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "expert_servers, attention_workers or prefill_workers is needed"),
        ({"prefill_workers": -1}, "prefill_workers: got -1"),
        ({"expert_servers": 0}, "expert_servers: got 0"),
        ({"attention_workers": -1}, "attention_workers: got -1"),
        ({"expert_servers": "3"}, "expert_servers: got '3'"),
        ({"expert_servers": 2.5}, "expert_servers: got 2.5"),
        ({"servers": 3}, "servers: not a parameter"),
    ],
)
def test_nonsense_is_refused_by_name(body: dict[str, object], message: str, launch: Launch) -> None:
    cluster = FakeCluster()
    answer = launch(cluster=cluster).post("/scale_elastic_ep", **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert cluster.asked == []


@pytest.mark.parametrize(("failure", "status"), [(BUSY, 409), (BROKEN, 503), (WRONG, 400)])
def test_a_failed_change_says_why(failure: Exception, status: int, launch: Launch) -> None:
    answer = launch(cluster=FakeCluster(failure=failure)).post("/scale_elastic_ep", expert_servers=3)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(failure)


def test_a_change_is_cancelled_by_delete(launch: Launch) -> None:
    live = launch(cluster=FakeCluster())
    with live.http as client:
        answer = client.delete("/scale_elastic_ep")
    assert answer.status_code == 409
    assert answer.json()["error"]["message"] == "no scaling call is under way"
    with httpx.Client(base_url=live.url, trust_env=False, verify=NO_TLS) as anybody:
        assert anybody.delete("/scale_elastic_ep").status_code == 401


def test_a_change_that_outlives_the_server_is_answered(launch: Launch) -> None:
    class Loading(FakeCluster):
        """A newcomer takes for ever."""

        def scale(
            self,
            expert_servers: int | None = None,
            attention_workers: int | None = None,
            prefill_workers: int | None = None,
        ) -> Future[None]:
            live.front.draining = True
            future: Future[None] = Future()
            future.set_running_or_notify_cancel()
            return future

    live = launch(cluster=Loading())
    answer = live.post("/scale_elastic_ep", expert_servers=3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


def test_changes_need_the_key(launch: Launch) -> None:
    cluster = FakeCluster()
    live = launch(api_key="s3cret", cluster=cluster)
    for path in ("/scale_elastic_ep", "/v1/fault_tolerance/status"):
        with httpx.Client(base_url=live.url, trust_env=False, verify=NO_TLS) as anybody:
            ask = anybody.get if path.startswith("/v1") else anybody.post
            assert ask(path).status_code == 401
    assert live.post("/scale_elastic_ep", expert_servers=1).status_code == 200
    assert cluster.asked == [(1, None, None)]


def test_changes_need_a_key_where_nothing_else_does(launch: Launch) -> None:
    cluster = FakeCluster()
    live = launch(cluster=cluster)
    with httpx.Client(base_url=live.url, trust_env=False, verify=NO_TLS) as anybody:
        assert anybody.get("/v1/models").status_code == 200
        assert anybody.get("/v1/fault_tolerance/status").status_code == 200
        for path in ("/scale_elastic_ep", "/scale%5felastic_ep"):
            answer = anybody.post(path, json={"expert_servers": 1})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "admin key" in answer.json()["error"]["message"]
    assert cluster.asked == []
    assert live.post("/scale_elastic_ep", expert_servers=1).status_code == 200


@pytest.mark.parametrize(
    "end", ["%0a", "%0d%0a", "%00", "%e2%80%a8", "%85", "/", "%2f", "/.", ";x", "%20", "?x", "%3f"]
)
def test_no_other_spelling_of_a_path_goes_around_the_admin_key(end: str, launch: Launch) -> None:
    """A route also matches a path with a line feed at its end."""
    cluster = FakeCluster()
    port = int(launch(cluster=cluster, closed=True).url.rsplit(":", 1)[1])
    for begin in ("", "/", "http://localhost", "/%2e"):
        changed = ask(
            port, post(f"{begin}/scale_elastic_ep{end}", {"expert_servers": 1}, "Connection: close")
        )
        told = ask(port, head(f"{begin}/v1/fault_tolerance/status{end}", None, "Connection: close"))
        assert changed is not None and told is not None
        assert {changed.status, told.status} <= {401, 404}, (begin, changed, told)
        assert b"expert_servers" not in changed.body and b"processes" not in told.body
    assert cluster.asked == []


def test_without_a_key_a_public_server_does_not_tell_who_is_behind_it(launch: Launch) -> None:
    live = launch(cluster=FakeCluster(), closed=True)
    with httpx.Client(base_url=live.url, trust_env=False, verify=NO_TLS) as anybody:
        answer = anybody.get("/v1/fault_tolerance/status")
        assert answer.status_code == 401
        assert "pid" not in answer.text and anybody.get("/metrics").status_code == 200
    assert live.get("/v1/fault_tolerance/status").status_code == 200


def test_a_web_page_cannot_change_a_server_on_its_readers_machine(launch: Launch) -> None:
    """A browser sends text/plain anywhere without asking; JSON it sends only where it is allowed to."""
    cluster = FakeCluster()
    with launch(cluster=cluster).http as client:
        headers = {"Content-Type": "text/plain"}
        answer = client.post("/scale_elastic_ep", content=b'{"expert_servers": 1}', headers=headers)
    assert (answer.status_code, cluster.asked) == (400, [])


def test_one_process_has_no_such_things(live: Live) -> None:
    for answer in (
        live.get("/v1/fault_tolerance/status"),
        live.post("/scale_elastic_ep", expert_servers=2),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "no_cluster"


def test_nothing_is_scaled_while_the_model_loads(launch: Launch) -> None:
    cluster = FakeCluster()
    live = launch(cluster=cluster, ready=False)
    assert live.post("/scale_elastic_ep", expert_servers=2).status_code == 503
    assert cluster.asked == []


def test_metrics_of_processes_and_experts(launch: Launch) -> None:
    found = samples(launch(cluster=FakeCluster(np.array([[5, 0], [1, 2]]))))
    assert found["moesaic:processes_up{role=attention worker}"] == 1
    assert found["moesaic:processes_up{role=expert server}"] == 1, "one of the two is starting"
    assert found["moesaic:expert_server_waiting_pairs{server=expert server 1}"] == 10
    assert found["moesaic:placement_version"] == 3
    assert found["moesaic:process_deaths_total"] == 4
    assert found["moesaic:failovers_total"] == 3
    assert found["moesaic:silent_failovers_total"] == 2
    assert found["moesaic:false_failovers_total"] == 1
    assert found["moesaic:resent_pairs_total"] == 99
    assert found["moesaic:slo_violations_total{objective=ttft}"] == 5
    assert found["moesaic:slo_violations_total{objective=itl}"] == 6
    assert found["moesaic:refused_connections_total"] == 7
    assert found["moesaic:expert_pairs_total{expert=0,layer=1}"] == 5
    assert found["moesaic:expert_pairs_total{expert=1,layer=2}"] == 2
    assert found["moesaic:expert_balancedness{layer=2}"] == 0.5
    assert found["moesaic:sent_pairs_total{layer=1}"] == 40
    assert found["moesaic:local_activation_pairs_total{layer=1}"] == 30
    assert found["moesaic:local_activation_pairs_total{layer=2}"] == 10
    assert found["moesaic:placement_solves_total"] == 3 and found["moesaic:placement_swaps_total"] == 2
    assert found["moesaic:far_bytes_total"] == 8
    assert found["moesaic:link_bytes_per_second{host=,other_host=b}"] == 1e9
    assert found["moesaic:link_latency_seconds{host=,other_host=b}"] == 1e-4
    assert found["moesaic:placement_predicted_gain_seconds"] == 4.5
    assert found["moesaic:placement_predicted_local{placement=after}"] == 0.6


def test_a_model_with_many_experts_has_a_series_for_each_layer(launch: Launch) -> None:
    found = samples(launch(cluster=FakeCluster(np.ones((9, 256), dtype=np.int64))))
    assert found["moesaic:expert_pairs_total{layer=9}"] == 256
    assert not any("expert=" in name for name in found)
