"""Encoder against decoder by size."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.numbers import count
from mlmclm.reports.drawing import Figure, FigureGroup, ReportInput
from mlmclm.reports.paired_models import most_trained
from mlmclm.reports.study_facts import DECODER, ENCODER, MADE
from mlmclm.reports.trends import Key, Quantity, trend_figures


class DecoderSizes(FigureGroup):
    """Score against the number of parameters, by how models were made, as in Ettin (arXiv 2507.11412)."""

    name = "sizes"
    section = "choices"
    title = "Encoder and decoder by size"
    note = "Of the models of a size that were made alike, the one that has seen the most tokens."

    def draw(self, study: ReportInput) -> Sequence[Figure]:
        series: dict[Key, list[tuple[float, str]]] = {(way,): [] for way in MADE}
        for size in dict.fromkeys(model.size for model in study.listed if model.size):
            ways = most_trained([model for model in study.listed if model.size == size and model.parameters])
            if ENCODER in ways and DECODER in ways:
                for way, model in ways.items():
                    series[(way,)].append((float(model.parameters or 0), model.name))
        return trend_figures(study, self.name, Quantity("parameters", "parameters", count, log=True), series)
