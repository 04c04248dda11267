"""Differences in how compared results were computed, and the sentences on them."""

from __future__ import annotations

from typing import Any

from analysis_study import synthetic_results

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.setups import setup_differences
from mlmclm.reports.advice import advise
from mlmclm.reports.cautions import cautions, setup_sentences

ALIKE = {"engine": "4", "protocol": {"batch_size": 16}, "cost": {"device": "A GPU", "backend": "cuda", "seconds": 1.0}}


def result(task: str = "t", **changes: Any) -> dict[str, Any]:
    return {"task": task, **ALIKE, **changes}


def said(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[str]:
    return setup_sentences(setup_differences({"a": a, "b": b}))


def test_results_that_were_computed_alike_differ_in_nothing() -> None:
    assert said([result(), result("u")], [result(), result("u")]) == []
    other_task = result("u", protocol={"batch_size": 8}, cost={"device": "Another", "backend": "cpu"})
    assert said([result(), other_task], [result(), other_task]) == [], "tasks may differ, if models do not"
    assert said([{"task": "t"}], [{"task": "t", "cost": None}]) == [], "nothing is said of what is not recorded"


def test_points_of_a_grid_are_not_compared_with_each_other() -> None:
    points = [result(setting=f"batch_size={size}", protocol={"batch_size": size}) for size in (8, 16)]
    assert said(points, points) == said(points, points[:1]) == []


def test_what_models_do_not_share_is_said_with_its_values_and_tasks() -> None:
    elsewhere = {"device": "Another", "backend": "cuda", "seconds": 1.0}
    (device,) = said([result()], [result(cost=elsewhere)])
    assert device.startswith("Not computed alike: the device is A GPU for a, Another for b on t.")
    (engine,) = said([result()], [result(engine="3")])
    assert "the engine is 4 for a, 3 for b on t" in engine
    (mixed,) = said(*[[result(), result(cost=elsewhere)]] * 2)
    assert mixed.startswith("Cells were computed with several devices (A GPU and Another) on t;")
    newer = {**ALIKE["cost"], "versions": {"torch": "2.14.1", "ray": "3"}}
    older = {**ALIKE["cost"], "versions": {"torch": "2.13.0", "ray": "2"}}
    (torch,) = said([result(cost=older)], [result(cost=newer)])
    assert torch.startswith("Not computed alike: the torch version is 2.13.0 for a, 2.14.1 for b on t.")
    settings = [result(task, protocol={"batch_size": 8}) for task in ("t", "u")]
    (protocol,) = said([result(), result("u")], settings)
    assert protocol.startswith("Fine-tuning differs: batch_size is 16 for a, 8 for b on t and u.")
    many = dict.fromkeys("bcdefg", 1)
    (listed,) = said([result(protocol=dict.fromkeys(many, 0))], [result(protocol=many)])
    assert listed.count(" is 0 for a, 1 for b") == 3 and "3 more settings" in listed


def test_what_only_some_sides_record_is_said() -> None:
    without = {"task": "t", "engine": "4", "protocol": {}, "cost": ALIKE["cost"]}
    assert said([result()], [without]) == ["Recorded for a only: batch_size. The others may differ in it."]
    (bare,) = said([{"task": "t"}], [result()])
    assert bare == "Recorded for b only: backend, device, engine and batch_size. The others may differ in these."
    three = {"a": [result()], "b": [result(protocol={"batch_size": 8})], "c": [without]}
    (protocol,) = setup_sentences(setup_differences(three))
    assert protocol.startswith("Fine-tuning differs: batch_size is 16 for a, 8 for b, not recorded for c on t.")


def test_the_report_says_of_a_study_which_models_were_computed_elsewhere() -> None:
    made = synthetic_results({"a": 0.8, "b": 0.6})
    for each in made:
        each["cost"] |= {"device": "Another" if each["model"] == "b" else "A GPU", "backend": "cuda"}
    found = analyse(made)
    assert [each.what for each in found.setups] == ["device"]
    assert any("the device is A GPU for a, Another for b" in caution for caution in cautions(found))
    assert "the device is A GPU for a, Another for b" in advise(found).rests_on[0]
    assert analyse(synthetic_results({"a": 0.8, "b": 0.6})).setups == ()
