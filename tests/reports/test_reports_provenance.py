"""Where a report's numbers come from, read in what the store holds."""

from __future__ import annotations

from typing import Any

from mlmclm.reports.provenance import ComputedWork, cell_work, provenance_facts, stage_work

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cell(**cost: Any) -> dict[str, Any]:
    usual = {"seconds": 30.0, "worker": "one/17", "finished": "2026-03-01T12:00:30+00:00"}
    return {"cost": usual | cost}


def made_with(torch: str) -> dict[str, Any]:
    return {"device": "A processor", "versions": {"mlmclm": "0.1", "torch": torch}, "commit": COMMIT}


def test_dates_cost_hardware_and_software_are_those_of_the_results() -> None:
    system = {
        "processor": "A processor",
        "host": "two",
        "device": "cpu",
        "workers": 2,
        "gpus": [],
        "versions": {"torch": "2.1"},
    }
    rows = [{"step": 1, "time": 1_772_366_400.0, "step_seconds": 600.0}, {"step": 2, "time": 1_772_370_000.0, "step_seconds": 3600.0},
            {"step": 2, "time": 1_772_370_060.0, "validation_loss": 3.0}]  # fmt: skip
    stage = stage_work(rows, system)
    assert stage is not None
    results = [
        cell(**made_with("2.1")),
        cell(**made_with("2.0"), finished="2026-03-02T00:00:00+02:00", worker="three/1"),
    ]
    found = provenance_facts(
        [stage], list(map(cell_work, results)), corpus="c0ffee", tasks={"sst2": "abc", "rte": "def"}
    )
    assert found == {
        # The stage's first step began 600 s before it was noted at 12:00.
        "Computed": "2026-03-01 11:50 to 2026-03-01 22:00 UTC",
        "Pretraining": "1 stage, 2.3 worker hours, on A processor",
        "Fine-tuning": "2 cells, 1 worker minute, on 2 machines: A processor",
        "Software": "mlmclm 0.1, torch 2.0 and 2.1, mlmclm's commit 0123456789ab",
        "Corpus": "c0ffee",
        "Task data": "sst2 abc, rte def",
    }


def test_a_gpu_is_named_and_what_earlier_versions_did_not_record_is_said() -> None:
    system = {"processor": "A processor", "host": "two", "device": "cuda:0", "workers": 8, "gpus": ["A GPU"] * 8}
    stage = stage_work([{"step": 1, "time": 10.0, "step_seconds": 1.0}], system)
    assert stage == ComputedWork(9.0, 10.0, 1.0, workers=8, device="A GPU")
    found = provenance_facts([], [cell_work(cell()), cell_work(cell(device="A GPU"))], corpus="c", tasks={})
    assert found["Fine-tuning"] == "2 cells, 1 worker minute, on 1 machine: A GPU (1) and unrecorded hardware (1)"
    assert found["Software"] == "versions were not recorded"


def test_changed_files_are_told_behind_the_commit_and_nothing_computed_is_no_date() -> None:
    assert provenance_facts([], [cell_work(cell(commit=f"{COMMIT}+"))], corpus="c", tasks={})["Software"] == (
        "mlmclm's commit 0123456789ab+"
    )
    assert provenance_facts([], [], corpus="c", tasks={"a": "b"}) == {"Corpus": "c", "Task data": "a b"}
    assert stage_work([], {}) is None
