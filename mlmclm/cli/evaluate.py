"""`mlmclm evaluate`: zero-shot tasks, for decoders and encoders alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table


def evaluate(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL...",
            help="Folders, names in a study of the store (NAME or STUDY/NAME), or names on the Hub (OWNER/NAME).",
        ),
    ],
    task: Annotated[
        list[str] | None,
        Option(
            metavar="NAME|FILE",
            help="A task of lm-evaluation-harness, or a YAML file in its format; may be given several times.",
        ),
    ] = None,
    winogender: Annotated[
        Path | None,
        Option(
            metavar="FOLDER", help="Also evaluate Winogender (pronouns by occupation), from this folder with its files."
        ),
    ] = None,
    winogender_rule: Annotated[
        str,
        Option(
            metavar="mass|published",
            help="How an answer is read: by all probability, or by the published script's rule.",
        ),
    ] = "mass",
    mteb: Annotated[
        list[str] | None,
        Option(
            metavar="NAME|FOLDER",
            help="Also evaluate a task or benchmark of MTEB, or a folder with queries, corpus and qrels; for sentence encoders.",
        ),
    ] = None,
    scoring: Annotated[
        str | None,
        Option(metavar="causal|masked|mntp", help="How tokens are predicted; by default as the model's folder says."),
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Evaluate on the first documents of each task only.")] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Evaluates models on zero-shot tasks, without training: the model scores each answer or writes one.

    Decoders are scored causally. Encoders are scored from left to right: each token at the first of three masks after the
    true text so far. The harness (lm-eval, in `mlmclm[evaluation]`) builds the prompts and computes the metrics.

    mteb runs its tasks on sentence-transformers folders, such as those that `mlmclm export --task` writes.

    Each result is computed once. It is a file in the store's evaluations/, named by a hash of everything that can change it.

    Example: mlmclm evaluate 1m-clm-1k 1m-mlm40-1k --task last_word.yaml
    """
    from mlmclm.sweeps.zero_shot import evaluate as evaluate_models

    evaluated = evaluate_models(
        models,
        tasks=task or (),
        winogender=winogender,
        winogender_rule=winogender_rule,
        mteb=mteb or (),
        scoring=scoring,
        limit=limit,
        check=False,
        store=store,
        data=data,
    )
    if as_json:
        results = [{name: value for name, value in result.items() if name != "values"} for result in evaluated.results]
        print_json({"results": results})
    elif evaluated.results:
        _show(evaluated.results)
    if evaluated.failure is not None:
        raise evaluated.failure


def _show(results: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for result in results:
        for name, metric in result["metrics"].items():
            score, low, high = (metric[part] for part in ("score", "low", "high"))
            value = "–" if score is None else f"{score:.4f}" if abs(score) < 10_000 else f"{score:.3e}"
            interval = "" if low is None or high is None else f"[{low:.4f}, {high:.4f}]"
            examples = "" if metric["examples"] is None else f"{metric['examples']:,}"
            labels = (result[part] for part in ("model", "scoring", "task"))
            chance = "–" if metric["chance"] is None else f"{metric['chance']:.4f}"
            rows.append((*labels, name, value, interval, chance, examples, "" if result["computed"] else "(found)"))
    for model in dict.fromkeys(result["model"] for result in results):
        means = [
            result["metrics"][result["main"]]["score"]
            for result in results
            if (result["model"], result["scoring"]) == (model, "embedding")
        ]
        if len(means) > 1:
            mean = f"{sum(means) / len(means):.4f}" if None not in means else "–"
            rows.append((model, "embedding", f"mean of {len(means)} tasks", "main scores", mean, "", "", "", ""))
    columns = ("model", "scoring", "task", "metric", "score", "95 %", "chance", "examples", "")
    show_table(columns, rows, drop=("", "examples"))
    show("Scores are fractions of 1, but for perplexities.")
