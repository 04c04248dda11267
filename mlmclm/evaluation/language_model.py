"""A model folder as a language model that scores and generates text, whether it is a decoder or an encoder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

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
    causal_likelihoods,
    generate_causal,
    generate_masked,
    masked_likelihoods,
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

    def likelihoods(
        self, pairs: Sequence[tuple[str, str]], *, score_end: bool = True, observe: Observer | None = None
    ) -> list[Likelihood]:
        """Score continuations given contexts, either as text; an empty context means the beginning of a text.

        Masked scoring scores the end token too unless `score_end` is false.
        """
        return self._score([self._begun(self.texts.pair(*pair)) for pair in pairs], score_end, observe)

    def rolling(self, texts: Sequence[str], *, observe: Observer | None = None) -> list[float]:
        """Return the log likelihood of each text, whatever its length, without an end token.

        A long text is divided into windows. Each predicts the tokens after those of the window before; the last one has as
        much context as fits.
        """
        size = self.longest if self.reading is None else self.reading.room(self.longest) - 1
        parts = [
            (number, pair) for number, text in enumerate(texts) for pair in text_windows(self.texts.ids(text), size)
        ]
        pairs = [pair if pair.context else self._begun(pair) for _, pair in parts]
        totals = [0.0] * len(texts)
        for (number, _), likelihood in zip(parts, self._score(pairs, False, observe), strict=True):
            totals[number] += likelihood.total
        return totals

    def generate(
        self, contexts: Sequence[str], *, stop: Sequence[str], most: int, observe: Observer | None = None
    ) -> list[str]:
        """Continue texts greedily (`generate_causal`); raise UserError if `most` tokens leave no room for a context."""
        room = (self.longest if self.reading is None else self.reading.room(self.longest)) - most
        if room < 1:
            raise UserError(
                f"up to {most} tokens are to be generated, but the model takes {self.longest} in all: lower the task's max_gen_toks."
            )
        begun = [self._begun(ContinuationIds(self.texts.ids(text), [])).context[-room:] for text in contexts]
        tokenizer = self.texts.tokenizer
        if self.reading is None:
            return generate_causal(self.model, tokenizer, begun, stop=stop, most=most, observe=observe)
        return generate_masked(self.model, tokenizer, begun, self.reading, stop=stop, most=most, observe=observe)

    def _begun(self, pair: ContinuationIds) -> ContinuationIds:
        """Return a pair with the tokens that begin a text before its context; `MaskedReading` adds an encoder's start tokens."""
        always = self.texts.start if self.reading is None else []
        return ContinuationIds([*always, *pair.context] or self.start, pair.continuation)

    def _score(self, pairs: Sequence[ContinuationIds], score_end: bool, observe: Observer | None) -> list[Likelihood]:
        if self.reading is None:
            return causal_likelihoods(self.model, pairs, longest=self.longest, observe=observe)
        return masked_likelihoods(
            self.model, pairs, self.reading, longest=self.longest, score_end=score_end, observe=observe
        )


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
