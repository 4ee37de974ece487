"""Splits the experts of a layer between two processors, each of which computes those that it has.

An expert that is not on the fast level is loaded, or the slow processor computes it where it is. Loading
costs the same for every expert, and computing costs more with more rows. So those with most rows are loaded.
The two processors work at the same time, so as many are loaded as let both end earliest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moesaic.core.offload import SplitPrices


def experts_to_load(
    prices: SplitPrices, missing: Mapping[int, int], resident_rows: Iterable[int], heat: Sequence[float] = ()
) -> list[int]:
    """The experts that the fast processor computes after they have been loaded.

    missing: rows of each chosen expert that is not on the fast level. resident_rows: rows of those that
    are. heat: how often each expert was chosen lately, which decides among those with equally many rows.

    >>> from moesaic.core.curves import Curve
    >>> prices = SplitPrices(3.0, Curve(((1, 1.0),)), Curve(((1, 2.0), (9, 10.0))))
    >>> experts_to_load(prices, {4: 1, 5: 9, 6: 1}, resident_rows=[2])
    [5]
    """
    by_rows = sorted(missing, key=lambda one: (-missing[one], -heat[one] if heat else 0.0, one))
    slow_seconds = sum(prices.slow.seconds(rows) for rows in missing.values())
    fast_seconds = sum(map(prices.fast.seconds, resident_rows))
    count, least_seconds = 0, max(slow_seconds, fast_seconds)
    for number, expert in enumerate(by_rows, 1):
        slow_seconds -= prices.slow.seconds(missing[expert])
        fast_seconds += prices.load + prices.fast.seconds(missing[expert])
        if max(slow_seconds, fast_seconds) < least_seconds:
            count, least_seconds = number, max(slow_seconds, fast_seconds)
    return by_rows[:count]
