"""Searches the learning rate of each model on one task of a search space, and stops the worse trials early (ASHA).

    python examples/asha.py quickstart pydocs-kind quickstart/1m-clm-1k quickstart/1m-mlm40-1k

The arguments are a search space, a task of it, and models. Each model has a search of its own, because ASHA compares all trials of
a search and would stop those of models and tasks with lower scores. Trials whose cells are in the store, such as those of the
quickstart, cost nothing. A trial that ASHA does not stop is filed there.
"""

from __future__ import annotations

import sys
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler

import mlmclm


def search(
    space: str,
    task: str,
    model: str,
    *,
    grace_period: int = 20,
    at_once: int | None = None,
    run: tune.RunConfig | None = None,
    **options: Any,
) -> tune.ResultGrid:
    """Search a model's learning rates on a task.

    `grace_period` is the training steps of a trial that ASHA stops first, and between reports; `at_once` the most trials that run at once.
    Options are those of `mlmclm.tune.param_space`.
    """
    return tune.Tuner(
        mlmclm.tune.Finetune,
        param_space=mlmclm.tune.param_space(space, [model], tasks=[task], report_every=grace_period, **options),
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            max_concurrent_trials=at_once,
            reuse_actors=True,
            trial_name_creator=mlmclm.tune.trial_name,
            # Beyond the longest training, since a trial that reaches `max_t` is stopped before its result is filed.
            scheduler=ASHAScheduler(time_attr="step", max_t=1_000_000, grace_period=grace_period, reduction_factor=2),
        ),
        run_config=run,
    ).fit()


if __name__ == "__main__":
    for model in sys.argv[3:]:
        trials = search(sys.argv[1], sys.argv[2], model).get_dataframe()
        # Only trials that ended by themselves say whether they were computed.
        columns = ["model", "task", "learning_rate", "seed", "step", "score", "computed"]
        print(trials.reindex(columns=columns).to_string())
