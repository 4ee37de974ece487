"""Rotary tables: the same bits in every process, whatever it did before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moesaic.models.rope import RopeConfig, RopeTable, frequencies

FRESH = """
import hashlib, os
import torch
from moesaic.models.rope import RopeConfig, RopeTable

def table():
    made = RopeTable.build(RopeConfig("default", 10000.0), 32, 2048, "cpu")
    return hashlib.sha256(made.cosine.numpy().tobytes() + made.sine.numpy().tobytes()).digest()

found = set()
for _ in range(400):
    reading, writing = os.pipe()
    if not os.fork():
        torch.set_num_threads(2)
        os.write(writing, table())
        os._exit(0)
    found.add(os.read(reading, 64))
    os.close(reading), os.close(writing), os.wait()
assert found == {table()}, f"{len(found)} different tables"
"""


@pytest.mark.slow
def test_every_process_has_the_same_table() -> None:
    """Computed by torch, two to nine of these 400 were wrong."""
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_the_table_is_rounded_once(kind: str) -> None:
    config = RopeConfig(kind, 10000.0, factor=4.0, original=64)
    table = RopeTable.build(config, 32, 300, "cpu")
    angles = torch.arange(300, dtype=torch.float32)[:, None] * frequencies(config, 32)
    for found, exact in ((table.cosine, angles.double().cos()), (table.sine, angles.double().sin())):
        assert found.dtype == torch.float32 and found.is_contiguous()
        torch.testing.assert_close(found, exact.float() * config.angle_scale, rtol=0, atol=0)
