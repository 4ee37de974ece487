"""Attention on a GPU and experts on a CPU server of the same host, with two batches in turn and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu.test_servers import config, generated
from tests.support import gpu_cases
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import WAITS, sanitized
from tests.support.served_worker import server
from tests.support.triton_kernels import IS_INTERPRETED

from moesaic.experts.remote import RemoteExperts
from moesaic.gpu.graphs.graphs import GraphRunner
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.runtime.step import step_kind

pytestmark = [
    pytest.mark.full,  # beside fifteen others on two cores it takes nearly a minute
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
PROMPTS = [[3], [5], [7, 9]]
TOKENS = {"to", "_to_copy"}
"""How the tokens of a step come to the host."""


def of_one_layer(waits: list[str]) -> bool:
    """Whether the host waited once for rows. Before, both batches may have come to the end of a step."""
    return waits[-1:] == ["synchronize"] and len(waits) <= 3 and TOKENS.issuperset(waits[:-1])


def test_the_host_waits_once_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_cases.write("mixtral-window", tmp_path)
    submit, record = RemoteExperts.submit, GraphRunner._record
    gaps: list[list[str]] = []
    sent: list[int] = []
    made: list[int] = []

    def submitted(self: RemoteExperts, request: Any) -> Any:
        sent.append(len(request.hidden))
        handle = submit(self, request)
        gaps.append(list(WAITS.of))
        WAITS.of.clear()
        return handle

    def recorded(self: GraphRunner, kind: Any, recorder: Any) -> Any:
        waited = list(WAITS.of)
        step = record(self, kind, recorder)
        made.append(kind.rows)
        WAITS.of[:] = waited
        return step

    monkeypatch.setattr(step_kind, "bucket", lambda rows: 4)
    monkeypatch.setattr(RemoteExperts, "submit", submitted)
    monkeypatch.setattr(GraphRunner, "_record", recorded)
    on_cpu = config(tmp_path, "cpu")
    with server(tmp_path, read_expert_layout(on_cpu.model), tmp_path) as directory, np.errstate(all="ignore"):
        wanted = generated(on_cpu, directory, PROMPTS, new=4)
        gaps.clear()
        sent.clear()
        with sanitized(), graphs():
            on_gpu = config(tmp_path, "cuda", kernels="triton", inflight_batches=2)
            found = generated(on_gpu, directory, PROMPTS, new=4)
    assert found == wanted
    assert made in ([4], [4, 4]), "one for each batch, where a second one began before the first one ended"
    assert sent.count(1) > 4 and sent.count(2) > 4, "padded rows stay here"
    assert len(gaps) > 12 and all(map(of_one_layer, gaps[1:])), gaps[1:]
