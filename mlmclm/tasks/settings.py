"""What a protocol says about a task's examples, head, loss and prediction."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from mlmclm.configuration import Frozen


class TaskSettings(Frozen):
    """The part of a protocol that the families read. Defaults without a source are this project's choice."""

    max_length: int = Field(default=512, ge=8)
    """Longest sequence in tokens, its end-of-sequence token included."""
    max_train_examples: int | None = Field(default=None, ge=1)
    """A fixed random subset of the training split (the same for all seeds)."""
    max_evaluation_examples: int | None = Field(default=None, ge=1)
    """A fixed random subset of validation and of test; queries in retrieval."""
    max_evaluation_documents: int | None = Field(default=None, ge=1)
    """Retrieval: the judged documents of the queries kept, and others at random up to this many; None keeps all."""

    special_tokens: Literal["end", "tokenizer"] = "end"
    """The tokens around a sequence's texts: an end-of-sequence token behind them (study), or what the corpus's tokenizer adds, such as
    BERT's `[CLS] a [SEP] b [SEP]` with its token types. The second is for classification, regression and retrieval."""
    pair_truncation: Literal["longest_first", "joined"] = "longest_first"
    """Two texts that are too long together: tokens of the longer one are left out, or the end of the text that the task's
    template joins (study), be it all of the second."""
    pooling: Literal["mean", "bos", "last"] = "mean"
    """Sequence classification and retrieval: one vector a sequence (study: mean, end-of-sequence token included). `bos` is that of
    the token before the text, and needs `special_tokens: tokenizer`."""
    classifier: Literal["dense-gelu", "linear"] = "dense-gelu"
    """Sequence classification: Linear -> GELU -> Linear (study), or one Linear."""
    head_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Token classification: dropout before the Linear (study: 0.1)."""
    label_sub_tokens: Literal["all", "first"] = "all"
    """Token classification: which sub-tokens carry their word's tag; `all` predicts by majority vote (study)."""

    stride: int = Field(default=128, ge=1)
    """Question answering: tokens that two windows of a long passage share."""
    max_answer_tokens: int = Field(default=30, ge=1)
    """Question answering: longest span that is searched (BERT's 30)."""

    query_prefix: str = "Query: "
    document_prefix: str = "Document: "
    temperature: float = Field(default=0.05, gt=0)
    """Retrieval: cosines are divided by it (a scale of 20, as in sentence-transformers)."""
    symmetric: bool = False
    """Retrieval: add the loss of finding the query from the document."""

    @model_validator(mode="after")
    def _form_fits(self) -> TaskSettings:
        own = self.special_tokens == "tokenizer"
        if self.pooling == "bos" and not own:
            raise ValueError(
                "pooling bos: with special_tokens end a sequence begins with its text, and no token is there to pool; "
                "use special_tokens: tokenizer, or pooling mean or last"
            )
        if self.pair_truncation == "joined" and own:
            raise ValueError("pair_truncation joined: special_tokens tokenizer joins no texts; leave it out")
        return self

    @property
    def cuts_longest(self) -> bool:
        """Whether pairs that the task's template joins lose tokens of the longer text."""
        return self.special_tokens == "end" and self.pair_truncation == "longest_first"

    def encoding(self, *, pairs: bool = False) -> dict[str, Any]:
        """The fields that determine a task's tokenised examples.

        Args:
            pairs: the task has two texts.
        """
        names = (
            "max_length", "max_train_examples", "max_evaluation_examples", "max_evaluation_documents", "stride",
            "query_prefix", "document_prefix",
        )  # fmt: skip
        own = {"special_tokens": "tokenizer"} if self.special_tokens == "tokenizer" else {}
        cut = {"pair_truncation": "longest_first"} if pairs and self.cuts_longest else {}
        return {**{name: getattr(self, name) for name in names}, **own, **cut}
