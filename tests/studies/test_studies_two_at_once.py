"""Two studies at once on one store: what they share is computed once, and both end well."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from mlmclm.pretraining.states import read_metrics
from small_study import start, write_study

STEPS = 80


@pytest.mark.slow
def test_two_studies_that_start_at_once_train_their_trunk_and_compute_their_cells_once(tmp_path: Path) -> None:
    one = write_study(tmp_path, name="one", models=["1m-untrained", f"1m-clm-{STEPS}"])
    study = yaml.safe_load(one.read_text())
    study["recipe"]["workers"] = 1
    one.write_text(yaml.safe_dump(study))
    two = tmp_path / "two.yaml"
    two.write_text(yaml.safe_dump(study | {"name": "two"}))
    store = tmp_path / "store"
    processes = [
        start("study", file, "--data", tmp_path / "data", "--store", store, home=tmp_path) for file in (one, two)
    ]
    try:
        ended = [process.communicate(timeout=1500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    said = "".join(errors for _, errors in ended)

    (state,) = store.glob("states/*/metrics.jsonl")
    trained = Counter(row["step"] for row in read_metrics(state) if "loss" in row)
    assert trained == Counter(range(1, STEPS + 1)), "each step once"
    assert len(re.findall(r"clm 0-80: waiting for process \d+ on .*, which trains it", said)) == 1
    assert said.count("another process has trained it") == 1

    cells = [json.loads(path.read_text()) for path in store.glob("cells/*/*.json")]
    assert len(cells) == 2 * 2 * 2 * 2
    # The last line of each sweep says how many cells there were, and how many of them the other one computed.
    last = [re.findall(r"fine-tuning: (\d+)/\d+ cells(.*)", errors)[-1] for _, errors in ended]
    elsewhere = [int((re.findall(r"(\d+) computed by other", rest) or [0])[0]) for _, rest in last]
    assert [int(count) for count, _ in last] == [len(cells)] * 2
    print(f"computed by one study and the other: {[len(cells) - count for count in elsewhere]} of {len(cells)} cells")
    assert sum(len(cells) - count for count in elsewhere) == len(cells), "each cell once"
    assert list((store / "claims").iterdir()) == []
    reports = [(store / "studies" / name / "report.html").is_file() for name in ("one", "two")]
    assert reports == [True, True]
