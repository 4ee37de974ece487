"""Assigns rows to columns, one to one, so that the sum of the gains is as large as possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def assign(gain: npt.NDArray[Any]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """(rows, columns): row rows[i] gets column columns[i]. The rows are sorted.

    gain: [N, M] of a row with a column. Example: [[1, 3], [2, 5]] -> [0, 1], [0, 1], for a sum of 6.

    SciPy is imported by the first call. Its import takes half a second, and most servers never assign.
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(gain, maximize=True)
    return rows, columns
