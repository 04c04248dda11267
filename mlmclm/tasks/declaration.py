"""The declaration of a task: the source of its data, its columns, its splits and its metric. One YAML file per task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mlmclm.configuration import Enters, Frozen, Inside, Role
from mlmclm.errors import unknown
from mlmclm.registry import KINDS, MemberName, Registry
from mlmclm.results.metrics import metric_parts

FAMILIES: Registry[type[Any]] = KINDS["family"]
"""The families by name: subclasses of `tasks.family.Family`, which imports this module."""
MetricFamily = Literal["standard", "study", "glue"]
"""Choice of a task's main score: its declared `metric`, the study's, or the one that enters GLUE's average."""


def titles(has: Callable[[type[Any]], bool]) -> str:
    """Return the titles of the families for which `has` is true, as "a, b or c" in lower case."""
    *others, last = [family.title.lower() for family in FAMILIES.values() if has(family)]
    return f"{', '.join(others)} or {last}" if others else last


class SourceTable(Frozen):
    """A table that a split name alone cannot identify: its data set, configuration or revision is not the task's."""

    split: Annotated[str, Inside, Role.SOURCE]
    source: Annotated[str | None, Inside, Role.SOURCE] = None
    """Another data set of the Hub; the task's configuration and revision then do not apply."""
    config_name: Annotated[str | None, Inside, Role.SOURCE] = None
    revision: Annotated[str | None, Inside, Role.SOURCE] = None
    columns: Annotated[dict[str, str], Role.SOURCE] = Field(default_factory=dict)
    """Canonical name -> the source's name, where it differs from the task's."""
    file: Annotated[str | None, Inside, Role.SOURCE] = None
    """Name of the local file without its extension; the split's name by default."""


def _form(value: Any) -> str:
    """Return the tag of the form in which a split is given, so that an error is about this form only.

    `configuration.parse_config` leaves tags in angle brackets out of its messages.
    """
    if isinstance(value, str):
        return "<name>"
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", {})
    return "<judged>" if Judged.model_fields.keys() & set(keys) else "<table>"


AnyTable = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[SourceTable, Tag("<table>")], Discriminator(_form), Inside
]
"""A table: the name of its file or split alone, or a `SourceTable`."""


class Judged(Frozen):
    """The three tables of a retrieval set (BEIR's layout)."""

    queries: Annotated[AnyTable, Role.SOURCE] = "queries"
    corpus: Annotated[AnyTable, Role.SOURCE] = "corpus"
    qrels: Annotated[AnyTable, Role.SOURCE] = "qrels"


AnySplit = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[SourceTable, Tag("<table>")] | Annotated[Judged, Tag("<judged>")],
    Discriminator(_form),
    Inside,
]
"""A split: a table, or a retrieval set."""


class Splits(Frozen):
    """The source's splits that serve as train, validation and test.

    A data set without a public test split follows the study (arXiv 2507.00994): its official validation split serves as
    test, and 5 % of train, drawn with seed 42, as validation.
    """

    train: Annotated[AnySplit, Role.SOURCE] = "train"
    """Judged queries and documents become pairs, one for each document judged relevant."""
    validation: Annotated[AnySplit | None, Role.SOURCE] = None
    validation_fraction: Annotated[float | None, Role.SOURCE] = Field(default=None, gt=0, lt=1)
    validation_from: Annotated[Literal["train", "test"], Role.SOURCE] = "train"
    """The split from which `validation_fraction` is held out. If this is test in retrieval, queries are held out, and both splits search all documents."""
    validation_seed: Annotated[int, Role.SOURCE] = 42
    validation_group: Annotated[str | None, Role.SOURCE] = None
    """A canonical column whose equal values stay in one split: questions on one passage, queries of one document."""
    test: Annotated[AnySplit, Role.SOURCE]

    @model_validator(mode="after")
    def _one_validation(self) -> Splits:
        if (self.validation is None) == (self.validation_fraction is None):
            raise ValueError("give either 'validation' or 'validation_fraction'")
        return self


class Negatives(Frozen):
    """Mining of hard negatives for the training pairs of a retrieval task."""

    bm25: Annotated[int, Role.TOKENS] = Field(ge=1)
    """Maximum number of negatives per pair: the best documents by BM25 that are not positives of the query."""


class Task(Frozen):
    """The declaration of one task."""

    name: Annotated[str, Role.DISPLAY] = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    family: Annotated[str, MemberName("family"), Role.WEIGHTS, Enters.INDIRECTLY]
    """The name of one of the `FAMILIES`."""
    title: Annotated[str, Role.DISPLAY]
    source: Annotated[str, Inside, Role.SOURCE]
    """A data set of the Hugging Face Hub, `pydocs` (made from installed documentation) or `local` (only a folder)."""
    config_name: Annotated[str | None, Inside, Role.SOURCE] = None
    revision: Annotated[str | None, Inside, Role.SOURCE] = None
    """A commit, or `refs/convert/parquet`: the Hub's conversion of a data set that a script defines. Scripts are never run."""
    data_dir: Annotated[str | None, Inside, Role.SOURCE] = None
    """Folder of the data set to read, if no configuration has its name. In `refs/convert/parquet`, each configuration is a folder."""
    folder: Annotated[str | None, Inside, Role.SOURCE, Enters.INDIRECTLY] = None
    """Folder under `--data` that replaces the Hub. It holds `<split>.parquet`, `.jsonl`, `.json`, `.csv` or `.tsv`, a
    file in a layout that `tasks.layouts` reads (all may be compressed), or the files of a download from the Hub, such
    as `data/<split>-00000-of-00002.parquet`."""
    columns: Annotated[dict[str, str], Role.SOURCE] = Field(default_factory=dict)
    """Canonical name -> the source's name, where they differ; `a.b` is field b of the struct column a."""
    header: Annotated[tuple[str, ...] | None, Role.SOURCE, Enters.INDIRECTLY] = None
    """Names of the columns, in order, of CSV and TSV files whose first line is a row of data, such as CoLA's. If a file's
    first line has one of these names, that line is its header."""
    splits: Annotated[Splits, Role.SOURCE]
    group: Annotated[str | None, Role.SOURCE, Enters.INDIRECTLY] = None
    """A column of the test split (in retrieval, of its queries). Examples with equal values, such as the questions on one passage or article,
    form a group. Intervals then hold for other groups, not only for other examples of the same groups."""
    label_names: Annotated[tuple[str, ...] | None, Role.SOURCE] = None
    """Names of the classes or tags, by number; None to find them in the data."""
    pair_template: Annotated[str | None, Role.SOURCE] = None
    """Template that joins two texts, with `{text}` and `{text_pair}`."""
    negatives: Annotated[Negatives | None, Role.TOKENS, Enters.INDIRECTLY] = None
    """Retrieval: hard negatives to mine, for a task without a column `negative`."""
    ignore_identical_ids: Annotated[bool | None, Role.EVALUATION, Enters.INDIRECTLY] = None
    """Retrieval: a query never finds the document that has its id, as BEIR and mteb score ArguAna and Quora, whose
    queries are documents of the corpus. By default, this holds only where that document has the query's text too."""
    unanswerable: Annotated[bool, Role.SOURCE] = False
    """Question answering: some questions have no answer, and the empty answer is then correct (SQuAD v2)."""
    metric: Annotated[str, Role.EVALUATION, Enters.INDIRECTLY]
    """The main score: one of the family's `metrics`, or the mean of several, joined by `+`."""
    glue_metric: Annotated[str | None, Role.DISPLAY] = None
    """Replaces `metric` in GLUE's average if GLUE uses another: the mean of the task's two metrics."""
    licence: Annotated[str, Role.DISPLAY]
    citation: Annotated[str, Role.DISPLAY]

    @model_validator(mode="after")
    def _consistent(self) -> Task:
        family = self.kind
        allowed = (*family.columns, *family.more_columns)
        for canonical in self.columns:
            if canonical not in allowed:
                raise ValueError(str(unknown("canonical column", canonical, allowed, where="columns")))
        for metric in filter(None, (self.metric, self.glue_metric)):
            for part in metric_parts(metric):
                if part not in (labels := family.labels_of_metrics()):
                    raise ValueError(f"metric {part!r} is not computed for {self.family}; allowed: {', '.join(labels)}")
        if "text_pair" in self.columns and not self.pair_template:
            raise ValueError("a task with a 'text_pair' column needs a 'pair_template'")
        if self.pair_template and any(self.pair_template.count(name) != 1 for name in ("{text}", "{text_pair}")):
            raise ValueError("pair_template must contain {text} and {text_pair}, each once")
        if self.unanswerable and not family.unanswerable:
            raise ValueError(f"only {titles(lambda kind: kind.unanswerable)} has 'unanswerable' questions")
        if self.negatives is not None and "negative" not in allowed:
            raise ValueError(f"only {titles(lambda kind: 'negative' in kind.more_columns)} has 'negatives'")
        if self.ignore_identical_ids is not None and not family.judged:
            raise ValueError(f"only {titles(lambda kind: kind.judged)} has 'ignore_identical_ids'")
        if "negative" in self.columns and self.negatives is not None:
            raise ValueError("give either the column 'negative' or 'negatives', which mines them")
        if "negative" in self.columns and isinstance(self.splits.train, Judged):
            raise ValueError(
                "splits.train {queries, corpus, qrels} has no column 'negative'; 'negatives' can mine them"
            )
        twice = next((name for name in self.header or () if (self.header or ()).count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"header names {twice!r} twice")
        if self.source == "local" and not self.folder:
            raise ValueError("a task whose source is 'local' needs a 'folder'")
        if isinstance(self.splits.train, Judged) and not family.judged:
            names = titles(lambda kind: kind.judged)
            raise ValueError(f"splits.train can be {{queries, corpus, qrels}} of a {names} task only")
        judged = isinstance(self.splits.test, Judged)
        if judged != family.judged:
            names = titles(lambda kind: kind.judged)
            raise ValueError(f"splits.test of a {names} task, and only of one, is {{queries, corpus, qrels}}")
        if self.splits.validation is not None and isinstance(self.splits.validation, Judged) != judged:
            raise ValueError("splits.validation must have the form of splits.test")
        return self

    @property
    def kind(self) -> type[Any]:
        """The class of the task's family (`tasks.family.Family`, which imports this module)."""
        return FAMILIES[self.family]

    def measured_by(self, metrics: MetricFamily) -> Task:
        """Return the task with the main metric of a metric family.

        No cell is run again for this, because every result holds the scores of all metric families.
        """
        main = {"standard": self.metric, "study": self.kind.study_metric, "glue": self.glue_metric}[metrics]
        return self.model_copy(update={"metric": main or self.metric})

    def column(self, canonical: str) -> str:
        """Return the source's name of a canonical column."""
        return self.columns.get(canonical, canonical)
