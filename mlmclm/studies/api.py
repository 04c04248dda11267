"""The functions of `import mlmclm`. The command line parses options, calls them, and prints what they return.

All take the `StudyFolders` as keywords: `store`, `data`, `task_dirs` and `wait_for_storage`. The environment gives the
omitted ones, as for the command line: MLMCLM_STORE (by default `store`), MLMCLM_DATA and MLMCLM_TASK_DIR. All raise
`UserError` for a mistake in the request and `EnvironmentFault` for a fault of the machine, the network or a
service. A message names an argument as the command line spells it: `--data` is `data`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mlmclm.answers.comparison_of_models import Comparison, compare_results
from mlmclm.answers.joined_records import joined
from mlmclm.answers.received_record import read_record
from mlmclm.answers.record import is_bundle
from mlmclm.answers.study_results import Results
from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.configuration import parse_config, read_yaml, with_overrides
from mlmclm.environment import set_library_defaults
from mlmclm.errors import UserError, unknown
from mlmclm.storage.place import Place, command_of, file_of, open_place, packaged_studies
from mlmclm.studies.study import Study
from mlmclm.studies.study_file import SweepFile, load_file, read_file
from mlmclm.studies.study_record import FILE, completed, is_path, kept_file, known_studies, last_run
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.results_store import ResultsStore

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.seeds import Seed
    from mlmclm.sweeps.one_cell import CellResult

Source = str | Path | Mapping[str, Any]

set_library_defaults()


@known_arguments
def study(
    source: Source, *, part: str | None = None, overrides: Sequence[str] = (), **folders: Unpack[StudyFolders]
) -> Study:
    """Return a study, checked; nothing is computed before its `run`.

    Args:
        source: a study or sweep file (YAML), the values of one as a dict, or the name of a packaged study, such as
            `quickstart`. Paths in a dict are relative to the working directory.
        part: one of the file's `parts`, as a study of its own; by default the whole study.
        overrides: settings in place of the file's, KEY=VALUE each, such as `recipe.batch=32`.
        folders: `StudyFolders`.

    Raises:
        UserError: there is no such file or part, or a key or value in the file is wrong.
    """
    path = None if isinstance(source, Mapping) else file_of(Path(source))
    values = dict(source) if isinstance(source, Mapping) else read_yaml(file_of(Path(source)))
    where = "study" if path is None else str(path)
    file = read_file(with_overrides(values, overrides, where=where), where=where, file=path)
    if part is not None:
        if isinstance(file, SweepFile):
            raise UserError(f"{where}: its models are given; only files of studies that train their models have parts.")
        file = file.of_part(part, where=where)
    if path is None:
        return Study(file, open_place(**folders), command=f"mlmclm.{file.kind}(...).run()")
    words = [str(source), *overrides, *(["--part", part] if part is not None else [])]
    command = command_of(file.kind, *words, **folders)
    return Study(file, open_place(**folders), source=shlex.join(words), command=command)


@known_arguments
def sweep(
    models: str | Sequence[str] | Mapping[str, str],
    tasks: str | Sequence[str] | None,
    space: str | Path | Mapping[str, Any],
    *,
    name: str | None = None,
    baseline: str | None = None,
    **folders: Unpack[StudyFolders],
) -> Study:
    """Return a study of given models.

    Args:
        models: one or several, each a folder, a name in a study of the store (NAME, STUDY/NAME, or STUDY/* for all), or a name on the
            Hugging Face Hub (OWNER/NAME[@REVISION]); `NAME=SOURCE`, or a mapping, gives names of your own.
        tasks: names of tasks; None for those of the space.
        space: the search space: a packaged one, such as `glue`, a YAML file, or the values of one as a dict.
        name: of the report's folder and the MLflow experiment; `sweep` if not given.
        baseline: the model that the others are compared with.
        folders: `StudyFolders`.

    Raises:
        UserError: two models have one name, or an argument is wrong.
    """
    place = open_place(**folders)
    models = [models] if isinstance(models, str) else models
    tasks = [tasks] if isinstance(tasks, str) else tasks
    sources = [f"{model}={source}" for model, source in models.items()] if isinstance(models, Mapping) else list(models)
    values: dict[str, Any] = {"models": sources, "tasks": list(tasks or ()) or None, "baseline": baseline}
    values |= {"space": dict(space) if isinstance(space, Mapping) else str(space)} | ({"name": name} if name else {})
    file = parse_config(SweepFile, values, where="options")
    if isinstance(space, Mapping):
        return Study(file, place, command="mlmclm.sweep(...).run()")
    options = {"--model": sources, "--task": tasks, "--space": [str(space)], "--name": name, "--baseline": baseline}
    lists = {option: [value] if isinstance(value, str) else value for option, value in options.items() if value}
    words = [word for option, values in lists.items() for value in values for word in (option, value)]
    return Study(file, place, command=command_of("sweep", *words, **folders))


@known_arguments
def study_on_file(
    folder: str | Path,
    rows: str | Path,
    models: str | Sequence[str] | Mapping[str, str],
    *,
    test: str | Path | None = None,
    validation: str | Path | None = None,
    family: str | None = None,
    text_columns: str | Sequence[str] = (),
    label_column: str | None = None,
    **folders: Unpack[StudyFolders],
) -> Study:
    """Write a study of models on a data file, whose task is inferred, to a folder, and return it; `run` computes it.

    The folder gets `study.yaml` with a small grid, the task in `tasks/`, and the file's rows, divided into three parts, in `data/`.

    Args:
        folder: is created if it does not exist; its name becomes the study's.
        rows: a CSV, TSV, JSON, JSON Lines or Parquet file, or one with a word and its tags on each line.
        models: as in `sweep`.
        test: a file with the test rows; by default a fifth of the rows is held out.
        validation: a file with the validation rows; by default a tenth is held out.
        family: the kind of task, such as `sequence-regression`, in place of the inferred one.
        text_columns: the column of text, or two: text and second text, query and positive, question and context.
        label_column: the column of labels, tags or answers.
        folders: `StudyFolders`; `data` and `task_dirs` only help to find models, as the study gets folders of its own.

    Raises:
        UserError: a file can't be read, it isn't clear what is in it, an argument is wrong, or a file to write exists.
    """
    from mlmclm.studies.new_study import STUDY, settings_for, write_study
    from mlmclm.tasks.data_file import read_task
    from mlmclm.tasks.inference import Overrides

    folder = Path(folder)
    overrides = Overrides(
        family, (text_columns,) if isinstance(text_columns, str) else tuple(text_columns), label_column
    )
    task = read_task(rows, overrides, test=test, validation=validation)
    write_study(folder, task, settings_for(folder, task, models, open_place(**folders)))
    folders |= {"data": folder / "data", "task_dirs": [folder / "tasks"]}
    return study(folder / STUDY, **folders)


@known_arguments
def pretrain(
    source: Source,
    models: Sequence[str] = (),
    *,
    suite: str | None = None,
    ray: str | None = None,
    **folders: Unpack[StudyFolders],
) -> list[SweepModel]:
    """Train the models of a study that are not trained yet, and return all of them, each with its Hugging Face folder.

    Args:
        source: as in `study`.
        models: only these models of the study; by default all.
        suite: name or file of a suite whose models take the place of the study's.
        ray: address of a running Ray cluster.
        folders: `StudyFolders`.

    Raises:
        UserError: a setting is wrong, or the models of this study are given rather than trained.
        EnvironmentFault: the machine or the cluster failed. What is finished is kept.
    """
    return study(source, **folders).narrowed(models, suite).pretrain(ray=ray)


@known_arguments
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
    **folders: Unpack[StudyFolders],
) -> CellResult:
    """Fine-tune one model on one task at one learning rate with one seed, without Ray, and return the scores.

    The cell is computed as in a sweep, on one thread of the CPU or on the GPU; sweeps and this function reuse each other's results.

    Args:
        model: a model's folder, its name in a study of the store (NAME or STUDY/NAME), or on the Hub (OWNER/NAME).
        task: a task's name.
        learning_rate: the peak learning rate, in (0, 1).
        seed: one for head, order and dropout, or a mapping with one for each of these.
        protocol: how to fine-tune: a packaged protocol (`standard` by default), or a file in the same format.
        space: a search space whose protocol is used instead.
        settings: settings in place of the protocol's, such as `{"epochs": 2}`; needed for the axes of its grid.
        start_from: the key of another cell of this model, whose encoder is the start, or `none` for the model's own;
            needed where the protocol starts the task from another one.
        folders: `StudyFolders`.

    Raises:
        UserError: a name or a setting is wrong.
    """
    from mlmclm.sweeps.one_cell import one_cell

    return one_cell(
        model,
        task,
        learning_rate,
        open_place(**folders),
        seed=seed,
        protocol=protocol,
        space=space,
        settings=settings,
        start_from=start_from,
    ).run()


@known_arguments
def open(
    store: str | Path | None = None,
    *,
    data: str | Path | None = None,
    task_dirs: Sequence[str | Path] | None = None,
) -> Store:
    """Return a store, to look at its studies and models; the arguments are `StudyFolders`."""
    return Store(store=store, data=data, task_dirs=task_dirs)


def published(*folders: str | Path) -> Results:
    """Return the results of a published study from its bundle, or from several bundles that are parts of it.

    Raises:
        UserError: a bundle is missing or damaged, or the bundles are not of one study.
    """
    records = {str(folder): read_record(Path(folder), read_file) for folder in folders}
    return Results(joined(records) if len(folders) > 1 else records[str(folders[0])])


class Store:
    """The studies, sweeps and models in a store. Looking at them computes nothing."""

    @known_arguments
    def __init__(self, **folders: Unpack[StudyFolders]) -> None:
        self._folders = folders
        self.place: Place = open_place(**folders)

    def __repr__(self) -> str:
        return f"<store {self.place.store}>"

    def studies(self) -> pd.DataFrame:
        """Return the studies and sweeps: name, kind, time of the last run (UTC), and numbers of models, tasks and cells."""
        import pandas as pd

        return pd.DataFrame([asdict(entry) for entry in known_studies(self.place.store)])

    def results(self, which: str | Path, *, rule: str | None = None) -> Results:
        """Return a study's results so far, by its name or file (`study`), or a published study's, by its folder.

        Args:
            rule: as in `Results.by_rule`.

        Raises:
            UserError: there is no such study, or it has no results; the message says what to run.
        """
        results = published(which) if is_bundle(Path(which)) else self.study(which).results
        return results.by_rule(rule)

    def compare_cells(self, first: str, second: str, *, metric: str | None = None) -> Comparison:
        """Compare two cells, given by their keys.

        Args:
            metric: a score in place of the main one.

        Raises:
            UserError: there is no such result, or the cells have no score in common.
        """
        results_store, results = ResultsStore(self.place.store), []
        for key in (first, second):
            result = results_store.find(key)
            if result is None:
                raise UserError(
                    f"{key}: {results_store.folder} has no result of that key; to compare models by name, give --study NAME."
                )
            results.append(result)
        return compare_results(results, results_store, metric=metric)

    def study(self, which: str | Path) -> Study:
        """Return a study: as it was last run, if its name is given, or as its file describes it.

        By default, the study uses the data and tasks of its last run.

        Raises:
            UserError: there is none, its file is wrong, or the store doesn't say how it was run.
        """
        if is_bundle(Path(which)):
            raise UserError(
                f"{which}: the folder of a published study, which has only results and can't be run; `results` returns them."
            )
        source, place = str(which), self.place
        folder, command = place.study_folder(source), None
        if is_path(source) or (source in packaged_studies() and not (folder / FILE).is_file()):
            file = load_file(Path(which))
            folder = place.study_folder(file.name)
            record = last_run(folder) if (folder / FILE).is_file() else None
            if record is not None:
                place = completed(place, folder, record)
                command = record["command"] if place != self.place else None
        else:
            record = self._last_run(source, folder)
            file = kept_file(folder, record)
            place, source, command = completed(place, folder, record), record["file"] or source, record["command"]
        command = command or command_of(file.kind, str(which), **self._folders)
        return Study(file, place, source=source, command=command)

    def _last_run(self, name: str, folder: Path) -> dict[str, Any]:
        if (folder / FILE).is_file():
            return last_run(folder)
        names = [entry.name for entry in known_studies(self.place.store)]
        if name not in names:
            raise unknown("study or sweep", name, names, where=str(self.place.store))
        raise UserError(
            f"{name}: {folder} has no {FILE}: its models are not fine-tuned yet. Give its file, or run it with "
            "`mlmclm study` or `mlmclm sweep`; what is finished is not computed again."
        )

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
