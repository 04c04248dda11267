"""`mlmclm.tune`: what Ray's dashboard and `ps` say of trials, in a session of its own, as only one can be open."""

from __future__ import annotations

import json
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from ray import tune
from ray.util.state import get_log, list_actors

import sweep_cells
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.finetuning.cell import cell_key
from mlmclm.progress import repeated
from mlmclm.storage.files import write_atomic
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.trial import SweepTrial, Training
from mlmclm.tune import trial_name
from sweep_cells import Seen, make_cell


@pytest.mark.slow
def test_the_process_list_the_dashboard_and_its_logs_name_the_trial_that_runs(tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sweep_cells)
    first, *cells = [make_cell(learning_rate=rate) for rate in (1e-3, 2e-3, 4e-3)]
    own = SweepTrial((Training({cell_key(first): first}),), tmp_path, by_itself=True, resources={"CPU": 1.0})
    seen: set[str] = set()
    write_atomic(tmp_path / "seen", "")
    try:
        with ray_session(tmp_path, num_cpus=1, dashboard=True) as session:
            (node,) = ray.nodes()
            request = urllib.request.Request(f"{session.dashboard}/nodes/{node['NodeID']}")
            assert session.token_file is not None
            request.add_header("Authorization", f"Bearer {session.token_file.read_text().strip()}")

            def look() -> None:
                workers = []
                with suppress(OSError), urllib.request.urlopen(request) as answer:  # it may not know the node yet
                    workers = json.load(answer)["data"]["detail"].get("workers", [])
                seen.update("".join(worker["cmdline"]) for worker in workers)
                write_atomic(tmp_path / "seen", "\n".join(seen))

            with repeated(look, seconds=0.5, name="dashboard"):
                named = tune.TuneConfig(trial_name_creator=trial_name)
                run = tune.RunConfig(name="tuned", storage_path=str(tmp_path), verbose=0)
                tune.Tuner(Seen, param_space=own.config, tune_config=named, run_config=run).fit()
                run_sweep(cells, SweepOptions(store=tmp_path, worker=Seen)).check()
            names = {each for each in seen if each.startswith("ray::a/")}
            assert names == {"ray::a/sst2/lr1e-3/s0", "ray::a/sst2/lr2e-3/s0", "ray::a/sst2/lr4e-3/s0"}
            found = [each for each in list_actors(address=session.dashboard, detail=True) if each.class_name == "Seen"]
            by_name = {each.repr_name: each.actor_id for each in found}
            assert by_name.keys() == {"a/sst2/lr1e-3/s0", "Seen"}
            log = "".join(get_log(address=session.address, actor_id=by_name["Seen"]))
            assert all(f"a/sst2/lr{rate}/s0: begun" in log for rate in ("2e-3", "4e-3")), log
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sweep_cells)
