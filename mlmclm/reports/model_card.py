"""The model card (README.md) of a pretrained model's Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mlmclm.reports import text

PIPELINES = {"clm": "text-generation", "mlm": "fill-mask"}
REQUIRED = ("name", "objective")


def model_card(facts: Mapping[str, Any]) -> str:
    """The card as Markdown with YAML front matter; a pure function of the facts.

    Args:
        facts: `name` and `objective` ("clm" or "mlm": of the last stage) are needed; the others are left out of the
            card where absent:
            description: one paragraph.
            stages: texts, one a stage of the plan.
            architecture, recipe, data: label to value, in the order to show.
            curve: the ends of the curves, label to value, such as "training loss, first 10 steps".
            parameters, steps, tokens, flops: numbers.
            languages: ISO codes. tags: further tags.
            load: Auto class to the subfolder that it loads ("" is the folder itself); by default AutoModel and
                AutoModelForMaskedLM load the folder, and after a "clm" stage AutoModelForCausalLM too.
            command: that makes the model again.

    Raises:
        ValueError: a needed fact is absent, or the objective is neither of the two.
    """
    absent = [name for name in REQUIRED if not facts.get(name)]
    if absent:
        raise ValueError(f"model card: no {', '.join(absent)} in the facts.")
    objective = facts["objective"]
    if objective not in PIPELINES:
        raise ValueError(f"model card: objective {objective!r} is neither of {', '.join(PIPELINES)}.")
    parts = [_front(facts, objective), f"# {facts['name']}"]
    if facts.get("description"):
        parts.append(str(facts["description"]))
    parts += _section("Plan", _numbered(facts.get("stages", ())))
    parts += _section("Load", _load(facts, objective))
    for title, name in (("Architecture", "architecture"), ("Recipe", "recipe"), ("Data", "data"), ("Curves", "curve")):
        parts += _section(title, _table(facts.get(name, {})))
    parts += _section("Cost", _table(_cost(facts)))
    if facts.get("command"):
        parts += _section("Make it again", _code("bash", [str(facts["command"])]))
    return "\n\n".join(parts) + "\n"


def _front(facts: Mapping[str, Any], objective: str) -> str:
    fields: dict[str, Any] = {}
    if facts.get("languages"):
        fields["language"] = list(facts["languages"])
    fields["library_name"] = "transformers"
    fields["pipeline_tag"] = PIPELINES[objective]
    fields["tags"] = ["mlmclm", "encoder", "pretraining", objective, *facts.get("tags", ())]
    # No licence: that of the corpus decides, and nobody but its user knows it.
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _numbered(items: Sequence[str]) -> str:
    return "\n".join(f"{number}. {_line(item)}" for number, item in enumerate(items, start=1))


def _load(facts: Mapping[str, Any], objective: str) -> str:
    loaders: dict[str, str] = {"AutoModel": "", "AutoModelForMaskedLM": ""}
    if objective == "clm":
        loaders["AutoModelForCausalLM"] = ""
    loaders = dict(facts.get("load") or loaders)
    lines = [f"from transformers import {', '.join(loaders)}, AutoTokenizer", "", 'folder = "path/to/this/folder"']
    lines.append("tokenizer = AutoTokenizer.from_pretrained(folder)")
    for loader, subfolder in loaders.items():
        more = f", subfolder={subfolder!r}" if subfolder else ""
        lines.append(f"model = {loader}.from_pretrained(folder{more})")
    intro = "Any of these; no remote code is needed." if len(loaders) > 1 else "No remote code is needed."
    return f"{intro}\n\n{_code('python', lines)}"


def _cost(facts: Mapping[str, Any]) -> dict[str, str]:
    written = {
        "parameters": text.count,
        "steps": lambda value: f"{value:,}",
        "tokens": text.count,
        "flops": text.scientific,
    }
    labels = {"flops": "FLOPs (estimated)"}
    return {
        labels.get(name, name): write(facts[name]) for name, write in written.items() if facts.get(name) is not None
    }


def _table(values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    rows = [f"| {_line(label)} | {_line(text.plain(value))} |" for label, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _line(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _code(language: str, lines: Sequence[str]) -> str:
    body = "\n".join(lines)
    fence = "```"
    # A fence longer than any in the text, so that no text can close it.
    while fence in body:
        fence += "`"
    return f"{fence}{language}\n{body}\n{fence}"
