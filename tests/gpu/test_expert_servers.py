"""Expert servers on the sanitizer's device, with Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.gpu.test_offload_converted import FORMS, written
from tests.gpu.test_servers import config
from tests.models import test_quantized
from tests.support import model_configs, pairs, served_worker, tiny_models
from tests.support.gpu_graphs import graphs
from tests.support.gpu_sanitizer import in_thread, sanitized
from tests.support.supervised_servers import Placement, Supervisor, served
from tests.support.triton_kernels import EXACT, IS_INTERPRETED, ROUNDED

from moesaic import LLM, SamplingParams
from moesaic.config import ExpertServerConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.weight_types import is_packed
from moesaic.experts.backend import CallPairs
from moesaic.experts.torch_backend import TorchBackend
from moesaic.runtime.model_loading import read_expert_layout
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
BF16 = "bf16"
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 2)]
NEW = 4
Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The folder of a checkpoint by how its experts are stored."""
    known: dict[str, Path] = {}

    def path(form: str) -> Path:
        if form not in known:
            folder = tmp_path_factory.mktemp("model")
            if form == BF16:
                model = tiny_models.build(*test_quantized.CASES["qwen3"])
                known[form] = tiny_models.save(model, folder, torch.bfloat16)
                byte_tokenizer(folder)
            else:
                known[form] = written(form, folder)
        return known[form]

    return path


@contextmanager
def device() -> Iterator[None]:
    with np.errstate(all="ignore"), sanitized(), graphs():
        yield


@pytest.mark.parametrize("form", pairs.some((BF16, *FORMS), ("packed int4", "mxfp4")))
def test_answers_are_those_of_the_reference(stored: Written, form: str) -> None:
    """Experts come and go. Quantised ones stay so on the device."""
    path, found = stored(form), []
    with device():
        for where, kernels in (("cpu", "reference"), ("cuda", "triton")):
            layout = read_expert_layout(config(path, where, kernels=kernels).model)
            backend = TorchBackend(path, layout, where, kernels, threads=1)
            backend.load({1: range(1, 4)})
            backend.load({1: range(2, 6), 0: [1]})
            backend.keep_only({1: [2, 3, 5], 0: [1]})
            assert backend.resident_experts == {0: [1], 1: [2, 3, 5]}
            found.append(
                [answered(backend, layout, 1, [5, 3, 5, 2, 3]), answered(backend, layout, 0, [1, 1])]
            )
            with pytest.raises(KeyError, match="expert 4 is not held here"):
                answered(backend, layout, 1, [4])
        types = {part.dtype for part in backend._weights[1].matrices_of(3)}
    packed = form == "gguf" or is_packed(test_quantized.STORED.get(form, "float32"))
    assert (types == {torch.uint8}) == packed
    tolerance = 4 * ROUNDED if form in (BF16, "compressed") else EXACT
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours).max() > 0
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(ours).max()


def answered(backend: TorchBackend, layout: ExpertLayout, layer: int, experts: list[int]) -> np.ndarray:
    rows = np.arange(len(experts), dtype=np.int32)
    hidden = np.random.default_rng(0).standard_normal((len(rows), layout.hidden), dtype=np.float32)
    call = CallPairs(
        hidden, rows, np.array(experts, dtype=np.int32), np.zeros_like(hidden), np.arange(len(rows))
    )
    backend.run(layer, [call])
    return call.results


MOVING = [
    (form, where)
    for form in (BF16, "int8 rows", "packed int4", "fp8 blocks", "mxfp4")
    for where in ("cuda", "cpu")
]


@pytest.mark.parametrize(("form", "where"), pairs.some(MOVING, [("mxfp4", "cuda")]))
def test_tokens_are_those_of_the_model_in_memory(
    stored: Written, form: str, where: str, tmp_path: Path
) -> None:
    """Two servers on the device, between which all experts move while the worker asks them."""
    path = stored(form)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    on_cpu = LLM(str(path), threads=1, max_model_len=64, kernels="reference", device="cpu")
    wanted = [one.outputs[0].token_ids for one in on_cpu.generate(PROMPTS, params)]
    with device():
        settings = config(path, where, kernels="triton" if where == "cuda" else "reference")
        layout = read_expert_layout(settings.model)
        servers = [
            ExpertServerConfig(str(path), layout, f"unix:{tmp_path}/{name}", kernels="triton", device="cuda")
            for name in "ab"
        ]
        with ExitStack() as stack:
            there = [stack.enter_context(served(one, in_thread)) for one in servers]
            supervisor = Supervisor(there, placements(layout))
            found = served_worker.generated(
                settings, supervisor.directory, PROMPTS, params, follow=supervisor.follow
            )
    assert list(found.values()) == wanted
    assert supervisor.moves == 2 and all(supervisor.pairs), supervisor.pairs


def placements(layout: ExpertLayout) -> list[Placement]:
    """Halves of the experts, then the other halves, then every second one."""
    every = list(range(layout.num_experts))
    halves = every[: len(every) // 2], every[len(every) // 2 :]
    return [
        [dict.fromkeys(layout.layers, held) for held in two]
        for two in (halves, halves[::-1], (every[::2], every[1::2]))
    ]
