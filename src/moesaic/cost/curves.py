"""The curves of known devices, by their data sheets (`machines`)."""

from __future__ import annotations

from moesaic.core.curves import Curve, DeviceCurves
from moesaic.cost.hardware import Hardware
from moesaic.cost.machines import MACHINES

LAUNCH = 20e-6
"""Seconds that a run takes on a GPU besides its products. Assumed."""
NAMES = (("T4", "t4"), ("L4", "l4"), ("A100", "a100-80"), ("H100", "h100"), ("H200", "h200"))
"""(word of the name that a driver gives a device, machine)."""


def of_device(name: str, expert: float, dense_weights: float, size: float) -> DeviceCurves | None:
    """The curves of the GPU with this name, or None if it is not known. See `of_machine`.

    >>> of_device("NVIDIA H100 80GB HBM3", 1e6, 1e6, 2).source
    'data sheet of h100'
    >>> of_device("GeForce 256", 1e6, 1e6, 2) is None
    True
    """
    words = name.replace("-", " ").split()
    machine_name = next((machine for word, machine in NAMES if word in words), None)
    return None if machine_name is None else of_machine(MACHINES[machine_name], expert, dense_weights, size)


def of_machine(machine: Hardware, expert: float, dense_weights: float, size: float) -> DeviceCurves:
    """The roofline of a machine's fast level: a run is level while its products take less than reading.

    expert: weights of a routed expert. dense_weights: weights of a layer besides. size: bytes of a weight.
    """
    processor, bandwidth = machine.fast.processor, machine.fast.bandwidth
    assert processor is not None, "the fast level computes"
    level = size * processor.flops / (2 * bandwidth)
    """Rows of a matrix up to which its products take less than reading."""
    row = 2 * expert / processor.flops
    read = max(dense_weights, 1.0) * size / bandwidth
    return DeviceCurves(
        f"data sheet of {machine.name}",
        Curve(((level, LAUNCH + read), (2 * level, LAUNCH + 2 * read))),
        Curve(((level, LAUNCH), (level + 1, LAUNCH + row)), per_expert=expert * size / bandwidth),
    )
