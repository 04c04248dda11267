"""A model folder as a language model that scores and generates text, whether it is a decoder or an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from mlmclm.corpora.notes import OBJECTIVE, UNTRAINED, read_notes
from mlmclm.errors import UserError, one_line, unknown
from mlmclm.evaluation.likelihoods import (
    ContinuationIds,
    Likelihood,
    MaskedReading,
    Observer,
    before_stop,
    length_batches,
    logits_at,
)
from mlmclm.models.folder import check_finite, check_model_folder, context_of, load_tokenizer, quiet, read_model
from mlmclm.objectives.objective import parse_objective
from mlmclm.storage.files import read_json
from mlmclm.tasks.texts import special_tokens

Scoring = Literal["causal", "masked", "mntp"]
"""How a token is predicted: from earlier tokens, from both sides at a mask, or from both sides one position before the mask."""
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)
NO_LIMIT = 1024
"""Longest sequence of a model whose config.json names none, in tokens."""


def scoring_of(folder: Path, wanted: str | None = None) -> tuple[Path, Scoring]:
    """Return the folder whose weights are scored, and the kind of scoring.

    Without `wanted`, the objective in an exported folder's notes decides. A model whose last training was causal is
    scored as the decoder that was exported with it. In other folders the class in config.json decides.

    Raises:
        UserError: the folder is no language model, or cannot be scored as wanted.
    """
    if wanted is not None and wanted not in SCORINGS:
        raise unknown("scoring", wanted, SCORINGS)
    config, notes = check_model_folder(folder), read_notes(folder)
    scoring = _by_class(folder, config)
    noted, decoder = notes.get(OBJECTIVE), folder / "decoder"
    if (decoder / "config.json").is_file():  # exported after a causal step only
        scoring = "causal"
    elif scoring == "masked" and noted not in (None, UNTRAINED):
        objective = parse_objective(str(noted), where=str(folder / "mlmclm.json"))
        scoring = "causal" if objective.causal else "mntp" if objective.predicts_one_earlier else "masked"
    chosen: Any = wanted or scoring
    if chosen == "causal" and (decoder / "config.json").is_file():
        return decoder, "causal"
    if (chosen == "causal") != (_by_class(folder, config) == "causal"):
        names = ", ".join(config.get("architectures") or ["no language model"])
        hint = " Its decoder was not exported." if chosen == "causal" else ""
        raise UserError(f"{folder}: its class ({names}) cannot be scored as {chosen}.{hint}")
    return folder, chosen


def _by_class(folder: Path, config: dict[str, Any]) -> Scoring:
    name = next(iter(config.get("architectures") or ()), "")
    # Qwen has no masked language model in transformers: its encoders are causal models with this setting.
    if name.endswith("ForMaskedLM") or (name.endswith("ForCausalLM") and config.get("is_causal") is False):
        return "masked"
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "causal"
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return "masked"
    raise UserError(
        f"{folder}: config.json names the class {name or 'of no model'!r}, which predicts no tokens; zero-shot evaluation needs a causal "
        "or a masked language model."
    )


@dataclass(frozen=True)
class Texts:
    """A tokenizer, and the special tokens that it puts around a text."""

    tokenizer: PreTrainedTokenizerFast
    start: list[int]
    end: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self:
        """Read the special tokens from what the tokenizer puts around a text."""
        return cls(tokenizer, *special_tokens(tokenizer))

    def ids(self, text: str) -> list[int]:
        """Return a text's tokens, without special ones around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def pair(self, context: str, continuation: str) -> ContinuationIds:
        """Tokenise context and continuation as one text, and divide it where the context alone ends.

        Spaces at the end of the context count as the continuation's, because most tokenizers join a space to the word
        after it. lm-evaluation-harness divides a text in the same way.

        Raises:
            UserError: the continuation has no token of its own.
        """
        spaces = context[len(context.rstrip()) :]
        context, continuation = context.rstrip(), spaces + continuation
        begin, joined = self.ids(context) if context else [], self.ids(context + continuation)
        if len(joined) <= len(begin):
            raise UserError(
                f"the continuation {continuation[:80]!r} has no token of its own after {context[-80:]!r}; begin it with a space."
            )
        return ContinuationIds(begin, joined[len(begin) :])


@dataclass(frozen=True)
class LanguageModel:
    """A language model in memory."""

    model: PreTrainedModel
    texts: Texts
    longest: int
    """Largest number of tokens that the model takes."""
    start: list[int]
    """Ids to put before a text that nothing precedes."""
    reading: MaskedReading | None = None
    """None for a decoder."""
    observe: Observer | None = None
    """Shows progress; it counts from 0 again for each kind of request."""

    @classmethod
    def load(cls, folder: Path, scoring: Scoring, *, device: str = "cpu") -> LanguageModel:
        """Load the folder that `scoring_of` chose, in fp32.

        Raises:
            UserError: the weights are not a whole language model, or the tokenizer lacks a token that scoring needs.
        """
        causal = scoring == "causal"
        masked_class = not causal and check_model_folder(folder).get("is_causal") is not False
        try:
            model, info = read_model(AutoModelForMaskedLM if masked_class else AutoModelForCausalLM, folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"{folder}: the model cannot be read ({one_line(error, 300)}).") from error
        if info["missing_keys"]:
            raise UserError(f"{folder}: the weights lack {', '.join(sorted(info['missing_keys'])[:5])}; a whole language model is needed.")  # fmt: skip
        check_finite(model, folder)
        if model.get_output_embeddings() is None:
            raise UserError(f"{folder}: {type(model).__name__} has no output embeddings to predict tokens with.")
        model.config.use_cache = False
        if causal:
            # Other settings of the folder, such as a repetition penalty, would change what is generated greedily.
            file = folder / "generation_config.json"
            end_of_text = (
                read_json(file).get("eos_token_id") if file.is_file() else model.generation_config.eos_token_id
            )
            model.generation_config = GenerationConfig(eos_token_id=end_of_text)
        texts = Texts.of(load_tokenizer(folder))
        tokenizer = texts.tokenizer
        longest = context_of(folder) or NO_LIMIT
        end = texts.end or [item for item in (tokenizer.eos_token_id, tokenizer.sep_token_id) if item is not None][:1]
        if causal:
            before = [item for item in (tokenizer.bos_token_id, *end) if item is not None][:1]
            start, reading = texts.start or before, None
            if not start:
                raise UserError(f"{folder}: the tokenizer names no token that can stand before a text (BOS or EOS).")
        else:
            if tokenizer.mask_token_id is None or not end:
                missing = "mask" if tokenizer.mask_token_id is None else "end"
                raise UserError(f"{folder}: the tokenizer names no {missing} token, which masked scoring needs.")
            earlier = scoring == "mntp"
            reading = MaskedReading(tokenizer.mask_token_id, texts.start, end, earlier=earlier)
            # In training, the token before a document was the end token of the previous one.
            start = end[:1] if earlier and not texts.start else []
        with quiet():
            return cls(model.eval().to(device), texts, longest, start, reading)

    @property
    def room(self) -> int:
        """Largest number of tokens of a text that it takes."""
        return self.longest if self.reading is None else self.reading.room(self.longest)

    def likelihoods(self, pairs: Sequence[tuple[str, str]], *, score_end: bool = True) -> list[Likelihood]:
        """Score continuations given contexts, either as text; an empty context means the beginning of a text.

        Masked scoring scores the end token too unless `score_end` is false.
        """
        return self.score([self._begun(self.texts.pair(*pair)) for pair in pairs], score_end=score_end)

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log likelihood of each text, whatever its length, without an end token.

        A long text is divided into windows. Each predicts the tokens after those of the window before; the last one has as
        much context as fits.
        """
        size = self.room - (self.reading is not None)
        parts = [
            (number, pair) for number, text in enumerate(texts) for pair in text_windows(self.texts.ids(text), size)
        ]
        pairs = [pair if pair.context else self._begun(pair) for _, pair in parts]
        totals = [0.0] * len(texts)
        for (number, _), likelihood in zip(parts, self.score(pairs, score_end=False), strict=True):
            totals[number] += likelihood.total
        return totals

    def generate(self, contexts: Sequence[str], *, stop: Sequence[str], most: int) -> list[str]:
        """Continue texts greedily.

        Args:
            stop: strings before which a text ends; it also ends at the model's end token.
            most: largest number of tokens to generate.

        Raises:
            UserError: `most` tokens leave no room for a context.
        """
        room = self.room - most
        if room < 1:
            raise UserError(
                f"up to {most} tokens are to be generated, but the model takes {self.longest} in all: lower the task's max_gen_toks."
            )
        begun = [self._begun(ContinuationIds(self.texts.ids(text), [])).context[-room:] for text in contexts]
        if self.reading is None:
            return self._generate_causal(begun, stop, most)
        return self._generate_masked(begun, self.reading, stop, most)

    def score(self, pairs: Sequence[ContinuationIds], *, score_end: bool = True) -> list[Likelihood]:
        """Score continuations; contexts that are too long lose tokens at their beginning.

        Args:
            pairs: contexts, of at least one token each for a decoder, and continuations.
            score_end: masked scoring: add the log probability of the end token after the continuation. It never counts in
                `greedy`: a continuation rarely ends its document.

        Raises:
            UserError: a continuation is too long for the model, or its first token has no position to be predicted at.
        """
        for _, continuation in pairs:
            if len(continuation) > self.room:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens, but the model takes {self.room} at most."
                )
        return self._causal(pairs) if self.reading is None else self._masked(pairs, self.reading, score_end)

    def _begun(self, pair: ContinuationIds) -> ContinuationIds:
        """Return a pair with the tokens that begin a text before its context; `MaskedReading` adds an encoder's start tokens."""
        always = self.texts.start if self.reading is None else []
        return ContinuationIds([*always, *pair.context] or self.start, pair.continuation)

    @torch.inference_mode()
    def _causal(self, pairs: Sequence[ContinuationIds]) -> list[Likelihood]:
        """Return for each continuation the sum of log p(token | all tokens before it)."""
        # The last token is only predicted, so one more than the longest sequence fits.
        rows = [[*context, *continuation][-(self.longest + 1) :] for context, continuation in pairs]
        result = [Likelihood(0.0, True)] * len(pairs)
        for batch in length_batches([len(row) for row in rows], observe=self.observe):
            ids = torch.tensor([rows[number] for number in batch], device=self.model.device)  # [rows, length + 1]
            last = ids.shape[1] - 1
            kept = max(len(pairs[number].continuation) for number in batch)
            positions = torch.arange(last - kept, last, device=ids.device).expand(len(batch), -1)
            logits = logits_at(self.model, ids[:, :-1], positions)  # [rows, kept, vocabulary]
            for number, row, predicted in zip(batch, ids, logits, strict=True):
                count = len(pairs[number].continuation)
                scores, targets = predicted[-count:], row[-count:]
                log_probs = scores.log_softmax(-1).gather(1, targets[:, None])
                greedy = bool((scores.argmax(-1) == targets).all())
                result[number] = Likelihood(float(log_probs.double().sum()), greedy)
        return result

    @torch.inference_mode()
    def _masked(self, pairs: Sequence[ContinuationIds], reading: MaskedReading, score_end: bool) -> list[Likelihood]:
        """Score continuations token by token from left to right (`MaskedReading`)."""
        device = self.model.device
        texts, steps = [], []
        for number, (context, continuation) in enumerate(pairs):
            room = self.room - len(continuation)
            begin = context[-room:] if room else []
            if reading.position(len(begin)) < 0:
                raise UserError("a model that predicts one position earlier cannot predict a text's first token.")
            texts.append([*begin, *continuation, *(reading.end[:1] if score_end else [])])
            steps += [(number, place) for place in range(len(begin), len(texts[-1]))]
        totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
        lengths = [len(reading.inputs(())) + place for _, place in steps]
        for batch in length_batches(lengths, observe=self.observe):
            chosen = [steps[index] for index in batch]
            place = chosen[0][1]
            ids = torch.tensor([reading.inputs(texts[number][:place]) for number, _ in chosen], device=device)
            targets = torch.tensor([texts[number][place] for number, _ in chosen], device=device)
            position = torch.full((len(chosen), 1), reading.position(place), device=device)
            logits = logits_at(self.model, ids, position)[:, 0]  # [rows, vocabulary]
            log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
            likeliest = (logits.argmax(-1) == targets).tolist()
            for (number, _), chance, hit in zip(chosen, log_probs, likeliest, strict=True):
                totals[number] += chance
                greedy[number] &= hit or (score_end and place == len(texts[number]) - 1)
        return [Likelihood(*pair) for pair in zip(totals, greedy, strict=True)]

    @torch.inference_mode()
    def _generate_causal(self, contexts: Sequence[list[int]], stop: Sequence[str], most: int) -> list[str]:
        """Continue token ids with a decoder's likeliest tokens, by transformers' `generate`."""
        tokenizer, end = self.texts.tokenizer, self.model.generation_config.eos_token_id
        settings = GenerationConfig(
            max_new_tokens=most,
            do_sample=False,
            use_cache=True,
            eos_token_id=tokenizer.eos_token_id if end is None else end,
            # Fills up rows that have ended; these tokens are skipped below.
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            stop_strings=list(stop) or None,
        )
        outputs = [""] * len(contexts)
        for batch in length_batches([len(context) + most for context in contexts], observe=self.observe):
            ids = torch.tensor([contexts[number] for number in batch], device=self.model.device)  # [rows, length]
            sequences = self.model.generate(ids, settings, attention_mask=torch.ones_like(ids), tokenizer=tokenizer)
            for number, row in zip(batch, sequences[:, ids.shape[1] :].tolist(), strict=True):
                outputs[number] = before_stop(tokenizer.decode(row, skip_special_tokens=True), stop)
        return outputs

    @torch.inference_mode()
    def _generate_masked(
        self, contexts: Sequence[list[int]], reading: MaskedReading, stop: Sequence[str], most: int
    ) -> list[str]:
        """Continue token ids with those that are likeliest at the first mask, up to the first token of `reading.end`."""
        device, tokenizer = self.model.device, self.texts.tokenizer
        outputs = [""] * len(contexts)
        lengths = [len(reading.inputs(context)) + most for context in contexts]
        for batch in length_batches(lengths, observe=self.observe):
            generated: dict[int, list[int]] = {number: [] for number in batch}
            active = list(batch)
            for _ in range(most):
                texts = [[*contexts[number], *generated[number]] for number in active]
                ids = torch.tensor([reading.inputs(text) for text in texts], device=device)
                position = torch.full((len(active), 1), reading.position(len(texts[0])), device=device)
                tokens = logits_at(self.model, ids, position)[:, 0].argmax(-1).tolist()
                for number, token in zip(list(active), tokens, strict=True):
                    if token not in reading.end[:1]:
                        generated[number].append(token)
                        outputs[number] = tokenizer.decode(generated[number], skip_special_tokens=True)
                        if before_stop(outputs[number], stop) == outputs[number]:
                            continue
                        outputs[number] = before_stop(outputs[number], stop)
                    active.remove(number)
                if not active:
                    break
        return outputs


def text_windows(tokens: Sequence[int], size: int) -> Iterator[ContinuationIds]:
    """Divide a text into windows that predict each token once.

    Args:
        size: most tokens that a window predicts; together with its context it has one more.
    """
    if tokens:
        yield ContinuationIds([], list(tokens[:size]))
    for begin in range(size, len(tokens), size):
        end = min(begin + size, len(tokens))
        yield ContinuationIds(list(tokens[end - size - 1 : begin]), list(tokens[begin:end]))
