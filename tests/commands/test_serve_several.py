"""`moesaic serve A B` as a person runs it: real processes, real sockets, models that come and go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.conftest import NO_TLS

import moesaic
from moesaic import LLM, SamplingParams
from moesaic.commands import cli

PATIENCE = 240.0
"""Seconds. What takes longer hangs."""
DEMO = Path(moesaic.__file__).parent / "demo"
PROMPTS = {"a": "def apples", "b": "def apples"}
LONG = 1500
"""Tokens of an answer that lasts while other things happen."""


class Front:
    """A running `moesaic serve` with several models."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "moesaic", "serve", *arguments, "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server ended with code {self.process.wait()} before it served"
        self.url = str(json.loads(line)["url"])
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=NO_TLS)

    def complete(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": PROMPTS[model], "temperature": 0, "max_tokens": 8}
        return self.client.post("/v1/completions", json=body | {"ignore_eos": True} | fields)

    def stream(self, model: str, tokens: int = LONG) -> Iterator[dict[str, Any]]:
        """The chunks of a long answer."""
        body = {"model": model, "prompt": PROMPTS[model], "temperature": 0, "max_tokens": tokens}
        body |= {"ignore_eos": True, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def states(self) -> dict[str, str]:
        cards = self.client.get("/v1/models").json()["data"]
        return {card["id"]: card["status"]["value"] for card in cards}

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.02)

    def metric(self, line: str) -> float:
        text = self.client.get("/metrics").text
        return next((float(found.split()[-1]) for found in text.splitlines() if found.startswith(line)), 0.0)

    def pids(self, model: str) -> list[int]:
        """The process of a model, and its worker."""
        server = next(pid for pid in list_children(self.process.pid) if command_of(pid).endswith(f" {model}"))
        return [server, *(pid for pid in list_children(server) if "moesaic.runtime" in command_of(pid))]

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(PATIENCE) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()


def list_children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode()


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo with fewer experts for each token, which answers otherwise."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_experts_per_tok"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, str]:
    """What each model answers to its prompt where it is the only one."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    models = {"a": "demo", "b": str(tiny)}
    texts = {
        name: LLM(model, threads=1).generate(PROMPTS[name], params)[0].text for name, model in models.items()
    }
    assert texts["a"] != texts["b"]
    return texts


@pytest.fixture(scope="module")
def one_at_a_time(tiny: Path) -> Iterator[Front]:
    front = Front("a,apples=demo", f"b={tiny}", "--max-loaded", "1")
    yield front
    front.close()


@pytest.mark.slow
def test_clients_that_flip_between_two_models_get_the_answers_of_each_alone(
    one_at_a_time: Front, alone: dict[str, str]
) -> None:
    def flip(names: str) -> list[httpx.Response]:
        return [one_at_a_time.complete(name) for name in names]

    with ThreadPoolExecutor(2) as pool:
        rounds = list(pool.map(flip, ("aba", "bab")))
    for names, answers in zip(("aba", "bab"), rounds, strict=True):
        assert [answer.status_code for answer in answers] == [200] * 3
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [alone[name] for name in names]
        assert [answer.json()["model"] for answer in answers] == list(names)
    states = one_at_a_time.states()
    assert states["apples"] == states["a"], "two names of one model"
    assert {states["a"], states["b"]} == {"loaded", "unloaded"}, "whichever was asked for last"
    loads = sum(one_at_a_time.metric(f'moesaic:model_loads_total{{model_name="{name}"}}') for name in "ab")
    unloads = sum(
        one_at_a_time.metric(f'moesaic:model_unloads_total{{model_name="{name}"}}') for name in "ab"
    )
    assert loads - unloads == 1 and loads >= 3


@pytest.mark.slow
def test_a_running_request_is_never_cut_and_others_wait_in_order(one_at_a_time: Front) -> None:
    assert one_at_a_time.complete("a").status_code == 200
    order: list[str] = []

    def ask(name: str, model: str) -> None:
        assert one_at_a_time.complete(model).status_code == 200
        order.append(name)

    chunks = one_at_a_time.stream("a")
    first = next(chunks)
    later = threading.Thread(target=ask, args=("b", "b"))
    later.start()
    one_at_a_time.wait_for(lambda: one_at_a_time.metric('moesaic:model_load_waiting{model_name="b"}') == 1)
    last = threading.Thread(target=ask, args=("a", "a"))
    last.start()
    one_at_a_time.wait_for(lambda: one_at_a_time.metric('moesaic:model_load_waiting{model_name="a"}') == 1)
    rest = list(chunks)
    order.append("stream")
    later.join(PATIENCE)
    last.join(PATIENCE)
    assert order == ["stream", "b", "a"]
    assert rest[-1]["choices"][0]["finish_reason"] == "length" and text_of([first, *rest])


@pytest.mark.slow
def test_models_are_loaded_and_unloaded_as_by_llama_cpp(one_at_a_time: Front) -> None:
    one_at_a_time.complete("a")
    client = one_at_a_time.client
    assert client.post("/models/load", json={"model": "apples"}).status_code == 400
    assert client.post("/models/unload", json={"model": "b"}).status_code == 400
    assert client.post("/models/unload", json={"model": "c"}).status_code == 404
    chunks = one_at_a_time.stream("a")
    next(chunks)
    assert client.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    assert one_at_a_time.states()["a"] == "loaded"  # while the request runs
    assert list(chunks)[-1]["choices"][0]["finish_reason"] == "length"
    one_at_a_time.wait_for(lambda: one_at_a_time.states()["a"] == "unloaded")
    assert "failed" not in client.get("/v1/models/a").json()["status"]
    assert client.post("/models/load", json={"model": "b"}).json() == {"success": True}
    one_at_a_time.wait_for(lambda: one_at_a_time.states()["b"] == "loaded")
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/health").status_code == 200


@pytest.fixture
def pair(tiny: Path) -> Iterator[Front]:
    front = Front("a=demo", f"b={tiny}")
    front.wait_for(lambda: front.states() == {"a": "loaded", "b": "loaded"})
    yield front
    front.close()


@pytest.mark.slow
def test_a_killed_process_ends_its_own_requests_only(pair: Front, alone: dict[str, str]) -> None:
    expected = pair.complete("a", max_tokens=LONG).json()["choices"][0]["text"]
    own, other = pair.stream("b"), pair.stream("a")
    begun = [next(other)]
    next(own)
    os.kill(pair.pids("b")[0], signal.SIGKILL)
    last = list(own)[-1]
    assert last["error"]["code"] == "model_ended" and "killed by signal 9" in last["error"]["message"]
    assert text_of([*begun, *other]) == expected
    status = pair.client.get("/v1/models/b").json()["status"]
    assert status["value"] == "unloaded" and status["failed"] is True and status["exit_code"] == -9
    assert pair.client.get("/health").status_code == 200
    assert pair.complete("b").json()["choices"][0]["text"] == alone["b"]  # loaded again for this request
    assert "failed" not in pair.client.get("/v1/models/b").json()["status"]

    chunks = pair.stream("b")
    next(chunks)
    os.kill(pair.pids("b")[1], signal.SIGKILL)  # its worker: the server of the model tells that itself
    assert "worker" in list(chunks)[-1]["error"]["message"]
    pair.wait_for(lambda: pair.states()["b"] == "unloaded")
    assert "worker" in pair.client.get("/v1/models/b").json()["status"]["error"]

    chunks = pair.stream("a")  # and a client that leaves ends its request
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    aborts = 'moesaic:request_success_total{finished_reason="abort",model_name="a"}'
    pair.wait_for(lambda: pair.metric(aborts) == 1)

    processes = pair.pids("a")  # none of them outlives a front that is killed
    os.kill(pair.process.pid, signal.SIGKILL)
    pair.process.wait(PATIENCE)
    pair.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


@pytest.mark.slow
def test_sigterm_drains_every_model(tiny: Path) -> None:
    front = Front("a=demo", f"b={tiny}", "--no-preload")
    chunks = front.stream("a")
    next(chunks)
    processes = [pid for pid in front.pids("a") if Path(f"/proc/{pid}").exists()]
    front.process.send_signal(signal.SIGTERM)
    front.wait_for(lambda: front.process.poll() is not None or refuses(front))
    assert list(chunks)[-1]["choices"][0]["finish_reason"] == "length"
    assert front.process.wait(PATIENCE) == 0
    front.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    front.close()


def refuses(front: Front) -> bool:
    try:
        return front.complete("b").json()["error"]["code"] == "shutting_down"
    except httpx.TransportError:
        return True


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_leaves_the_others_alone(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    front = Front("a=demo", f"b={broken}", "--no-preload", "--load-wait", "0", "--idle-unload", "1")
    answer = front.complete("b")
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["code"] == "model_not_loaded"
    front.complete("b")  # its bytes are known now, so it loads
    front.wait_for(lambda: failed(front))
    status = front.client.get("/v1/models/b").json()["status"]
    assert status["exit_code"] == 2 and weights.name in status["error"]
    front.wait_for(lambda: front.complete("a").status_code == 200)
    front.wait_for(lambda: front.states()["a"] == "unloaded")  # after a second without a request
    front.close()


def failed(front: Front) -> bool:
    return "failed" in front.client.get("/v1/models/b").json()["status"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("demo", "demo"), "MODEL: got 'demo'; allowed: models with different names"),
        (("a=demo", "=demo"), "MODEL: got '=demo'; allowed: MODEL, NAME=MODEL"),
        (("a=demo", "b=/nowhere"), "model: got '/nowhere'; allowed: "),
        (("a=demo", "b=demo", "--served-model-name", "c"), "--served-model-name: got 'c'; allowed: nothing"),
        (("a=demo", "b=demo", "--nnodes", "2", "--tensor-parallel-size", "2"), "--nnodes: got 2; allowed"),
        (("a=demo", "b=demo", "--placement", "p", "--expert-servers", "2"), "--placement: got 'p'; allowed"),
        (("a=demo", "b=demo", "--trace", "t.json"), "--trace: got 't.json'; allowed: nothing"),
        (("a=demo", "b=demo", "--tool-call-parser", "x"), "--tool-call-parser: got 'x'"),
        (("a=demo", "--max-loaded", "0"), "--max-loaded: got 0; allowed: an integer of at least 1"),
        (("a=demo", "--load-wait", "-1"), "--load-wait: got -1.0; allowed"),
        (("a=demo", "--idle-unload", "0"), "--idle-unload: got 0.0; allowed"),
    ],
)
def test_what_several_models_cannot_have_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert cli.main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_models_may_stand_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("model: a=demo\nmodels: [b=demo, c=/nowhere]\nmax-loaded: 1\n")
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert "model: got '/nowhere'; allowed: " in capsys.readouterr().err
