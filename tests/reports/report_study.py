"""Facts of a made-up study, to go with `analysis_study.synthetic_results`."""

from __future__ import annotations

import math

from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts

MODELS = {"2m-clm-600": 0.66, "2m-mlm40-600": 0.70, "2m-clm-150-mlm40-600": 0.715, "2m-untrained": 0.52}


def facts() -> StudyFacts:
    """A quickstart-like study of the models above."""
    plans = {
        "2m-clm-600": ("CLM, steps 0 to 600",),
        "2m-mlm40-600": ("MLM with 40 % masked, steps 0 to 600",),
        "2m-clm-150-mlm40-600": ("CLM, steps 0 to 150, no decay", "MLM with 40 % masked, steps 150 to 600"),
        "2m-untrained": (),
    }
    curve = tuple((step, 3.5 + 6.2 * math.exp(-step / 140)) for step in range(0, 601, 5))
    models = tuple(
        ModelFacts(
            name,
            "pretrained" if stages else "untrained",
            description="Causal, then masked."
            if len(stages) > 1
            else ""
            if stages
            else "The same architecture as it is initialised.",
            stages=stages,
            parameters=2_130_000,
            steps=600 if stages else 0,
            tokens=4_915_200 if stages else 0,
            flops=6.3e13 if stages else None,
            validation_loss=3.61 + 0.1 * number if stages else None,
            curve=tuple((step, loss + 0.12 * number) for step, loss in curve) if stages else (),
            validation_curve=((150, 5.4 + 0.1 * number), (300, 4.4), (450, 3.9), (600, 3.61 + 0.1 * number))
            if stages
            else (),
            switches=(150,) if len(stages) > 1 else (),
        )
        for number, (name, stages) in enumerate(plans.items())
    )
    sizes = {"train": 8000, "validation": 500, "test": 500}
    tasks = (
        TaskFacts("pydocs-kind", "Kind of definition", "sequence-classification", "accuracy", sizes, "pydocs"),
        TaskFacts("pydocs-fields", "Parameters and types", "token-classification", "f1", sizes, "pydocs"),
        TaskFacts("pydocs-qa", "What does parameter x do?", "question-answering", "f1", sizes, "pydocs"),
        TaskFacts("pydocs-retrieval", "Summary to docstring", "retrieval", "ndcg_at_10", sizes, "pydocs"),
    )
    return StudyFacts(
        name="quickstart",
        command="mlmclm study quickstart",
        models=models,
        tasks=tasks,
        corpus={"source": "pydocs", "documents": 81_234, "tokens": 11_234_567, "vocabulary": 8192},
        recipe={"peak learning rate": 5e-4, "warm-up steps": 60, "decay steps": 60, "weight decay": 0.1, "bf16": True},
        protocol={"batch": 32, "steps": 150, "warm-up": "10 %", "schedule": "linear decay", "weight decay": 0.1},
        provenance={"Computed": "2026-01-02 03:04 to 2026-01-03 04:05 UTC", "Corpus": "0123abcd"},
    )
