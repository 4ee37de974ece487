"""Whole models on the Triton kernels: tokens of the reference, launches of a layer, and nothing read back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_quantized import CASES, FORMATS
from tests.support import model_configs, paged_steps, pairs, quantizers, tiny_models
from tests.support.model_driver import Driver
from tests.support.triton_kernels import DEVICE, IS_INTERPRETED, TRITON, Launches, operations
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic import LLM, SamplingParams
from moesaic.core.weight_types import QUANTIZATIONS
from moesaic.kernels.batch import AttentionBatch
from moesaic.kernels.gating import Gating
from moesaic.kernels.weights import ExpertWeights
from moesaic.models import registry
from moesaic.testing import byte_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, in the interpreter
]
FAMILIES = (
    "qwen3-window-yarn",
    "deepseek-full",
    "gpt-oss",
    "minimax",
    "glm4-lite-layers-groups-yarn",
    "qwen3-next-dense-layers-odd-heads",
)
NOW = ("deepseek-full", "gpt-oss")
WITH_STATES = ("qwen3-next", *(pytest.param(one, marks=pairs.REST) for one in ("lfm2", "qwen3.5")))
"""Families whose layers keep states, with short prompts. `gpu/test_graphs.py` has LFM2 in `make test`."""
"""Families in `make test`. The others are left to `make full`: the interpreter takes seconds a token."""
PROMPTS = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (1, 17, 33)]


def tokens(folder: Path, prompts: list[list[int]] = PROMPTS, **settings: Any) -> list[list[int]]:
    model = LLM(str(folder), threads=1, max_model_len=64, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [one.outputs[0].token_ids for one in model.generate(prompts, params)]


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in NOW else pairs.REST) for one in FAMILIES]
)
def test_tokens_are_those_of_the_reference(tmp_path: Path, family: str) -> None:
    byte_tokenizer(tiny_models.save(tiny_models.build(*model_configs.CASES[family]), tmp_path))
    found = tokens(tmp_path, kernels="triton", device=DEVICE)
    assert found == tokens(tmp_path, kernels="reference", device="cpu")


@pytest.mark.parametrize("family", WITH_STATES)
def test_tokens_of_models_with_states_are_those_of_the_reference(tmp_path: Path, family: str) -> None:
    byte_tokenizer(tiny_models.save(tiny_models.build(*model_configs.CASES[family]), tmp_path))
    short = [prompt[:3] for prompt in PROMPTS[:2]]
    found = tokens(tmp_path, short, kernels="triton", device=DEVICE)
    assert found == tokens(tmp_path, short, kernels="reference", device="cpu")


@pytest.mark.parametrize(
    "form", ["packed int4", *(pytest.param(one, marks=pairs.REST) for one in ("fp8 blocks", "mxfp4"))]
)
def test_quantised_weights_stay_as_they_are_stored(tmp_path: Path, form: str) -> None:
    model = tiny_models.build(*CASES["gpt-oss" if form == "mxfp4" else "qwen3"])
    path, plain = quantizers.quantize(
        tiny_models.save(model, tmp_path / "source"), tmp_path / "form", FORMATS[form]
    )
    for one in (path, plain):
        byte_tokenizer(one)
    kinds = set()

    def seen(weights: ExpertWeights, *rest: Any) -> torch.Tensor:
        kinds.add(weights.on_device.kinds)
        return TRITON.experts(weights, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(operations.OPERATIONS, "experts", seen)
        found = tokens(path, PROMPTS[:2], kernels="triton", device=DEVICE)
    assert found == tokens(plain, PROMPTS[:2], kernels="reference", device="cpu")
    assert all(kind in QUANTIZATIONS for pair in kinds for kind in pair) and kinds


@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU has the Triton kernels")
def test_a_cpu_outside_of_the_interpreter_is_refused() -> None:
    code = "from moesaic.kernels import table; table.pick('cpu', 'triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "--kernels: got 'triton'; allowed: " in done.stderr.splitlines()[-1]


class NothingRead(TorchDispatchMode):
    """Fails where the host reads a number, or a shape depends on one: on a GPU both wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        assert name not in READS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


READS = {
    f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "bincount", "_unique2", "masked_select")
}
LAUNCHES = {"norms": 2, "rope": 2, "store": 2, "attention": 1, "gate": 1, "experts": 4, "merge": 1}
"""Of a layer with 2 to 1,024 cached tokens, beside torch's three products."""


def test_a_layer_has_few_launches_and_reads_nothing_back() -> None:
    batch = AttentionBatch.build(paged_steps.tokens([1, 1, 5], [9, 30, 12], 4, num_blocks=40), 4, DEVICE)
    assert len(batch.tiles(8)) == 3 and batch.on_device.longest == 30  # copied to the device once a step
    hidden, weight, cache = (torch.randn(*shape, device=DEVICE) for shape in ((7, 32), (32,), (40, 4, 2, 8)))
    matrices = [torch.randn(32, 32, device=DEVICE) for _ in range(2)]
    part = [
        tuple(torch.randn(*shape, device=DEVICE) for _ in range(6))
        for shape in ((16, 32), (16, 32), (32, 16))
    ]
    angles, positions = torch.randn(64, 4, device=DEVICE), torch.arange(7, device=DEVICE)
    gating, routed = Gating(2, normalise=True), ExpertWeights(*part)
    assert routed.on_device.width == 16
    batch.tiles(32)
    before = Launches.count
    with NothingRead(), torch.inference_mode():
        normed = TRITON.rms_norm(hidden, weight, 1e-6)
        query = TRITON.linear(normed, matrices[0]).view(7, 4, 8)
        key = TRITON.rope(query[:, :2], angles, angles, positions)
        query = TRITON.rope(query, angles, angles, positions)
        TRITON.store(cache, key, batch.slots)
        TRITON.store(cache, key, batch.slots)
        attended = TRITON.paged_attention(query, cache, cache, batch, 0.3)
        total, normed = TRITON.add_norm(hidden, TRITON.linear(attended.flatten(1), matrices[1]), weight, 1e-6)
        ids, weights = TRITON.gate(normed, torch.randn(6, 32, device=DEVICE), gating)
        TRITON.merge(total, None, TRITON.experts(routed, normed, ids), weights)
    assert Launches.count - before == sum(LAUNCHES.values())


OF_LAYERS = {
    "qwen3-next": {"states": 5, "attention": 8, "routed": 7},
    "lfm2": {"states": 3, "attention": 7, "routed": 6},
    "deepseek-full": {"attention": 8, "routed": 7},
}
"""Launches in decode, the two norms of a layer among those of its attention. Shared experts have one."""
MORE_IN_CHUNKS = {"qwen3-next": 2, "lfm2": 1, "deepseek-full": 0}
"""Launches of a layer with states: for the convolution, and for the delta rule."""


@pytest.mark.skipif(not IS_INTERPRETED, reason="the driver's cache is on the CPU")
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pairs.REST if one == "lfm2" else ()) for one in OF_LAYERS]
)
def test_layers_with_states_and_latent_ones_have_few_launches_and_read_nothing_back(
    tmp_path: Path, family: str
) -> None:
    tiny_models.save(tiny_models.build(*model_configs.CASES[family]), tmp_path)
    model = registry.load(tmp_path, TRITON)
    spec, driver, found = model.spec, Driver(model), []
    for rows in ({0: [5, 6], 1: [7]}, {0: [8], 1: [9]}):
        before = Launches.count
        with NothingRead():
            driver.step(rows)
        found.append(Launches.count - before)
    states, each, routed = len(spec.state_layers), OF_LAYERS[family], len(spec.moe_layers)
    wanted = states * each.get("states", 0) + (spec.num_layers - states) * each["attention"]
    wanted += routed * each["routed"] + (spec.num_layers - routed) + 1  # dense layers, and the last norm
    assert found == [wanted + states * MORE_IN_CHUNKS[family], wanted]


ARCHITECTURES = ("80", "86", "90", "100", "120")
"""Compute capabilities: A100, GeForce 30, H100, B200, GeForce 50."""


@pytest.mark.full
@pytest.mark.timeout(1200)  # compiling takes a minute of CPU for each architecture
@pytest.mark.skipif(not IS_INTERPRETED, reason="a GPU compiles what it runs")
def test_every_kernel_compiles_for_gpus_that_are_not_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.compile_triton", *ARCHITECTURES]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    compiled = Counter(line.partition(" ")[0] for line in done.stdout.splitlines())
    assert set(compiled) == {f"sm_{one}" for one in ARCHITECTURES} and min(compiled.values()) > 70
