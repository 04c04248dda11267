"""Searches the learning rate of models on the tasks of a search space, and stops the worse trials early (ASHA).

    python examples/asha.py quickstart quickstart/1m-clm-1k quickstart/1m-mlm40-1k

The arguments are a search space and models. Trials whose cells are in the store, such as those of the quickstart, cost
nothing; those that end are filed there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

import mlmclm


def search(
    space: str,
    models: Sequence[str],
    *,
    steps: int = 160,
    at_once: int | None = None,
    run: tune.RunConfig | None = None,
    **options: Any,
) -> tune.ResultGrid:
    """Search each model's learning rates on each task.

    `steps` are those of the longest training, and `at_once` is the most trials that run at once. Options are those of `mlmclm.tune.param_space`.
    """
    return tune.Tuner(
        mlmclm.tune.Finetune,
        param_space=mlmclm.tune.param_space(space, models, report_every=steps // 8, **options),
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            max_concurrent_trials=at_once,
            reuse_actors=True,
            trial_name_creator=mlmclm.tune.trial_name,
            scheduler=ASHAScheduler(time_attr="step", max_t=steps, grace_period=steps // 8, reduction_factor=2),
        ),
        run_config=run,
    ).fit()


if __name__ == "__main__":
    found = search(sys.argv[1], sys.argv[2:]).get_dataframe()
    print(found[["model", "task", "learning_rate", "seed", "step", "score", "computed"]].to_string())
