"""What doctor and serve say of the code that torch computes with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from moesaic import LLM
from moesaic.commands import schedule_curves
from moesaic.commands.announce import as_record, as_table, rounding_lines
from moesaic.commands.doctor import KERNELS_OF, choose, speeds_table, warnings
from moesaic.commands.machine import examine
from moesaic.commands.processes import in_text
from moesaic.core.curves import Curve, DeviceCurves
from moesaic.kernels import table
from moesaic.planning.hardware import kernel_speeds
from moesaic.policy.scheduling.minimum_batch import cpu_curves

PROGRAM = """
import json, sys
from moesaic import LLM, SamplingParams
llm = LLM("demo", kv_cache_memory="16MiB")
[found] = llm.generate(["def add(a, b):"], SamplingParams(max_tokens=24, temperature=0, logprobs=0))
[output] = found.outputs
logprobs = [entry.logprob for entry in output.logprobs]
sys.stdout.write(json.dumps([llm.info.kernels, llm.info.torch_code, output.token_ids, logprobs]))
"""


def computed(capability: str) -> Any:
    """Kernels, torch's code, tokens and log-probabilities of a process in which torch is told its code."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", PROGRAM]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def test_serve_names_torchs_code_beside_the_kernels() -> None:
    info = LLM("demo", kv_cache_memory="8MiB").info
    assert info.torch_code == table.torch_code()
    assert f"{info.kernels}, torch {info.torch_code}" in in_text(as_table("demo", info))
    assert as_record("demo", "http://x", info)["torch_code"] == info.torch_code
    assert ", torch" not in in_text(as_table("demo", replace(info, torch_code="")))


def test_doctor_warns_where_torch_takes_its_portable_code() -> None:
    machine = examine()
    portable = replace(machine, torch_cpu_capability="DEFAULT")
    choice = replace(choose(machine), device="cpu")
    found = [note for note in warnings(portable, choice) if "torch computes without AVX2" in note]
    assert len(found) == ("avx2" in table.instruction_sets())
    assert not any(
        "without AVX2" in note for note in warnings(replace(machine, torch_cpu_capability="AVX2"), choice)
    )


@pytest.mark.parametrize("instructions", KERNELS_OF)
def test_doctor_names_instructions_whose_kernels_are_missing(
    instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(examine(), instruction_sets=(*KERNELS_OF,))
    choice = replace(choose(machine), device="cpu")
    for is_missing in (True, False):
        kernels = [name for key, name in KERNELS_OF.items() if not (is_missing and key == instructions)]
        monkeypatch.setattr(table, "instruction_sets", lambda kernels=kernels: (*kernels, "portable"))
        notes = [note for note in warnings(machine, choice) if "without the kernels for it" in note]
        assert len(notes) == is_missing
        assert all(f"this CPU has {instructions}, but" in note for note in notes)


def test_this_installation_has_kernels_for_what_the_cpu_has() -> None:
    machine = examine()
    choice = replace(choose(machine), device="cpu")
    assert not [note for note in warnings(machine, choice) if "without the kernels for it" in note]


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in table.instruction_sets(), reason="the CPU has no AVX-512")
def test_what_differs_without_proc_is_named() -> None:
    """torch takes DEFAULT where it cannot read /proc/cpuinfo. The kernels are the same there."""
    usual, portable = computed("avx512"), computed("default")
    assert usual[0] == portable[0] == "native (avx512)"
    assert (usual[1], portable[1]) == ("AVX512", "DEFAULT")
    assert usual[2] == portable[2]
    assert usual[3] == pytest.approx(portable[3], abs=1e-5) and usual[3] != portable[3]


def test_doctor_says_which_rows_run_alone() -> None:
    """On a CPU: those of about 64 rows an expert, and a server waits below 6. A GPU never waits."""
    cpu = schedule_curves.derive_schedule(cpu_curves(3.0 * 2048 * 768, schedule_curves.OTHER_WEIGHTS))
    assert cpu.shared and cpu.separate_rows is not None and 500 < cpu.separate_rows < 1100
    assert cpu.waited_pairs == 6 * 128 and not cpu.expert_queues
    shown = schedule_curves.facts(cpu)
    assert shown["a batch is cut"] == f"in parts that do not wait, from {cpu.separate_rows} tokens"
    assert shown["servers wait"] == "for more while fewer than 768 experts of tokens are asked"
    gpu = schedule_curves.find("NVIDIA H100 80GB HBM3", 2)
    assert (gpu.source, gpu.shared, gpu.told_rows, gpu.waited_pairs) == ("data sheet of h100", False, 3, 0)
    assert schedule_curves.facts(gpu)["servers wait"] == "never"
    assert gpu.attention_ms[1] == gpu.attention_ms[256] < gpu.attention_ms[1024]
    unknown = schedule_curves.find("GeForce 256", 2)
    assert unknown.source.startswith("assumed") and not unknown.shared
    flat = Curve(((1.0, 1.0),))
    never = schedule_curves.derive_schedule(DeviceCurves("x", flat, flat))
    assert never.separate_rows is None
    assert schedule_curves.facts(never)["a batch is cut"] == "never"


def test_serve_names_kernels_that_round_where_they_would_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for the type of the weights, and none where such kernels are chosen already."""
    sets = ("avx512", "portable", "avx512_bf16", "avx512_int8", "avx2_int8")
    monkeypatch.setattr(table, "instruction_sets", lambda: sets)
    assert table.list_rounding_sets(["bfloat16"]) == ("avx512_bf16",)
    assert table.list_rounding_sets(["q4_k", "bfloat16"]) == ("avx512_int8", "avx2_int8")
    assert table.list_rounding_sets(["float32"]) == table.list_rounding_sets(["fp8"]) == ()
    monkeypatch.undo()
    info = LLM("demo", kv_cache_memory="8MiB").info
    assert info.rounding_kernels == table.list_rounding_sets(["bfloat16"])
    [line] = rounding_lines(replace(info, rounding_kernels=("avx2_int8", "avx512_int8")))
    assert "--kernels avx2_int8 " in line and "int8, as in llama.cpp, so answers may differ" in line
    assert rounding_lines(replace(info, rounding_kernels=())) == []
    if info.rounding_kernels:
        rounding = LLM("demo", kv_cache_memory="8MiB", kernels=info.rounding_kernels[0]).info
        assert rounding.rounding_kernels == ()
    table.pick("cpu")


def test_doctor_measures_kernels_that_round_beside_the_others() -> None:
    speeds = kernel_speeds.measure_kernels(threads=1)
    for stored_type in kernel_speeds.ROW_TYPES:
        names = [speed.kernels for speed in speeds if speed.weights == stored_type]
        rounding_sets = table.list_rounding_sets([stored_type])
        assert names == ([table.instruction_sets()[0], *rounding_sets] if rounding_sets else [])
    assert all(speed.gflops[rows] > 0 for speed in speeds for rows in kernel_speeds.ROWS)
    text = in_text(speeds_table(speeds))
    assert all(speed.kernels in text for speed in speeds)
    assert table.pick("cpu").name == f"native ({table.instruction_sets()[0]})"
