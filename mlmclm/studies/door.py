"""The functions of `import mlmclm`. The command line parses options, calls them, and prints what they return.

Folders that are not given come from the environment, as for the command line: MLMCLM_STORE (by default `store`),
MLMCLM_DATA and MLMCLM_TASK_DIR. All functions raise `UserError` for a mistake in the request and `EnvironmentFault` for
a fault of the machine, the network or a service. A message names an argument as the command line spells it: `--data` is
`data`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.configuration import parse, read_yaml
from mlmclm.environment import set_library_defaults
from mlmclm.errors import UserError
from mlmclm.studies.given_study import GivenStudy
from mlmclm.studies.in_folder import file_of
from mlmclm.studies.last_run import find_run, known_studies
from mlmclm.studies.place import Place, UserFolders
from mlmclm.studies.study import Study
from mlmclm.studies.study_file import StudyFile, read_study
from mlmclm.studies.sweep_file import SweepFile, is_sweep
from mlmclm.studies.trained_study import TrainedStudy
from mlmclm.sweeps.cells import SweepModel

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.seeds import Seed
    from mlmclm.studies.one_cell import CellResult

Source = str | Path | Mapping[str, Any]

set_library_defaults()


def study(
    source: Source,
    *,
    store: str | Path | None = None,
    data: str | Path | None = None,
    task_dirs: Sequence[str | Path] | None = None,
    ledger: str | None = None,
    wait_for_storage: float | None = None,
) -> Study:
    """Return a study, checked; nothing is computed before its `run`.

    Args:
        source: a study or sweep file (YAML), the values of one as a dict, or the name of a packaged study, such as
            `quickstart`. Paths in a dict are relative to the working directory.
        store: folder that keeps everything.
        data: folder of local data sets that stand in for the Hugging Face Hub.
        task_dirs: folders of your own tasks, one YAML file each.
        ledger: where results are kept in place of the store, such as `s3://bucket/prefix`; the store remembers it.
        wait_for_storage: seconds for which an outage of the results' object store is waited for.

    Raises:
        UserError: there is no such file, or a key or value in it is wrong.
    """
    folders = UserFolders(store, data, task_dirs, ledger, wait_for_storage)
    if isinstance(source, Mapping):
        values, where, path = dict(source), "study", None
    else:
        path = file_of(Path(source))
        values, where = read_yaml(path), str(path)
    verb = "sweep" if is_sweep(values) else "study"
    command = folders.command(verb, str(source)) if path is not None else f"mlmclm.{verb}(...).run()"
    file: StudyFile | SweepFile
    if is_sweep(values):
        file = parse(SweepFile, values, where=where, context={"file": path})
        return GivenStudy(file, folders.place(), source=str(source) if path else "", command=command)
    file = read_study(values, where=where, file=path)
    return TrainedStudy(file, folders.place(), source=str(source) if path else "", command=command)


def sweep(
    models: Sequence[str] | Mapping[str, str],
    tasks: Sequence[str] | None,
    space: str | Path,
    *,
    name: str | None = None,
    baseline: str | None = None,
    store: str | Path | None = None,
    data: str | Path | None = None,
    task_dirs: Sequence[str | Path] | None = None,
    ledger: str | None = None,
    wait_for_storage: float | None = None,
) -> Study:
    """Return a study of given models.

    Args:
        models: each a folder, a name in a study of the store (NAME, STUDY/NAME, or STUDY/* for all), or a name on the
            Hugging Face Hub (OWNER/NAME[@REVISION]); `NAME=SOURCE`, or a mapping, gives names of your own.
        tasks: names of tasks; None for those of the space.
        space: the search space: a packaged one, such as `glue`, or a YAML file.
        name: of the report's folder and the MLflow experiment; `sweep` if not given.
        baseline: the model that the others are compared with.
        store, data, task_dirs, ledger, wait_for_storage: as in `study`.

    Raises:
        UserError: two models have one name, or an argument is wrong.
    """
    folders = UserFolders(store, data, task_dirs, ledger, wait_for_storage)
    place = folders.place()
    sources = [f"{own}={source}" for own, source in models.items()] if isinstance(models, Mapping) else list(models)
    values: dict[str, Any] = {"models": sources, "space": str(space), "tasks": list(tasks or ()) or None}
    values |= {"baseline": baseline} | ({"name": name} if name else {})
    given = {"--model": sources, "--task": tasks, "--space": [str(space)], "--name": name, "--baseline": baseline}
    several = {option: [value] if isinstance(value, str) else value for option, value in given.items() if value}
    words = [shlex.quote(word) for option, own in several.items() for value in own for word in (option, value)]
    return GivenStudy(parse(SweepFile, values, where="options"), place, command=folders.command("sweep", *words))


def pretrain(
    source: Source,
    models: Sequence[str] = (),
    *,
    suite: str | None = None,
    ray: str | None = None,
    store: str | Path | None = None,
    data: str | Path | None = None,
    task_dirs: Sequence[str | Path] | None = None,
) -> list[SweepModel]:
    """Train the models of a study that are not trained yet, and return all of them, each with its Hugging Face folder.

    Args:
        source: as in `study`.
        models: only these models of the study; by default all.
        suite: name or file of a suite whose models take the place of the study's.
        ray: address of a running Ray cluster.
        store, data, task_dirs: as in `study`.

    Raises:
        UserError: a setting is wrong, or the models of this study are given rather than trained.
        EnvironmentFault: the machine or the cluster failed. What is finished is kept.
    """
    made = trained_study(source, models, suite=suite, store=store, data=data, task_dirs=task_dirs)
    return made.pretrain(ray=ray)


def trained_study(
    source: Source, models: Sequence[str] = (), *, suite: str | None = None, **folders: Any
) -> TrainedStudy:
    """Return a study that trains its models, or some of them; arguments as in `pretrain`."""
    made = study(source, **folders)
    if not isinstance(made, TrainedStudy):
        raise UserError(f"{made.source}: its models are given; there is nothing to pretrain.")
    if suite is not None:
        made = made.with_suite(suite)
    return made.only(models, where=made.source if suite is None else f"--suite {suite}") if models else made


def finetune(
    model: str,
    task: str,
    learning_rate: float,
    *,
    seed: Seed | Mapping[str, int] = 0,
    protocol: str | None = None,
    space: str | None = None,
    settings: Mapping[str, Any] | None = None,
    start_from: str | None = None,
    store: str | Path | None = None,
    data: str | Path | None = None,
    task_dirs: Sequence[str | Path] | None = None,
) -> CellResult:
    """Fine-tune one model on one task at one learning rate with one seed, without Ray, and return the scores.

    The cell is computed as in a sweep, on one thread of the CPU or on the GPU, and each uses the other's results.

    Args:
        model: a model's folder, its name in a study of the store (NAME or STUDY/NAME), or on the Hub (OWNER/NAME).
        task: a task's name.
        learning_rate: the peak learning rate, in (0, 1).
        seed: of head, order and dropout; or a mapping with one for each of these.
        protocol: how to fine-tune: a packaged protocol (`standard` by default), or a file in the same format.
        space: a search space whose protocol is used instead.
        settings: settings in place of the protocol's, such as `{"epochs": 2}`; needed for the axes of its grid.
        start_from: the key of another cell of this model, whose encoder is the start, or `none` for the model's own;
            needed where the protocol starts the task from another one.
        store, data, task_dirs: as in `study`.

    Raises:
        UserError: a name or a setting is wrong.
    """
    from mlmclm.studies.one_cell import one_cell

    return one_cell(
        model,
        task,
        learning_rate,
        UserFolders(store, data, task_dirs).place(),
        seed=seed,
        protocol=protocol,
        space=space,
        settings=settings,
        start_from=start_from,
    ).run()


def open(
    store: str | Path | None = None,
    *,
    data: str | Path | None = None,
    task_dirs: Sequence[str | Path] | None = None,
) -> Store:
    """Return a store, to look at its studies and models; arguments as in `study`."""
    return Store(UserFolders(store, data, task_dirs))


class Store:
    """A store: what studies and sweeps have left there. Nothing is computed to look at it."""

    def __init__(self, folders: UserFolders) -> None:
        self._folders = folders
        self.place: Place = folders.place()

    def __repr__(self) -> str:
        return f"<store {self.place.store}>"

    def studies(self) -> pd.DataFrame:
        """Return the studies and sweeps: name, kind, time of the last run (UTC), and numbers of models, tasks and cells."""
        import pandas as pd

        return pd.DataFrame([asdict(each) for each in known_studies(self.place.store)])

    def study(self, which: str | Path) -> Study:
        """Return a study as it was last run, by its name, or as it is in its file.

        Data and tasks of the last run are used if none are given.

        Raises:
            UserError: there is none, its file is wrong, or the store doesn't say how it was run.
        """
        run = find_run(str(which), self.place)
        kind: type[Study] = GivenStudy if isinstance(run.file, SweepFile) else TrainedStudy
        command = run.command or self._folders.command(kind.verb, str(which))
        return kind(run.file, run.place, source=run.source, command=command)

    def models(self) -> pd.DataFrame:
        """Return the models that studies have exported: study, name and Hugging Face folder."""
        import pandas as pd

        folders = sorted((self.place.store / "studies").glob("*/models/[!.]*"))
        rows = [(folder.parent.parent.name, folder.name, folder) for folder in folders]
        return pd.DataFrame(rows, columns=["study", "name", "folder"])

    def model(self, name: str) -> SweepModel:
        """Return a model by its name in a study (NAME or STUDY/NAME), its folder, or its name on the Hub.

        Raises:
            UserError: there is no such model, or several studies have different models of that name.
            EnvironmentFault: the Hub can't provide it.
        """
        from mlmclm.sweeps.find_model import find_model

        return find_model(name, self.place.store, data_root=self.place.data_root)
