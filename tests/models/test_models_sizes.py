"""Sizes have the parameters that are published, counted from the real architecture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from mlmclm.models.architectures import ARCHITECTURES
from mlmclm.models.build import model_config
from mlmclm.models.sizes import SIZES, STUDY_VOCABULARY, parameters, training_flops
from small_models import small_tokenizer

ETTIN_VOCABULARY = 50_368


def model(name: str, vocabulary: int) -> PreTrainedModel:
    """On the meta device: shapes without weights."""
    config = model_config(name, small_tokenizer(), 64)
    config.vocab_size = vocabulary
    with torch.device("meta"):
        return ARCHITECTURES[SIZES[name].architecture].model(config)


@pytest.mark.parametrize("name", SIZES)
def test_the_closed_form_counts_the_parameters_of_the_transformers_model(name: str) -> None:
    counted = sum(parameter.numel() for parameter in model(name, 1000).model.parameters())
    assert counted == parameters(SIZES[name], 1000)


@pytest.mark.parametrize(("name", "published"), [("210m", 212e6), ("610m", 608e6), ("1b", 1.19e9)])
def test_the_study_s_sizes_have_the_published_number_of_parameters(name: str, published: float) -> None:
    assert parameters(SIZES[name], STUDY_VOCABULARY) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("ettin17m", 17e6), ("ettin32m", 32e6), ("ettin68m", 68e6),
        ("ettin150m", 149e6), ("ettin400m", 395e6), ("ettin1b", 1.03e9),
    ],
)  # fmt: skip
def test_ettin_s_sizes_have_the_published_number_of_parameters_with_their_head(name: str, published: float) -> None:
    whole = model(name, ETTIN_VOCABULARY)
    assert sum(parameter.numel() for parameter in whole.parameters()) == pytest.approx(published, rel=0.01)


def test_flops_of_one_step_equal_the_products_that_were_counted() -> None:
    size, length, vocabulary = SIZES["ettin17m"], 512, 1000
    weights = sum(
        p.numel() for n, p in model("ettin17m", vocabulary).model.layers.named_parameters() if "norm" not in n
    )
    head = model("ettin17m", vocabulary)
    weights_of_head = head.head.dense.weight.numel() + head.decoder.weight.numel()
    kinds = head.config.layer_types
    for causal in (False, True):
        keys = {"full_attention": length / 2 if causal else length, "sliding_attention": 64 if causal else 129}
        # a score and a weighted sum, each 2 FLOPs per unit and key, once forward and twice backward
        attention = sum(12 * size.hidden * keys[kind] for kind in kinds)
        expected = 10 * length * (6 * weights + attention) + 6 * 100 * weights_of_head
        found = training_flops(
            size, tokens=10 * length, labelled=100, length=length, vocabulary=vocabulary, causal=causal
        )
        assert found == expected


@pytest.mark.parametrize("causal", [False, True])
def test_attention_within_documents_is_counted_document_by_document(causal: bool) -> None:
    size, lengths = SIZES["ettin17m"], np.array([512, 3, 100, 1, 200, 720])
    common = {"labelled": 0, "vocabulary": 1000, "causal": causal}
    each = sum(training_flops(size, tokens=int(length), length=int(length), **common) for length in lengths)
    together = training_flops(size, tokens=int(lengths.sum()), length=1536, documents=lengths, **common)
    assert together == pytest.approx(each, rel=1e-6)
    twice = training_flops(size, tokens=2 * int(lengths.sum()), length=1536, documents=lengths, **common)
    assert twice == 2 * together, "some documents stand for all"
    assert together < training_flops(size, tokens=int(lengths.sum()), length=1536, **common)
