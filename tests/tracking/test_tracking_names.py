"""What a metric is called here is a name that MLflow takes."""

from __future__ import annotations

import re

from mlmclm.tasks.declaration import FAMILIES
from mlmclm.tracking.views import group_record


def test_every_metric_of_every_family_gets_a_name_that_mlflow_accepts() -> None:
    names = {name for family in FAMILIES.values() for name in family.metrics}
    record = group_record("study", "model", "task", metrics={f"test_{name}": 0.5 for name in names})
    assert len(record.metrics) == len(names)
    for name, *_ in record.metrics:
        assert re.fullmatch(r"[\w\-. :/]+", name), name
