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
from moesaic.commands.announce import as_record, as_table
from moesaic.commands.doctor import choose, warnings
from moesaic.commands.machine import examine
from moesaic.commands.processes import in_text
from moesaic.kernels import table

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


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in table.instruction_sets(), reason="the CPU has no AVX-512")
def test_what_differs_without_proc_is_named() -> None:
    """torch takes DEFAULT where it cannot read /proc/cpuinfo. The kernels are the same there."""
    usual, portable = computed("avx512"), computed("default")
    assert usual[0] == portable[0] == "native (avx512)"
    assert (usual[1], portable[1]) == ("AVX512", "DEFAULT")
    assert usual[2] == portable[2]
    assert usual[3] == pytest.approx(portable[3], abs=1e-5) and usual[3] != portable[3]
