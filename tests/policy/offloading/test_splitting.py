"""Experts are split such that no other number of loaded ones would end earlier."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from moesaic.core.curves import Curve
from moesaic.core.offload import Choice, Load, Offload, SplitPrices
from moesaic.policy.offloading.splitting import experts_to_load

SECONDS = st.floats(0.1, 8)


def took(prices: SplitPrices, missing: dict[int, int], held: list[int], loaded: tuple[int, ...]) -> float:
    there = sum(prices.slow.seconds(rows) for expert, rows in missing.items() if expert not in loaded)
    here = [*held, *(missing[expert] for expert in loaded)]
    return max(there, len(loaded) * prices.load + sum(prices.fast.seconds(rows) for rows in here))


@given(
    st.dictionaries(st.integers(0, 20), st.integers(1, 9), max_size=6),
    st.lists(st.integers(1, 9), max_size=3),
    SECONDS, SECONDS, SECONDS, st.floats(0, 2),
)  # fmt: skip
def test_no_other_experts_would_end_earlier(
    missing: dict[int, int], held: list[int], load: float, fast: float, slow: float, each: float
) -> None:
    """The fast processor reads an expert's weights, however many rows it has."""
    prices = SplitPrices(load, Curve(((1, fast),)), Curve(((1, slow), (2, slow + each))))
    every = [some for count in range(len(missing) + 1) for some in combinations(missing, count)]
    best = min(took(prices, missing, held, some) for some in every)
    found = tuple(experts_to_load(prices, missing, held))
    assert took(prices, missing, held, found) <= best + 1e-9


def test_of_experts_with_equally_many_rows_the_hotter_one_is_loaded() -> None:
    prices = SplitPrices(1.0, Curve(((1, 0.1),)), Curve(((1, 1.0),)))
    assert experts_to_load(prices, {1: 2, 2: 2, 3: 2}, [], [0.0, 1.0, 3.0, 2.0]) == [2]
    assert experts_to_load(prices, {}, [4]) == []


def test_prices_come_to_another_process_as_they_are() -> None:
    prices = SplitPrices(0.5, Curve(((1, 0.1), (4, 0.25))), Curve(((1, 1.0),), 0.5))
    choices = (Choice("on-demand", 1, 0, (1.0,)),)
    for one in (prices, None):
        offload = Offload(1 << 20, "split", 2, 3, 4, prices=one, loads=(Load(1, 2),), choices=choices)
        assert Offload.from_json(json.loads(json.dumps(asdict(offload)))) == offload
