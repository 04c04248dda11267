"""The card of a model's folder."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import yaml

from mlmclm.reports.model_card import eval_results, model_card, model_cards

FACTS: dict[str, Any] = {
    "name": "2m-clm-150-mlm40-600",
    "size": "2m",
    "objective": "mlm40",
    "causal": False,
    "stages": ["steps 0 to 150: causal (CLM)", "steps 150 to 600: masked at 40 % (MLM)"],
    "recipe": {"peak_learning_rate": 5e-4, "adam_betas": [0.9, 0.95], "precision": "fp32 | none"},
    "corpus": {"source": "pydocs", "documents": 81234},
    "curve": [(0, 9.01), (300, 5.0), (599, 3.7)],
    "validation_loss": 3.61,
    "parameters": 2_130_000,
    "steps": 600,
    "tokens": 4_915_200,
    "flops": 6.3e13,
    "languages": ["en"],
    "command": "mlmclm study quickstart",
}

SCORE = {
    "task": "sst2", "family": "sequence-classification", "metric": "accuracy", "learning_rates": "1e-3", "n": 3,
    "test_mean": 0.82, "score": 0.8125, "score_low": 0.79, "score_high": 0.83,
}  # fmt: skip


def front(card: str) -> dict[str, Any]:
    _, matter, _ = card.split("---\n", 2)
    value: dict[str, Any] = yaml.safe_load(matter)
    return value


def code(card: str) -> str:
    found = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert found
    ast.parse(found[1])
    return found[1]


@pytest.mark.parametrize("decoder", [False, True])
def test_a_card_of_a_model_with_rotary_positions_says_that_version_4_of_transformers_misreads_them(
    decoder: bool,
) -> None:
    for architecture, warned in (("eurobert", True), ("modernbert", True), ("qwen3", True), ("bert", False)):
        card = model_card(FACTS | {"architecture": architecture, "decoder": decoder})
        assert ("transformers 5" in card) is warned, architecture


def test_the_front_matter_is_what_the_hub_reads() -> None:
    matter = front(model_card(FACTS))
    assert matter["library_name"] == "transformers"
    assert matter["pipeline_tag"] == "fill-mask"
    assert matter["tags"] == ["mlmclm", "eurobert", "encoder", "mlm40"]
    assert "license" not in matter
    assert matter["language"] == ["en"]
    causal, given = {"objective": "clm", "causal": True}, {"objective": None, "initial": "owner/model"}
    for facts, tag in (
        (causal, "feature-extraction"), (causal | {"decoder": True}, "text-generation"), (given, "feature-extraction"),
        ({"objective": "mntp15", "predicts_one_earlier": True}, "feature-extraction"), ({"architecture": "qwen3"}, "feature-extraction"),
    ):  # fmt: skip
        assert front(model_card(FACTS | facts))["pipeline_tag"] == tag
    shown = {"licence": "mit", "datasets": ("a/b",), "citation": "@misc{a}\n", "siblings": ["2m-clm-600"]}
    matter = front(model_card(FACTS | shown))
    assert matter["license"] == "mit" and matter["datasets"] == ["a/b"]
    assert "```bibtex\n@misc{a}\n```" in model_card(FACTS | shown) and "- 2m-clm-600\n" in model_card(FACTS | shown)


@pytest.mark.parametrize(
    ("objective", "decoder", "pipeline", "kind"),
    [
        ("clm", True, "text-generation", "AutoModelForCausalLM"),
        ("clm", False, "feature-extraction", "AutoModel"),
        ("mlm40", False, "fill-mask", "AutoModelForMaskedLM"),
        (None, True, None, "AutoModelForCausalLM"),
        (None, False, None, "AutoModel"),
    ],
)
def test_the_card_of_a_revision_names_its_tag_and_one_class(
    objective: str | None, decoder: bool, pipeline: str | None, kind: str
) -> None:
    here = {"repository": "me/a", "revision": "step5", "revisions": ("step0", "step5", "step9"), "missing": ("step7",)}
    card = model_card(FACTS | here | {"objective": objective, "causal": objective == "clm", "decoder": decoder})
    assert front(card).get("pipeline_tag") == pipeline
    assert front(card)["tags"][2] == ("decoder" if decoder else "encoder")
    assert f'model = {kind}.from_pretrained(name, revision="step5")' in code(card)
    assert "`main` is `step9`" in card and "Not kept: step7." in card


def test_the_card_says_what_the_tokenizer_adds_and_where_mntp_predicts() -> None:
    revision = {"repository": "me/a", "revision": None, "revisions": ("step0",), "decoder": False}
    plain = model_card(FACTS | revision | {"objective": "mlm40"})
    assert "roll" not in code(plain) and "ends a text with EOS and puts nothing in front" in plain
    mntp = model_card(
        FACTS | revision | {"objective": "mntp15", "predicts_one_earlier": True, "recipe": {"rows": "chunks"}}
    )
    assert "hidden = hidden.roll(-1)" in code(mntp) and "puts BOS before a text and EOS behind it" in mntp


def test_an_encoder_and_its_decoder_have_a_card_each_which_names_the_other() -> None:
    causal = FACTS | {"objective": "clm", "causal": True, "recipe": {"rows": "chunks"}, "scores": [SCORE]}
    card, decoder_card = model_cards(causal, decoder=True)
    assert decoder_card is not None
    assert "`decoder/` has the same weights as a Llama decoder" in card and "AutoModelForCausalLM" not in code(card)
    assert "AutoModelForCausalLM.from_pretrained(name)" in code(decoder_card)
    assert "begins a text with BOS" in decoder_card and "A Llama text decoder" in decoder_card
    assert "| sst2 |" in card and "| sst2 |" not in decoder_card and "model-index" not in front(decoder_card)
    card, decoder_card = model_cards(causal, decoder=True, repositories=("me/a", "me/a-encoder"))
    assert decoder_card is not None
    assert 'name = "me/a-encoder"' in code(card) and "`me/a` has the same weights as a Llama decoder" in card
    assert (
        'name = "me/a"' in code(decoder_card)
        and "`me/a-encoder` has the same weights as a EuroBERT encoder" in decoder_card
    )
    assert "## Revisions" not in card + decoder_card
    masked, nothing = model_cards(FACTS, decoder=False)
    assert nothing is None and "has the same weights" not in masked


def test_the_card_says_what_the_model_cost_and_what_it_learnt() -> None:
    card = model_card(FACTS)
    for line in (
        "| tokens | 4.92 M |",
        "| FLOPs (estimated) | 6.30 × 10¹³ |",
        "| validation, at the end, nats per predicted token | 3.610 |",
        "| training, step 0 (first), nats per predicted token | 9.010 |",
        "| training, step 599 (last), nats per predicted token | 3.700 |",
        "1. steps 0 to 150: causal (CLM)",
        "| adam betas | 0.9, 0.95 |",
        "| precision | fp32 \\| none |",
        "mlmclm study quickstart",
    ):
        assert line in card


def test_an_untrained_model_is_called_so_and_promises_nothing() -> None:
    empty = {"stages": [], "curve": [], "validation_loss": None, "flops": 0, "steps": 0, "tokens": 0}
    card = model_card(FACTS | {"objective": None} | empty)
    assert "untrained, a baseline" in card
    assert "pipeline_tag" not in front(card) and "untrained" in front(card)["tags"]
    assert "## Plan" not in card and "## Loss" not in card


def test_the_card_names_the_architecture() -> None:
    card, _ = model_cards(FACTS | {"architecture": "modernbert", "causal": True}, decoder=True)
    assert "A ModernBERT text encoder" in card and "as a ModernBERT decoder" in card
    assert "modernbert" in front(card)["tags"]


def test_the_card_of_a_continued_model_names_what_it_continues_from() -> None:
    given = {"initial": "owner/model", "base_model": "owner/model", "architecture": "bert"}
    card = model_card(FACTS | given)
    assert "A BERT text encoder of size 2m with the weights of owner/model, continued by the plan below" in card
    assert front(card)["base_model"] == "owner/model"
    card = model_card(FACTS | {"objective": None, "initial": "folder"})
    assert "with the weights of folder, not trained any further" in card
    assert "base_model" not in front(card) and "untrained" not in front(card)["tags"]
    masked = model_card(FACTS | {"architecture": "qwen3"})
    assert "AutoModelForMaskedLM" not in masked and "AutoModelForCausalLM.from_pretrained(name)" in code(masked)


def test_the_card_is_the_same_every_time_and_leaves_out_what_is_unknown() -> None:
    assert model_card(FACTS) == model_card(dict(FACTS))
    bare = model_card({"name": "m"})
    assert "## Cost" not in bare and "## Data" not in bare and "## Load" in bare
    assert bare.endswith("\n") and "\n\n\n" not in bare


def test_a_card_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no name"):
        model_card({"objective": "mlm40"})


def test_scores_are_a_table_and_what_the_hub_reads_as_results() -> None:
    from huggingface_hub import ModelCardData, parse_eval_result_entries

    row = SCORE
    card = model_card(FACTS | {"scores": [row, row | {"task": "sick_relatedness", "family": "sequence-regression"}]})
    first, second = ModelCardData(**front(card)).eval_results or []
    assert (first.task_type, first.dataset_type, first.metric_type) == ("text-classification", "sst2", "accuracy")
    assert first.metric_value == 0.8125
    assert "3 seeds" in (first.metric_name or "") and "82.00 [79.00, 83.00] points of 100" in (first.metric_name or "")
    assert second.task_type == "sentence-similarity"
    assert (
        "| sst2 | 81.25 [79.00, 83.00] points of 100 (accuracy with 95 % interval, of the chosen runs that learn; plain mean of 3 seeds, 82.00, at"
        in card
    )
    assert "model-index" not in front(model_card(FACTS))
    assert eval_results([row]) == "", "a task that is not on the Hub has no data set there"
    data = {"path": "stanfordnlp/sst2", "revision": "c0ffee", "config_name": "default"}
    on_hub = row | {"data": data}
    (first,) = ModelCardData(**front(model_card(FACTS | {"scores": [on_hub]}))).eval_results or []
    assert (first.dataset_type, first.dataset_config, first.dataset_revision) == tuple(
        data[k] for k in ("path", "config_name", "revision")
    )
    (entry,) = parse_eval_result_entries(yaml.safe_load(eval_results([row, on_hub])))
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("stanfordnlp/sst2", "default", "c0ffee")
    assert entry.value == 0.8125 and "3 seeds" in (entry.notes or "")
    assert "chosen on" not in card and "at learning rate 1e-3)" in card
    assert "at learning rate 1e-3, epochs 3)" in model_card(FACTS | {"scores": [row | {"setting": "epochs 3"}]})
    assert "the learning rate was chosen on these scores" in model_card(FACTS | {"scores": [row | {"rule": "on_test"}]})
