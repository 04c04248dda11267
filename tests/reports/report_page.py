"""A parser of report pages, for their tests."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

from analysis_study import synthetic_results
from report_study import MODELS, facts

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.reports.write_report import render_report

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """Parses a page into elements, ids, links and text, and checks that elements are nested."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append(tag)
        self.attributes.append(named)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def study(**more: Any) -> Analysis:
    return analyse(synthetic_results(MODELS, **more), "2m-untrained")


def read(analysis: Analysis, about: Any = None) -> tuple[str, Page]:
    source = render_report(analysis, about or facts())
    return source, Page(source)


@cache
def usual() -> tuple[str, Page]:
    """The page of `study`, which tests only read."""
    return read(study())


def charts(source: str) -> dict[str, ElementTree.Element]:
    """The page's charts by id."""
    figures = re.findall(r'<div class="plot[^>]*>(<svg id="([^"]+)".*?</svg>)</div>', source, re.DOTALL)
    return {name: ElementTree.fromstring(text) for text, name in figures}


def of_model(chart: ElementTree.Element, number: str) -> list[ElementTree.Element]:
    return [mark for group in chart.iter("g") if group.get("data-m") == number for mark in group]


def numbers(source: str) -> dict[str, str]:
    """Each model's number in the figures, from the legend."""
    return {name: number for number, name in re.findall(r'<button [^>]*data-m="(\d+)"[^>]*>.*?</span>(.*?)</button>', source)}  # fmt: skip


def labels(chart: ElementTree.Element) -> list[str]:
    """The labels of the vertical axis, from top to bottom."""
    texts = [text for text in chart.iter("text") if text.get("class") == "y"]
    return ["".join(text.itertext()) for text in sorted(texts, key=lambda text: float(text.attrib["y"]))]


MANY = {f"{size}-mlm{ratio}-40k": 0.5 + ratio / 400 for size in ("210m", "610m", "1b") for ratio in range(10, 24)}
