"""Plans of quantised checkpoints and of gpt-oss: their bytes in memory and in files, and what is assumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.commands import cli
from moesaic.commands.plan import find_model
from moesaic.commands.plan import plan as plan_command
from moesaic.commands.plan_options import Plan
from moesaic.config import KernelName, ModelConfig, OffloadConfig, WorkerConfig
from moesaic.cost.assumptions import list_assumptions
from moesaic.cost.hardware import GIB
from moesaic.cost.machines import machine
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.headers import Headers
from moesaic.offload.converted_experts import StreamedConvertedExperts
from moesaic.offload.weights import StreamedExperts
from moesaic.planning import WorkerPlan, plan
from moesaic.planning.sizes import read_checkpoint_sizes
from moesaic.policy.offloading.durations import Durations
from moesaic.policy.offloading.policies import Policy, Workload
from moesaic.policy.offloading.tasks import Kind, Lane
from moesaic.runtime import offloaded_worker
from moesaic.runtime.model_loading import load_model
from tests.models.test_quantized import FORMATS
from tests.support import gguf_files, model_configs, quantizers, tiny_models
from tests.test_planning import HARDWARE, JOB, MIB, SIZES

pytestmark = pytest.mark.slow

FORMS = (
    "fp8 blocks",
    "packed int4",
    "gptq v2, act order",
    "nvfp4",
    "mxfp4",
    "columns",
    "gguf",
    "mxfp4 in gguf",
)
CAPS = {"fp8 blocks": 3.8, "packed int4": 2.5, "gptq v2, act order": 10, "mxfp4": 2.5, "columns": 7}
CAPS |= {"gguf": 2.3, "mxfp4 in gguf": 2.1, "nvfp4": 2.5}
"""MiB in which some experts of each layer stay."""
QWEN3 = ("qwen3_moe", model_configs.qwen3(**SIZES))
GPT_OSS = (
    "gpt_oss",
    model_configs.gpt_oss(hidden_size=128, intermediate_size=128, num_local_experts=16, num_hidden_layers=4),
)


MIXES = {
    "gguf": lambda name: "Q8_0" if "blk.2.ffn_down" in name else "Q4_1" if "blk.2." in name else "Q4_0",
    "mxfp4 in gguf": lambda name: "MXFP4" if "_exps" in name else "Q8_0",
    "bf16 in gguf": lambda name: "BF16" if "_exps" in name else "Q8_0",
}
"""Types of a GGUF file's tensors, of which one layer is another than the others."""


class Written(dict[str, Path]):
    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, form: str) -> Path:
        kind = GPT_OSS if "mxfp4" in form or form == "columns" else QWEN3
        source = tiny_models.save(tiny_models.build(*kind), self.root / f"source of {form}", torch.bfloat16)
        if form in MIXES:
            self[form], _ = gguf_files.write(source, self.root / form, MIXES[form])
            return self[form]
        columns = form == "columns"
        self[form] = source if columns else quantizers.quantize(source, self.root / form, FORMATS[form])[0]
        return self[form]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("quantised"))


def planned(path: Path, cap: str) -> WorkerPlan:
    return plan(WorkerConfig(ModelConfig(str(path))), OffloadConfig(cap), JOB, HARDWARE)


@pytest.mark.parametrize(
    "form",
    [
        form if form in ("packed int4", "columns") else pytest.param(form, marks=pytest.mark.slow)
        for form in FORMS
    ],
)
def test_what_is_planned_is_what_a_worker_takes(written: Written, form: str) -> None:
    path = written[form]
    cap = CAPS[form]
    found = planned(path, f"{cap}MiB")
    offload, price = found.worker.offload, found.price
    assert offload is not None and 0 < offload.static_experts < 16
    loaded, layout = offloaded_worker.load(found.worker, offload, None)
    assert found.model.expert_bytes == layout.num_bytes / layout.num_experts / len(layout.layers)
    assert found.model.largest_expert_bytes == layout.expert_bytes
    if form != "columns":  # these are counted as all of one type
        assert found.model.other_bytes == pytest.approx(loaded.model.num_bytes)
    assert found.model.other_bytes >= 0.9 * loaded.model.num_bytes
    converts = found.model.conversion is not None
    memory = (StreamedConvertedExperts if converts else StreamedExperts).memory_for(
        path, layout, {layer: range(offload.static_experts) for layer in layout.layers}
    )
    counted = price.fast["static experts"] + price.fast["two layers of streamed experts"]
    # Reads of the files' own bytes are of whole blocks at both ends of each tensor.
    num_ends = 2 * (len(layout.layers) + 2) * len(layout.tensors(0, 0))
    assert counted <= memory.static + 2 * memory.slot <= counted + 4096 * (4 if converts else num_ends + 4)
    staging = price.fast.get("an expert as it is read", 0)
    assert memory.staging <= staging <= memory.staging + converts * (12 * 128 * 128 + 2**17)
    held = sum(price.fast.values()) - price.fast["cache"] + int(found.worker.cache.kv_cache_memory)
    assert held <= 0.95 * cap * MIB


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_of_the_files_are_read(written: Written, form: str) -> None:
    """Every byte of one expert once, and no other's."""
    path, kernels = written[form], table.pick("cpu")
    model, layout = read_checkpoint_sizes(path, "x", kernels), registry.expert_layout(path, kernels)
    headers = Headers(path)
    places = headers.list_tensors().items()
    every = sum(place.size for name, place in places if ".mlp.experts." in name and "input_" not in name)
    assert model.read_bytes == every / layout.num_experts / len(layout.layers)
    converted_to = None if "gguf" in form else "columns" if form == "columns" else layout.largest
    assert model.conversion == converted_to
    assert model.quantized_dtype == (None if form == "columns" else layout.largest)


def loads(model: Any, hardware: Any, experts: int) -> float:
    """Seconds to load so many experts of a layer as one page."""
    policy = Policy("cgopipe", 4, 1, False, static_experts=model.experts - experts)
    table = Durations(model, hardware, Workload(30, 10, 4.0)).decode(policy)
    return table[Kind.LOAD_PAGE, Lane.LINK_DOWN]


def test_reading_and_converting_take_time(written: Written) -> None:
    model = read_checkpoint_sizes(written["packed int4"], "x", table.pick("cpu"))
    assert model.read is not None and model.read < model.expert_bytes
    assert loads(model, HARDWARE, 6) == pytest.approx(6 * model.read / HARDWARE.link.down_bandwidth)
    rates = replace(HARDWARE, link=replace(HARDWARE.link, conversions=(("fp8", 1.0), ("int4_g32", 1e6))))
    assert loads(model, rates, 6) == pytest.approx(6 * model.read * (1 / HARDWARE.link.down_bandwidth + 1e-6))
    busy = {
        Lane.LINK_DOWN: loads(model, rates, 6),
        **dict.fromkeys((Lane.LINK_UP, Lane.STAGING, Lane.SLOW), 0.0),
    }
    policy = Policy("cgopipe", 4, 1, False)
    read = Durations(model, rates, Workload(30, 10, 4.0)).slow_memory(policy, busy)
    assert read == pytest.approx(6 * model.read / rates.slow.bandwidth), "converting is no work of the disk"
    with_link = rates.with_link(5e6)
    assert loads(model, with_link, 6) == pytest.approx(6 * model.read / 5e6), "a measured link has both"


def test_what_no_figure_says_is_told(written: Written) -> None:
    model = read_checkpoint_sizes(written["packed int4"], "x", table.pick("cpu"))
    [computing, converting] = list_assumptions(model, HARDWARE)
    assert "experts in int4_g32 compute at the roofline of their bytes" in computing
    assert "converting quantised experts to int4_g32 takes no time" in converting
    assert HARDWARE.fast.processor is not None
    known = replace(HARDWARE.fast.processor, experts=((1.0, 1e9),))
    fast = replace(HARDWARE.fast, processor=known)
    [computing, _] = list_assumptions(model, replace(HARDWARE, fast=fast))
    assert "at the rates of unquantised ones" in computing
    fast = replace(HARDWARE.fast, processor=replace(known, packed_rates=(("int4_g32", ((1.0, 2e9),)),)))
    link = replace(HARDWARE.link, conversions=(("int4_g32", 1e9),))
    assert list_assumptions(model, replace(HARDWARE, fast=fast, link=link)) == []
    columns = read_checkpoint_sizes(written["columns"], "x", table.pick("cpu"))
    assert len(list_assumptions(columns, HARDWARE)) == 1


def test_experts_have_the_rates_of_their_type(written: Written) -> None:
    model = read_checkpoint_sizes(written["fp8 blocks"], "x", table.pick("cpu"))
    assert HARDWARE.fast.processor is not None
    known = replace(HARDWARE.fast.processor, experts=((1.0, 1e9),), packed_rates=(("fp8", ((1.0, 4e9),)),))
    workload, policy = Workload(30, 10, 4.0), Policy("on-demand", 4, 1, False)
    took = []
    for one in (known, replace(known, packed_rates=())):
        hardware = replace(HARDWARE, fast=replace(HARDWARE.fast, processor=one))
        took.append(Durations(model, hardware, workload).decode(policy)[Kind.EXPERTS, Lane.FAST])
    assert took[1] == pytest.approx(4 * took[0])


MACHINE = """
machine = { name = "a CPU" }
fast = { name = "RAM", memory_gib = 0.02, bandwidth_gib = 20, tflops = 0.3 }
slow = { name = "disk", memory_gib = 500, bandwidth_gib = 1.5 }
link = { down_gib = 1.5 }
"""


@pytest.mark.parametrize("form", ["mxfp4", pytest.param("packed int4", marks=pytest.mark.slow)])
def test_the_command_plans_it_and_says_what_it_assumes(
    written: Written, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "this.toml"
    file.write_text(MACHINE)
    line = ["plan", str(written[form]), "--hardware", str(file), "--prompt-len", "30", "--gen-len", "8"]
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["fast"]["an expert as it is read"] > 0 and len(found["assumed"]) == 2
    assert cli.main(line) == 0
    shown = capsys.readouterr().out
    assert "Assumed: experts in" in shown and "an expert as it is read" in shown


@pytest.mark.slow
def test_on_a_gpu_it_is_planned_as_tritons_kernels_compute_it(written: Written) -> None:
    """RAM has the memory for conversions, and the link carries experts as they are on the GPU."""
    options = Plan(model=str(written["packed int4"]), hardware="l4", prompt_len=30, gen_len=8)
    found = plan_command(options)
    assert (found.model.quantized_dtype, found.model.staging) == ("int4_offset", 0.0)
    assert found.model.read_bytes == found.model.expert_bytes
    assert len(found.assumptions) == 3 and "Assumed: --kernels triton." in found.assumptions[2]
    found = plan_command(replace(options, model=str(written["columns"])))
    assert (found.model.staging, found.model.number, found.model.conversion) == (0.0, 2.0, "columns")
    assert len(found.assumptions) == 1 and "converting columns takes no time" in found.assumptions[0]


@pytest.mark.parametrize(("kernels", "dtype"), [("triton", "int4_offset"), ("reference", "bfloat16")])
def test_a_worker_on_a_gpu_is_planned_with_its_own_kernels(
    written: Written, kernels: KernelName, dtype: str
) -> None:
    path = written["packed int4"]
    worker = WorkerConfig(ModelConfig(str(path), kernels=kernels))
    found = plan(worker, OffloadConfig("16MiB"), JOB, machine("l4"), gpus=1).model
    layout = registry.expert_layout(path, table.pick("cuda", kernels), "cuda")
    assert layout.dtype == dtype and found.expert_bytes == found.read_bytes == layout.expert_bytes
    assert found.staging == 0 and found.conversion == (dtype if kernels == "triton" else "float32")


@pytest.mark.parametrize(
    "form", ["fp8 blocks", "packed int4", "mxfp4", "awq", "gptq v2, act order", "int8 rows"]
)
def test_a_config_alone_is_planned_too(written: Written, form: str) -> None:
    """It counts the bytes that the format has in files, and not those in memory.

    It does not know that the scales of this file take 32 bits.
    """
    alone, whole = (find_model(str(written[form] / name)) for name in ("config.json", ""))
    tolerance = 0.1 if form == "int8 rows" else 0
    assert alone.expert_bytes == pytest.approx(whole.expert_bytes, rel=tolerance)
    assert alone.read == pytest.approx(whole.read, rel=0.04) and alone.read <= alone.expert_bytes
    assert alone.staging == pytest.approx(whole.staging, rel=0.6)
    assert alone.other_bytes == pytest.approx(whole.other_bytes, rel=0.1)


def test_memory_of_a_worker_is_that_of_the_files(written: Written) -> None:
    """Matrices outside of the experts have several types: the embedding stays in bf16."""
    path = written["packed int4"]
    outside = registry.bytes_outside_experts(path, table.pick("cpu"))
    layout = registry.expert_layout(path, table.pick("cpu"))
    assert outside == load_model(ModelConfig(str(path)), expert_layout=layout).model.num_bytes
    assert outside < 4 * read_checkpoint_sizes(path, "x", table.pick("cpu")).other_bytes / GIB * GIB


def test_experts_in_bf16_among_quantised_matrices(written: Written) -> None:
    path, kernels = written["bf16 in gguf"], table.pick("cpu")
    model, layout = read_checkpoint_sizes(path, "x", kernels), registry.expert_layout(path, kernels)
    assert (layout.dtype, model.conversion) == ("bfloat16", None)
    assert model.expert_bytes == layout.expert_bytes
    assert model.other_bytes == pytest.approx(registry.bytes_outside_experts(path, kernels))
    assert list_assumptions(model, HARDWARE) == []
