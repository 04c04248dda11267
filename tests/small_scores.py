"""Small files in the formats of other tools, for the tests of their readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write JSON Lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sample(document: int, acc: float, text: str = "", **others: Any) -> dict[str, Any]:
    """A line of lm-evaluation-harness 0.4.13's samples."""
    return {
        "doc_id": document,
        "doc": {"question": text or f"question {document}"},
        "target": "0",
        "arguments": [["question", " yes"], ["question", " no"]],
        "resps": [[[-1.0, False]], [[-2.0, False]]],
        "filtered_resps": [[-1.0, False], [-2.0, False]],
        "filter": "none",
        "metrics": ["acc", "acc_norm"],
        "doc_hash": f"hash of {text or document}",
        "prompt_hash": "p",
        "target_hash": "t",
        "acc": acc,
        "acc_norm": 1 - acc,
    } | others


def write_samples(folder: Path, task: str, values: Sequence[float], date: str = "2026-01-02T03-04-05.678") -> Path:
    return write_lines(folder / f"samples_{task}_{date}.jsonl", [sample(at, acc) for at, acc in enumerate(values)])


def write_mteb(folder: Path, tasks: Mapping[str, float], *, model: str = "", revision: str = "r1") -> Path:
    """Write the results of tasks as mteb does; the score of each is that of its one split and subset."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, score in tasks.items():
        subset = {"hf_subset": "default", "languages": ["eng-Latn"], "main_score": score, "ndcg_at_10": score / 2}
        about = {"dataset_revision": revision, "task_name": task, "mteb_version": "2.0", "evaluation_time": 3.0}
        (folder / f"{task}.json").write_text(json.dumps(about | {"scores": {"test": [subset]}}))
    if model:
        (folder / "model_meta.json").write_text(json.dumps({"name": model, "revision": "main"}))
    return folder


def write_run(
    root: Path,
    model: str,
    dataset: str,
    run: str,
    validation: float | None,
    test: Sequence[float] | None,
    family: str = "SC",
) -> Path:
    """Write a `results.json` of EncodEval."""
    parts: dict[str, Any] = {}
    if validation is not None:
        parts["validation"] = {"score": validation, "scores_i": [validation] * 3}
    if test is not None:
        parts["test"] = {"score": sum(test) / len(test), "scores_i": list(test)}
    file = root / "results" / model / family / dataset / run / "results.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(parts, indent=4))
    return file
