from __future__ import annotations

from functools import partial

import pytest
import torch

from moesaic.gpu import hardware as cuda
from moesaic.gpu.hardware import Cuda
from moesaic.planning.hardware.device import find_device
from moesaic.planning.hardware.timing import Stopwatch


class Host:
    """Lets the CPU take a GPU's place, and counts the waits."""

    name = "cpu"
    title = "a GPU that is none"

    def __init__(self) -> None:
        self.waits = 0
        self.pins: list[torch.Tensor] = []

    def free(self) -> int:
        return 64 << 20

    def allocate_pinned(self, size: int) -> torch.Tensor:
        self.pins.append(torch.empty(size, dtype=torch.uint8))
        return self.pins[-1]

    def wait(self) -> None:
        self.waits += 1

    def release(self) -> None:
        pass


def test_every_way_is_measured_in_bytes_a_second() -> None:
    device, clock, shown = Host(), iter(range(1000)), list[tuple[str, int, int]]()
    watch = Stopwatch(0.5, partial(next, clock), device.wait)
    found = cuda.copies(device, 5000, watch, lambda *step: shown.append(step))
    assert [(one.way, one.is_pinned) for one in found] == [
        ("down", True),
        ("down", False),
        ("up", True),
        ("up", False),
        ("staging", True),
    ]
    assert {one.bandwidth for one in found} == {5000}
    assert device.waits == 2 * 5, "before and after each"
    assert len(device.pins) == 1 and device.pins[0].tolist() == [1] * 5000
    assert shown[0] == ("link", 0, 5) and shown[-1] == ("link", 5, 5)


def test_the_copies_go_where_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    class Copied(torch.Tensor):
        def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            seen.append((self, other, non_blocking))
            return self

    def ones(size: int, **_: object) -> torch.Tensor:
        return torch.zeros(size).as_subclass(Copied)

    device = Host()
    monkeypatch.setattr(device, "allocate_pinned", ones)
    monkeypatch.setattr(torch, "ones", ones)
    cuda.copies(device, 8, Stopwatch(1e-12), lambda *_: None)
    (there, pinned, first), *others = seen
    here = others[0][1]
    assert first and len({id(one) for one in (there, pinned, here)}) == 3
    expected = [(there, here, False), (pinned, there, True), (here, there, False), (pinned, here, False)]
    assert [(id(to), id(source), late) for to, source, late in others] == [
        (id(to), id(source), late) for to, source, late in expected
    ]


def test_the_device_is_found_where_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = find_device()
    assert isinstance(found, Cuda) and found.name == "cuda"


def test_the_device_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3, 5))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("wait"))
    monkeypatch.setattr(torch, "empty", lambda size, **kind: (size, kind))
    device = Cuda()
    device.wait()
    assert (device.title, device.free(), asked) == ("H100", 3, ["wait"])
    assert device.allocate_pinned(7) == (7, {"dtype": torch.uint8, "pin_memory": True})
