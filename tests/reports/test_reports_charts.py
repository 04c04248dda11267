"""Axes and charts as SVG."""

from __future__ import annotations

import re
from importlib import resources
from xml.etree import ElementTree

import numpy as np
import pytest

from mlmclm.reports.charts import Axis, Chart, HeatCell, Style, Whisker, label_rows, round_ticks, shortened
from mlmclm.reports.svg_charts import svg_of


@pytest.mark.parametrize(
    ("low", "high", "ticks", "words"),
    [
        (44.1, 72.9, [45, 50, 55, 60, 65, 70], ["45", "50", "55", "60", "65", "70"]),
        (0, 0.93, [0, 0.2, 0.4, 0.6, 0.8], ["0.0", "0.2", "0.4", "0.6", "0.8"]),
        (-1.2, 0.9, [-1, -0.5, 0, 0.5], ["\N{MINUS SIGN}1.0", "\N{MINUS SIGN}0.5", "0.0", "0.5"]),
        (0, 42_000, [0, 10_000, 20_000, 30_000, 40_000], ["0", "10,000", "20,000", "30,000", "40,000"]),
        (66.661, 66.668, [66.662, 66.664, 66.666, 66.668], ["66.662", "66.664", "66.666", "66.668"]),
    ],
)
def test_ticks_are_round_and_told_apart(low: float, high: float, ticks: list[float], words: list[str]) -> None:
    assert round_ticks(low, high) == pytest.approx(ticks)
    axis = Axis.numbers([low, high], "", tight=True)
    assert [label for _, label in axis.ticks] == words


def test_an_axis_covers_its_values_and_zero_if_asked() -> None:
    axis = Axis.numbers([3.0, float("nan"), 5.0], "")
    assert axis.low < 3 < 5 < axis.high
    assert Axis.numbers([3.0, 5.0], "", zero=True).low == 0
    assert Axis.numbers([-3.0], "", zero=True).high == 0
    for single in ([], [4.0], [0.0]):
        for zero in (False, True):
            axis = Axis.numbers(single, "", zero=zero)
            assert axis.low < axis.high and axis.ticks


@pytest.mark.parametrize("tight", [False, True])
def test_values_that_differ_by_rounding_have_the_axis_of_equal_ones(tight: bool) -> None:
    """Labels such as 75.000000000000014 stuck out of the figure."""
    axis = Axis.numbers([75.0, 75.00000000000001], "", tight=tight)
    assert axis.low < 74.6 and axis.high > 75.4 and max(len(label) for _, label in axis.ticks) <= 5


def test_a_logarithmic_axis_gives_equal_ratios_equal_room() -> None:
    axis = Axis(1e-5, 1e-3, [], log=True)
    assert [axis.share(rate) for rate in (1e-5, 1e-4, 1e-3)] == pytest.approx([0, 0.5, 1])


def test_labels_that_would_overlap_take_turns_and_then_stay_out() -> None:
    assert label_rows([0, 0.5, 1], ["1e-5", "1e-4", "1e-3"]) == [0, 0, 0]
    assert label_rows([0.1, 0.15, 0.3], ["8e-5", "1e-4", "2e-4"]) == [0, 1, 0]
    assert label_rows([0.1, 0.11, 0.12, 0.5], ["1e-5"] * 4) == [0, 1, None, 0]


def test_a_long_name_is_shortened_in_its_middle() -> None:
    assert shortened("610m-clm-10k-mlm40-42k") == "610m-clm-10k-mlm40-42k"
    assert shortened("a-model-that-has-been-given-a-long-name") == "a-model-tha\u2026a-long-name"


def test_words_from_outside_are_escaped() -> None:
    chart = Chart(Axis.numbers([0, 1], "<i>"), Axis.names(["</text><script>"]), 40)
    chart.series(Style("c0", 0))
    chart.add(Whisker(0.5, 0.4, 0.6, 0, "</title><script>&"))
    drawn = svg_of(chart, "one", '"><script>')
    assert "<script" not in drawn
    (circle,) = ElementTree.fromstring(drawn).iter("circle")
    assert circle.findtext("title") == "</title><script>&"


def luminance(colour: tuple[float, ...]) -> float:
    """Relative luminance of an sRGB colour (WCAG 2)."""
    red, green, blue = ((part / 12.92) if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_labels_of_a_heat_map_can_be_read_at_any_shade_on_light_and_dark_pages() -> None:
    style = resources.files("mlmclm.reports").joinpath("templates/charts.css").read_text(encoding="utf-8")
    (mid,) = re.findall(r"text\.on-mid{fill:(#\w+)", style)
    for page in style.split("@media screen and (prefers-color-scheme:dark)")[:2]:
        named = dict(re.findall(r"(?:--|\.)(ink|card|c0)(?::|{--c:)(#[0-9a-f]+)", page))
        named = {
            name: code if len(code) == 7 else "#" + "".join(2 * each for each in code[1:])
            for name, code in named.items()
        }
        ink, card, hue, middle = (
            tuple(int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
            for code in (named["ink"], named["card"], named["c0"], mid)
        )
        for share in np.linspace(0, 1, 201):
            cell = HeatCell(0, 0, float(share), "", "")
            shade = tuple(cell.opacity * a + (1 - cell.opacity) * b for a, b in zip(hue, card, strict=True))
            label = luminance({"pale": ink, "mid": middle, "bar": card}[cell.tone])
            low, high = sorted((label, luminance(shade)))
            assert (high + 0.05) / (low + 0.05) > 3.5, (share, cell.tone)
