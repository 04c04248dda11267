"""Files of claims: where they are found, and what is said of a wrong one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mlmclm.answers.claim_files import absolute_claims, read_claims
from mlmclm.errors import UserError
from mlmclm.studies.study_file import load_file
from mlmclm.studies.study_sweep import plans_of_given

GOOD = """
source: mine
claims:
  first:
    says: MLM is better.
    first: {objective: mlm}
    second: {objective: clm}
"""


def test_all_packaged_claims_are_tested_unless_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    assert {each.source for each in read_claims()} == {"arXiv 2507.00994", "arXiv 2507.11412"}
    assert [each.name for each in read_claims(["mine.yaml"], tmp_path)] == ["first"]
    assert {each.source for each in read_claims(["ettin", tmp_path / "mine.yaml"])} == {"arXiv 2507.11412", "mine"}


def test_a_study_names_its_claims_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    file = tmp_path / "sweep.yaml"
    file.write_text("models: [m]\nspace: quickstart\nclaims: [mine.yaml]\n")
    assert [each.source for each in load_file(file).find_claims()] == ["mine"]
    assert absolute_claims("mine.yaml", tmp_path) == str(tmp_path / "mine.yaml")
    (tmp_path / "ettin").mkdir()
    assert absolute_claims("ettin", tmp_path) == "ettin"
    file.write_text("models: [m]\nspace: quickstart\nclaims: [etin]\n")
    with pytest.raises(UserError, match=r"unknown claims 'etin'\. Did you mean 'ettin'\? Allowed: ettin, mlm-vs-clm"):
        load_file(file).find_claims()


@pytest.mark.parametrize(
    ("good", "wrong", "message"),
    [
        ("objective: mlm", "objectve: mlm", r"unknown key 'claims\.first\.first\.objectve'\. Did you mean 'claims\.first\.first\.objective'"),
        ("objective: mlm", "objective: mln", r"claims\.first\.first\.objective: unknown objective 'mln'\. Did you mean 'mlm'\? Allowed: .*clm"),
        ("objective: mlm", "mask: [50, 20]", r"claims\.first\.first\.mask: a range is \[lowest, highest\] \(got \[50, 20\]\)"),
        ("objective: mlm", "made: coder", r"claims\.first\.first\.made.*'encoder', 'decoder'.*got 'coder'"),
        ("says:", "tasks: {families: retrival}\n    says:", r"unknown family 'retrival'\. Did you mean 'retrieval'"),
        ("says:", "alike: [size, stps]\n    says:", r"claims\.first\.alike: unknown feature 'stps'\. Did you mean 'steps'"),
        ("says:", "direction: lower\n    published: 3\n    says:", r"published: 3 is not a difference that is lower"),
        ("says:", "metric: acc\n    says:", r"metric: it is for the statistic zero_shot, not score"),
        ("source: mine", "", r"key 'source' is missing"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_its_key_and_what_is_allowed(
    good: str, wrong: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD.replace(good, wrong, 1))
    with pytest.raises(UserError, match=rf"mine\.yaml: .*{message}"):
        read_claims(["mine.yaml"], tmp_path)


def test_plans_of_given_models_are_known_if_one_study_of_the_store_has_trained_them(tmp_path: Path) -> None:
    def plans(*folders: str) -> list[str]:
        models = [
            SimpleNamespace(model=SimpleNamespace(name=Path(each).name, folder=tmp_path / each)) for each in folders
        ]
        return sorted(map(str, plans_of_given(models, tmp_path / "store").values()))  # type: ignore[arg-type]

    one, other = "store/studies/a/models/1m-clm-1k", "store/studies/b/models/1m-mlm40-1k"
    assert plans(one, "store/studies/a/models/mine-mlm40-1k", "elsewhere/bert") == ["1m-clm-1k"]
    assert plans(one, other) == []
