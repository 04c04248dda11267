"""Sizes have the parameters that are published, counted from the real architecture."""

from __future__ import annotations

import pytest
import torch
from transformers import EuroBertConfig, EuroBertModel

from mlmclm.models.sizes import SIZES, STUDY_VOCABULARY, parameters


@pytest.mark.parametrize("name", SIZES)
def test_the_closed_form_counts_the_parameters_of_the_transformers_model(name: str) -> None:
    size = SIZES[name]
    config = EuroBertConfig(
        vocab_size=1000, hidden_size=size.hidden, intermediate_size=size.intermediate, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.key_value_heads, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = EuroBertModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters(size, 1000)


@pytest.mark.parametrize(("name", "published"), [("210m", 212e6), ("610m", 608e6), ("1b", 1.19e9)])
def test_the_study_s_sizes_have_the_published_number_of_parameters(name: str, published: float) -> None:
    assert parameters(SIZES[name], STUDY_VOCABULARY) == pytest.approx(published, rel=0.005)
