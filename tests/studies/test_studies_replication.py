"""The replications: packaged studies whose parts, one after the other, are the whole, and `mlmclm replicate`."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm.analysis.results import records
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.plans.stages import Plan, State, make_plan
from mlmclm.studies.api import published, study
from mlmclm.studies.plan import REPLICATED, SCALES, price_plan, replication_of, write_replication
from mlmclm.studies.study_file import StudyFile, load_study, read_file
from mlmclm.studies.study_record import as_yaml
from mlmclm.studies.study_sweep import StudySweep, study_space

NAMES = [replication_of(*each) for each in itertools.product(REPLICATED, SCALES)]
SMALL = [name for name in NAMES if name.endswith("small")]
ROOT = Path(__file__).parents[2]
MOST_TOKENS = 110e6
"""Of a part: three hours at 10,000 tokens a second."""
VALUES: dict[str, Any] = {
    "name": "mine",
    "parts": {"short": ["1m-untrained", "1m-clm-40", "1m-clm-20-mlm40-40"], "long": ["1m-untrained", "1m-clm-80"]},
    "baseline": "1m-untrained",
    "corpus": {"source": "pydocs"},
    "tokenizer": {"train_vocab_size": 400},
    "recipe": {"warmup_steps": 4, "decay_steps": 10},
    "space": "quickstart",
    "per_model": {"1m-clm-80": {"max_steps": 3}},
}


def read(**changes: Any) -> StudyFile:
    file = read_file(VALUES | changes, where="mine.yaml")
    assert isinstance(file, StudyFile)
    return file


def planned(file: StudyFile) -> Plan:
    return make_plan(file.parsed, file.recipe, beside=file.beside)


def steps_left(plan: Plan, there: set[State]) -> int:
    return sum(part.steps for stage in plan.stages for part in stage.left(there.__contains__))


@pytest.mark.parametrize("name", NAMES)
def test_every_replication_is_a_study_of_its_paper_s_claims(name: str) -> None:
    file = load_study(Path(name))
    assert file.name == name
    assert study_space(file).tasks
    sources = {claim.source for claim in file.find_claims()}
    assert sources == {"arXiv 2507.00994" if "study" in name else "arXiv 2507.11412"}


@pytest.mark.parametrize("name", SMALL)
def test_its_parts_in_either_order_train_what_the_whole_does_and_no_step_twice(name: str) -> None:
    whole = load_study(Path(name))
    every, page = planned(whole), (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")
    plans: dict[str, Plan] = {}
    for part in whole.parts:
        own = whole.of_part(part, where=name)
        assert (own.name, own.claims) == (f"{name}-{part}", whole.claims)
        assert study_space(own).tasks == study_space(whole).tasks
        plans[part] = planned(own)
    for order in (list(plans), list(plans)[::-1]):
        there: set[State] = set()
        steps = {}
        for part in order:
            steps[part] = steps_left(plans[part], there)
            there.update(state for stage in plans[part].stages for state in stage.states)
        assert sum(steps.values()) == every.steps
        assert steps_left(every, there) == 0
        if order == list(plans):
            assert max(steps.values()) * whole.recipe.batch * whole.recipe.block_length < MOST_TOKENS
            assert [part for part, new in steps.items() if not re.search(rf"\| `{part}` .* \| {new:,} \|", page)] == []
    assert f"{every.steps:,}" in page


def test_a_part_is_the_study_with_its_models_and_its_file_in_the_store_says_so() -> None:
    file = read()
    assert file.models == ("1m-untrained", "1m-clm-40", "1m-clm-20-mlm40-40", "1m-clm-80") and not file.beside
    short, long = (file.of_part(part, where="mine.yaml") for part in ("short", "long"))
    assert (short.name, short.baseline, short.per_model) == ("mine-short", "1m-untrained", {})
    assert short.models == ("1m-untrained", "1m-clm-40", "1m-clm-20-mlm40-40")
    assert [len(each.per_model) for each in (short, long)] == [0, 1]
    # Where a model of the other part branches off, a state is left: the other's decay begins at step 70.
    assert {state.step for stage in planned(short).stages for state in stage.states} == {20, 30, 40}
    assert {state.step for stage in planned(long).stages for state in stage.states} == {20, 30, 80}
    place = study(VALUES).place
    again = read_file(yaml.safe_load(as_yaml(StudySweep(long, place, study_space(long)))), where="study.yaml")
    assert again == long


def test_replicates_are_in_the_part_of_the_model_that_they_repeat_unless_they_are_listed() -> None:
    parts = {"once": ["1m-clm-40", "1m-mlm40-40"], "again": ["1m-clm-40-r2"]}
    file = read(parts=parts, replicates=2, baseline=None, per_model={"1m-clm-40": {"max_steps": 3}})
    once, again = (file.of_part(part, where="mine.yaml") for part in parts)
    assert once.models == ("1m-clm-40", "1m-mlm40-40", "1m-mlm40-40-r2")
    assert again.models == ("1m-clm-40-r2",) and list(study_space(again).per_model) == ["1m-clm-40-r2"]


def test_wrong_parts_are_named(tmp_path: Path) -> None:
    for changes, message in (
        ({"models": ["1m-clm-40", "1m-clm-50"]}, "parts: models in none of them: 1m-clm-50"),
        ({"parts": {"a": ["1m-clm-40", "1m-clm-40"]}}, "parts.a: listed twice: 1m-clm-40"),
        ({"models": ["1m-clm-40"], "parts": {"a": ["1m-clm-40", "1m-cml-40"]}}, "parts.a: .*cml"),
        ({"parts": {}}, "models"),
    ):
        with pytest.raises(UserError, match=message):
            read(**{"baseline": None, "per_model": {}} | changes)
    with pytest.raises(UserError, match=r"part 'shrt'.*Did you mean 'short'"):
        study(VALUES, part="shrt")
    with pytest.raises(UserError, match=r"models: none of part 'long' \(1m-untrained, 1m-clm-80\) is among them"):
        read(models=["1m-clm-40"], baseline=None, per_model={}).of_part("long", where="mine.yaml")
    made = study(VALUES, part="long", store=tmp_path)
    assert made.narrowed(["1m-clm-80"]).trained_file.beside
    with pytest.raises(UserError, match="only files of studies that train their models have parts"):
        study({"models": ["a"], "space": "glue"}, part="long")


def test_a_replication_is_copied_with_its_tasks_and_not_over_anything(tmp_path: Path) -> None:
    written = write_replication("replicate-ettin-small", tmp_path / "mine")
    assert [file.name for file in written] == ["replicate-ettin-small.yaml", "last_word.py", "last_word.yaml"]
    asked = load_study(written[0]).zero_shot
    assert asked is not None
    (tmp_path / "winogender").mkdir()
    assert asked.found(written[0].parent, tmp_path).tasks == (str(written[2]),)
    with pytest.raises(UserError, match="it exists and is not overwritten"):
        write_replication("replicate-ettin-small", tmp_path / "mine")


def test_the_last_words_are_words_that_their_passages_have_had() -> None:
    from datasets import Dataset

    from mlmclm.replications.tasks.last_word import passages

    words = [f"w{number}" for number in range(100)]
    article = " ".join([*words[:10], "harbour", *words, "harbour", "again"])
    (found,) = passages(Dataset.from_list([{"text": article}, {"text": "too short"}])).to_list()
    assert found["word"] == "harbour" and article.startswith(f"{found['context']} harbour again")


def test_the_page_has_the_hours_of_the_papers_own_scale() -> None:
    page = (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")
    for suite, file in (("paper", Path("paper")), ("ettin", None)):
        priced = price_plan(suite=suite, study=file, device="h100")
        assert f"`{suite}` {'takes ' * (suite == 'paper')}{priced.as_dict()['device_hours']:,.0f}" in page


def test_wrong_papers_and_scales_are_named_with_the_nearest() -> None:
    for words, message in (
        (("etin", "tiny"), "Did you mean 'ettin'?"),
        (("study", "smal"), "--scale: .*Did you mean 'small'?"),
        (("study", "paper"), "mlmclm plan --suite paper --price"),
    ):
        with pytest.raises(UserError, match=message):
            replication_of(*words)


@pytest.mark.slow
def test_the_tiny_replication_ends_with_its_claims(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replicate", "study", "--scale", "tiny", "--store", str(tmp_path / "store")])
    printed = capfd.readouterr().out
    assert not ended.value.code
    assert "too small to tell (" in printed and "; clm-then-mlm-beats-mlm)" in printed
    assert (tmp_path / "store" / "studies" / "replicate-study-tiny" / "tested_claims.csv").is_file()
    assert "Pretraining: 8 stages" in printed


def test_the_page_shows_the_verdicts_of_the_published_bundles() -> None:
    page = (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")
    shown: dict[str, dict[str, str]] = {}
    for table in re.findall(r"^\| claim of arXiv.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL):
        (_, *bundles), _, *rows = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines())
        for says, *verdicts in rows:
            for bundle, verdict in zip(bundles, verdicts, strict=True):
                shown.setdefault(bundle, {})[says] = verdict
    assert set(shown) == {"study-small-1k", "study-small", "ettin-small"}
    for bundle, verdicts in shown.items():
        found = records(published(ROOT / "docs" / "replication" / bundle).claims())
        tested = {row["says"]: row for row in found if row["verdict"] != "not tested here"}
        assert set(tested) == {says for says, verdict in verdicts.items() if verdict}
        for says, row in tested.items():
            parts = re.fullmatch(r"(.*?): (?:deviation over rates )?(.*), ([<.\d]+)", verdicts[says])
            if parts is None:
                assert verdicts[says] == f"{row['verdict']}, by design"
                continue
            verdict, numbers, p = parts.groups()
            assert verdict == row["verdict"] and numbers in row["reason"] and f"; p {p} after Holm's" in row["reason"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    for effect in re.findall(r"beats MLM alone by ([\d.]+) points \[([\d.]+), ([\d.]+)\]", readme):
        assert (
            "+{} [+{}, +{}]".format(*effect)
            in shown["study-small"]["At a fixed budget, CLM followed by MLM scores higher than MLM alone."]
        )
