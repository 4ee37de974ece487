"""Splits the experts of a layer between two processors, each of which computes those that it has.

An expert that is not on the fast level is loaded, or the slow processor computes it where it is. Loading
costs the same for every expert, and computing costs more with more rows. So those with most rows are loaded.
The two processors work at the same time, so as many are loaded as let both end earliest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moesaic.core.offload import SplitPrices


def experts_to_load(
    prices: SplitPrices, missing: Mapping[int, int], held: Iterable[int], heat: Sequence[float] = ()
) -> list[int]:
    """The experts that the fast processor computes after they have been loaded.

    missing: rows of each chosen expert that is not on the fast level. held: rows of those that are. heat: how
    often each expert was chosen lately, which decides among those with equally many rows.

    >>> prices = SplitPrices(3.0, Curve(((1, 1.0),)), Curve(((1, 2.0), (9, 10.0))))
    >>> experts_to_load(prices, {4: 1, 5: 9, 6: 1}, held=[2])
    [5]
    """
    by_rows = sorted(missing, key=lambda one: (-missing[one], -heat[one] if heat else 0.0, one))
    there = sum(prices.slow.seconds(rows) for rows in missing.values())
    here = sum(map(prices.fast.seconds, held))
    count, least = 0, max(there, here)
    for number, expert in enumerate(by_rows, 1):
        there -= prices.slow.seconds(missing[expert])
        here += prices.load + prices.fast.seconds(missing[expert])
        if max(there, here) < least:
            count, least = number, max(there, here)
    return by_rows[:count]
