"""A child process of `make gpu` on the device of `gpu_sanitizer`, where each part is small.

Triton's interpreter takes seconds a token. So answers and prompts are short, and the layer whose kernels are
timed is the demo's.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest import mock

from scripts.gpu import child, identity, kernels, served
from scripts.gpu.parts import PARTS

from moesaic.commands import bench_kernels
from moesaic.planning.hardware import roofline
from tests.support.gpu_process import take_device

SMALL: tuple[tuple[ModuleType, dict[str, Any]], ...] = (
    (identity, {"LENGTHS": (1, 5), "NEW": 2}),
    (kernels, {"CASES": {"demo": ("demo", ("int8",), "int8")}, "ROWS": (1,), "SECONDS": 0.001}),
    (roofline, {"DEVICE_SIZE": 64, "DEVICE_BYTES": 1 << 16, "RECORDED": 2}),
    (bench_kernels, {"BEYOND": 0}),
    (served, {"kernels_of": lambda work: "reference", "machine": lambda work: "l4", "SMALL_SHARE": 0.9}),
)
"""Modules, and what their names stand for here."""


def main() -> int:
    """As `scripts.gpu.child`. The device is there until the process ends."""
    for module, names in SMALL:
        mock.patch.multiple(module, **names).start()  # type: ignore[no-untyped-call]
    take_device()
    return child.main(PARTS)


if __name__ == "__main__":
    raise SystemExit(main())
