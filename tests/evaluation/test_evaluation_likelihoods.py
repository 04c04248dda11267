"""Log likelihoods equal plain loops, one sequence at a time, and lm-evaluation-harness's own model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from mlmclm.errors import UserError
from mlmclm.evaluation.language_model import LanguageModel, text_windows
from mlmclm.evaluation.likelihoods import (
    ContinuationIds,
    before_stop,
    length_batches,
)
from mlmclm.models.exported_folder import export_folder
from small_models import save_framed_model, save_small_decoder, save_small_model

PAIRS = [
    ("Anna was in Paris", " today"),
    ("Anna was in Paris", " here again"),
    ("the film was ", "lovely"),
    ("", "one of a kind"),
    ("so very", " dull and cold and stale"),
    ("one of a kind", " here"),
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder without a start token, which takes 40 tokens."""
    return save_small_model(tmp_path_factory.mktemp("encoder"), length=40)


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder whose texts are framed: <bos> a <eos>."""
    return save_framed_model(tmp_path_factory.mktemp("framed"))


def plain_causal(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One forward pass for each token."""
    total, greedy = 0.0, True
    for count, token in enumerate(continuation):
        with torch.no_grad():
            logits = model(torch.tensor([context + continuation[:count]])).logits[0, -1]
        total += float(torch.log_softmax(logits.double(), -1)[token])
        greedy = greedy and int(logits.argmax()) == token
    return total, greedy


def plain_masked(model: Any, start: list[int], context: list[int], continuation: list[int], shift: int) -> float:
    """One forward pass for each token and the end token; ids of `small_tokenizer`: end 2, mask 3."""
    total = 0.0
    for count, token in enumerate([*continuation, 2]):
        before = start + context + continuation[:count]
        with torch.no_grad():
            logits = model(torch.tensor([[*before, 3, 3, 3, 2]])).logits[0, len(before) - shift]
        total += float(torch.log_softmax(logits.double(), -1)[token])
    return total


@pytest.mark.parametrize(("folder", "scoring", "shift"), [
    ("encoder", "masked", 0), ("encoder", "mntp", 1), ("framed", "masked", 0), ("framed", "mntp", 1),
])  # fmt: skip
def test_masked_likelihoods_equal_a_plain_loop(
    folder: str, scoring: Any, shift: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(folder)
    model = LanguageModel.load(path, scoring)
    plain = AutoModelForMaskedLM.from_pretrained(path).eval()
    ids = model.texts.ids
    start = [1] if folder == "framed" else []
    for (context, continuation), found in zip(PAIRS, model.likelihoods(PAIRS), strict=True):
        head = ids(context.rstrip())
        tail = ids(context + continuation)[len(head) :]
        if not start and not head and shift:
            head = [2]  # one position earlier needs a position: the end of the document before
        assert found.total == pytest.approx(plain_masked(plain, start, head, tail, shift), abs=1e-4)


def test_batches_hold_equal_lengths_and_everything_once() -> None:
    lengths = [5, 3, 5, 9, 3, 5, 40]
    found = list(length_batches(lengths, 10))
    assert sorted(number for batch in found for number in batch) == list(range(len(lengths)))
    assert all(len({lengths[number] for number in batch}) == 1 for batch in found)
    assert [len(batch) for batch in found] == [1, 1, 2, 1, 2]


def test_windows_predict_each_token_once_with_all_the_context_that_fits() -> None:
    assert list(text_windows(range(100, 111), 4)) == [
        ([], [100, 101, 102, 103]),
        ([103], [104, 105, 106, 107]),
        ([106, 107], [108, 109, 110]),
    ]


def test_the_likeliest_continuation_is_greedy_and_no_other(encoder: Path) -> None:
    masked = LanguageModel.load(encoder, "masked")
    context = masked.texts.ids("Anna was")
    with torch.no_grad():
        best = int(masked.model(torch.tensor([[*context, 3, 3, 3, 2]])).logits[0, len(context)].argmax())
    for other in (0, 1):
        (found,) = masked.score([ContinuationIds(context, [best + other])])
        assert found.greedy == (other == 0), "the end token behind a continuation doesn't count"


def test_a_context_that_is_too_long_loses_its_beginning(decoder: Path, encoder: Path) -> None:
    ids, tail = list(range(10, 110)), [20, 21]
    causal = LanguageModel.load(decoder, "causal")
    assert causal.longest == 64
    plain = plain_causal(AutoModelForCausalLM.from_pretrained(decoder).eval(), ids[-63:], tail)
    found = causal.score([ContinuationIds(ids, tail)])
    assert found[0].total == pytest.approx(plain[0], abs=1e-4)
    masked = LanguageModel.load(encoder, "masked")
    # 40 positions: 34 of context, 2 of continuation, 3 masks, 1 end.
    alike = [masked.score([ContinuationIds(part, tail)]) for part in (ids, ids[-34:])]
    assert alike[0] == alike[1]
    with pytest.raises(UserError, match="a continuation has 70 tokens"):
        causal.score([ContinuationIds([5], ids[:70])])


def test_rolling_by_masks_is_the_plain_loop_without_the_end(encoder: Path) -> None:
    model = LanguageModel.load(encoder, "masked")
    plain = AutoModelForMaskedLM.from_pretrained(encoder).eval()
    ids = model.texts.ids("so very lovely")
    with torch.no_grad():
        expected = sum(
            float(plain(torch.tensor([[*ids[:n], 3, 3, 3, 2]])).logits[0, n].log_softmax(-1)[token])
            for n, token in enumerate(ids)
        )
    assert model.rolling(["so very lovely"]) == pytest.approx([expected], abs=1e-4)


@pytest.mark.parametrize("scoring", ["masked", "mntp"])
def test_without_the_end_all_continuations_of_a_length_have_a_probability_of_1_together(
    encoder: Path, scoring: Any
) -> None:
    """As under a decoder, so a perplexity of both means the same."""
    model = LanguageModel.load(encoder, scoring)
    pairs = [ContinuationIds([20, 21], [token]) for token in range(model.model.config.vocab_size)]
    scored = model.score(pairs, score_end=False)
    assert sum(math.exp(each.total) for each in scored) == pytest.approx(1, abs=1e-5)


def test_generation_takes_the_likeliest_token_each_time(decoder: Path, encoder: Path) -> None:
    contexts = ["Anna was in", "the film", "Carl was in"]
    causal, masked = LanguageModel.load(decoder, "causal"), LanguageModel.load(encoder, "masked")
    for model, suffix in ((causal, []), (masked, [3, 3, 3, 2])):
        expected = []
        for context in contexts:
            ids, made = model.texts.ids(context), []
            for _ in range(6):
                with torch.no_grad():
                    logits = model.model(torch.tensor([ids + made + suffix])).logits[0]
                token = int(logits[len(ids + made) - (0 if suffix else 1)].argmax())
                if token == 2:
                    break
                made.append(token)
            expected.append(model.texts.tokenizer.decode(made, skip_special_tokens=True))
        assert model.generate(contexts, stop=[], most=6) == expected
        # A stop string cuts the text where it begins.
        stop = expected[0][2:4]
        assert stop
        assert model.generate(contexts, stop=[stop], most=6) == [before_stop(text, [stop]) for text in expected]


def test_cut_ends_at_the_first_stop_string() -> None:
    assert before_stop("one. two\nthree", ["\n", "."]) == "one"
    assert before_stop("one", ["\n"]) == "one"


def test_generation_says_what_does_not_fit(decoder: Path) -> None:
    with pytest.raises(UserError, match=r"up to 64 tokens .* takes 64 in all.*max_gen_toks"):
        LanguageModel.load(decoder, "causal").generate(["a"], stop=[], most=64)


def test_a_continuation_without_a_token_is_refused(decoder: Path) -> None:
    with pytest.raises(UserError, match="has no token of its own"):
        LanguageModel.load(decoder, "causal").likelihoods([("Anna", "")])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder as mlmclm exports it, whose tokenizer adds nothing and has EOS for BOS."""
    folder = tmp_path_factory.mktemp("exported")
    model = AutoModelForMaskedLM.from_pretrained(save_framed_model(folder / "model"))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    export_folder(folder / "of", weights, model.config, folder / "model", card="", decoder_card="", objective="clm")
    return folder / "of" / "decoder"


@pytest.mark.parametrize("folder", ["decoder", "exported"])
def test_causal_scores_equal_the_harness_s_own_model(folder: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'mlmclm[evaluation]'")
    pytest.importorskip("accelerate", reason="the harness's own model needs accelerate")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from mlmclm.evaluation.harness import HarnessModel

    def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]

    decoder = request.getfixturevalue(folder)
    theirs = HFLM(pretrained=str(decoder), device="cpu", dtype="float32", batch_size=4)
    ours = HarnessModel(LanguageModel.load(decoder, "causal"))
    long = "one of a kind here today " * 30
    for (total, greedy), (their_total, their_greedy) in zip(
        ours.loglikelihood(requests("loglikelihood", PAIRS)),
        theirs.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True),
        strict=True,
    ):
        assert total == pytest.approx(their_total, abs=1e-4)
        assert greedy == their_greedy
    asked = requests("loglikelihood_rolling", [(long,), ("Anna was in Paris",)])
    found = ours.loglikelihood_rolling(asked)
    assert found == pytest.approx(theirs.loglikelihood_rolling(asked, disable_tqdm=True), abs=1e-3)
    assert all(math.isfinite(each) for each in found)
    settings = {"until": ["was"], "max_gen_toks": 8, "do_sample": False}
    asked = requests("generate_until", [("Anna was in", settings), ("the film", settings)])
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


def test_causal_scores_equal_a_plain_loop(decoder: Path) -> None:
    model, plain = LanguageModel.load(decoder, "causal"), AutoModelForCausalLM.from_pretrained(decoder).eval()
    ids = model.texts.ids
    for (context, continuation), found in zip(PAIRS, model.likelihoods(PAIRS), strict=True):
        # Spaces go with the word behind them; without a context the text begins after BOS (id 1).
        head, whole = ids(context.rstrip()) or [1], ids(context + continuation)
        total, greedy = plain_causal(plain, head, whole[len(ids(context.rstrip())) :])
        assert found.total == pytest.approx(total, abs=1e-4) and found.greedy == greedy
    with torch.no_grad():
        best = int(plain(torch.tensor([ids("Anna was")])).logits[0, -1].argmax())
    assert [model.score([ContinuationIds(ids("Anna was"), [best + other])])[0].greedy for other in (0, 1)] == [
        True,
        False,
    ]
    text = "one of a kind here today " * 2
    total, _ = plain_causal(plain, [1], ids(text))
    assert model.rolling([text, ""]) == pytest.approx([total, 0.0], abs=1e-4)
