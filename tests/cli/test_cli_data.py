"""`mlmclm data`: a corpus in shards, verified and repaired."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm.cluster.placement import Cluster
from mlmclm.cluster.ray_cluster import RaySession
from small_study import write_study

Run = Callable[..., tuple[int, str, str]]


def study(folder: Path, **corpus: Any) -> list[str | Path]:
    """Writes a study with these keys of its corpus; the words that follow a verb."""
    path = write_study(folder)
    content = yaml.safe_load(path.read_text())
    content["corpus"] |= corpus
    path.write_text(yaml.safe_dump(content))
    return [path, "--store", folder / "store", "--data", folder / "data"]


def test_a_damaged_corpus_is_found_named_and_repaired(tmp_path: Path, run_apart: Run) -> None:
    words, verify = study(tmp_path, shard_mib=0.004), ("store", "verify", "--store", tmp_path / "store")
    code, output, errors = run_apart("data", *words, "--json")
    assert code == 0, errors
    described = json.loads(output)["corpus"]
    folder = Path(described["folder"])
    shards = sorted(folder.glob("*.bin"))
    assert described["shards"] == len(shards) > 3
    assert run_apart(*verify)[0] == 0

    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    times = {shard: shard.stat().st_mtime_ns for shard in shards}
    code, output, _ = run_apart(*verify, "--json")
    assert code == 1
    (damaged,) = (one for kind in json.loads(output)["kinds"] for one in kind["damaged"])
    assert damaged["path"] == str(shards[1]) and damaged["reason"].startswith("it is not what was written")
    assert run_apart("study", *words, "--dry-run")[1].splitlines()[1].endswith("prepared"), (
        "sizes are all that is looked at"
    )

    shards[1].unlink()
    code, output, _ = run_apart(*verify)
    assert (code, f"{shards[1]}: it is missing" in output) == (1, True)
    assert "to be prepared" in run_apart("study", *words, "--dry-run")[1]
    code, _, errors = run_apart("data", *words)
    assert code == 0
    assert f"making {shards[1].name} again (no such file)" in errors
    assert shards[1].read_bytes() == content
    assert all(shard.stat().st_mtime_ns == times[shard] for shard in shards if shard != shards[1])
    assert run_apart(*verify)[0] == 0
    code, output, errors = run_apart("data", "order", *words, "--steps", "0:2")
    assert (code, len(output.splitlines())) == (0, 16), errors


@pytest.mark.parametrize(
    ("corpus", "parts"),
    [
        ({"shards": "s4://bucket/corpora"}, ["corpus: shards", "unknown protocol 's4'", "Did you mean 's3'"]),
        ({"shard_mib": 0}, ["corpus.shard_mib", "greater than 0"]),
        ({"workers": "dask"}, ["corpus.workers", "'auto', 'local' or 'ray'", "dask"]),
        ({"cache": "/copies"}, ["cache goes with an address"]),
        ({"max_unknown": 2}, ["corpus.max_unknown", "less than or equal to 1"]),
    ],
)
def test_a_wrong_place_for_shards_is_refused_before_any_work(
    tmp_path: Path, run_apart: Run, corpus: dict[str, Any], parts: list[str]
) -> None:
    code, _, errors = run_apart("data", *study(tmp_path, **corpus))
    assert code == 2
    assert all(part in " ".join(errors.split()) for part in parts), errors
    assert not list((tmp_path / "store").glob("tokenizers/*"))


@pytest.mark.parametrize("verb", ["data", "pretrain", "study"])
def test_each_verb_that_uses_a_cluster_waits_for_its_nodes_as_long_as_it_is_told(
    verb: str, run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = RaySession("127.0.0.1:1", None, local=False)
    monkeypatch.setattr("mlmclm.studies.work.ray_session", lambda *_, **__: nullcontext(there))
    monkeypatch.setattr("mlmclm.studies.work.cluster_view", lambda: lambda: Cluster(({},), {}))
    study = write_study(tmp_path)
    words = (study, "--ray", "auto", "--store", tmp_path / "store", "--data", tmp_path / "data")
    code, printed = run(verb, *words, "--wait-for-nodes", "0")
    assert code == 1
    assert "No node that computes has joined the Ray cluster in 0 s (--wait-for-nodes)" in printed.replace("\n", " ")
