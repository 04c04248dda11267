"""Decisions about two models: the looks are kept, the next one is priced, and the verb's exit status says which it is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.looks import bounds
from mlmclm.analysis.results import Grid
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.reports.advice import advise
from mlmclm.reports.decision import FILE, decide
from mlmclm.reports.provenance import asked_for

TASKS = ("sst2", "rte")


def study(seeds: int, lead: float, missing: int = 0) -> tuple[Analysis, list[dict[str, Any]]]:
    """Two models at two rates on two tasks, whose runs vary by a point."""
    import random

    draw = random.Random(3)
    rows = []
    for seed in range(seeds):
        for model, level in (("base", 0.7), ("new", 0.7 + lead), ("third", 0.6)):
            for task in TASKS:
                for rate in (1e-4, 1e-3):
                    score = level + draw.gauss(0, 0.01)
                    rows.append(
                        {
                            "key": f"{model}{task}{rate}{seed}", "model": model, "task": task, "learning_rate": rate, "seed": seed,
                            "family": "sequence-classification", "metric": "accuracy", "status": "ok",
                            "scores": {"validation": {"accuracy": score}, "test": {"accuracy": score + draw.gauss(0, 0.003)}},
                            "cost": {"seconds": 3.0, "device": "a CPU"},
                        }
                    )  # fmt: skip
    rows = rows[missing:]
    grid = Grid(("base", "new", "third"), TASKS, (1e-4, 1e-3), tuple(range(seeds)))
    return analyse(rows, grid=grid), rows


def test_looks_are_kept_and_the_first_that_decides_stands(tmp_path: Path) -> None:
    basis = asked_for("mlmclm study s.yaml")
    first = decide(study(3, 0.002)[0], basis, "new", "base", folder=tmp_path)
    assert (first.decision, first.next, len(first.looks)) == ("undecided", 5, 1)
    assert first.bound == pytest.approx(bounds((3,), 9)[0])
    again = decide(study(3, 0.002)[0], basis, "new", "base", folder=tmp_path)
    assert again.looks == first.looks, "the same seeds are the same look"
    clear = decide(study(5, 0.1)[0], basis, "new", "base", folder=tmp_path)
    assert (clear.decision, clear.next, [look.number for look in clear.looks]) == ("better", None, [3, 5])
    assert clear.bound == pytest.approx(bounds((3, 5), 9)[1])
    later = decide(study(7, -0.1)[0], basis, "new", "base", folder=tmp_path)
    assert later.decision == "better", "what was decided is not decided again"
    assert set(json.loads((tmp_path / FILE).read_text())) == {"new base"}
    with pytest.raises(
        UserError, match="--most 20: new and base were first looked at with 9, on which the bounds depend"
    ):
        decide(study(7, 0.1)[0], basis, "new", "base", most=20, folder=tmp_path)


def test_no_more_seeds_are_asked_for_where_the_test_sets_are_too_small() -> None:
    _, rows = study(3, 0.02)
    draws = np.random.default_rng(0)
    found = analyse(rows, folds=lambda _: 0.7 + 0.01 * draws.standard_normal(100))  # a jackknife's error of a tenth
    told = decide(found, asked_for("mlmclm study s.yaml").with_costs(rows), "new", "base")
    assert (told.decision, told.next, told.cells) == ("undecided", None, 0)
    assert "More seeds would hardly decide: the test sets are too small" in told.sentences[-1]
    answer = " ".join(advise(found, asked_for("mlmclm study s.yaml").with_costs(rows)).open)
    assert "No number of seeds would show" in answer, "which is what the advice says"


def test_at_the_last_number_of_seeds_undecided_is_not_better() -> None:
    found = decide(study(5, 0.0)[0], asked_for(""), "new", "base", most=5)
    assert found.decision == "not better" and found.next is None
    worse = decide(study(3, -0.1)[0], asked_for(""), "new", "base")
    assert worse.decision == "not better"


def test_the_next_look_is_priced_for_both_models_alone() -> None:
    analysis, rows = study(3, 0.002)
    found = decide(analysis, asked_for("mlmclm study s.yaml").with_costs(rows), "new", "base")
    assert (found.cells, found.seconds) == (2 * 2 * 2 * 2, 2 * 2 * 2 * 2 * 3.0)
    words = " ".join(found.sentences)
    assert "Next look: 5 seeds a rate, 16 more cells of both, about 1 worker minute on a CPU" in words
    assert "`seeds: [0, 1, 2, 3, 4]` into s.yaml" in words


def test_an_unfinished_study_is_no_look(tmp_path: Path) -> None:
    found = decide(study(3, 0.1, missing=1)[0], asked_for(""), "new", "base", folder=tmp_path)
    assert (found.decision, found.looks, found.next) == ("undecided", (), None)
    assert (
        "Not final: 1 of 24 cells have no result yet (1 of base on sst2). There is no look before they are run."
        in found.sentences
    )
    assert not (tmp_path / FILE).exists()
    with pytest.raises(UserError, match="decide new new: expected two different ones of base, new, third"):
        decide(study(3, 0.1)[0], asked_for(""), "new", "new")


@pytest.mark.parametrize(("lead", "code"), [(0.1, 0), (-0.1, 1), (0.001, 3)])
def test_the_verb_ends_with_the_decision(
    lead: float, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    analysis, rows = study(3, lead)
    facts = SimpleNamespace(basis=asked_for("mlmclm study s.yaml").with_costs(rows))
    published = SimpleNamespace(source="record/study.yaml")
    results = SimpleNamespace(analysis=analysis, facts=facts, record=published, model_of=lambda name, where: name)
    there = SimpleNamespace(results=lambda which, rule: results)
    monkeypatch.setattr("mlmclm.studies.api.open", lambda *_, **__: there)
    with pytest.raises(SystemExit) as ended:
        main(["decide", "new", "base", "--study", "s", "--json"])
    assert ended.value.code == code
    told = json.loads(capfd.readouterr().out)
    assert told["decision"] == {0: "better", 1: "not better", 3: "undecided"}[code]
    assert (told["next"], told["most"]) == (5 if code == 3 else None, 9)
