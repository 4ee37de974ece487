"""The comparison of a joined server's digests with the checkpoint here."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from moesaic.cluster.member import Member, Role
from moesaic.cluster.weight_check import WeightCheck
from moesaic.core import messages
from moesaic.core.endpoint import Endpoint
from moesaic.core.experts import ExpertLayout
from moesaic.models.fingerprint import ExpertDigests

LAYOUT = ExpertLayout({0: "a"}, "g", "u", "d", 8, 4, 2, 1, "float32", weights="w")


class Checked:
    """A check of a checkpoint with two experts, run step by step."""

    def __init__(self, path: Path) -> None:
        tensors = {
            name: np.full(shape, expert, np.float32)
            for expert in range(2)
            for name, *shape in LAYOUT.tensors(0, expert)
        }
        self.file = path / "model.safetensors"
        save_file(tensors, self.file)
        (path / "config.json").write_text("{}")
        digests = ExpertDigests(path, LAYOUT)
        self.right = {0: {expert: digests.digest_of(0, expert) for expert in range(2)}}
        self.accepted: list[int] = []
        self.refused: list[str] = []
        self.later: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.check = WeightCheck(
            path,
            self.later.put,
            lambda member, holds: self.accepted.append(member.number),
            lambda member, reason: self.refused.append(reason),
            lambda: 0.0,
        )
        self.check.set_layout(LAYOUT)

    def step(self) -> None:
        self.later.get(timeout=60)()


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Checked]:
    found = Checked(tmp_path)
    yield found
    found.check.close()


def joined(number: int) -> Member:
    return Member(Role.SERVER, number, 1, SimpleNamespace(), is_external=True, last_hold=1)  # type: ignore[arg-type]


def test_servers_that_left_are_forgotten(checked: Checked) -> None:
    """A server that comes and goes for months must not fill the memory."""
    for number in range(20):
        member = joined(number)
        checked.check.record_holds(
            member, messages.HoldReply(1, Endpoint("tcp:x:1"), "reference", weights="w")
        )
        checked.check.record_digests(member, messages.Digests(checked.right))
        checked.step()
        checked.check.tick(member, lambda: {0: [0, 1]})
        checked.check.keep([member])
    assert checked.accepted == list(range(20)) and not checked.refused
    assert len(checked.check._servers) == 1


def test_servers_are_compared_after_the_files_are_gone(checked: Checked) -> None:
    """What was read before stays known. Who needs more is refused, and the next one is compared."""

    def then_gone(function: Callable[[], None]) -> None:
        checked.file.unlink(missing_ok=True)
        checked.later.put(function)

    checked.check._run_later = then_gone
    first, wrong = {0: {0: checked.right[0][0]}}, {0: {0: "0" * 64}}
    for number, told in enumerate((first, first, checked.right, wrong)):
        checked.check.record_digests(joined(number), messages.Digests(told))
        checked.step()
    assert [reason.partition(": ")[0] for reason in checked.refused] == [
        "expert 1 of layer 0 cannot be compared",
        "expert 0 of layer 0",
    ]


def test_a_pair_that_no_checkpoint_has_is_refused_in_words(checked: Checked) -> None:
    for layer, expert in ((9, 0), (0, 10**9), (0, -1), (-1, 0)):
        checked.check.record_digests(joined(0), messages.Digests({layer: {expert: "x"}}))
        checked.step()
    assert checked.refused == [
        f"the checkpoint has no expert {expert} of layer {layer}"
        for layer, expert in ((9, 0), (0, 10**9), (0, -1), (-1, 0))
    ]
