"""The model card (README.md) in a model's Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml

from mlmclm.reports import text
from mlmclm.reports.templating import render

ARCHITECTURES = {
    "eurobert": ("EuroBERT", "Llama"),
    "modernbert": ("ModernBERT", "ModernBERT"),
    "bert": ("BERT", "BERT"),
    "roberta": ("RoBERTa", "RoBERTa"),
    "qwen2": ("Qwen2", "Qwen2"),
    "qwen3": ("Qwen3", "Qwen3"),
}
"""Names of the encoder and the decoder, by transformers' name of the architecture."""
WITHOUT_ROPE = ("bert", "roberta")
UNMASKED = ("qwen2", "qwen3")
"""Architectures for which transformers has no masked language model.

Their encoder is the causal model with `is_causal` set to false.
"""
OPTIONAL = (
    "description", "size", "initial", "objective", "stages", "shape", "recipe", "decoder", "other", "repository", "revision", "revisions",
    "missing", "siblings", "citation", "command",
)  # fmt: skip
"""Facts that the template asks for; None if they are absent."""


def model_card(facts: Mapping[str, Any]) -> str:
    """Return the card as Markdown with YAML front matter; a pure function of the facts.

    Args:
        facts: `name` is required; other facts that are absent, empty or None are left out of the card:
            objective: of the last phase, such as "clm" or "mlm40"; None for an untrained model. causal: whether it is
                causal. predicts_one_earlier: whether it predicts a masked token one position before it.
            decoder: whether this is the card of the weights as a decoder; by default it is the encoder's.
            architecture: a key of `ARCHITECTURES`; "eurobert" by default.
            initial: the model from which this one continues, if any. base_model: its name on the Hub, if it has one.
            description: one paragraph. stages: texts, one per phase of the plan. size: the name of the size.
            recipe, corpus: label to value, in display order; underscores are shown as spaces.
            curve: training loss as (step, nats per predicted token) pairs. validation_loss: at the end, in nats.
            parameters, steps, tokens, flops: numbers.
            shape: label to value of the architecture. licence, citation: texts; the citation is BibTeX. datasets: names on
                the Hub. siblings: names of models of the same study.
            other: where the same weights are in the other form: a repository, or `decoder/` in the encoder's folder.
            repository: OWNER/NAME, if the card is that of a repository. revision: its tag; None for `main`. revisions,
                missing: tags of all revisions, if it has any.
            scores: the model's rows of the report's `best.csv`: test scores after fine-tuning, as an encoder; `data` is the
                Hub's data set of a row's task, if there is one: its path, revision and config_name.
            languages: ISO codes. tags: further tags. command: the command that reproduces the model.

    Raises:
        ValueError: there is no name.
    """
    if not facts.get("name"):
        raise ValueError("model card: no name in the facts.")
    architecture = facts.get("architecture") or "eurobert"
    encoder_and_decoder, form = ARCHITECTURES[architecture], "decoder" if facts.get("decoder") else "encoder"
    family, other = encoder_and_decoder if form == "encoder" else encoder_and_decoder[::-1]
    tables = {
        "Recipe": facts.get("recipe"),
        "Data": facts.get("corpus"),
        "Loss": _losses(facts),
        "Scores after fine-tuning": _scores(facts.get("scores") or ()),
        "Cost": _cost(facts),
    }
    return render(
        "model_card.md.j2",
        **{**dict.fromkeys(OPTIONAL), **facts},
        front=_front(facts, family, form),
        family=family,
        form=form,
        other_family=other,
        rope=architecture not in WITHOUT_ROPE,
        masked=architecture not in UNMASKED,
        predicts=_predicts(facts),
        tables=tables,
    )


def model_cards(facts: Mapping[str, Any], *, decoder: bool, repositories: Sequence[str] = ()) -> tuple[str, str | None]:
    """Return the card of a model as an encoder, and with `decoder` the card of the same weights as a decoder.

    Args:
        facts: as `model_card` takes them.
        repositories: OWNER/NAME of the model, if it is published; with `decoder`, two names: that of the decoder, then that of the encoder.
    """
    if not decoder:
        return model_card({**facts, "repository": repositories[0] if repositories else None}), None
    published, encoder_published = repositories or (None, None)
    encoder = {**facts, "repository": encoder_published, "other": published or "decoder/"}
    # Scores after fine-tuning are the encoder's.
    return model_card(encoder), model_card(
        {**facts, "decoder": True, "scores": (), "repository": published, "other": encoder_published}
    )


def _pipeline(facts: Mapping[str, Any]) -> str | None:
    """Return the Hub's pipeline tag of the model as transformers loads it; None for an untrained model."""
    if not facts.get("objective") and not facts.get("initial"):
        return None
    if facts.get("decoder"):
        return "text-generation"
    # The fill-mask pipeline reads the prediction at the mask's position, and needs one of transformers' masked language models.
    plain = _predicts(facts) == "mask" and facts.get("architecture") not in UNMASKED
    return "fill-mask" if plain else "feature-extraction"


def _predicts(facts: Mapping[str, Any]) -> Literal["mask", "before"] | None:
    """Return where an encoder predicts a masked token: at the mask or one position before it; None if it does not."""
    if not facts.get("objective") or facts.get("causal"):
        return None
    return "before" if facts.get("predicts_one_earlier") else "mask"


def _front(facts: Mapping[str, Any], family: str, form: str) -> str:
    objective = facts.get("objective")
    kind = objective or ("untrained" if not facts.get("initial") else None)
    fields = {
        "language": list(facts.get("languages") or ()),
        # None by default: the licence depends on that of the corpus, which only the user knows.
        "license": facts.get("licence"),
        "datasets": list(facts.get("datasets") or ()),
        "library_name": "transformers",
        "pipeline_tag": _pipeline(facts),
        "base_model": facts.get("base_model"),
        "tags": ["mlmclm", family.lower(), form, *filter(None, [kind]), *(facts.get("tags") or ())],
        "model-index": _model_index(str(facts["name"]), facts.get("scores") or ()),
    }
    filled = {name: value for name, value in fields.items() if value}
    return f"---\n{yaml.safe_dump(filled, sort_keys=False, allow_unicode=True)}---"


def _scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the test score of each task in points, with its metric, plain mean and learning rate."""
    return {
        str(row["task"]): f"{text.estimate(row['score'], row['score_low'], row['score_high']).rstrip()} points of 100 "
        f"({_what(row)}, {text.points(row['test_mean'])}, at learning rate "
        f"{', '.join(filter(None, (row['learning_rates'], row.get('setting'))))})"
        for row in rows
    }


def _what(row: Mapping[str, Any]) -> str:
    chosen = "; the learning rate was chosen on these scores" if row.get("rule") == "on_test" else ""
    seeds = text.plural(int(row["n"]), "seed")
    return (
        f"{text.metric(row['metric'])} with 95 % interval, of the chosen runs that learn{chosen}; plain mean of {seeds}"
    )


def _model_index(name: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the scores in the form that the Hub shows beside the card."""
    if not rows:
        return []
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = [
        EvalResult(
            task_type=hub_task(row["family"]),
            dataset_type=(data := row.get("data") or {}).get("path", row["task"]),
            dataset_name=row["task"],
            dataset_config=data.get("config_name"),
            dataset_revision=data.get("revision"),
            dataset_split="test",
            metric_type=row["metric"],
            metric_value=row["score"],
            metric_name=_named(row),
        )
        for row in rows
    ]
    return eval_results_to_model_index(name, results)


def eval_results(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the YAML file from which the Hub reads a model's scores on data sets of the Hub; empty if there are no such scores.

    Values are fractions of 1, as in the card's front matter.
    """
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = [
        EvalResultEntry(
            dataset_id=row["data"]["path"],
            dataset_revision=row["data"].get("revision"),
            task_id=row["data"].get("config_name", row["task"]),
            value=row["score"],
            notes=_named(row),
        )
        for row in rows
        if row.get("data")
    ]
    return str(yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)) if entries else ""


def _named(row: Mapping[str, Any]) -> str:
    return (
        f"{_what(row)} {text.points(row['test_mean'])} {text.interval(row['score_low'], row['score_high'])}".rstrip()
        + " points of 100"
    )


def hub_task(family: str) -> str:
    """Return the Hub's name of a task family."""
    return (family in text.FAMILIES and text.FAMILIES[family].hub_task) or family


def _losses(facts: Mapping[str, Any]) -> dict[str, str]:
    curve = facts.get("curve") or ()
    ends = {0: "first", len(curve) - 1: "last"} if curve else {}
    rows = {f"training, step {curve[index][0]:,} ({word})": text.loss(curve[index][1]) for index, word in ends.items()}
    if facts.get("validation_loss") is not None:
        rows["validation, at the end"] = text.loss(facts["validation_loss"])
    return {f"{label}, nats per predicted token": value for label, value in rows.items()}


def _cost(facts: Mapping[str, Any]) -> dict[str, str]:
    rows = (
        ("parameters", "parameters without LM head", text.count),
        ("steps", "steps", text.plain),
        ("tokens", "tokens", text.count),
        ("flops", "FLOPs (estimated)", text.scientific),
    )
    return {label: write(facts[name]) for name, label, write in rows if facts.get(name) is not None}
