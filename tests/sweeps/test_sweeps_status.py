"""How far a sweep is: said from the store's files alone, and nothing is changed by looking."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlmclm.cli import sweep
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Start, cell_key
from mlmclm.results.examples import to_parquet
from mlmclm.seeds import Seeds
from mlmclm.storage.checksums import sealed
from mlmclm.sweeps.cell_failures import failure_notes, record
from mlmclm.sweeps.manifest import listed_cells, read_manifest, write_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.status import RATE_SECONDS, SweepStatus, Watch, rate
from sweep_cells import make_cell, make_result

Run = Callable[..., tuple[int, str, str]]
CELLS = [make_cell(model, task, seed=seed) for model in ("a", "b") for task in ("sst2", "qnli") for seed in range(2)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a sweep `mine` of eight cells: two done, one diverged, one damaged, one failed, three missing."""
    store = tmp_path / "store"
    results_store = ResultsStore(store)
    write_manifest(store / "studies" / "mine", "mine", Planned(CELLS, waiting={"rte": 4}))
    for cell, status in zip(CELLS, ("ok", "ok", "diverged", "ok"), strict=False):
        result = make_result(cell, status=status)
        if status == "ok":
            results_store.write_examples(result, to_parquet(result, {"correct": np.array([0, 1])}, ()))
        results_store.write(result)
    results_store.path(cell_key(CELLS[3])).write_text('{"sch')
    record(results_store.folder, cell_key(CELLS[4]), "CUDA out of memory", kind="out of memory", node="node7")
    return store


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], store: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process: exit code, output, errors."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("mlmclm.progress.SECONDS_OF_SILENCE", 600.0)

    def call(*words: str | Path) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["sweep", *map(str, words), "--store", str(store)])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def look(store: Path) -> SweepStatus:
    return Watch(read_manifest("mine", store), ResultsStore(store)).look()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_manifest_lists_the_cells_with_their_keys_and_names(tmp_path: Path) -> None:
    streams = dataclasses.replace(make_cell(seed=0), seed=Seeds(0, 1, 2), setting="epochs 3")
    started = dataclasses.replace(make_cell(task="rte"), start=Start("f00", "mnli"))
    cells = [make_cell(learning_rate=3e-5), streams, started]
    write_manifest(tmp_path / "studies" / "x", "x", Planned(cells, waiting={"mnli": 3}))
    found = read_manifest("x", tmp_path)
    assert found.cells == listed_cells(cells)
    assert [cell.key for cell in found.cells] == list(map(cell_key, cells))
    assert found.cells[1].name == "a/sst2/lr1e-3/epochs3/h0-o1-d2"
    assert (found.cells[2].start, found.waiting) == ("f00", {"mnli": 3})


def test_a_sweep_that_is_not_there_is_named_with_the_nearest(store: Path) -> None:
    with pytest.raises(UserError, match=r"unknown study or sweep 'mien'. Did you mean 'mine'"):
        read_manifest("mien", store)
    (store / "studies" / "older").mkdir()
    with pytest.raises(UserError, match=r"none of its cells has been planned yet"):
        read_manifest("older", store)
    for content, reason in (("{}", "it has no checksum"), (json.dumps(sealed({})), "not the cells of a sweep")):
        (store / "studies" / "mine" / "cells.json").write_text(content)
        with pytest.raises(UserError, match=reason):
            read_manifest("mine", store)


def test_every_cell_has_one_state_and_looking_changes_nothing(store: Path) -> None:
    results_store = ResultsStore(store)
    before = files(store)
    with results_store.leases.attempt([results_store.lease(cell_key(CELLS[key])) for key in (4, 5)]):
        found = look(store)
        assert [state.status for state in found.states] == (
            ["ok", "ok", "diverged", "damaged", "running", "running", "missing", "missing"]
        )
        assert found.states[5].holder is not None and found.states[5].holder.process == os.getpid()
    found = look(store)
    assert [state.status for state in found.states][3:6] == ["damaged", "failed", "missing"]
    assert (found.done, found.total, found.complete) == (3, 12, False)
    assert found.by_pair()["a", "qnli"] == {"diverged": 1, "damaged": 1}
    assert [(state.cell.key, state.row()["node"]) for state in found.errors()] == (
        [(cell_key(CELLS[4]), "node7"), (cell_key(CELLS[3]), None)]
    )
    assert files(store) == before


def test_the_claim_of_a_dead_process_counts_for_nothing(store: Path) -> None:
    hold = (
        "import os, sys; from pathlib import Path; from mlmclm.sweeps.results_store import ResultsStore\n"
        "at = ResultsStore(Path(sys.argv[1])); held = at.leases.attempt([at.lease(sys.argv[2])]); held.__enter__(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", hold, store, cell_key(CELLS[6])], check=False)
    assert len(list((store / "claims").iterdir())) == 1
    assert look(store).counts["running"] == 0
    # Of another machine only renewals are known.
    lease = store / "claims" / f"cells-{cell_key(CELLS[7])}"
    lease.write_text('{"machine": "there", "host": "node7", "process": 12}')
    state = look(store).states[7]
    assert state.status == "running" and state.row()["node"] == "node7"
    os.utime(lease, (1, 1))
    assert look(store).states[7].status == "missing"


def test_results_that_come_and_go_are_seen_at_the_next_look(store: Path) -> None:
    watch = Watch(read_manifest("mine", store), ResultsStore(store))
    assert watch.look().done == 3
    ResultsStore(store).write(make_result(CELLS[4]))
    assert watch.look().states[4].status == "ok", "and its note of failure is gone"
    assert failure_notes(store / "cells") == {}
    ResultsStore(store).set_aside(cell_key(CELLS[0]))
    assert watch.look().states[0].status == "missing"


def test_the_rate_is_that_of_the_results_between_the_first_and_the_last_that_count() -> None:
    assert rate([]) is None and rate([5.0]) is None and rate([5.0, 5.0]) is None
    assert rate([10.0, 14.0, 12.0]) == 0.5
    assert rate([0.0, 1.0, 10.0, 12.0, 14.0], since=10.0) == 0.5
    late = 3 * RATE_SECONDS
    assert rate([0.0, 1.0, late, late + 10, late + 20]) == 0.1


def test_a_failure_is_counted_and_a_note_that_cannot_be_written_is_no_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for reason in ("first", "second"):
        record(tmp_path, "f00", reason, kind="crash", node="n")
    (tmp_path / "failed" / "f01.json").write_text("{")
    (found,) = failure_notes(tmp_path).values()
    assert (found.count, found.reason, found.kind, found.node) == (2, "second", "crash", "n")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "failed").write_text("in the way")
    record(tmp_path / "none", "f02", "third", kind="crash")
    assert "failures of cells cannot be noted" in capfd.readouterr().err


def test_a_result_is_set_aside_with_its_examples_as_often_as_it_is_asked_for(store: Path) -> None:
    results_store, key = ResultsStore(store), cell_key(CELLS[0])
    whole = [results_store.path(key).read_bytes(), results_store.examples_path(key).read_bytes()]
    folder = results_store.set_aside(key)
    assert [(folder / f"{key}.json").read_bytes(), (folder / f"{key}.parquet").read_bytes()] == whole
    assert results_store.find(key) is None and not results_store.examples_path(key).exists()
    with pytest.raises(UserError, match="there is none"):
        results_store.set_aside(key)
    results_store.write(make_result(CELLS[0]))
    with (
        results_store.leases.attempt([results_store.lease(key)]),
        pytest.raises(UserError, match=f"process {os.getpid()} on .* wait"),
    ):
        results_store.set_aside(key)
    assert results_store.set_aside(key) != folder
    assert len(list((store / "cells" / "set-aside").iterdir())) == 2


def test_status_prints_counts_by_model_and_task_and_what_failed(run: Run, store: Path) -> None:
    code, out, _ = run("status", "mine")
    assert code == 0
    assert out.startswith("sweep mine: 3 of 12 cells are done, 1 diverged, 1 failed, 1 damaged, 4 wait for the cells")
    assert "b/sst2/lr1e-3/s0 failed, 20" in out and "1 times: CUDA out of memory" in out
    code, out, _ = run("status", "mine", "--json")
    found = json.loads(out)
    assert found["pairs"][0] == {"model": "a", "task": "sst2", "ok": 2, "diverged": 0, "running": 0, "failed": 0,
                                 "damaged": 0, "missing": 0}  # fmt: skip
    assert (found["cells"], found["done"], found["errors"][0]["kind"]) == (12, 3, "out of memory")


def test_a_file_stands_for_the_name_in_it(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("name: mine\nmodels: [x]\nspace: glue\n")
    code, out, _ = run("status", file)
    assert code == 0 and out.startswith("sweep mine: 3 of 12")
    assert "no such file" in run("status", tmp_path / "none.yaml")[2]


def test_a_study_that_is_only_pretrained_is_said_to_have_no_planned_cells(run: Run, store: Path) -> None:
    (store / "studies" / "pretrained").mkdir(parents=True)
    code, _, errors = run("status", "pretrained")
    assert code == 2 and "none of its cells has been planned yet" in errors
    assert "not computed again" not in errors


@pytest.mark.parametrize("terminal", [False, True])
def test_following_ends_with_the_sweep(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    write_manifest(store / "studies" / "mine", "mine", Planned(CELLS[:6]))
    results_store, left = ResultsStore(store), iter(CELLS[3:6])
    monkeypatch.setattr(sweep, "SECONDS_BETWEEN_LOOKS", 0.0)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    looking = Watch.look

    def look_and_file(watch: Watch) -> SweepStatus:
        found = looking(watch)
        cell = next(left, None)
        if cell is not None:
            results_store.path(cell_key(cell)).unlink(missing_ok=True)
            results_store.write(make_result(cell))
        return found

    monkeypatch.setattr(Watch, "look", look_and_file)
    code, out, _ = run("status", "mine", "--follow")
    assert code == 0
    assert [f"{done} of 6 cells are done" in out for done in (3, 4, 5, 6)] == [True] * 4
    assert ("\x1b[" in out) == terminal
    if terminal:
        assert "1/2" in out and "\x1b[2J" not in out, "drawn in place, without clearing the screen"
    else:
        assert len(out.splitlines()) == 4


def test_cells_are_listed_and_filtered(run: Run) -> None:
    code, out, _ = run("cells", "mine", "--model", "a", "--task", "qnli", "--json")
    assert code == 0
    first, second = json.loads(out)
    assert (first["name"], first["status"], first["score"]) == ("a/qnli/lr1e-3/s0", "diverged", None)
    assert second["status"] == "damaged" and "damaged result file" in second["error"]
    for_a_pipe = run("cells", "mine", "--model", "a", "--task", "qnli", "--format", "csv")[1]
    named, damaged = csv.DictReader(for_a_pipe.splitlines())
    assert (named["name"], named["status"], named["score"]) == ("a/qnli/lr1e-3/s0", "diverged", "")
    assert named.keys() == first.keys() and damaged["error"] == second["error"]
    found = json.loads(run("cells", "mine", "--status", "ok", "--json")[1])
    assert [(row["score"], row["seconds"], row["node"]) for row in found] == [(0.5, 2.0, "host"), (0.51, 2.0, "host")]
    assert "0.5100" in run("cells", "mine")[1]
    assert json.loads(run("cells", "mine", "--status", "running", "--json")[1]) == []
    for words, message in (
        (("--status", "done"), "unknown status 'done'"),
        (("--model", "c"), "unknown model 'c'"),
        (("--format", "xml"), "unknown format 'xml'"),
    ):
        code, _, said = run("cells", "mine", *words)
        assert code == 2 and message in said


def test_retry_lists_until_it_is_told_to_go_ahead(run: Run, store: Path) -> None:
    before = files(store)
    code, out, _ = run("retry", "mine", "--status", "damaged", "--cell", "a/sst2/lr1e-3/s0")
    assert code == 0 and files(store) == before
    assert "1 failed and 3 other cells have no result" in out
    assert out.count("would be set aside") == 2 and "nothing is changed yet: with --yes, 2 results" in out
    assert (
        "with --yes, 1 result will be set aside, and the next run computes it"
        in run("retry", "mine", "--status", "damaged")[1]
    )
    code, out, _ = run("retry", "mine", "--status", "damaged", "--cell", "a/sst2/lr1e-3/s0", "--yes", "--json")
    assert code == 0
    assert set(json.loads(out)["set_aside"]) == {cell_key(CELLS[3]), cell_key(CELLS[0])}
    assert [cell_key(cell) for cell in ResultsStore(store).missing(CELLS)] == [
        cell_key(CELLS[number]) for number in (0, 3, 4, 5, 6, 7)
    ]
    assert sorted(files(store).values()) == sorted(before.values()), "nothing is lost"


def test_retry_of_what_is_damaged_finds_damaged_examples(run: Run, store: Path) -> None:
    examples, before = ResultsStore(store).examples_path(cell_key(CELLS[0])), files(store)
    assert cell_key(CELLS[0]) not in json.loads(run("retry", "mine", "--status", "damaged", "--json")[1])["again"]
    content = bytearray(examples.read_bytes())
    content[-20] ^= 1
    examples.write_bytes(content)
    code, out, _ = run("retry", "mine", "--status", "damaged")
    assert code == 0 and f"damaged: {examples}: it is not what was written: its checksum differs" in out
    code, out, _ = run("retry", "mine", "--status", "damaged", "--yes", "--json")
    assert code == 0 and cell_key(CELLS[0]) in json.loads(out)["set_aside"]
    assert not examples.exists() and len(files(store)) == len(before), "they are moved with their result"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--yes",), "--yes: choose results with --status or --cell"),
        (("--status", "ok"), "unknown status 'ok'"),
        (("--cell", "b/sst2/lr1e-3/s0"), "no result matches"),
        (("--cell", ""), "4 results match"),
        (("--model", "a"), "--model and --task narrow --status or --cell"),
    ],
)
def test_retry_refuses_what_it_cannot_mean(run: Run, words: tuple[str, ...], message: str) -> None:
    code, out, said = run("retry", "mine", *words)
    assert (code, out) == (2, "") and message in said


def test_without_a_command_a_sweep_is_run_and_a_file_may_be_called_as_a_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("none.yaml",), ("run", "none.yaml"), ("--dry-run", "none.yaml")):
        code, _, said = run(*words)
        assert code == 2 and "none.yaml: no such file" in said
    code, _, said = run("statis")
    assert code == 2 and "statis: no such file. Did you mean" in said and "sweep status`?" in said
    (tmp_path / "status").write_text("models: [x]\n")
    code, _, said = run("./status")
    assert code == 2 and "status: key 'space' is missing" in said
    assert "Missing argument" in run("status")[2]


def test_the_help_of_a_sweep_has_its_options_and_its_commands(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for word in ("--space", "--dry-run", "status", "cells", "retry"):
        assert word in out
