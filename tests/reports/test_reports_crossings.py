"""Where two curves cross."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlmclm.reports.crossings import crossing


def test_the_crossing_of_two_curves_is_where_their_difference_is_0_and_its_interval_where_that_holds_0() -> None:
    rows = [(1e6, 0.04, 0.02, 0.06), (2e6, 0.03, 0.01, 0.05), (4e6, -0.01, -0.03, 0.01), (8e6, -0.05, -0.07, -0.03)]
    grid = np.geomspace(1e6, 8e6, 200_001)
    value, low, high = (
        np.interp(np.log(grid), np.log([row[0] for row in rows]), [row[k] for row in rows]) for k in (1, 2, 3)
    )
    within = grid[(low <= 0) & (high >= 0)]
    for sign in (1, -1):  # whichever model is the first
        turned = [(x, sign * d, *sorted((sign * a, sign * b))) for x, d, a, b in rows]
        found = crossing(turned)
        assert found is not None
        assert found.value == pytest.approx(grid[np.abs(value).argmin()], rel=1e-4)
        assert (found.low, found.high) == pytest.approx((within[0], within[-1]), rel=1e-4)
    assert str(crossing([(1e6, 0.01, -0.02, 0.04), (4e6, -0.01, -0.04, 0.02)])) == "2.00 M [below all, beyond all]"
    assert crossing(rows[:2]) is None and crossing([(1e6, math.nan, math.nan, math.nan), *rows[:2]]) is None
    assert crossing([*rows, (16e6, 0.02, 0.01, 0.03)]) is None, "it crosses twice"
