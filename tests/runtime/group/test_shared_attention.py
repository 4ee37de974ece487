"""Messages between the ranks of a group whose experts are on servers. What the group computes is tested in
`tests/cluster/test_groups_with_servers.py`."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.support.paged_steps import tokens

from moesaic.core.errors import ConfigError, ConnectionLost
from moesaic.experts.collectives.one_shot import local_group
from moesaic.gpu.graphs.graph_inputs import run_eagerly
from moesaic.gpu.ranks.recorded_attention import AttentionRecordings
from moesaic.kernels.batch import AttentionBatch
from moesaic.runtime.group import shared_attention
from moesaic.runtime.group.arrays import pack
from moesaic.runtime.group.rows import HostRows
from moesaic.runtime.group.shared_attention import AttentionRank, SharedAttention

WIDTH = 4
BLOCKS = [10.0, 20.0]
SPEC = SimpleNamespace(hidden_size=WIDTH, num_layers=len(BLOCKS), predicting=0)
MODEL = cast(Any, SimpleNamespace(spec=SPEC, blocks=BLOCKS, block=BLOCKS.__getitem__))
CPU = torch.device("cpu")
STEP = pack(tokens([2], [2], 16))


def attend(block: Any, layer: int, hidden: torch.Tensor, *_: object) -> torch.Tensor:
    """A partial sum that tells the block, the layer and the rows."""
    if block < 0:
        raise ConfigError("no")
    return hidden * block + layer


def summed(shared: SharedAttention, *given: Any) -> torch.Tensor:
    """What the stages return, which yield nothing where nothing is recorded."""
    with pytest.raises(StopIteration) as end:
        next(shared.stages(*given))
    found: torch.Tensor = end.value.value
    return found


class Ranks:
    """The first rank's end, and a thread that follows it."""

    def __init__(self) -> None:
        self.first, second = local_group(2)
        rows, no_memory = HostRows(second), cast(Any, None)
        recordings = AttentionRecordings(MODEL, no_memory, CPU, 16, rows, run_eagerly, 4)
        rank = AttentionRank(MODEL, no_memory, CPU, 16, rows, recordings)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, args=(rank,))
        self._thread.start()

    def _follow(self, rank: AttentionRank) -> None:
        try:
            rank.follow()
        except ConnectionLost as error:
            self.error = error
            rank._rows.close()

    def end(self) -> str:
        """What made the other rank end."""
        self.first.close()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return str(self.error)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(shared_attention, "until_output_projection", attend)
    return Ranks()


def test_layers_of_several_steps_take_turns(ranks: Ranks) -> None:
    shared = SharedAttention(HostRows(ranks.first), lambda lost: lost, torch.empty(0, WIDTH))
    steps = [AttentionBatch.build(tokens([rows], [rows], 16), 16) for rows in (3, 5)]
    for number, layer in ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0)):
        rows = torch.randn(3 + 2 * number, WIDTH)
        block = MODEL.blocks[layer]
        out = summed(shared, block, layer, rows, torch.arange(len(rows)), steps[number], cast(Any, None))
        assert torch.equal(out, (rows * block + layer) + (rows * block + layer))
    assert shared.stats().all_gather_bytes > 0 == shared.stats().reduce_scatter_bytes
    assert "gone" in ranks.end()


def test_an_error_in_the_middle_of_a_layer_ends_the_group(ranks: Ranks) -> None:
    shared = SharedAttention(HostRows(ranks.first), lambda lost: lost, torch.empty(0, WIDTH))
    step = AttentionBatch.build(tokens([2], [2], 16), 16)
    with pytest.raises(ConfigError):
        summed(shared, cast(Any, -1.0), 0, torch.zeros(2, WIDTH), torch.arange(2), step, cast(Any, None))
    assert "gone" in ranks.end()
    with pytest.raises(ConnectionLost):
        summed(shared, MODEL.blocks[0], 0, torch.zeros(2, WIDTH), torch.arange(2), step, cast(Any, None))


@pytest.mark.parametrize(
    ("message", "rows", "says"),
    [
        (b"abc", None, "a layer's message of 3 bytes"),
        (np.array([2]).tobytes(), None, "rows for layer 2 of 2"),
        (np.array([-1]).tobytes(), None, "rows for layer -1 of 2"),
        (np.array([0]).tobytes(), None, "rows of an unknown step"),
        (np.array([0]).tobytes() + STEP, 3, "the ranks sent 3 rows where 2 were expected"),
        (np.array([0, 1, 2]).tobytes(), None, "a step of 16 bytes"),
        (np.array([-1, 1, 4, 1024]).tobytes(), None, "a recording's message of 32 bytes"),
        (np.array([-2, 5, 0]).tobytes(), None, "message -2 for the unknown recording 5"),
        (np.array([-4, 5, 0]).tobytes() + STEP, None, "message -4 for the unknown recording 5"),
    ],
)
def test_a_damaged_message_ends_the_rank(ranks: Ranks, message: bytes, rows: int | None, says: str) -> None:
    ranks.first.announce(message)
    if rows is not None:
        ranks.first.all_gather(np.zeros((rows, WIDTH), np.float32))
    assert ranks.end() == says
