"""Parameters by which models are grouped in MLflow, as their names say them."""

from __future__ import annotations

import pytest

from mlmclm.plans.names import parse_name
from mlmclm.studies.study_tracking import given_parameters, named_parameters


@pytest.mark.parametrize(
    ("name", "objective", "ratio"),
    [
        ("1m-clm-600", "clm", ""),
        ("1m-mlm40-1k", "mlm", "0.4"),
        ("1m-clm-250-mlm5-1k", "clm+mlm", "0.05"),
        ("1m-clm-250-mlm5-1k-100", "clm", ""),
        ("1m-mlm40-250-mlm20-1k", "mlm", "0.2"),
        ("1m-mntp15-1k", "mntp", "0.15"),
        ("1m-untrained", "untrained", ""),
    ],
)
def test_a_models_name_says_objective_size_and_mask_ratio(name: str, objective: str, ratio: str) -> None:
    expected = {"objective": objective, "size": "1m", "mask_ratio": ratio, "replicate": "1"}
    assert named_parameters(parse_name(name)) == expected


@pytest.mark.parametrize(
    ("source", "objective", "size"),
    [
        ("folder/1m-mlm40-1k", "mlm", "1m"),
        ("study/1m-clm-250-mlm5-1k", "clm+mlm", "1m"),
        ("owner/1m-clm-600@main", "clm", "1m"),
        ("bert-base-uncased", "", ""),
    ],
)
def test_a_given_model_says_what_its_name_says_and_no_tokens(source: str, objective: str, size: str) -> None:
    found = given_parameters(source)
    assert (found["objective"], found["size"], found["tokens"], found["pretraining_data"]) == (objective, size, "", "")
