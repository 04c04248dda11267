"""Paths in a study file are relative to it, and where nothing is there, to the working directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm.errors import UserError
from mlmclm.storage.place import Place, packaged_studies
from mlmclm.studies.prepare import PreparedStudy, find_prepared, prepare_study
from mlmclm.studies.study_file import StudyFile, load_study
from mlmclm.studies.study_sweep import study_space
from mlmclm.sweeps.space import find_space
from small_models import save_small_decoder
from small_study import write_study

PACKAGED = packaged_studies()
SPACE = {
    "tasks": ["sst2"],
    "learning_rates": [1e-3],
    "seeds": [0],
    "protocol": {"max_steps": 4, "max_length": 32, "stride": 8},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The studies' folder, beside the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "studies"


def study(folder: Path, **changes: Any) -> StudyFile:
    """Loaded by a relative path."""
    write_study(folder, **changes)
    return load_study(Path("..") / folder.name / "study.yaml")


def space(path: Path, steps: int, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**SPACE, "protocol": {**SPACE["protocol"], "max_steps": steps}, **changes}))
    return path


def test_a_space_is_looked_for_beside_the_study_file_then_here_and_both_places_are_named(folder: Path) -> None:
    loaded = study(folder, space="spaces/own.yaml")
    message = (
        r"search space spaces/own\.yaml: no such file; looked for \.\./studies/spaces/own\.yaml and spaces/own\.yaml\."
    )
    with pytest.raises(UserError, match=message):
        study_space(loaded)
    space(Path("spaces/own.yaml"), 7)
    assert study_space(loaded).protocol.max_steps == 7
    space(folder / "spaces" / "own.yaml", 8)
    assert study_space(loaded).protocol.max_steps == 8
    with pytest.raises(UserError, match=r"search space own\.yaml: no such file; looked for own\.yaml\.$"):
        find_space("own.yaml")  # an option of the command line is no path of a file


def test_a_name_is_that_of_a_packaged_space_whatever_lies_beside_the_study_file(folder: Path) -> None:
    space(folder / "english.yaml", 9)
    assert study_space(
        study(folder, space="english", recipe={"block_length": 128, "warmup_steps": 4, "decay_steps": 6})
    ) == find_space("english")


def test_a_space_s_protocol_is_looked_for_beside_the_space(folder: Path) -> None:
    loaded = study(folder, space="spaces/own.yaml")
    space(folder / "spaces" / "own.yaml", 0, protocol={"base": "protocols/mine.yaml", "max_length": 16, "stride": 4})
    with pytest.raises(UserError, match=r"own\.yaml: protocol: .*mine\.yaml and protocols/mine\.yaml"):
        study_space(loaded)
    for place, steps in ((Path(), 5), (folder / "spaces", 6)):
        (place / "protocols").mkdir()
        (place / "protocols" / "mine.yaml").write_text(f"protocol: {{max_steps: {steps}}}\n")
        assert study_space(loaded).protocol.max_steps == steps
    tasks = study(folder.with_name("more"), space="../studies/spaces/own.yaml", tasks=["sst2"])
    assert study_space(tasks).protocol.max_steps == 6


def test_corpus_tokenizer_and_models_to_continue_from_are_looked_for_there_too(folder: Path) -> None:
    given: dict[str, Any] = {
        "initial": {"tiny": "decoder"}, "tokenizer": {"path": "decoder"}, "models": ["tiny-untrained"], "baseline": None,
        "corpus": {"source": "texts/train.txt", "text_documents": "paragraph", "validation_fraction": 0.1},
    }  # fmt: skip
    loaded, place = study(folder, **given), Place(folder.parent / "store", folder / "data")

    def made() -> PreparedStudy:
        return prepare_study(loaded, place)

    for needed, message in (
        (folder / "elsewhere", r"tokenizer\.path: decoder: no such file or folder; looked for .*studies/decoder and decoder"),
        (folder / "decoder", r"source 'texts/train\.txt'.*studies/texts/train\.txt nor texts/train\.txt nor .*data/texts"),
    ):  # fmt: skip
        if needed.name == "decoder":
            save_small_decoder(folder / "decoder")
        with pytest.raises(UserError, match=message):
            made()
    shutil.copytree(folder / "data" / "prose", folder / "texts")
    prepared = made()
    assert find_prepared(loaded, place) is not None
    assert prepared.initial["tiny"].source == "decoder"
    save_small_decoder(Path("decoder"), seed=1)  # what is here comes second
    assert made().initial == prepared.initial
    shutil.rmtree("decoder")
    shutil.rmtree(folder / "decoder")
    loaded = loaded.model_copy(update={"tokenizer": None})
    assert made().initial == prepared.initial  # the store has it
    unknown = loaded.model_copy(update={"initial": {"tiny": "my/models/nowhere"}})
    with pytest.raises(
        UserError, match=r"my/models/nowhere: no such model folder \(looked for .*studies/my/models/nowhere and my/"
    ):
        prepare_study(unknown, place)


@pytest.mark.parametrize("name", PACKAGED)
def test_the_packaged_studies_spaces_are_found_from_anywhere(name: str, folder: Path) -> None:
    loaded = load_study(Path(name))
    assert loaded.name == name
    assert study_space(loaded).tasks == (loaded.tasks or find_space(loaded.space).tasks)


def test_stride_is_a_matter_of_question_answering_alone(folder: Path) -> None:
    loaded = study(folder, space="own.yaml")
    short = {"max_steps": 4, "max_length": 16}
    space(folder / "own.yaml", 4, protocol=short)
    assert study_space(loaded).protocol.stride == 128
    space(folder / "own.yaml", 4, protocol=short, tasks=["sst2", "squad"])
    with pytest.raises(UserError, match=r"task squad: stride 128 must be less than max_length 16.*stride: 4"):
        study_space(loaded)
