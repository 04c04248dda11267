"""The model card (README.md) in a model's Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml

from mlmclm.reports import text

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
    sections = {
        "Plan": _plan(facts.get("stages")),
        "Architecture": _table(facts.get("shape")),
        "Load": _load_decoder(facts) if facts.get("decoder") else _load_encoder(facts),
        "Revisions": _revisions(facts),
        "Recipe": _table(facts.get("recipe")),
        "Data": _table(facts.get("corpus")),
        "Loss": _table(_losses(facts)),
        "Scores after fine-tuning": _table(_scores(facts.get("scores") or ())),
        "Cost": _table(_cost(facts)),
        "Related models": _siblings(facts.get("siblings")),
        "Citation": _code("bibtex", str(facts.get("citation") or "").strip()),
        "Make it again": _code("bash", facts.get("command") or ""),
    }
    parts = [_front(facts), f"# {facts['name']}", _introduction(facts)]
    parts += [part for title, body in sections.items() if body for part in (f"## {title}", body)]
    return "\n\n".join(parts) + "\n"


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


def _family(facts: Mapping[str, Any], *, decoder: bool | None = None) -> str:
    """Return the name of the model's architecture: that of the card's form, or if `decoder` is given, that of the decoder or of the encoder."""
    form = facts.get("decoder") if decoder is None else decoder
    return ARCHITECTURES[facts.get("architecture") or "eurobert"][1 if form else 0]


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


def _front(facts: Mapping[str, Any]) -> str:
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
        "tags": ["mlmclm", _family(facts).lower(), _form(facts), *filter(None, [kind]), *(facts.get("tags") or ())],
        "model-index": _model_index(str(facts["name"]), facts.get("scores") or ()),
    }
    filled = {name: value for name, value in fields.items() if value}
    return f"---\n{yaml.safe_dump(filled, sort_keys=False, allow_unicode=True)}---"


def _introduction(facts: Mapping[str, Any]) -> str:
    if facts.get("description"):
        return str(facts["description"])
    size = f" of size {facts['size']}" if facts.get("size") else ""
    model = f"A {_family(facts)} text {_form(facts)}{size}"
    if facts.get("initial"):
        done = "continued by the plan below with mlmclm" if facts.get("objective") else "not trained any further"
        return f"{model} with the weights of {facts['initial']}, {done}."
    if not facts.get("objective"):
        return f"{model} as it is initialised: untrained, a baseline to compare with."
    return f"{model}, pretrained by the plan below with mlmclm."


def _form(facts: Mapping[str, Any]) -> str:
    return "decoder" if facts.get("decoder") else "encoder"


def _plan(stages: Sequence[str] | None) -> str:
    if not stages:
        return ""
    listed = "\n".join(f"{number}. {_line(stage)}" for number, stage in enumerate(stages, start=1))
    return (
        f"{listed}\n\nThe name is the plan: the size, then each phase's objective with the number of steps, from the "
        "beginning on, at which it ends; last the step, if the weights are earlier ones."
    )


def _load_decoder(facts: Mapping[str, Any]) -> str:
    """Return how to load and use a decoder."""
    use = [
        'inputs = tokenizer("In the beginning", return_tensors="pt", return_token_type_ids=False)',
        "output = model.generate(**inputs, max_new_tokens=20)",
        "print(tokenizer.decode(output[0]))",
    ]
    note = f"The tokenizer {_adds(facts, decoder=True)}, as in training."
    if facts.get("other"):
        note += f" `{facts['other']}` has the same weights as a {_family(facts, decoder=False)} encoder."
    return f"{_needs(facts)} {note}\n\n{_loaded(facts, 'AutoModelForCausalLM', *use)}"


def _load_encoder(facts: Mapping[str, Any]) -> str:
    """Return how to load and use an encoder: the masked language model if it was trained as one, and vectors of texts."""
    notes = [f"{_needs(facts)} Attention is bidirectional. The tokenizer {_adds(facts)}, as in training."]
    if facts.get("other"):
        notes.append(
            f"`{facts['other']}` has the same weights as a {_family(facts, decoder=True)} decoder with causal attention, as they were "
            "trained last."
        )
    parts, predicts = [" ".join(notes)], _predicts(facts)
    if predicts is not None:
        early = predicts == "before"
        if early:
            parts[0] += (
                " MNTP predicts a token one position before the mask, where the `fill-mask` pipeline does not read."
            )
        kind = "AutoModelForCausalLM" if facts.get("architecture") in UNMASKED else "AutoModelForMaskedLM"
        parts.append(
            _loaded(
                facts,
                kind,
                'inputs = tokenizer(f"The {tokenizer.mask_token} is here.", return_tensors="pt", return_token_type_ids=False)',
                "logits = model(**inputs).logits  # [1, tokens, vocabulary]",
                'hidden = inputs["input_ids"] == tokenizer.mask_token_id',
                *(["hidden = hidden.roll(-1)  # one position earlier"] if early else []),
                "print(tokenizer.decode(logits[hidden].argmax(-1)))",
            )
        )
    vectors = _loaded(
        facts,
        "AutoModel",
        'texts = ["A text.", "Another text, which is longer."]',
        'inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt", return_token_type_ids=False)',
        "hidden = model(**inputs).last_hidden_state  # [texts, tokens, hidden]",
        'mask = inputs["attention_mask"].unsqueeze(-1)  # [texts, tokens, 1]',
        "vectors = (hidden * mask).sum(1) / mask.sum(1)",
        "print(vectors.shape)  # [texts, hidden]",
    )
    return "\n\n".join([*parts, "A vector for each text, the mean over its tokens:", vectors])


def _needs(facts: Mapping[str, Any]) -> str:
    """Return which version of transformers loads the model."""
    if facts.get("architecture") in WITHOUT_ROPE:
        return "No remote code is needed."
    return "Load it with transformers 5: version 4 ignores its RoPE base without a word. No remote code is needed."


def _loaded(facts: Mapping[str, Any], kind: str, *use: str) -> str:
    """Return code that loads the card's model as a class of transformers, and uses it."""
    tag = f', revision="{facts["revision"]}"' if facts.get("revision") else ""
    return _code(
        "python",
        f"from transformers import {', '.join(sorted([kind, 'AutoTokenizer']))}",
        "",
        f'name = "{facts.get("repository") or "path/to/this/folder"}"',
        f"model = {kind}.from_pretrained(name{tag})",
        f"tokenizer = AutoTokenizer.from_pretrained(name{tag})",
        *use,
    )


def _adds(facts: Mapping[str, Any], *, decoder: bool = False) -> str:
    """Return what a model's tokenizer adds to a text (`corpora/exported_tokenizer.py`)."""
    begins = facts.get("recipe", {}).get("rows") == "chunks"
    if decoder:
        return "begins a text with BOS" if begins else "adds nothing to a text"
    return "puts BOS before a text and EOS behind it" if begins else "ends a text with EOS and puts nothing in front"


def _revisions(facts: Mapping[str, Any]) -> str:
    tags = list(facts.get("revisions") or ())
    if not tags:
        return ""
    text = (
        f"This is the revision `{facts.get('revision') or 'main'}`. A tag `stepN` has the weights after N steps of training, and one that begins with the "
        f"name of a later phase those after N steps of that phase; `main` is `{tags[-1]}`. Tags: {', '.join(f'`{tag}`' for tag in tags)}."
    )
    if facts.get("missing"):
        text += f" Not kept: {', '.join(facts['missing'])}."
    return (
        f"{text}\n\nWhere the repository is a folder `models--OWNER--NAME`, give the folder that it is in as `cache_dir`, or in the "
        "environment variable HF_HUB_CACHE. A path in place of the name would load one revision whatever `revision` says."
    )


def _siblings(names: Sequence[str] | None) -> str:
    if not names:
        return ""
    listed = "\n".join(f"- {_line(name)}" for name in names)
    return f"They have the same data, recipe and tokenizer, and other plans or sizes:\n\n{listed}"


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


def _table(values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    rows = [
        f"| {_line(str(label).replace('_', ' '))} | {_line(text.plain(value))} |" for label, value in values.items()
    ]
    return "\n".join(["| | |", "|---|---|", *rows])


def _line(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _code(language: str, *lines: str) -> str:
    body = "\n".join(lines)
    if not body:
        return ""
    fence = "```"
    # The fence must be longer than any in the text, so that the text cannot close it.
    while fence in body:
        fence += "`"
    return f"{fence}{language}\n{body}\n{fence}"
