"""A store, opened from Python: its studies and models."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mlmclm.answers.comparison_of_models import Comparison, compare_results
from mlmclm.answers.joined_records import joined
from mlmclm.answers.received_record import read_record
from mlmclm.answers.record import is_bundle
from mlmclm.answers.study_results import Results
from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.errors import UserError, unknown
from mlmclm.studies.given_study import GivenStudy
from mlmclm.studies.last_grid import FILE
from mlmclm.studies.last_run import completed, is_path, kept_file, known_studies, last_run
from mlmclm.studies.packaged_studies import packaged_studies
from mlmclm.studies.place import Place, command_of, place_of
from mlmclm.studies.study import Study
from mlmclm.studies.study_file import AnyFile, SweepFile, load_file, read_file
from mlmclm.studies.trained_study import TrainedStudy
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.results_store import ResultsStore

if TYPE_CHECKING:
    import pandas as pd


def study_of(file: AnyFile, place: Place, *, source: str = "", command: str) -> Study:
    """Return the study of a file; arguments as of `Study`."""
    if isinstance(file, SweepFile):
        return GivenStudy(file, place, source=source, command=command)
    return TrainedStudy(file, place, source=source, command=command)


def published(*folders: str | Path) -> Results:
    """Return the results of a published study, of which there is a bundle, or several that are parts of it.

    Raises:
        UserError: a bundle is missing or damaged, or the bundles are not of one study.
    """
    records = {str(folder): read_record(Path(folder), read_file) for folder in folders}
    return Results(joined(records) if len(folders) > 1 else records[str(folders[0])])


class Store:
    """A store: what studies and sweeps have left there. Nothing is computed to look at it."""

    @known_arguments
    def __init__(self, **folders: Unpack[StudyFolders]) -> None:
        self._folders = folders
        self.place: Place = place_of(**folders)

    def __repr__(self) -> str:
        return f"<store {self.place.store}>"

    def studies(self) -> pd.DataFrame:
        """Return the studies and sweeps: name, kind, time of the last run (UTC), and numbers of models, tasks and cells."""
        import pandas as pd

        return pd.DataFrame([asdict(each) for each in known_studies(self.place.store)])

    def results(self, which: str | Path, *, rule: str | None = None) -> Results:
        """Return the results of a study so far, by its name or file (`study`); or of a published one, by its folder.

        Args:
            rule: as in `Results.by_rule`.

        Raises:
            UserError: there is no such study, or it has no results; the message says what to run.
        """
        found = published(which) if is_bundle(Path(which)) else self.study(which).results
        return found.by_rule(rule)

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
        """Return a study as it was last run, by its name, or as it is in its file.

        Data and tasks of the last run are used if none are given.

        Raises:
            UserError: there is none, its file is wrong, or the store doesn't say how it was run.
        """
        if is_bundle(Path(which)):
            raise UserError(
                f"{which}: a published study has results alone, of which nothing is computed; `results` returns them."
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
        return study_of(file, place, source=source, command=command)

    def _last_run(self, name: str, folder: Path) -> dict[str, Any]:
        if (folder / FILE).is_file():
            return last_run(folder)
        names = [known.name for known in known_studies(self.place.store)]
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
