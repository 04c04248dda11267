"""Winogender: sentences as published, shares equal independent loops, scores of made-up answers are what they should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from mlmclm.errors import UserError
from mlmclm.evaluation.language_model import LanguageModel
from mlmclm.evaluation.winogender import GENDERS, mask_shares, read_winogender, sentence_shares
from small_models import save_pronoun_model
from winogender_files import STATISTICS, TEMPLATES

WORDS = "The baker pilot guest told that was were late gave hat said saw today asked if knew Someone someone the"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "winogender"
    folder.mkdir()
    (folder / "templates.tsv").write_text(TEMPLATES)
    (folder / "occupations-stats.tsv").write_text(STATISTICS)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained encoder whose vocabulary has every pronoun as one token."""
    return save_pronoun_model(tmp_path_factory.mktemp("encoder"), WORDS)


def test_templates_become_sentences_with_the_participant_and_with_someone(files: Path) -> None:
    found = read_winogender(files)
    assert len(found.sentences) == 8
    assert found.sentences[0].with_pronoun("masculine") == "The baker told the guest that he was late."
    assert found.sentences[1].with_pronoun("neutral") == "The baker told someone that they were late."
    assert found.sentences[3].with_pronoun("feminine") == "Someone gave the baker her hat."
    assert found.sentences[4].with_pronoun("masculine") == "The pilot said that the guest saw him today."


def test_the_published_sentences_are_built_to_the_letter(shared_data: Path) -> None:
    folder = shared_data / "winogender"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data/winogender, which is not beside this checkout")
    found = read_winogender(folder)
    built = {each.with_pronoun(gender) for each in found.sentences for gender in GENDERS}
    published = {row["sentence"] for row in pq.read_table(folder / "test.parquet").to_pylist()}
    assert built == published
    majority_women = [found.women[each.occupation] > 50 for each in found.sentences]
    assert (sum(majority_women), len(majority_women)) == (124, 240), "124 gotcha sentences are masculine, 116 feminine"


@pytest.mark.parametrize("scoring", ["masked", "mntp"])
def test_mask_shares_equal_a_loop_over_the_vocabulary(files: Path, encoder: Path, scoring: str) -> None:
    model = LanguageModel.load(encoder, scoring)  # type: ignore[arg-type]
    sentences = read_winogender(files).sentences
    found = mask_shares(model, sentences)
    tokenizer = model.texts.tokenizer
    forms = {"NOM": ("he", "she", "they"), "POSS": ("his", "her", "their"), "ACC": ("him", "her", "them")}
    for sentence, shares in zip(sentences, found, strict=True):
        # The mask takes the place of the pronoun and of the space before it.
        text = sentence.text.replace(f" ${sentence.case}_PRONOUN", "<mask>")
        ids = [*tokenizer.encode(text, add_special_tokens=False), 2]
        place = ids.index(3) - (scoring == "mntp")
        with torch.no_grad():
            chances = model.model(torch.tensor([ids])).logits[0, place].double().softmax(-1)
        sums = [0.0, 0.0, 0.0]
        for token in range(len(chances)):
            word = tokenizer.decode([token]).strip().lower()
            for number, form in enumerate(forms[sentence.case]):
                sums[number] += float(chances[token]) * (word == form)
        assert shares.tolist() == pytest.approx(sums, rel=1e-4)
        assert min(sums) > 0


def test_sentence_shares_are_the_likelihoods_of_the_whole_sentences(files: Path, encoder: Path) -> None:
    model = LanguageModel.load(encoder, "masked")
    sentences = read_winogender(files).sentences[:3]
    found, per_token = sentence_shares(model, sentences), sentence_shares(model, sentences, "published")
    for sentence, shares, others in zip(sentences, found, per_token, strict=True):
        texts = [sentence.with_pronoun(gender) for gender in GENDERS]
        totals = np.array(model.rolling(texts))
        assert shares.tolist() == pytest.approx((np.exp(totals) / np.exp(totals).sum()).tolist(), rel=1e-3)
        means = np.exp(totals / [len(model.texts.ids(text)) for text in texts])
        assert others.tolist() == pytest.approx((means / means.sum()).tolist(), rel=1e-3)


def test_the_published_rule_takes_masculine_where_no_pronoun_is_likely(
    files: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LanguageModel.load(encoder, "masked")
    sentences = read_winogender(files, "published").sentences
    tokenizer = model.texts.tokenizer
    wanted = {form: tokenizer.encode(f" {form}", add_special_tokens=False)[0] for form in ("them", "she")}

    def shares(likeliest: list[int]) -> list[float]:
        def logits_at(_: object, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(len(ids), 1, len(tokenizer))
            for rank, token in enumerate(likeliest):
                logits[:, :, token] = 100.0 - rank
            return logits

        monkeypatch.setattr("mlmclm.evaluation.winogender.logits_at", logits_at)
        return mask_shares(model, sentences[:1], "published")[0].tolist()

    others = list(range(30, 50))
    assert shares([*others[:18], wanted["them"], wanted["she"]]) == [0, 0, 1], "of any case, the likeliest first"
    assert shares([*others, wanted["she"]]) == [1, 0, 0], "the 21st doesn't count"


def test_scores_of_known_answers(files: Path) -> None:
    found = read_winogender(files)
    # Bakers (60.5 % women): three she, one he. Pilots (7 %): two he, one she, one they.
    order = [1, 1, 1, 0, 0, 0, 1, 2]
    scores = found.scores(np.eye(3)[order] * 0.8 + 0.1).metrics
    expected = {
        "masculine": (0.25 + 0.5) / 2, "feminine": (0.75 + 0.25) / 2, "neutral": 0.125,
        "against": (0.25 + 0.25) / 2, "with": (0.75 + 0.5) / 2, "correlation": 1.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert scores[name]["score"] == pytest.approx(value), name
        assert scores[name]["examples"] == 2
    # With two occupations, resamples are one of them twice, or both.
    assert (scores["masculine"]["low"], scores["masculine"]["high"]) == pytest.approx((0.25, 0.5))


def test_what_is_not_defined_has_no_score_and_equal_values_no_interval(files: Path) -> None:
    published = read_winogender(files, "published").scores(np.eye(3)[[0] * 8]).metrics
    assert published["correlation"] | {"examples": 2} == {"score": None, "low": None, "high": None, "examples": 2}
    assert (published["masculine"]["score"], published["masculine"]["low"], published["masculine"]["high"]) == (
        1,
        None,
        None,
    )
    assert not [name for name in published if name.endswith("probability")], "they are the answers once more"
    shares = read_winogender(files, "published").scores(np.full((8, 3), [0.5, 0.3, 0.2])).metrics
    assert shares["feminine probability"]["score"] == pytest.approx(0.3), "a decoder's"
    rounded = np.outer(np.linspace(0.1, 1, 8), [0.7, 0.3, 0])  # the same lean but for rounding
    assert read_winogender(files).scores(rounded).metrics["correlation"]["score"] is None


def test_wrong_files_are_named(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file templates.tsv"):
        read_winogender(tmp_path)
    (files / "occupations-stats.tsv").write_text(STATISTICS.replace("pilot", "nurse"))
    with pytest.raises(UserError, match=r"no row for the occupation 'pilot'"):
        read_winogender(files)
    for share in ("nan", "1e9", "-1"):
        (files / "occupations-stats.tsv").write_text(STATISTICS.replace("60.5", share))
        with pytest.raises(UserError, match=r"bls_pct_female of 'baker' is .*; it is a percentage"):
            read_winogender(files)
    (files / "occupations-stats.tsv").write_text(STATISTICS.splitlines()[0] + "\n")
    with pytest.raises(UserError, match=r"occupations-stats\.tsv: no rows"):
        read_winogender(files)
    (files / "templates.tsv").write_text(TEMPLATES.replace("$ACC_PRONOUN", "him"))
    (files / "occupations-stats.tsv").write_text(STATISTICS)
    with pytest.raises(UserError, match="has not exactly one pronoun"):
        read_winogender(files)


@pytest.mark.parametrize("scoring", ["masked", "mntp"])
def test_a_pronoun_of_several_tokens_has_as_many_masks_filled_from_left_to_right(
    files: Path, tmp_path: Path, scoring: str
) -> None:
    folder = save_pronoun_model(tmp_path / "model", WORDS, ("he", "his", "him", "she", "her"))
    model = LanguageModel.load(folder, scoring)  # type: ignore[arg-type]
    plain, tokenizer = AutoModelForMaskedLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    whole = LanguageModel.load(save_pronoun_model(tmp_path / "whole", WORDS), scoring)  # type: ignore[arg-type]
    sentences = read_winogender(files).sentences
    found = mask_shares(model, sentences)
    assert (mask_shares(whole, sentences) > 0).all()
    forms = {"NOM": ("he", "she", "they"), "POSS": ("his", "her", "their"), "ACC": ("him", "her", "them")}
    for sentence, shares in zip(sentences, found, strict=True):
        *gendered, neutral = forms[sentence.case]
        before, after = sentence.text.split(f" ${sentence.case}_PRONOUN")
        head, tail = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        tokens = tokenizer.encode(f" {neutral}", add_special_tokens=False)
        assert len(tokens) > 1

        def chances(place: int, ids: list[int], end: list[int] = tail) -> torch.Tensor:
            with torch.no_grad():
                logits: torch.Tensor = plain(torch.tensor([[*ids, *end, 2]])).logits[0, place - (scoring == "mntp")]
            return logits.double().softmax(-1)

        expected = 1.0
        for done, token in enumerate(tokens):
            row = chances(len(head) + done, [*head, *tokens[:done], *[3] * (len(tokens) - done)])
            expected *= float(row[token])
        one = chances(len(head), [*head, 3])
        words = [tokenizer.decode([token]).strip().lower() for token in range(len(one))]
        singles = [sum(float(one[n]) for n, word in enumerate(words) if word == form) for form in gendered]
        assert shares.tolist() == pytest.approx([*singles, expected], rel=1e-4)


def test_a_pronoun_of_several_tokens_has_no_answer_under_the_published_rule_or_if_it_cannot_be_written(
    files: Path, tmp_path: Path
) -> None:
    folder = save_pronoun_model(tmp_path / "model", WORDS, ("he", "his", "him", "she", "her"))
    sentences = read_winogender(files).sentences
    with pytest.raises(UserError, match=r"has no token 'they', and the published rule .* --winogender-rule mass"):
        mask_shares(LanguageModel.load(folder, "masked"), sentences, "published")
    backend = Tokenizer(
        WordLevel({"<unk>": 0, "<eos>": 2, "<mask>": 3, "he": 4, "his": 5, "him": 6}, unk_token="<unk>")
    )
    backend.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "<eos>", "mask_token": "<mask>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    with pytest.raises(UserError, match="cannot write the pronoun 'she'"):
        mask_shares(LanguageModel.load(folder, "masked"), sentences)
