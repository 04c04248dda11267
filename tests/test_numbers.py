"""Numbers as people read them."""

from __future__ import annotations

import pytest

from mlmclm.numbers import rate_text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1e-5, "1e-5"), (3e-4, "3e-4"), (0.001, "1e-3"), (1.5e-5, "1.5e-5"), (0.1, "1e-1"), (2.0, "2e0")],
)
def test_rates_are_written_as_in_configurations(rate: float, text: str) -> None:
    assert rate_text(rate) == text
    assert float(text) == rate
