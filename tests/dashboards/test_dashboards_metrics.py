"""The dashboards query what a run really exports: all of ours, and of Ray's only what there is."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from mlmclm.cluster.live_metrics import DEFINITIONS, PREFIX, metrics_labelled, show
from mlmclm.cluster.ray_cluster import ray_session

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
DASHBOARDS = sorted(FOLDER.glob("*.json"))
CLUSTER = FOLDER / "cluster.json"
OF_STUDIES = [path for path in DASHBOARDS if path != CLUSTER]
SUFFIXES = ("_bucket", "_sum", "_count")
METRIC = re.compile(r"\bray_[a-z0-9_]+")


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def queries(dashboard: dict[str, Any]) -> list[str]:
    variables = [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return variables + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def queried() -> set[str]:
    return {name for path in DASHBOARDS for query in queries(load(path)) for name in METRIC.findall(query)}


def only_with_a_gpu() -> set[str]:
    """Metrics of GPUs, which a machine without one does not export."""
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    of_ray = {f"{PREFIX}{name}" for name in METRICS_GAUGES if "gpu" in name or "gram" in name}
    return of_ray | {f"{PREFIX}mlmclm_pretraining_published_utilisation"}


def defined_name(name: str) -> str | None:
    """The definition that a queried series belongs to."""
    bare = name.removeprefix(PREFIX)
    for suffix in SUFFIXES:
        stem = bare.removesuffix(suffix)
        if stem != bare and stem in DEFINITIONS and DEFINITIONS[stem].kind == "histogram":
            return stem
    return bare if bare in DEFINITIONS else None


@ray.remote
class Exporter:
    def export_everything(self) -> None:
        for definition in DEFINITIONS.values():
            show(definition.name, 3, **dict.fromkeys(definition.labels, "x"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """Name of each series of a real session -> its labels."""
    store = tmp_path_factory.mktemp("session")
    with metrics_labelled(store, "s1"), ray_session(store, num_cpus=1):
        exporter = Exporter.remote()
        ray.get(exporter.export_everything.remote())
        root = Path(ray._private.worker._global_node.get_temp_dir_path())
        discovery = root.parent.with_suffix(".json")
        wanted = queried() - only_with_a_gpu()
        series: dict[str, set[str]] = {}
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not wanted <= series.keys():
            time.sleep(0.5)
            if discovery.exists():
                (group,) = json.loads(discovery.read_text())
                assert group["labels"]["store"] == str(store), "Ray's own metrics have no store"
                series = scrape(group["targets"])
        patterns = scraped_files()
        assert any(fnmatch(str(discovery), pattern) for pattern in patterns), "prometheus.yml finds a local session"
    yield series


def test_every_query_asks_for_a_store_and_a_study() -> None:
    for path in OF_STUDIES:
        dashboard = load(path)
        variables = {v["name"]: v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"}
        assert list(variables)[:2] == ["store", "study"], path.name
        expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        for query in [*expressions, *(query for name, query in variables.items() if name not in ("store", "study"))]:
            for name, asked in re.findall(r"\b(ray_\w+)(\{[^}]*\})?", query):
                assert 'store=~"$store"' in asked, (path.name, query)
                # A node computes for all studies, so Ray's metrics of it have none.
                assert name.startswith("ray_node_") or 'study=~"$study"' in asked, (path.name, query)
        for query in expressions:
            for group in re.findall(r"(?:sum|max|avg) ?(by \([^)]*\))? ?\(+(?:rate\()?ray_mlmclm", query):
                assert {"store", "study"} <= set(re.findall(r"\w+", group)), f"{path.name}: {query} adds up studies"


def test_every_query_of_the_cluster_asks_for_a_session() -> None:
    dashboard = load(CLUSTER)
    variables = {v["name"]: v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"}
    assert list(variables) == ["session", "node"]
    for query in queries(dashboard)[1:]:
        for name, asked in re.findall(r"\b(ray_\w+)(\{[^}]*\})?", query):
            assert 'SessionName=~"$session"' in asked, (name, query)
        for group in re.findall(r"(?:sum|max|count) by \(([^)]*)\) \(ray_(?!mlmclm)", query):
            assert "SessionName" in group, f"{query} adds up clusters"


def scraped_files() -> list[str]:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    return [file for job in jobs for config in job["file_sd_configs"] for file in config["files"]]


def scrape(targets: list[str]) -> dict[str, set[str]]:
    series: dict[str, set[str]] = {}
    for target in targets:
        try:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            continue  # not up yet
        for line in lines:
            found = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line)
            if found and not line.startswith("#"):
                series.setdefault(found[1], set()).update(re.findall(r'(\w+)="', found[2] or ""))
    return series


def test_every_query_names_a_series_that_a_run_exports(exported: dict[str, set[str]]) -> None:
    assert {name for name in queried() if name not in exported} <= only_with_a_gpu()


def test_every_metric_of_ours_is_shown(exported: dict[str, set[str]]) -> None:
    shown = {defined_name(name) for name in queried()}
    assert set(DEFINITIONS) <= shown
    assert {defined_name(name) for name in exported if name.startswith(f"{PREFIX}mlmclm")} == set(DEFINITIONS)


def test_every_label_that_a_query_groups_by_or_asks_for_is_exported(exported: dict[str, set[str]]) -> None:
    for path in DASHBOARDS:
        for query in queries(load(path)):
            names = [name for name in METRIC.findall(query) if name in exported]
            grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
            for name in names:
                assert grouped <= exported[name] | {"GpuIndex"}, (path.name, query)
            for name, asked in re.findall(r"\b(ray_\w+)\{([^}]*)\}", query):
                # Ray's own metrics have a store only where whoever scrapes them adds it.
                labels = set(re.findall(r"(\w+)(?:=~|!=|=)", asked)) - (set() if "mlmclm" in name else {"store"})
                assert name not in exported or labels <= exported[name], (path.name, query)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(path: Path) -> None:
    dashboard = load(path)
    assert dashboard["uid"] == f"mlmclm-{path.stem}"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["title"] and panel["description"] and panel["targets"]
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not own & cells, f"{panel['title']} overlaps another panel"
        cells |= own
    assert any(variable["type"] == "datasource" for variable in dashboard["templating"]["list"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":  # Grafana asks `query`, and shows `definition`, which the tests read
            assert variable["query"]["query"] == variable["definition"]
    assert any(link["type"] == "dashboards" and link["tags"] == dashboard["tags"] for link in dashboard["links"])


def test_the_dashboards_and_their_provisioning_are_there() -> None:
    assert [path.stem for path in DASHBOARDS] == ["cluster", "pretraining", "sweep"]
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/mlmclm.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "${MLMCLM_DASHBOARDS}"
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"


def test_a_name_that_is_not_defined_cannot_be_exported() -> None:
    with pytest.raises(KeyError, match="mlmclm_lose"):
        show("mlmclm_lose", 1)
