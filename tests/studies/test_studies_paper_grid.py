"""The published study's whole grid, and the shipped spaces that are taken from it, counted without the plan's own code."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from mlmclm.cli.main import main
from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.plans.suite import find_suite
from mlmclm.seeds import Seeds
from mlmclm.studies.study_file import load_study
from mlmclm.studies.study_sweep import study_space
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.space import Space, find_space

PAPER = Path(__file__).parents[2] / "examples" / "paper.yaml"
BASE = [f"{size}-{kind}-42k" for size in ("210m", "610m", "1b") for kind in ("clm", "mlm20", "mlm30", "mlm40", "mlm50")]
CLM_STEPS = {12: (0, 3, 6, 9, 12), 22: (0, 5, 11, 17, 22), 42: (10, 21, 32)}
"""Thousands of steps in all -> those with CLM; at 42, none and all are base models."""
SETS = ["sst2", "mnli", "qqp", "conll2003", "ontonotes", "uner", "squad", "squad_v2", "record", "msmarco", "nq", "mldr"]
RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)


def biphasic(budget: int, clm: int) -> str:
    if clm in (0, budget):
        return f"610m-{'clm' if clm else 'mlm40'}-{budget}k"
    return f"610m-clm-{clm}k-mlm40-{budget}k"


def evaluated() -> list[str]:
    """The first version's 30 models and 12 intermediate checkpoints."""
    two_stage = [biphasic(budget, clm) for budget, steps in CLM_STEPS.items() for clm in steps]
    continued = [f"610m-{first}-dec42k-mlm40-64k" for first in ("clm", "mlm40")]
    steps = (1000, 2000, 5000, 10000, 20000, 40000)
    checkpoints = [f"610m-{kind}-42k-{step}" for kind in ("clm", "mlm40") for step in steps]
    assert (len(BASE + two_stage + continued), len(checkpoints)) == (30, 12)
    return BASE + two_stage + continued + checkpoints


def keys(space: Space, models: list[str]) -> Counter[tuple[str, str, float]]:
    """How many cells there are of each model, task and rate, each key counted once."""
    data = {task: f"data of {task}" for task in space.tasks}
    cells = expand(space, [SweepModel(name, Path(name), f"weights of {name}") for name in models], data)
    return Counter((cell.model, cell.task, cell.learning_rate) for cell in cells)


def test_the_example_is_the_study_s_15120_cells() -> None:
    study = load_study(PAPER)
    assert sorted(study.models) == sorted(evaluated())
    found = keys(study_space(study), list(study.models))
    assert found == Counter(dict.fromkeys(itertools.product(evaluated(), SETS, RATES), 5))
    assert found.total() == 42 * 12 * 6 * 5 == 15_120


def test_its_dry_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        HubRepository, "commit", lambda _: "0" * 40
    )  # of the tokenizer, for which the Hub cannot be asked
    corpus = tmp_path / "data" / load_study(PAPER).source  # stands in for the Hub's, which cannot be asked here
    corpus.mkdir(parents=True)
    (corpus / "train.txt").write_text("Some text.")
    with pytest.raises(SystemExit) as ended:
        main(["study", str(PAPER), "--dry-run", "--json", "--store", str(tmp_path), "--data", str(tmp_path / "data")])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert (found["cells"], found["cells_to_compute"]) == (15_120, 15_120)
    assert (found["tasks"], found["learning_rates"], found["seeds"]) == (SETS, list(RATES), [0, 1, 2, 3, 4])


def test_it_is_the_suite_without_what_the_fourth_version_added() -> None:
    late = {f"610m-clm-40k-mlm{ratio}-42k" for ratio in (20, 30, 40, 50)} | {
        f"610m-{first}-dec42k-mlm40-{steps}k" for first in ("clm", "mlm40") for steps in (44, 54)
    }
    suite = find_suite("paper")
    assert set(map(str, suite.parsed)) - set(load_study(PAPER).models) == late
    assert suite.recipe is not None and suite.recipe.rewarmup_steps == load_study(PAPER).recipe.rewarmup_steps == 0


def test_the_how_to_s_grid_has_its_rates_and_rule_and_shares_cells_with_the_paper_s() -> None:
    skill, paper = find_space("skill"), find_space("paper")
    assert (skill.learning_rates, skill.seeds, skill.rule) == (
        (1e-5, 3e-5, 5e-5, 1e-4, 3e-4),
        (0, 1, 2, 3, 4),
        "per_seed",
    )
    assert (list(skill.tasks), skill.cells_a_model) == (SETS, 12 * 5 * 5)
    assert {task: skill.protocol_for(task) for task in SETS} == {task: paper.protocol_for(task) for task in SETS}


def test_the_grid_of_variance_varies_each_stream_with_the_others_held() -> None:
    space = find_space("variance")
    seeds = [Seeds.of(seed) for seed in space.seeds]
    assert len(set(seeds)) == len(seeds) == 4 * 4 * 2
    for stream, count in (("head", 4), ("order", 4), ("dropout", 2)):
        others = Counter(
            tuple(getattr(each, name) for name in ("head", "order", "dropout") if name != stream) for each in seeds
        )
        assert set(others.values()) == {count}
    assert (len(space.learning_rates), space.cells_a_model) == (1, 4 * 32)
