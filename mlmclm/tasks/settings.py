"""The settings of a protocol that concern a task's examples, head, loss and predictions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlmclm.configuration import Enters, Frozen, Role


class TaskSettings(Frozen):
    """The part of a protocol that task families read. "Study" is arXiv 2507.00994; defaults without a source are this project's choice."""

    max_length: Annotated[int, Role.TOKENS, Role.WEIGHTS] = Field(default=512, ge=8)
    """Longest sequence in tokens, including its end-of-sequence token."""
    max_train_examples: Annotated[int | None, Role.TOKENS, Role.WEIGHTS] = Field(default=None, ge=1)
    """Size of a fixed random subset of the training split (the same for all seeds); None keeps all."""
    max_evaluation_examples: Annotated[int | None, Role.TOKENS, Role.EVALUATION] = Field(default=None, ge=1)
    """Size of a fixed random subset of validation and of test (in retrieval, of their queries); None keeps all."""
    max_evaluation_documents: Annotated[
        Literal["judged"] | Annotated[int, Field(ge=1)] | None, Role.TOKENS, Role.EVALUATION
    ] = None
    """Retrieval: size of a corpus that holds the judged documents of the remaining queries, and others at random.
    `judged` keeps the judged documents only (study), None keeps all."""

    special_tokens: Annotated[Literal["end", "tokenizer"], Role.TOKENS, Role.WEIGHTS, Enters.IF_CHANGED] = "end"
    """Special tokens of a sequence. `end` appends an end-of-sequence token (study). `tokenizer` adds what the corpus's
    tokenizer adds, such as BERT's `[CLS] a [SEP] b [SEP]` with its token types; it supports classification, regression
    and retrieval."""
    pair_truncation: Annotated[Literal["longest_first", "joined"], Role.TOKENS, Enters.INDIRECTLY] = "longest_first"
    """Truncation of two texts that are too long together. `longest_first` removes tokens from the longer text. `joined`
    cuts the end off the text that the template makes of both (study), even if all of the second text is lost."""
    pooling: Annotated[Literal["mean", "bos", "last"], Role.WEIGHTS] = "mean"
    """Sequence classification and retrieval: pooling into one vector per sequence (study: mean, including the
    end-of-sequence token). `bos` takes the token before the text, and needs `special_tokens: tokenizer`."""
    classifier: Annotated[Literal["dense-gelu", "linear"], Role.WEIGHTS] = "dense-gelu"
    """Sequence classification: Linear -> GELU -> Linear (study), or a single Linear."""
    head_dropout: Annotated[float, Role.WEIGHTS] = Field(default=0.1, ge=0, lt=1)
    """Token classification: dropout before the Linear (study: 0.1)."""
    label_sub_tokens: Annotated[Literal["all", "first"], Role.WEIGHTS] = "all"
    """Token classification: the sub-tokens that carry their word's tag; `all` predicts by majority vote (study)."""

    stride: Annotated[int, Role.TOKENS, Role.WEIGHTS] = Field(default=128, ge=1)
    """Question answering: number of tokens by which two windows of a long passage overlap."""
    max_answer_tokens: Annotated[int, Role.EVALUATION] = Field(default=30, ge=1)
    """Question answering: longest predicted span in tokens (BERT's 30)."""

    query_prefix: Annotated[str, Role.TOKENS, Role.WEIGHTS] = "Query: "
    document_prefix: Annotated[str, Role.TOKENS, Role.WEIGHTS] = "Document: "
    temperature: Annotated[float, Role.WEIGHTS] = Field(default=0.05, gt=0)
    """Retrieval: divisor of the cosines (a scale of 20, as in sentence-transformers)."""
    symmetric: Annotated[bool, Role.WEIGHTS] = False
    """Retrieval: average the loss with the loss of finding the query, given the document."""
    distinct_batches: Annotated[bool, Role.WEIGHTS, Enters.IF_CHANGED] = False
    """Retrieval: no text occurs twice in a batch, as another row's positive for the same query would be a false negative. A task
    with hard negatives always has such batches. If False, the loss leaves out only a second copy of a positive."""

    @model_validator(mode="after")
    def _form_fits(self) -> TaskSettings:
        framed = self.special_tokens == "tokenizer"
        if self.pooling == "bos" and not framed:
            raise ValueError(
                "pooling bos: with special_tokens end a sequence begins with its text, and no token is there to pool; "
                "use special_tokens: tokenizer, or pooling mean or last"
            )
        if self.pair_truncation == "joined" and framed:
            raise ValueError("pair_truncation joined: special_tokens tokenizer joins no texts; leave it out")
        return self

    @property
    def cuts_longest(self) -> bool:
        """True if pairs joined by the task's template lose tokens of the longer text."""
        return self.special_tokens == "end" and self.pair_truncation == "longest_first"

    def at_most(self, rows: int) -> TaskSettings:
        """Return the settings with a limit of `rows` examples, and documents, per split."""
        limits = ("max_train_examples", "max_evaluation_examples", "max_evaluation_documents")
        return self.model_copy(update=dict.fromkeys(limits, rows))

    def encoding(self, *, pairs: bool = False) -> dict[str, Any]:
        """Return the fields that determine the tokenised examples of a task, or of one with `pairs` of texts."""
        # `pair_truncation` changes pairs only, and was added after data were prepared without it.
        cut = {"pair_truncation": "longest_first"} if pairs and self.cuts_longest else {}
        return {**self.keyed(Role.TOKENS), **cut}
