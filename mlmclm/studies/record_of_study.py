"""The record of a study whose results are in a store, and the record that is published."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlmclm.answers.claim_files import CLAIMS
from mlmclm.answers.outcomes import Outcomes
from mlmclm.answers.received_study import ELSEWHERE, check_study, kept_inside
from mlmclm.answers.received_values import ReceivedAbout
from mlmclm.answers.received_values import read_setting as received_setting
from mlmclm.answers.record import (
    FACTS,
    STATES_TYPE,
    STUDY,
    ComputedStage,
    ComputedStates,
    StudyRecord,
    about_value,
    without_paths,
)
from mlmclm.configuration import read_yaml
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.corpora.tokenizer import repository_of
from mlmclm.errors import UserError
from mlmclm.reports.basis import NO_BASIS, asked_for
from mlmclm.reports.provenance import stage_work
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.storage.files import check_folder
from mlmclm.storage.packaged import PROTOCOLS, SPACES, packaged_or_path
from mlmclm.studies.last_run import AGAIN, FILE, check_same, last_run
from mlmclm.studies.place import Place, packaged_studies
from mlmclm.studies.prepare import initial_models
from mlmclm.studies.study_file import AnyFile, StudyFile
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.studies.zero_shot import zero_shot_facts
from mlmclm.sweeps.cells import added_rates
from mlmclm.sweeps.manifest import read_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declared_tasks import user_files


def record_value(sweep: StudySweep, facts: StudyFacts) -> dict[str, Any]:
    """Return a study's record without its results, as plain values for `run.json`; its models and data must exist.

    Args:
        facts: `study_facts` of it.
    """
    return {
        "about": about_value(facts, sweep.setting()),
        "states": STATES_TYPE.dump_python(_states(sweep), mode="json"),
    }


def kept_record(
    file: AnyFile, place: Place, command: str, rows: Sequence[dict[str, Any]] | None = None, *, remedy: str
) -> StudyRecord:
    """Return the record of a study as it was last run; neither its models nor its data need exist.

    Args:
        command: the command that computes it again, as the report shows it.
        rows: the results; None to read those in the store.
        remedy: what to do if there are none.

    Raises:
        UserError: it has no results, or a file is damaged.
    """
    folder, results_store = check_folder(place.study_folder(file.name)), ResultsStore(place.store)
    run = last_run(folder) if (folder / FILE).is_file() else {}
    cells = read_manifest(file.name, place.store).cells if "about" in run else ()
    if rows is None:
        if cells:
            check_same(file, place, run)
        rows = results_store.results(cells)
    if not rows:
        file.find_space()  # an error in the search space is reported first
        raise UserError(f"{file.kind} {file.name!r} has no results yet: {remedy}")
    try:
        about = ReceivedAbout.model_validate_json(json.dumps(run["about"]))
        states = STATES_TYPE.validate_json(json.dumps(run["states"]), strict=True)
    except ValidationError as error:
        raise UserError(f"{folder / FILE}: another version of mlmclm wrote it. {AGAIN}") from error
    setting = received_setting(about)
    grid = replace(setting.grid, added=added_rates(cells, setting.grid.learning_rates))
    basis = asked_for(command, packaged_studies())
    return StudyRecord(
        name=file.name,
        rows=rows,
        setting=replace(setting, grid=grid),
        kept=results_store,
        about=lambda: (
            replace(about.facts, command=command, zero_shot=zero_shot_facts(run, place.store), basis=basis),
            states,
        ),
        claims=file.find_claims,
        kind=file.kind,
        spelled=file.spelled,
    )


def to_publish(record: StudyRecord, file: AnyFile, place: Place, *, examples: bool = True) -> StudyRecord:
    """Return the record of a study with its files, and without paths and names of machines.

    Args:
        file: the study's, as it was last run (`last_run.kept_file`).
        examples: whether it has the outcomes of test examples, and with them the tasks' expected answers.

    Raises:
        UserError: a result is damaged, or the study has a setting that no record has.
    """
    study, files = _study(file, place)
    facts = replace(record.facts, command=f"mlmclm {record.kind} {STUDY}", basis=NO_BASIS)
    plain = FACTS.validate_python(without_paths(FACTS.dump_python(facts, mode="json")))
    return replace(
        record,
        rows=[_anonymous(row) for row in record.rows],
        kept=record.outcomes if examples else Outcomes(),
        about=lambda: (plain, record.states),
        study=study,
        files=files,
    )


def _anonymous(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result with a hash in place of the name of the machine that computed it."""
    cost = dict(row.get("cost") or {})
    if "worker" in cost:
        host, _, process = cost["worker"].rpartition("/")
        cost["worker"] = f"{hashlib.sha256(host.encode()).hexdigest()[:8]}/{process}"
    return {**row, "cost": cost}


def _states(sweep: StudySweep) -> ComputedStates:
    prepared = sweep.prepared
    weights = {swept.model.name: swept.model.weights for swept in sweep.models}
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


def _study(file: AnyFile, place: Place) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the values of the study's file, with relative paths only, and the files that they name."""
    values, files = _portable(file.model_dump(mode="json", exclude_defaults=True)), dict[str, bytes]()
    if isinstance(file, StudyFile):
        initial = {name: model.commit for name, model in initial_models(file, place).items()}
        values |= commits(file, place.store, initial)
    beside = file.folder
    if isinstance(file.space, str):
        path = packaged_or_path("search space", file.space, SPACES, beside)
        values["space"], beside = read_yaml(path), path.parent
    space = values["space"]
    protocol = space.get("protocol")
    base = protocol.get("base") if isinstance(protocol, dict) else protocol
    if isinstance(base, str) and (path := packaged_or_path("protocol", base, PROTOCOLS, beside)).parent != PROTOCOLS:
        copy = f"protocols/{path.name}"
        files[copy] = path.read_bytes()
        space["protocol"] = {**protocol, "base": copy} if isinstance(protocol, dict) else copy
    if file.claims is not None:
        values["claims"] = []
        for name in file.claims:
            path = packaged_or_path("claims", name, CLAIMS, file.folder)
            if path.parent != CLAIMS:
                files[f"claims/{path.name}"] = path.read_bytes()
            values["claims"].append(name if path.parent == CLAIMS else f"claims/{path.name}")
    for name, path in user_files(file.find_space().tasks, place.task_dirs).items():
        files[f"tasks/{name}.yaml"] = path.read_bytes()
    values = kept_inside(without_paths(values))
    check_study(values, Path(STUDY), files)
    return values, {name: without_paths(content.decode()).encode() for name, content in files.items()}


def commits(study: StudyFile, store: Path, initial: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the values of a study's file that name the Hub, with the commits to which the store has pinned them.

    A branch or a tag may move before somebody computes the study again.

    Args:
        initial: the commits of models to continue from; None for folders.
    """
    pinned: dict[str, Any] = {}

    def at_commit(config: CorpusConfig | TokenizerConfig, repository: HubRepository) -> dict[str, Any]:
        values = _portable(config.model_dump(mode="json", exclude_defaults=True))
        commit = repository.pinned(store)
        return dict(values) if commit is None else {**values, "revision": commit}

    def of_corpus(corpus: CorpusConfig) -> dict[str, Any]:
        return at_commit(corpus, HubRepository(corpus.source, "dataset", corpus.revision))

    if study.corpus is not None:
        pinned["corpus"] = of_corpus(study.corpus)
    if study.corpora:
        pinned["corpora"] = {name: of_corpus(corpus) for name, corpus in study.corpora.items()}
    if study.tokenizer is not None and study.tokenizer.name is not None:
        pinned["tokenizer"] = at_commit(study.tokenizer, repository_of(study.tokenizer.name, study.tokenizer.revision))
    if study.initial:
        pinned["initial"] = {
            name: source if (commit := initial.get(name)) is None else f"{source.partition('@')[0]}@{commit}"
            for name, source in study.initial.items()
        }
    return pinned


def _portable(value: Any) -> Any:
    """Return a file's values without those about the machine."""
    if isinstance(value, Mapping):
        return {name: _portable(item) for name, item in value.items() if name not in ELSEWHERE}
    return value
