"""The record of a study in its folder of the store, `store/studies/NAME`, and the record that is published.

    study.yaml, sweep.yaml    its file, as it was last run
    tasks/                    the user's own tasks
    run.json                  grid, facts of models and tasks, keys of states, and zero-shot evaluations
    cells.json                the keys of its cells (`sweeps.manifest`), whose results are in the store

With these files, commands that compute nothing need only the study's name, and neither models nor data.

A folder holds one report. If another grid under an old name would leave something out of the report, the user must
decide. A grid that only grew replaces nothing. Metrics and rule are not part of a grid: if they change, the same
command reports the same cells again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import ValidationError

from mlmclm.answers.claim_files import CLAIMS, absolute_claims
from mlmclm.answers.outcomes import Outcomes
from mlmclm.answers.received_study import ELSEWHERE, check_study, kept_inside
from mlmclm.answers.received_values import ReceivedAbout
from mlmclm.answers.received_values import read_setting as received_setting
from mlmclm.answers.record import (
    FACTS,
    STATES_TYPE,
    STUDY,
    AnalysisSetting,
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
from mlmclm.models.sources import local_folder
from mlmclm.progress import say
from mlmclm.reports.provenance import NO_BASIS, asked_for, stage_work
from mlmclm.reports.study_facts import StudyFacts, ZeroShotFacts
from mlmclm.storage.checksums import read_sealed, sealed
from mlmclm.storage.files import check_folder, first_existing, places_of, write_atomic
from mlmclm.storage.packaged import PROTOCOLS, SPACES, packaged_or_path
from mlmclm.storage.place import Place, packaged_studies
from mlmclm.studies.prepare import initial_models
from mlmclm.studies.study_file import AnyFile, StudyFile, SweepFile, load_file
from mlmclm.studies.study_sweep import StudySweep, space_of, study_facts
from mlmclm.sweeps.cells import added_rates
from mlmclm.sweeps.grid import AXES, Difference, grid_difference, grid_of
from mlmclm.sweeps.manifest import read_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.zero_shot import zero_shot_results
from mlmclm.tasks.declared_tasks import user_files

if TYPE_CHECKING:
    from mlmclm.sweeps.status import Watch

FILE = "run.json"
TASKS = "tasks"
AGAIN = "Run the study or sweep again to write it; what is finished is not computed again."
Kind = Literal["study", "sweep"]


@dataclass(frozen=True)
class KnownStudy:
    """A study or sweep of a store, for lists.

    Attributes:
        run: time at which it last listed its cells (UTC, ISO 8601); None if it has none yet.
        done: number of cells that have a result.
    """

    name: str
    kind: Kind
    run: str | None
    models: int
    tasks: int
    cells: int
    done: int


def record_value(sweep: StudySweep) -> dict[str, Any]:
    """Return a study's record without its results, as plain values for `run.json`; its models and data must exist."""
    return {
        "about": about_value(study_facts(sweep), sweep.setting()),
        "states": STATES_TYPE.dump_python(_states(sweep), mode="json"),
    }


def write_record(sweep: StudySweep, command: str, record: Mapping[str, Any]) -> None:
    """Write the record of a study's run to its folder: `run.json`, its settings and the user's own tasks.

    Args:
        command: the command that computes it again, as the report shows it.
        record: `record_value`, and the zero-shot evaluations (`sweeps.zero_shot.listed_evaluations`).
    """
    file, place = sweep.file, sweep.place
    folder = place.study_folder(file.name)
    write_atomic(folder / f"{file.kind}.yaml", as_yaml(sweep))
    task_files = user_files(sweep.space.tasks, place.task_dirs)
    for declared in (folder / TASKS).glob("*.yaml"):
        if declared.stem not in task_files:
            declared.unlink()
    for name, declaration in task_files.items():
        (folder / TASKS).mkdir(exist_ok=True)
        write_atomic(folder / TASKS / f"{name}.yaml", declaration.read_bytes())
    value = {
        "kind": file.kind,
        "file": None if file.file is None else str(file.file.absolute()),
        "data": None if place.data_root is None else str(place.data_root),
        "command": command,
        "grid": grid_of_study(sweep),
        **record,
    }
    # Not in canonical order: facts are shown in the order of their keys in the file.
    write_atomic(folder / FILE, json.dumps(sealed(value), ensure_ascii=False) + "\n")


def as_yaml(sweep: StudySweep) -> str:
    """Return a study's settings as YAML.

    Paths are still relative to its own file; those of given models are absolute, and models of the Hub have their commits.
    """
    file = sweep.file
    values = file.model_dump(mode="json", exclude_defaults=True)
    if isinstance(file, SweepFile):
        for swept in sweep.models:
            source = values["models"][swept.model.name]
            if local_folder(source, sweep.place.data_root, file.folder) is not None:
                values["models"][swept.model.name] = str(swept.model.folder)
            elif swept.commit is not None:
                values["models"][swept.model.name] = f"{source.partition('@')[0]}@{swept.commit}"
        space = first_existing(places_of(file.space, file.folder)) if isinstance(file.space, str) else None
        if space is not None and space.is_file():
            values["space"] = str(space.resolve())
        if file.claims is not None:
            values["claims"] = [absolute_claims(name, file.folder) for name in file.claims]
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


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


def last_run(folder: Path) -> dict[str, Any]:
    """Return `run.json` of a study's folder, as `write_record` wrote it.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder / FILE
    run = read_sealed(path, AGAIN)
    if not run.keys() >= {"kind", "file", "data", "command"}:
        raise UserError(f"{path}: not the record of a run. {AGAIN}")
    return dict(run)


def kept_file(folder: Path, run: Mapping[str, Any]) -> AnyFile:
    """Return a study's file as it was last run, from its copy in the study's folder."""
    # The paths in a sweep's copy are absolute.
    original = run["file"] if run["kind"] == "study" else None
    return load_file(folder / f"{run['kind']}.yaml", copy_of=Path(original) if original else None)


def completed(place: Place, folder: Path, run: Mapping[str, Any]) -> Place:
    """Return the place with the data and task folders of a study's last run, if it has none itself and they still exist."""
    data, tasks = run["data"], folder / TASKS
    if place.data_root is None and data is not None and Path(data).is_dir():
        place = replace(place, data_root=Path(data))
    if not place.task_dirs and tasks.is_dir() and any(tasks.iterdir()):
        place = replace(place, task_dirs=(tasks,))
    return place


def read_about(folder: Path, run: Mapping[str, Any]) -> tuple[AnalysisSetting, StudyFacts, ComputedStates]:
    """Return what `run.json` says of the results: how they are analysed, facts of models and tasks, and keys of states.

    Raises:
        UserError: another version wrote it.
    """
    try:
        about = ReceivedAbout.model_validate_json(json.dumps(run["about"]))
        states = STATES_TYPE.validate_json(json.dumps(run["states"]), strict=True)
    except ValidationError as error:
        raise UserError(f"{folder / FILE}: another version of mlmclm wrote it. {AGAIN}") from error
    return received_setting(about), about.facts, states


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
            _check_same(file, place, run)
        rows = results_store.results(cells)
    if not rows:
        file.find_space()  # an error in the search space is reported first
        raise UserError(f"{file.kind} {file.name!r} has no results yet: {remedy}")
    setting, facts, states = read_about(folder, run)
    grid = replace(setting.grid, added=added_rates(cells, setting.grid.learning_rates))

    def about() -> tuple[StudyFacts, ComputedStates]:
        zero_shot = tuple(map(_zero_shot_facts, zero_shot_results(run, place.store)))
        return replace(
            facts, command=command, zero_shot=zero_shot, basis=asked_for(command, packaged_studies())
        ), states

    return StudyRecord(
        name=file.name,
        rows=rows,
        setting=replace(setting, grid=grid),
        kept=results_store,
        about=about,
        claims=file.find_claims,
        kind=file.kind,
        spelled=file.spelled,
    )


def _zero_shot_facts(result: Mapping[str, Any]) -> ZeroShotFacts:
    values = result["values"].get(result["main"]) or []
    numbers = all(isinstance(value, int | float) for value in values)  # a perplexity's are pairs
    texts = (result["model"], result["task"], result["scoring"], result["main"])
    return ZeroShotFacts(*texts, result["metrics"], tuple(map(float, values)) if numbers else ())


def _check_same(file: AnyFile, place: Place, run: Mapping[str, Any]) -> None:
    """Check that a study's file still asks for the results of its last run; a study that is given by name always does.

    Raises:
        UserError: it has changed since; the message says what.
    """
    if file == kept_file(place.study_folder(file.name), run):
        return
    space, before, about = space_of(file, place), run["grid"], run["about"]
    # Weights are not compared, because models may have been deleted.
    difference = grid_difference(
        before, grid_of(space, {name: (before["models"].get(name, ""),) for name in file.models})
    )
    choices = {
        "rule": (space.rule, about["rule"]),
        "metrics": (space.metrics, about["facts"]["protocol"]["metrics"]),
        "baseline": (file.baseline, about["baseline"]),
    }
    chosen = [f"{key} {now} (was {was})" for key, (now, was) in choices.items() if now != was]
    if changed := "; ".join((*difference.lost, *difference.added, *chosen)):
        raise UserError(
            f"{file.kind} {file.name!r}: its file has changed since it was last run: {changed}. Run it again, which computes only what "
            f"is missing; the name {file.name!r} in place of the file stands for the last run."
        )


def is_path(which: str) -> bool:
    """Return whether a command's NAME|FILE is a file rather than a name."""
    return Path(which).is_file() or which.endswith((".yaml", ".yml")) or "/" in which


def known_studies(store: Path) -> list[KnownStudy]:
    """Return all studies and sweeps of a store, by name; damaged lists of cells count as none."""
    keys: set[str] | None = None
    studies = []
    for folder in sorted((store / "studies").glob("[!.]*/")):
        models = len([path for path in folder.glob("models/*") if path.name[0] != "."])
        study = KnownStudy(
            folder.name, "sweep" if (folder / "sweep.yaml").is_file() else "study", None, models, 0, 0, 0
        )
        with suppress(UserError):
            manifest = read_manifest(folder.name, store)
            keys = ResultsStore(store).keys() if keys is None else keys
            study = replace(
                study,
                run=manifest.planned,
                models=len({cell.model for cell in manifest.cells}),
                tasks=len({*(cell.task for cell in manifest.cells), *manifest.waiting}),
                cells=len(manifest.cells) + sum(manifest.waiting.values()),
                done=sum(cell.key in keys for cell in manifest.cells),
            )
        if models or study.run is not None or (folder / FILE).is_file():
            studies.append(study)
    return studies


def watch_of(which: str, store: Path) -> Watch:
    """Return a watch on the cells of a study, which is given by its name or its file.

    Raises:
        UserError: there is no such study in the store, or the file is wrong.
    """
    from mlmclm.sweeps.status import Watch

    return Watch(read_manifest(name_of(which), store), ResultsStore(store))


def name_of(which: str) -> str:
    """Return the name of a study that is given by its name or its file; a `UserError` if the file is missing or wrong."""
    return load_file(Path(which)).name if is_path(which) else which


def grid_of_study(sweep: StudySweep) -> dict[str, Any]:
    """Return the grid of a study; the weights of models that it trains are no part of it."""
    if isinstance(sweep.file, StudyFile):
        return grid_of(sweep.space, dict.fromkeys(sweep.file.models, ("",)))
    return grid_of(sweep.space, {swept.model.name: swept.model.hashes for swept in sweep.models})


def since_last(folder: Path, grid: Mapping[str, Any]) -> Difference:
    """Compare a grid with the last one of a study's or sweep's folder, if any; a `UserError` if its record is damaged."""
    if not (folder / FILE).is_file():
        return Difference((), ())
    again = "Delete it, or run with --replace: the report is then replaced, whatever its grid was."
    last = read_sealed(folder / FILE, again).get("grid", {})
    if not {*AXES, "per_model", "start_from"} <= last.keys():
        raise UserError(f"{folder / FILE}: it has no grid. {again}")
    return grid_difference(last, grid)


def check_last(folder: Path, grid: Mapping[str, Any], *, replace: bool) -> None:
    """Raise a `UserError` for a grid that lacks something of the last one in the folder, or if the record of the last
    one is damaged; say if the grid only grew.

    Args:
        replace: whether the user allows this; then there is no error.
    """
    try:
        difference = since_last(folder, grid)
    except UserError as error:
        if not replace:
            raise
        say(f"{error} It is written anew.")
        return
    if difference.lost and not replace:
        raise UserError(
            f"name {folder.name!r}: it was last run over another grid, whose report in {folder} would be replaced.\n"
            + "".join(f"  {line}\n" for line in (*difference.lost, *difference.added))
            + "Give this one another name (--name, or `name` in the file), or add --replace. Results of cells are kept "
            "either way."
        )
    if difference.added and not difference.lost:
        say(f"{folder.name}: the grid has grown: {'; '.join(difference.added)}")


def to_publish(record: StudyRecord, file: AnyFile, place: Place, *, examples: bool = True) -> StudyRecord:
    """Return the record of a study with its files, and without paths and names of machines.

    Args:
        file: the study's, as it was last run (`kept_file`).
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
