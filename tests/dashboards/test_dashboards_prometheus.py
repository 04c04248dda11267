"""Every query of the dashboards has an answer from a Prometheus that has watched a study."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml
from test_dashboards_metrics import DASHBOARDS, METRIC, load, only_with_a_gpu

from mlmclm.service.state import read_state
from small_study import write_study

LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
BUILT_IN = {"$__rate_interval": "20s"}
"""Grafana's own variable at a scrape interval of 5 s: four of them."""
ALL = ".*"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs a program of this installation, which must succeed, and returns its output; a service is ended at the end."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_A", "MLFLOW_", "MLMCLM_"))
    } | {"RAY_GRAFANA_HOST": "http://127.0.0.1:1"}

    def call(*words: str | Path, **more: str) -> str:
        program = Path(sys.executable).with_name(str(words[0]))
        done = subprocess.run(
            [program, *words[1:]], cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield call
    call("mlmclm", "down")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs a prometheus on the PATH")
def test_every_query_is_answered_while_a_study_runs(tmp_path: Path, shell: Callable[..., str]) -> None:
    began = time.time()
    study = write_study(tmp_path, models=["1m-untrained", "1m-clm-10"])
    space = yaml.safe_load((tmp_path / "space.yaml").read_text()) | {"tasks": ["sst2"], "learning_rates": [1e-3]}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    shell("mlmclm", "up", "--cpus", "2")
    state = read_state(tmp_path / "store")
    assert state is not None
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "store" / "ray" / "auth_token")}
    submit = ("ray", "job", "submit", "--address", state.addresses["dashboard"], "--", "mlmclm", "study", study)
    log = shell(*submit, "--data", tmp_path / "data", **token)
    grafana = f"http://127.0.0.1:1/d/mlmclm-sweep?{urlencode({'var-store': tmp_path / 'store', 'var-study': 'small'})}"
    assert f"Grafana: {grafana}" in log

    def ask(path: str, **query: str) -> Any:
        url = f"{state.addresses['prometheus']}/api/v1/{path}?{urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    span = {"start": f"{began:.0f}", "end": f"{time.time():.0f}"}
    for path in DASHBOARDS:
        dashboard = load(path)
        chosen, everything = dict(BUILT_IN), dict(BUILT_IN)
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                assert variable["allValue"] == ALL
                found = LABEL_VALUES.fullmatch(variable["definition"])
                assert found is not None
                match = {"match[]": filled(found[1], chosen)}
                values = ask(f"label/{found[2]}/values", **match, **span)
                assert values, (path.name, variable["name"])
                chosen[f"${variable['name']}"], everything[f"${variable['name']}"] = values[0], ALL
        for values in (chosen, everything):
            for panel in dashboard["panels"]:
                for target in panel["targets"]:
                    query = filled(target["expr"], values)
                    found = ask("query_range", query=query, step="5", **span)["result"]
                    # A machine without a GPU has no resource of this name either.
                    gpu = set(METRIC.findall(query)) & only_with_a_gpu() or 'Name="GPU"' in query
                    assert found or gpu, (path.name, panel["title"], query)
    (info,) = ask("query_range", query="ray_mlmclm_study_info", step="5", **span)["result"]
    for name in ("mlflow", "dashboard"):
        assert info["metric"][name].startswith(state.addresses[name]), info
    assert len(info["values"]) > 3, "it is there for as long as the study runs"
    report = tmp_path / "store" / "studies" / "small" / "report.html"
    assert info["metric"]["report"] == str(report)
    text = report.read_text(encoding="utf-8").replace("&amp;", "&")
    for page in (state.addresses["mlflow"], state.addresses["dashboard"], grafana):
        assert f'<a href="{page}' in text


def filled(query: str, variables: dict[str, str]) -> str:
    """The query as Grafana sends it."""
    for name, value in variables.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
