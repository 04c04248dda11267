"""The bundle of a study whose results are in a store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from mlmclm.configuration import read_yaml
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.corpora.tokenizer import repository_of
from mlmclm.errors import UserError
from mlmclm.models.sources import local_folder
from mlmclm.progress import Bar, say
from mlmclm.reports.basis import NO_BASIS
from mlmclm.reports.provenance import stage_work
from mlmclm.studies.bundle import FACTS, STUDY, AnalysisSetting, Bundle, ComputedStage, ComputedStates, without_paths
from mlmclm.studies.claim_files import CLAIMS
from mlmclm.studies.received_study import ELSEWHERE, check_study, kept_inside
from mlmclm.studies.study_file import StudyFile, SweepFile
from mlmclm.studies.study_results import StudyResults
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.sweeps.packaged import PROTOCOLS, SPACES, packaged_or_own
from mlmclm.tasks.declared_tasks import own_files


def bundle_of(results: StudyResults, *, examples: bool = True) -> Bundle:
    """Return the bundle of a study, from its results so far.

    Args:
        examples: whether it has the outcomes of test examples, and with them the tasks' expected answers.

    Raises:
        UserError: a result is damaged, or the study has a setting that no record has.
    """
    sweep, analysis = results.sweep, results.analysis
    study, files = _study(sweep)
    facts = replace(
        results.facts,
        command=f"mlmclm {sweep.file.kind} study.yaml",
        claims=(),
        basis=NO_BASIS,
        recorded=None,
        provenance={},
    )
    rows = [_anonymous(row) for row in results.rows]
    outcomes, labels = _outcomes(results, rows) if examples else ({}, {})
    return Bundle(
        study=study,
        files=files,
        facts=FACTS.validate_python(without_paths(FACTS.dump_python(facts, mode="json"))),
        setting=AnalysisSetting(
            analysis.grid,
            sweep.space.rule,
            analysis.baseline,
            analysis.chances,
            sweep.replicate_of,
        ),
        states=_states(sweep),
        rows=rows,
        outcomes=outcomes,
        labels=labels,
    )


def _anonymous(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with a hash in place of the name of the machine that computed it."""
    cost = dict(row.get("cost") or {})
    if "worker" in cost:
        host, _, process = cost["worker"].rpartition("/")
        cost["worker"] = f"{hashlib.sha256(host.encode()).hexdigest()[:8]}/{process}"
    return {**row, "cost": cost}


def _outcomes(
    results: StudyResults, rows: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, pa.Table], dict[str, tuple[str, ...]]]:
    """Return the outcomes of test examples by task, each cell's together, and the labels by cell."""
    parts: dict[str, list[pa.Table]] = {}
    labels: dict[str, tuple[str, ...]] = {}
    kept = results.kept
    scored = {row["key"]: row for row in rows if row["status"] == "ok"}
    # Cells that are alike lie side by side, where compression finds most.
    order = sorted(scored.values(), key=lambda row: (row["task"], row["model"], row["learning_rate"], row["key"]))
    with Bar("reading test examples", len(order), unit="cells") as bar:
        for number, row in enumerate(order, 1):
            try:
                found = kept.examples(row)
            except UserError as error:
                say(f"left out of the bundle: {error}")
                continue
            columns = {**found.columns, **found.predictions}
            arrays = {name: pa.array(values, from_pandas=True) for name, values in columns.items()}
            # The scores of ranked documents are as large as all the rest, don't compress, and are in no score of a cell.
            table = pa.table({name: each for name, each in arrays.items() if not _numbers(each.type)})
            keys = pa.array([row["key"]] * found.rows, pa.string())
            parts.setdefault(row["task"], []).append(table.add_column(0, "key", keys))
            if found.label_names:
                labels[row["key"]] = found.label_names
            bar.update(number)
    return {
        task: pa.concat_tables(own, promote_options="permissive").combine_chunks() for task, own in parts.items()
    }, labels


def _numbers(kind: pa.DataType) -> bool:
    """Return whether a column holds lists of numbers with fractions."""
    return bool(pa.types.is_list(kind) and pa.types.is_floating(kind.value_type))


def _states(sweep: StudySweep) -> ComputedStates:
    prepared = sweep.prepared
    weights = {each.model.name: each.model.weights for each in sweep.models}
    data = {name: task.task_data for name, task in sweep.tasks.items()}
    if prepared is None:
        return ComputedStates(None, None, None, weights, data)
    stages = []
    for stage in prepared.plan.stages:
        work = stage_work(*prepared.trained(stage))
        if work is not None:
            stages.append(ComputedStage(stage.end.key(prepared.fingerprint), stage.title, stage.models, work))
    corpus = prepared.corpus
    return ComputedStates(corpus.key, corpus.tokenizer.name, prepared.fingerprint, weights, data, tuple(stages))


def _study(sweep: StudySweep) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the values of the study's file, with relative paths alone, and the files that they name."""
    file, files = sweep.file, dict[str, bytes]()
    values = _here(file.model_dump(mode="json", exclude_defaults=True))
    if isinstance(file, StudyFile):
        initial = {} if sweep.prepared is None else sweep.prepared.initial
        values |= commits(file, sweep.place.store, {name: each.commit for name, each in initial.items()})
    if isinstance(file, SweepFile):
        for each in sweep.models:
            source = values["models"][each.model.name]
            if local_folder(source, sweep.place.data_root, file.folder) is not None:
                values["models"][each.model.name] = each.model.folder.name
            elif each.commit is not None:
                values["models"][each.model.name] = f"{source.partition('@')[0]}@{each.commit}"
    beside = file.folder
    if isinstance(file.space, str):
        path = packaged_or_own("search space", file.space, SPACES, beside)
        values["space"], beside = read_yaml(path), path.parent
    space = values["space"]
    named = space.get("protocol")
    base = named.get("base") if isinstance(named, dict) else named
    if isinstance(base, str) and (own := packaged_or_own("protocol", base, PROTOCOLS, beside)).parent != PROTOCOLS:
        files[f"protocols/{own.name}"] = own.read_bytes()
        space["protocol"] = (
            {**named, "base": f"protocols/{own.name}"} if isinstance(named, dict) else f"protocols/{own.name}"
        )
    if file.claims is not None:
        values["claims"] = []
        for name in file.claims:
            path = packaged_or_own("claims", name, CLAIMS, file.folder)
            if path.parent != CLAIMS:
                files[f"claims/{path.name}"] = path.read_bytes()
            values["claims"].append(name if path.parent == CLAIMS else f"claims/{path.name}")
    for name, path in own_files(sweep.space.tasks, sweep.place.task_dirs).items():
        files[f"tasks/{name}.yaml"] = path.read_bytes()
    values = kept_inside(without_paths(values))
    check_study(values, Path(STUDY), files)
    return values, {name: without_paths(content.decode()).encode() for name, content in files.items()}


def commits(study: StudyFile, store: Path, initial: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of a study's file that name the Hub, with the commits that the store keeps to.

    A branch or a tag may move before somebody computes the study again.

    Args:
        initial: the commits of models to continue from; None for folders.
    """
    found: dict[str, Any] = {}

    def at_commit(config: CorpusConfig | TokenizerConfig, repository: HubRepository) -> dict[str, Any]:
        values = _here(config.model_dump(mode="json", exclude_defaults=True))
        commit = repository.pinned(store)
        return dict(values) if commit is None else {**values, "revision": commit}

    def of_corpus(corpus: CorpusConfig) -> dict[str, Any]:
        return at_commit(corpus, HubRepository(corpus.source, "dataset", corpus.revision))

    if study.corpus is not None:
        found["corpus"] = of_corpus(study.corpus)
    if study.corpora:
        found["corpora"] = {name: of_corpus(corpus) for name, corpus in study.corpora.items()}
    if study.tokenizer is not None and study.tokenizer.name is not None:
        found["tokenizer"] = at_commit(study.tokenizer, repository_of(study.tokenizer.name, study.tokenizer.revision))
    if study.initial:
        found["initial"] = {
            name: source if (commit := initial.get(name)) is None else f"{source.partition('@')[0]}@{commit}"
            for name, source in study.initial.items()
        }
    return found


def _here(value: Any) -> Any:
    """Return a file's values without those about the machine."""
    if isinstance(value, Mapping):
        return {name: _here(each) for name, each in value.items() if name not in ELSEWHERE}
    return value


def dataset_card(bundle: Bundle) -> str:
    """Return the README.md of a bundle: a card of a data set on the Hugging Face Hub, which is also readable elsewhere."""
    files = [{"config_name": "results", "data_files": "results.csv", "default": True}]
    files += [{"config_name": f"examples-{task}", "data_files": f"examples/{task}.parquet"} for task in bundle.outcomes]
    front = {"pretty_name": bundle.name, "tags": ["mlmclm", "encoder", "evaluation"], "configs": files}
    grid, states = bundle.setting.grid, bundle.states
    stages = (
        f" Pretraining took {len(states.stages)} stages; `states.json` has their hardware and time."
        if states.stages
        else ""
    )
    examples = "- `examples/TASK.parquet`: the outcome of each test example in each cell.\n" if bundle.outcomes else ""
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---

# {bundle.name}

The results of a study by mlmclm: {len(bundle.rows):,} fine-tuning cells of {len(grid.models)} models on
{", ".join(grid.tasks)}, at {len(grid.learning_rates)} learning rates with {len(grid.seeds)} seeds.{stages}

- `results.csv`: one row a cell, with its scores as fractions of 1, its key and its seconds.
- `cells.parquet`: each cell's result as JSON, by key.
{examples}- `states.json`: hashes of weights, keys of corpus and tokenizer, and what pretraining took.
- `study.yaml`: the study's file, with its search space.

To see what the results show, and to compute some cells again and compare them:

```bash
mlmclm report FOLDER --to report
mlmclm verify FOLDER --cells 10
```
"""
