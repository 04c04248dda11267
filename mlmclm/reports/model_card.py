"""The model card (README.md) in a model's Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mlmclm.reports import text

FAMILIES = {
    "eurobert": ("EuroBERT", "Llama"),
    "modernbert": ("ModernBERT", "ModernBERT"),
    "bert": ("BERT", "BERT"),
    "roberta": ("RoBERTa", "RoBERTa"),
    "qwen2": ("Qwen2", "Qwen2"),
    "qwen3": ("Qwen3", "Qwen3"),
}
"""Names of the encoder and the decoder, by transformers' name of the architecture."""
UNMASKED = ("qwen2", "qwen3")
"""Architectures for which transformers has no masked language model.

Their encoder is the causal model with `is_causal` set to false.
"""

HUB_TASKS = {"sequence-classification": "text-classification", "sequence-regression": "sentence-similarity"}
"""The Hub's names of task families, where they differ from ours."""


def model_card(facts: Mapping[str, Any]) -> str:
    """Return the card as Markdown with YAML front matter; a pure function of the facts.

    Args:
        facts: `name` is required; of the others, what is absent, empty or None is left out of the card:
            objective: of the last phase, such as "clm" or "mlm40"; None for an untrained model. causal: whether it is
                causal, so that `decoder/` holds the same weights as a decoder.
            architecture: a key of `FAMILIES`; "eurobert" by default.
            initial: the model from which this one continues, if any. base_model: its name on the Hub, if it has one.
            description: one paragraph. stages: texts, one per phase of the plan. size: the name of the size.
            recipe, corpus: label to value, in display order; underscores are shown as spaces.
            curve: training loss as (step, nats per predicted token) pairs. validation_loss: at the end, in nats.
            parameters, steps, tokens, flops: numbers.
            shape: label to value of the architecture. licence, citation: texts; the citation is BibTeX. datasets: names on
                the Hub. siblings: names of models of the same study.
            repository: OWNER/NAME, if the card is that of a repository with revisions, which is either a decoder or an
                encoder (`decoder`). revision: its tag; None for `main`. revisions, missing: tags of all revisions.
            scores: the model's rows of the report's `best.csv`: test scores after fine-tuning.
            languages: ISO codes. tags: further tags. command: the command that reproduces the model.

    Raises:
        ValueError: there is no name.
    """
    if not facts.get("name"):
        raise ValueError("model card: no name in the facts.")
    parts = [_front(facts), f"# {facts['name']}", _introduction(facts)]
    parts += _section("Plan", _plan(facts.get("stages") or ()))
    parts += _section("Architecture", _table(facts.get("shape") or {}))
    unmasked = facts.get("architecture") in UNMASKED
    if facts.get("repository"):
        parts += _section("Load", _load_revision(facts, unmasked))
        parts += _section("Revisions", _revisions(facts))
    else:
        parts += _section("Load", _load(facts, unmasked))
    parts += _section("Recipe", _table(facts.get("recipe") or {}))
    parts += _section("Data", _table(facts.get("corpus") or {}))
    parts += _section("Loss", _table(_losses(facts)))
    parts += _section("Scores after fine-tuning", _table(_scores(facts.get("scores") or ())))
    parts += _section("Cost", _table(_cost(facts)))
    if facts.get("siblings"):
        parts += _section("Related models", _siblings(facts["siblings"]))
    if facts.get("citation"):
        parts += _section("Citation", _code("bibtex", [str(facts["citation"]).strip()]))
    if facts.get("command"):
        parts += _section("Make it again", _code("bash", [str(facts["command"])]))
    return "\n\n".join(parts) + "\n"


def _family(facts: Mapping[str, Any]) -> tuple[str, str]:
    return FAMILIES[facts.get("architecture") or "eurobert"]


def _front(facts: Mapping[str, Any]) -> str:
    fields: dict[str, Any] = {}
    if facts.get("languages"):
        fields["language"] = list(facts["languages"])
    if facts.get("licence"):
        fields["license"] = facts["licence"]
    if facts.get("datasets"):
        fields["datasets"] = list(facts["datasets"])
    fields["library_name"] = "transformers"
    objective, decoder = facts.get("objective"), facts.get("decoder")
    if objective:
        causal = "feature-extraction" if decoder is False else "text-generation"
        fields["pipeline_tag"] = causal if facts.get("causal") else "fill-mask"
    family = _family(facts)[1 if decoder else 0].lower()
    if facts.get("base_model"):
        fields["base_model"] = facts["base_model"]
    kind = objective or ("untrained" if not facts.get("initial") else None)
    fields["tags"] = ["mlmclm", family, _form(facts), *([kind] if kind else []), *(facts.get("tags") or ())]
    if facts.get("scores"):
        fields["model-index"] = _model_index(str(facts["name"]), facts["scores"])
    # No licence by default: it depends on the licence of the corpus, which only the user knows.
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _introduction(facts: Mapping[str, Any]) -> str:
    if facts.get("description"):
        return str(facts["description"])
    size = f" of size {facts['size']}" if facts.get("size") else ""
    name = _family(facts)[1 if facts.get("decoder") else 0]
    if facts.get("initial"):
        done = "continued by the plan below with mlmclm" if facts.get("objective") else "not trained any further"
        return f"A {name} text {_form(facts)}{size} with the weights of {facts['initial']}, {done}."
    if not facts.get("objective"):
        return f"A {name} text {_form(facts)}{size} as it is initialised: untrained, a baseline to compare with."
    return f"A {name} text {_form(facts)}{size}, pretrained by the plan below with mlmclm."


def _form(facts: Mapping[str, Any]) -> str:
    return "decoder" if facts.get("decoder") else "encoder"


def _plan(stages: Sequence[str]) -> str:
    if not stages:
        return ""
    return (
        f"{_numbered(stages)}\n\nThe name is the plan: the size, then each phase's objective with the number of steps, from the "
        "beginning on, at which it ends; last the step, if the weights are earlier ones."
    )


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _numbered(items: Sequence[str]) -> str:
    return "\n".join(f"{number}. {_line(item)}" for number, item in enumerate(items, start=1))


def _load(facts: Mapping[str, Any], unmasked: bool) -> str:
    causal, decoder = bool(facts.get("causal")), _family(facts)[1]
    masked = "AutoModelForCausalLM" if unmasked else "AutoModelForMaskedLM"
    classes = sorted({"AutoModel", masked, "AutoTokenizer", *(["AutoModelForCausalLM"] if causal else [])})
    lines = [
        f"from transformers import {', '.join(classes)}",
        "",
        'folder = "path/to/this/folder"',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "encoder = AutoModel.from_pretrained(folder)",
        f"masked = {masked}.from_pretrained(folder)" + ("  # is_causal is false" if unmasked else ""),
    ]
    note = "No remote code is needed. Attention is bidirectional"
    if causal:
        lines.append('decoder = AutoModelForCausalLM.from_pretrained(folder + "/decoder")')
        lines.append('prompts = AutoTokenizer.from_pretrained(folder + "/decoder")')
        note += f"; `decoder/` holds the same weights as a {decoder} decoder with causal attention, as they were trained last"
        adds = f"the tokenizer {_adds(facts)}; `decoder/`'s {_adds(facts, decoder=True)}"
    else:
        adds = f"the tokenizer {_adds(facts)}"
    return f"{note}; {adds}, as in training.\n\n{_code('python', lines)}"


def _adds(facts: Mapping[str, Any], *, decoder: bool = False) -> str:
    """Return what a model's tokenizer adds to a text (`models/exported_tokenizer.py`)."""
    begins = facts.get("recipe", {}).get("rows") == "chunks"
    if decoder:
        return "begins a text with BOS" if begins else "adds nothing to a text"
    return "puts BOS before a text and EOS behind it" if begins else "ends a text with EOS and puts nothing in front"


def _load_revision(facts: Mapping[str, Any], unmasked: bool) -> str:
    """Return the note and the code for a repository with revisions; the code prints what the model makes of a text."""
    tag = f', revision="{facts["revision"]}"' if facts.get("revision") else ""
    if facts.get("decoder"):
        kind = "AutoModelForCausalLM"
        note = f"The tokenizer {_adds(facts, decoder=True)}, as in training."
        use = [
            'inputs = tokenizer("In the beginning", return_tensors="pt", return_token_type_ids=False)',
            "output = model.generate(**inputs, max_new_tokens=20)",
            "print(tokenizer.decode(output[0]))",
        ]
    else:
        mntp = str(facts.get("objective")).startswith("mntp")
        masked = bool(facts.get("objective")) and not facts.get("causal") and not unmasked
        kind = "AutoModelForMaskedLM" if masked else "AutoModel"
        note = f"Attention is bidirectional. The tokenizer {_adds(facts)}, as in training."
        if masked:
            use = [
                'inputs = tokenizer(f"The {tokenizer.mask_token} is here.", return_tensors="pt", return_token_type_ids=False)',
                "logits = model(**inputs).logits  # [1, tokens, vocabulary]",
                'hidden = inputs["input_ids"] == tokenizer.mask_token_id',
                *(["hidden = hidden.roll(-1)  # MNTP predicts a token one position earlier"] if mntp else []),
                "print(tokenizer.decode(logits[hidden].argmax(-1)))",
            ]
        else:
            use = [
                'inputs = tokenizer("A text.", return_tensors="pt", return_token_type_ids=False)',
                "print(model(**inputs).last_hidden_state.mean(dim=1).shape)  # a vector a text",
            ]
    lines = [
        f"from transformers import {', '.join(sorted([kind, 'AutoTokenizer']))}",
        "",
        f'name = "{facts["repository"]}"',
        f"model = {kind}.from_pretrained(name{tag})",
        f"tokenizer = AutoTokenizer.from_pretrained(name{tag})",
        *use,
    ]
    return f"No remote code is needed. {note}\n\n{_code('python', lines)}"


def _revisions(facts: Mapping[str, Any]) -> str:
    tags = list(facts.get("revisions") or ())
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


def _siblings(names: Sequence[str]) -> str:
    listed = "\n".join(f"- {_line(name)}" for name in names)
    return f"They have the same data, recipe and tokenizer, and other plans or sizes:\n\n{listed}"


def _scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the test score of each task, in points, with what it is."""
    return {
        str(row["task"]): f"{text.points(row['test_mean'])} {text.interval(row['test_low'], row['test_high'])} "
        f"({_what(row)}, at learning rate {row['learning_rates']})"
        for row in rows
    }


def _what(row: Mapping[str, Any]) -> str:
    chosen = "; the learning rate was chosen on these scores" if row.get("rule") == "on_test" else ""
    return f"{text.metric(row['metric'])}, mean of {text.plural(int(row['n']), 'seed')} and 95 % interval{chosen}"


def _model_index(name: str, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the scores in the form that the Hub shows beside the card."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    return eval_results_to_model_index(
        name,
        [
            EvalResult(
                task_type=HUB_TASKS.get(row["family"], row["family"]),
                dataset_type=row["task"],
                dataset_name=row["task"],
                dataset_split="test",
                metric_type=row["metric"],
                metric_value=row["test_mean"],
                metric_name=f"{_what(row)} {text.interval(row['test_low'], row['test_high'])}".rstrip(),
            )
            for row in rows
        ],
    )


def _losses(facts: Mapping[str, Any]) -> dict[str, str]:
    curve = facts.get("curve") or ()
    ends = {0: "first", len(curve) - 1: "last"} if curve else {}
    rows = {f"training, step {curve[place][0]:,} ({word})": text.loss(curve[place][1]) for place, word in ends.items()}
    if facts.get("validation_loss") is not None:
        rows["validation, at the end"] = text.loss(facts["validation_loss"])
    return {f"{label}, nats a predicted token": value for label, value in rows.items()}


def _cost(facts: Mapping[str, Any]) -> dict[str, str]:
    written = {
        "parameters": text.count,
        "steps": lambda value: f"{value:,}",
        "tokens": text.count,
        "flops": text.scientific,
    }
    labels = {"flops": "FLOPs (estimated)", "parameters": "parameters without LM head"}
    return {
        labels.get(name, name): write(facts[name]) for name, write in written.items() if facts.get(name) is not None
    }


def _table(values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    rows = [
        f"| {_line(str(label).replace('_', ' '))} | {_line(text.plain(value))} |" for label, value in values.items()
    ]
    return "\n".join(["| | |", "|---|---|", *rows])


def _line(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _code(language: str, lines: Sequence[str]) -> str:
    body = "\n".join(lines)
    fence = "```"
    # The fence must be longer than any in the text, so that the text cannot close it.
    while fence in body:
        fence += "`"
    return f"{fence}{language}\n{body}\n{fence}"
