"""Looks at one difference, again and again: equal models are seldom taken for different, and different ones are found."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from mlmclm.analysis.looks import Look, bounds, decided, spent

STUDIES = 4_000


def claims(looks: tuple[int, ...], limits: tuple[float, ...], shift: float, seed: int = 1) -> float:
    """The share of studies in which scipy's t test falls below its limit at one of the looks."""
    draw = np.random.default_rng(seed)
    first, second = draw.normal(shift, 1, (STUDIES, looks[-1])), draw.standard_normal((STUDIES, looks[-1]))
    found = np.zeros(STUDIES, bool)
    for number, limit in zip(looks, limits, strict=True):
        found |= scipy.stats.ttest_ind(first[:, :number], second[:, :number], axis=1).pvalue < limit
    return float(found.mean())


@pytest.mark.parametrize("looks", [(3, 5, 7, 9), tuple(range(3, 21)), (2, 9), (4,)])
def test_equal_models_differ_in_five_per_cent_over_all_looks(looks: tuple[int, ...]) -> None:
    limits = bounds(looks, looks[-1])
    assert claims(looks, limits, 0.0) == pytest.approx(0.05, abs=0.011)
    if len(looks) > 2:
        assert claims(looks, (0.05,) * len(looks), 0.0) > 0.11, "as plain tests do"


def test_a_difference_is_found_nearly_as_often_as_by_one_look_at_the_end() -> None:
    looks = (3, 5, 7, 9)
    found, once = claims(looks, bounds(looks, 9), 1.5), claims((9,), (0.05,), 1.5)
    assert once > 0.8 and found > once - 0.05


def test_the_error_is_spent_as_obrien_and_fleming_s_bounds_spend_it() -> None:
    """Lan and DeMets (1983): with so many seeds Student's t is normal, and looks are correlated by the root of their shares."""
    looks = (250, 500, 750, 1000)
    ends = [-scipy.stats.norm.ppf(limit / 2) for limit in bounds(looks, 1000)]
    correlation = np.sqrt(np.minimum.outer(looks, looks) / np.maximum.outer(looks, looks))
    for number in (2, 3, 4):
        normal = scipy.stats.multivariate_normal(np.zeros(number), correlation[:number, :number])
        inside = normal.cdf(ends[:number], lower_limit=[-end for end in ends[:number]])
        assert 1 - inside == pytest.approx(2 * scipy.stats.norm.sf(1.96 / (number / 4) ** 0.5), abs=1.5e-3)
    assert spent(250, 1000, 0.05) == pytest.approx(2 * scipy.stats.norm.sf(1.96 / 0.5), rel=1e-3)
    assert spent(9, 9, 0.05) == pytest.approx(0.05) and spent(12, 9, 0.05) == pytest.approx(0.05)


def test_the_first_look_below_its_bound_decides() -> None:
    limits = bounds((3, 5, 9), 9)
    undecided, sure = Look(3, 0.01, 0.01), Look(5, 0.02, 0.001)
    assert decided([undecided], 9) == ("undecided", limits[0])
    assert decided([undecided, sure], 9) == ("better", limits[1])
    assert decided([undecided, sure, Look(9, -0.01, 0.5)], 9)[0] == "better", "later looks change nothing"
    assert decided([undecided, sure._replace(difference=-0.02)], 9)[0] == "not better"
    assert decided([undecided, Look(5, 0.01, 0.2), Look(9, 0.01, 0.06)], 9)[0] == "not better", "the end"
    assert decided([Look(3, 0.01, 1.0)], 9)[0] == "undecided"
