"""The weights of a worker stay when its connection ends, and nothing else of it."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest

from moesaic import LLM, SamplingParams
from moesaic.config import CacheConfig, ModelConfig, WorkerConfig
from moesaic.core import messages
from moesaic.core.errors import ConnectionLost
from moesaic.core.request import Request
from moesaic.models import files
from moesaic.models.kvcache.paged_kv import PagedKV
from moesaic.runtime import in_memory
from moesaic.runtime.keeping import KeptModel
from moesaic.runtime.model_loading import LoadedModel
from moesaic.runtime.process import serve
from moesaic.runtime.worker import Worker
from moesaic.transport.stream import StreamConnection, stream_pair
from moesaic.transport.wakeup import Wakeup

CONFIG = WorkerConfig(
    ModelConfig(str(files.resolve("demo", None)), threads=1, device="cpu"),
    CacheConfig("8MiB"),
    supervised=True,
)
PROMPT, TOKENS = [5, 6, 7, 8], 6
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, seed=0)


class Life:
    """A worker in a thread, from its start to the end of its connection."""

    def __init__(self, kept: KeptModel, config: WorkerConfig = CONFIG) -> None:
        ours, theirs = stream_pair()
        wakeup = Wakeup()
        self.connection = StreamConnection(ours)
        there = StreamConnection(theirs, on_message=wakeup.ring)
        self.error: Exception | None = None

        def run() -> None:
            try:
                serve(there, config, wakeup, kept_model=kept)
            except ConnectionLost as error:
                self.error = error.copy()
            there.close()
            wakeup.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def until(self, kind: type[Any]) -> Any:
        """The next message of this kind."""
        while not isinstance(message := self.connection.receive(60.0), kind):
            assert message is not None
        return message

    def tokens(self) -> list[int]:
        """What follows PROMPT."""
        self.connection.send(messages.Submit([Request(0, PROMPT, GREEDY)]))
        found: list[int] = []
        while len(found) < TOKENS:
            found += self.until(messages.Tokens).token_ids
        return found

    def vanish(self) -> None:
        self.connection.close()
        self._thread.join(30)
        assert isinstance(self.error, ConnectionLost)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each model that was loaded."""
    found, load = [], in_memory.load_model

    def counted(*given: Any, **named: Any) -> Any:
        found.append(len(found))
        return load(*given, **named)

    monkeypatch.setattr(in_memory, "load_model", counted)
    return found


def of_kind(kind: type[Any]) -> int:
    """Number of objects that are not garbage."""
    gc.collect()
    return sum(isinstance(one, kind) for one in gc.get_objects())


def test_the_next_worker_has_the_weights_of_the_last_one(loads: list[int]) -> None:
    alone = LLM("demo", threads=1, kv_cache_memory="8MiB")
    [expected] = alone.generate([{"prompt_token_ids": PROMPT}], GREEDY)
    del alone
    loads.clear()
    kept, before = KeptModel(), (of_kind(Worker), of_kind(PagedKV))
    for _ in range(2):
        life = Life(kept)
        life.until(messages.Ready)
        assert life.tokens() == expected.outputs[0].token_ids
        life.vanish()
        assert (of_kind(Worker), of_kind(PagedKV)) == before, "a worker that is gone, and its KV cache"
    assert kept.num_loads == len(loads) == 1


def test_other_settings_and_other_files_are_loaded_anew(loads: list[int]) -> None:
    kept = KeptModel()
    other = replace(CONFIG, model=replace(CONFIG.model, kernels="reference"))
    for config in (CONFIG, other):
        life = Life(kept, config)
        life.until(messages.Ready)
        life.vanish()
    assert kept.num_loads == len(loads) == 2


def test_a_connection_that_ends_while_weights_are_read_keeps_nothing() -> None:
    def lost() -> LoadedModel:
        raise ConnectionLost("the other end is gone")

    kept = KeptModel()
    with pytest.raises(ConnectionLost):
        kept.get("a", lost)
    assert not kept.has_model and kept.num_loads == 0
