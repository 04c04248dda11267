"""Each sink writes a whole study offline, and its tool's own reader finds every number and setting again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlmclm.tracking.records import RunRecord

RUNS = (
    RunRecord(
        "a" * 64,
        "a clm/0-10",
        params={"recipe.batch": "8"},
        tags={"mlmclm.kind": "pretraining", "mlflow.note.content": "MLflow's"},
        metrics=[("loss", 5.0, 1, 1000), ("loss", 4.5, 2, 2000), ("accuracy", 0.25, 2, 2000)],
    ),
    RunRecord(
        "b" * 64,
        "sweep study",
        tags={"mlmclm.kind": "sweep", "mlmclm.verdict": "a is better than b."},
        metrics=[("share_failed", 0.5, 0, 5000)],
    ),
    RunRecord(
        "c" * 64,
        "a",
        params={"model": "a"},
        tags={"mlmclm.kind": "model"},
        metrics=[("score", 0.8, 0, 5000), ("score_low", 0.7, 0, 5000), ("sd_seeds", 0.125, 0, 5000)],
    ),
)
SETTINGS = {
    "a clm/0-10": {"kind": "pretraining", "recipe.batch": 8.0},
    "sweep study": {"kind": "sweep", "verdict": "a is better than b."},
    "a": {"kind": "model", "model": "a"},
}
STEPS = {
    "a clm/0-10": [(1, {"loss": 5.0}), (2, {"loss": 4.5, "accuracy": 0.25})],
    "sweep study": [(0, {"share_failed": 0.5})],
    "a": [(0, {"score": 0.8, "score_low": 0.7, "sd_seeds": 0.125})],
}
WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from mlmclm.registry import KINDS
from test_tracking_sinks import RUNS
print(KINDS["sink"][sys.argv[1]]("study", RUNS, Path(sys.argv[2])))
"""
"""Writes the runs in a process of its own, which ends the tool's own processes."""


def written(sink: str, tmp_path: Path) -> Path:
    """The folder that a sink has written; nothing goes to the home folder, or needs one."""
    home, folder = tmp_path / "home", tmp_path / "store" / sink
    home.mkdir()
    folder.mkdir(parents=True)
    variables = {
        "HOME": str(home),
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "WANDB_CONFIG_DIR": str(tmp_path / "cache"),
    }
    arguments = [sys.executable, "-c", WRITER, sink, folder, Path(__file__).parent]
    made = subprocess.run(arguments, env={**os.environ, **variables}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert str(folder) in made.stdout.splitlines()[-1], "how to see the runs; nothing is printed at the end"
    assert list(home.rglob("*")) == []
    return folder


def test_tensorboard_reads_curves_settings_and_the_verdict(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    hparams = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    folder = written("tensorboard", tmp_path)
    found = {}
    for file in folder.rglob("events.*"):
        found[file.parent.name] = events = reader.EventAccumulator(str(file.parent)).Reload()
    assert len(list(folder.rglob("events.*"))) == len(found) == 3
    for name, settings in SETTINGS.items():
        events = found[name.replace("/", "_")]
        (start,) = [
            hparams.parse_session_start_info_plugin_data(content)
            for tag, content in events.PluginTagToContent("hparams").items()
            if tag.endswith("session_start_info")
        ]
        assert {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()} == settings
        steps = defaultdict[int, dict[str, float]](dict)
        for tag in events.Tags()["scalars"]:
            for each in events.Scalars(tag):
                steps[each.step][tag] = each.value
        assert dict(steps) == {step: pytest.approx(values) for step, values in STEPS[name]}
    losses = found["a clm_0-10"].Scalars("loss")
    assert [(each.step, each.value, each.wall_time) for each in losses] == [(1, 5.0, 1.0), (2, 4.5, 2.0)]
    (verdict,) = found["sweep study"].Tensors("verdict/text_summary")
    assert verdict.tensor_proto.string_val == [b"a is better than b."]


def records(content: bytes) -> Iterator[Any]:
    """The records of a .wandb file, whose framing is LevelDB's log: wandb has no reader in Python."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, part = 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        end = at + 7 + int.from_bytes(content[at + 4 : at + 6], "little")
        part += content[at + 7 : end]
        if content[at + 6] in (1, 4):  # a whole record, or its last part
            yield Record.FromString(part)
            part = b""
        at = end


def test_wandb_has_each_run_once_with_its_history_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    files = list(written("wandb", tmp_path).rglob("*.wandb"))
    found = {}
    for file in files:
        told = list(records(file.read_bytes()))
        (run,) = [each.run for each in told if each.HasField("run")]
        steps = [
            {item.nested_key[0]: json.loads(item.value_json) for item in each.history.item}
            for each in told
            if each.HasField("history")
        ]
        found[run.display_name] = run, [(step["_step"], visible(step)) for step in steps]
    assert len(files) == len(found) == 3
    for record in RUNS:
        run, steps = found[record.name]
        config = {each.key: json.loads(each.value_json) for each in run.config.update}
        assert visible(config) == SETTINGS[record.name]
        assert (run.project, run.run_id, run.job_type) == ("study", record.key[:16], record.kind)
        assert steps == STEPS[record.name]
    assert found["sweep study"][0].notes == "a is better than b."


def visible(values: dict[str, Any]) -> dict[str, Any]:
    """Values without those of a tool itself."""
    return {name: value for name, value in values.items() if name[0] != "_"}


READER = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = trackio.Api().runs("study")
print(json.dumps([[run.name, run.config, SQLiteStorage.get_logs("study", run.name)] for run in runs]))
"""


def test_trackio_has_each_run_once_with_its_history(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed: it needs an older pillow than constraints.txt has")
    variables = {**os.environ, "TRACKIO_DIR": str(written("trackio", tmp_path))}
    read = subprocess.run([sys.executable, "-c", READER], env=variables, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)
    assert sorted(name for name, *_ in found) == sorted(SETTINGS)
    for name, config, logs in found:
        assert visible(config) == SETTINGS[name]
        kept = [(log.pop("step"), {key: value for key, value in log.items() if key != "timestamp"}) for log in logs]
        assert kept == STEPS[name]
