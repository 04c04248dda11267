"""The families by their names."""

from __future__ import annotations

from mlmclm.tasks.family import Family
from mlmclm.tasks.question_answering import QuestionAnswering
from mlmclm.tasks.retrieval import Retrieval
from mlmclm.tasks.sequence_classification import SequenceClassification
from mlmclm.tasks.sequence_regression import SequenceRegression
from mlmclm.tasks.token_classification import TokenClassification

FAMILIES: dict[str, type[Family]] = {
    "sequence-classification": SequenceClassification,
    "sequence-regression": SequenceRegression,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
    "retrieval": Retrieval,
}
