"""A study on a mix of two sources: what is prepared, said of it, and exported as the order of its data."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml

from mlmclm.cli.main import main
from mlmclm.corpora.mixed_blocks import InTurns, MixedBlocks, rows_of_length
from mlmclm.corpora.mixed_corpus import PreparedSources
from mlmclm.corpora.order import block_numbers
from mlmclm.corpora.tokenizer import special_ids
from mlmclm.errors import UserError
from mlmclm.plans.costs import segment_flops
from mlmclm.plans.names import parse_name
from mlmclm.plans.segments import samples_of
from mlmclm.pretraining.initial import shape
from mlmclm.pretraining.state_facts import flops, state_facts
from mlmclm.reports.model_card import model_card
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import PreparedStudy, find_prepared, prepare_study
from mlmclm.studies.study_file import load_study
from small_study import MIXED_PHASES, write_mixed

MODEL = "1m-mlm40-14"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixed(tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="module")
def made(path: Path) -> PreparedStudy:
    study, place = load_study(path), Place(path.parent / "store", path.parent / "data")
    assert find_prepared(study, place) is None
    return prepare_study(study, place)


def joined(made: PreparedStudy, length: int) -> MixedBlocks:
    found = rows_of_length(made.corpus.train, length, "joined", made.corpus.tokenizer)
    assert isinstance(found, MixedBlocks)
    return found


def test_sources_share_a_tokenizer_of_the_mix_and_are_found_again(path: Path, made: PreparedStudy) -> None:
    corpus = made.corpus
    assert isinstance(corpus, PreparedSources) and list(corpus.sources) == ["prose", "verse"]
    assert {each.tokenizer for each in corpus.sources.values()} == {corpus.tokenizer}
    assert corpus.tokens == sum(each.tokens for each in corpus.sources.values())
    found = find_prepared(load_study(path), made.place)
    assert found is not None and found.corpus.key == corpus.key and found.fingerprint == made.fingerprint


def test_cards_have_the_phases_lengths_and_every_size_needs_phases(made: PreparedStudy, tmp_path: Path) -> None:
    name, study = parse_name(MODEL), made.study
    facts = state_facts(name, made.target(name), study.recipe, made.corpus, study.sources, [])
    assert facts["shape"]["longest training sequence, tokens"] == 64
    assert not {"warmup_steps", "decay_steps", "block_length", "batch"} & set(facts["recipe"])
    path = write_mixed(tmp_path, recipe={"phases": [], "phases_by_size": {"2m": MIXED_PHASES}})
    with pytest.raises(UserError, match="models of size 1m have no phases"):
        load_study(path)
    path = write_mixed(tmp_path / "typo", recipe={"phases_by_size": {"1M": MIXED_PHASES}})
    with pytest.raises(UserError, match=r"study.yaml: recipe.phases_by_size: unknown size '1M'. Did you mean '1m'"):
        load_study(path)
    path = write_mixed(tmp_path / "ends", models=["1m-mlm40-12"])
    with pytest.raises(UserError, match=r"study.yaml: model '1m-mlm40-12': it ends at step 12, but"):
        load_study(path)
    phases = [{**MIXED_PHASES[0], "local_rope_base": 5000}, MIXED_PHASES[1]]
    path = write_mixed(tmp_path / "local", recipe={"phases": phases})
    with pytest.raises(UserError, match=r"study.yaml: recipe.phases: 'a': local_rope_base 5000: models of size 1m"):
        load_study(path)


def test_flops_of_isolated_documents_are_those_of_each_phase_s_blocks(made: PreparedStudy) -> None:
    recipe = made.study.recipe.model_copy(update={"isolate_documents": True})
    state, size = made.target(parse_name(MODEL)), shape("1m", None)
    wanted = 0
    for segment in state.segments:
        own = recipe.during(segment.phase)
        blocks = InTurns(joined(made, own.block_length), own.mix)
        rows = blocks.take(np.linspace(0, len(blocks) - 1, min(len(blocks), 1024)).astype(np.int64))
        ends = special_ids(made.corpus.tokenizer)["eos"]
        lengths = [len(part) for row in rows for part in np.split(row, np.flatnonzero(row == ends) + 1) if len(part)]
        wanted += segment_flops(size, segment, recipe, made.corpus.vocabulary, np.array(lengths))
    assert flops(state, recipe, size, made.corpus.vocabulary, made.corpus) == wanted


def test_equal_shares_are_the_same_mix_with_the_same_states_and_tokenizer(path: Path, made: PreparedStudy) -> None:
    content = yaml.safe_load(path.read_text())
    content["recipe"]["mix"] = {"verse": 0.1, "prose": 0.3}
    other = path.with_name("other.yaml")
    other.write_text(yaml.safe_dump(content))
    found = find_prepared(load_study(other), made.place)
    assert found is not None and found.fingerprint == made.fingerprint
    assert found.target(parse_name(MODEL)).key(found.fingerprint) == made.target(parse_name(MODEL)).key(
        made.fingerprint
    )


def test_another_mix_has_other_states_but_the_same_blocks_if_the_tokenizer_is_given(
    made: PreparedStudy, tmp_path: Path
) -> None:
    given = {"path": str(made.corpus.tokenizer.resolve())}
    keys = []
    for number, recipe in enumerate(
        ({}, {"mix": "prose"}, {"mix": {"prose": 3, "verse": 1}, "phases": MIXED_PHASES[:1]})
    ):
        models = [MODEL] if number < 2 else ["1m-mlm40-10"]
        file = write_mixed(tmp_path / str(number), tokenizer=given, recipe=recipe, models=models)
        other = prepare_study(load_study(file), Place(tmp_path / "store", tmp_path / str(number) / "data"))
        keys.append((other.corpus.key, other.plan.stages[0].states[0].key(other.fingerprint)))
    assert keys[0][0] == keys[1][0] == keys[2][0]
    assert keys[0][1] != keys[1][1], "another mix"
    assert list(load_study(file).sources) == ["prose", "verse"]


def test_a_source_that_a_later_phase_adds_changes_no_key_of_the_phases_before(
    made: PreparedStudy, path: Path, tmp_path: Path
) -> None:
    given = {"path": str(made.corpus.tokenizer.resolve())}
    keys = []
    for added in (False, True):
        phases = [*MIXED_PHASES, {"name": "c", "steps": 2, "mix": {"prose": 1, "late": 1}}] if added else MIXED_PHASES
        file = write_mixed(
            tmp_path / str(added),
            tokenizer=given,
            recipe={"phases": phases},
            models=[f"1m-mlm40-{16 if added else 14}"],
        )
        content = yaml.safe_load(file.read_text())
        content["corpora"]["late"] = {**content["corpora"]["verse"], "seed": 7}
        file.write_text(yaml.safe_dump(content))
        other = prepare_study(load_study(file), Place(tmp_path / "store", file.parent / "data"))
        assert set(other.corpus.sources) == {"prose", "verse", *(["late"] if added else [])}
        (target,) = other.plan.targets
        keys.append([target.at(step).key(other.fingerprint) for step in (0, 4, 10, 14)])
        last = target.key(other.fingerprint)
        # Another text under the same name is another state.
        renamed = dict(target.sources) | {"late": "another", "none": "unused"}
        changed = replace(target, sources=tuple(renamed.items())).key(other.fingerprint)
        assert (changed != last) == added
    assert keys[0] == keys[1]


def test_the_card_and_the_plan_name_sources_weights_tokens_and_repetitions(made: PreparedStudy) -> None:
    name, study = parse_name(MODEL), made.study
    facts = state_facts(name, made.target(name), study.recipe, made.corpus, study.sources, [])
    # 10 steps of 8 blocks of 32 at 3 to 1, then 4 of 8 of 64 at 1 to 1.
    tokens = {"prose": 60 * 32 + 16 * 64, "verse": 20 * 32 + 16 * 64}
    assert isinstance(made.corpus, PreparedSources)
    for source, seen in tokens.items():
        times = seen / made.corpus.sources[source].tokens
        assert facts["corpus"][f"source {source}"].endswith(f"{seen:,} tokens seen ({times:.3g} times)")
    assert facts["tokens"] == sum(tokens.values())
    card = model_card(facts)
    assert "75 % prose, 25 % verse" in card and "steps 10 to 14 (b)" in card
    assert ", of 50 % prose, 50 % verse" in card


def test_the_order_as_a_data_set_is_what_the_training_loop_reads(
    path: Path, made: PreparedStudy, tmp_path: Path
) -> None:
    folder = tmp_path / "order"
    words = ["data", "order", path, "--model", MODEL, "--export", folder, "--store", made.place.store]
    words += ["--data", path.parent / "data"]
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code == 0
    names = [f"train-{first:09}-{min(first + 4, 14):09}.parquet" for first in (0, 4, 8, 12)]
    assert sorted(file.name for file in folder.iterdir()) == names
    rows = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert sorted(rows.column_names) == ["input_ids", "step"]
    segments, expected = made.target(parse_name(MODEL)).segments, []
    for step in range(14):
        blocks = joined(made, 32 if step < 10 else 64)
        chosen = block_numbers(blocks, samples_of(segments, step, made.study.recipe), made.study.recipe.seed)
        expected += [{"input_ids": ids, "step": step} for ids in blocks.take(chosen).tolist()]
    assert rows.to_list() == expected
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert ended.value.code == 2, "the folder is there"


def test_commands_show_each_source(path: Path, made: PreparedStudy, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--store", str(made.place.store), "--data", str(path.parent / "data")]

    def call(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, *where])
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert list(json.loads(call("data", str(path), "--json"))["corpora"]) == ["prose", "verse"]
    assert "corpus verse" in call("data", str(path))
    assert "corpus 75 % prose, 25 % verse; 50 % prose, 50 % verse: prepared" in call("study", str(path), "--dry-run")
    assert "step 0 row 0 block" in call("data", "order", str(path), "--model", MODEL, "--steps", "0:1")


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda study: study.pop(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda study: study["recipe"].update(mix={"prose": 1, "vers": 1}), "recipe: mix: unknown source 'vers'. Did you mean 'verse'?"),
        (lambda study: study["recipe"]["phases"][1].update(mix="books"), "recipe.phases: 'b': mix: unknown source 'books'"),
        (lambda study: study["recipe"].pop("mix"), "recipe.mix: it is missing; give the weights of the corpora (prose, verse)"),
        (lambda study: study["recipe"].update(mix={"prose": 0}), "its weights add up to 0"),
        (lambda study: study["recipe"].update(mix={"prose": -1, "verse": 2}), "prose: the weight -1 is not a number of 0 or more"),
        (without("corpora"), "give either corpus or, for a mix of several sources, corpora"),
        (lambda study: study.update(corpus=study.pop("corpora")["prose"]), "recipe: a mix is one of several sources, and the study has no corpora"),
    ],
)  # fmt: skip
def test_wrong_mixes_are_refused(
    path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    study = yaml.safe_load(path.read_text())
    change(study)
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    with pytest.raises(UserError) as refused:
        load_study(file)
    assert str(file) in str(refused.value) and said in " ".join(str(refused.value).split())


def test_a_source_without_a_block_is_refused_by_its_name(path: Path, tmp_path: Path) -> None:
    file = write_mixed(tmp_path / "small")
    (tmp_path / "small" / "data" / "verse" / "train.txt").write_text("A few words.\n\nAnd a few more.")
    with pytest.raises(UserError, match=r"corpora.verse: corpus source 'verse': the \w+ part has at most \d+ tokens"):
        prepare_study(load_study(file), Place(tmp_path / "store", tmp_path / "small" / "data"))
    assert np.all([not folder.is_dir() for folder in (tmp_path / "store" / "corpora").glob("*")])
