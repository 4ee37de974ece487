"""SGLang's own code reads what `moesaic place --format sglang` writes.

The file that reads it is taken from SGLang's wheel of 39 MB, which pip downloads. Its imports are stand-ins.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.commands.place_formats import sglang_text
from moesaic.core.placement import Placement

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
VERSION = "0.5.23"
LAYERS, EXPERTS, RANKS, REDUNDANT = 3, 6, 4, 2
PLACEMENT = Placement(
    0,
    EXPERTS,
    {
        1: {0: [0, 5], 1: [1, 2], 2: [3, 5], 3: [1, 4]},
        2: {0: [2, 3], 1: [0, 2], 2: [4, 5], 3: [1, 3]},
    },
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of SGLang's expert_location.py."""
    folder = tmp_path_factory.mktemp("sglang")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*command, f"sglang=={VERSION}"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"sglang=={VERSION} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return wheel.read("sglang/srt/eplb/expert_location.py").decode()


def load_reader(source: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module for a server with --init-expert-location FILE."""
    moe = types.SimpleNamespace(
        init_expert_location=str(file),
        ep_num_redundant_experts=REDUNDANT,
        ep_join_mode=None,
        moe_a2a_backend="none",
        ep_dispatch_algorithm=None,
    )
    parallel = types.SimpleNamespace(ep_size=RANKS, nnodes=1, elastic_ep_initial_size=None)
    context: Any = types.ModuleType("sglang.srt.runtime_context")
    context.get_device = lambda: types.SimpleNamespace(device="cpu")
    context.get_exec = lambda: types.SimpleNamespace(moe=moe)
    context.get_parallel = lambda: parallel
    context.get_resources = types.SimpleNamespace

    class Model:
        @staticmethod
        def get_model_config_for_expert_location(_: object) -> Any:
            return reader.ModelConfigForExpertLocation(LAYERS, EXPERTS)

    loader: Any = types.ModuleType("sglang.srt.model_loader")
    loader.get_model_architecture = lambda _: (Model, "")
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (context, loader):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    reader: Any = types.ModuleType("expert_location")
    monkeypatch.setitem(sys.modules, reader.__name__, reader)
    exec(compile(source, "expert_location.py", "exec"), reader.__dict__)
    return reader


def test_sglang_reads_the_placement(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "map.json"
    file.write_text(sglang_text(PLACEMENT, RANKS))
    reader = load_reader(source, file, monkeypatch)
    config = types.SimpleNamespace(hf_config=None)
    located = reader.compute_initial_expert_location_metadata(config, moe_ep_rank=0)
    assert located.num_physical_experts == EXPERTS + REDUNDANT
    rows = json.loads(file.read_text())["physical_to_logical_map"]
    assert torch.equal(located.physical_to_logical_map, torch.tensor(rows))
    share = located.num_local_physical_experts
    for layer, by_server in PLACEMENT.experts_by_layer.items():
        for expert in range(EXPERTS):
            slots = located.logical_to_all_physical(layer, expert)
            ranks = {slot // share for slot in slots}
            assert ranks == {rank for rank, experts in by_server.items() if expert in experts}
