"""Tasks and benchmarks of MTEB (arXiv 2210.07316), run by mteb itself on models of sentence-transformers.

Both are optional packages: `mlmclm[evaluation]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pyarrow as pa
import pyarrow.compute
from datasets import Dataset
from mteb.abstasks import AbsTask
from mteb.abstasks.retrieval import AbsTaskRetrieval
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

from mlmclm.errors import UserError
from mlmclm.evaluation.hub_data import cannot_load
from mlmclm.evaluation.scores import Scores, finite
from mlmclm.models.folder import DEFAULT_KERNELS, check_finite, load_tokenizer, read_base
from mlmclm.progress import say
from mlmclm.results.chance import Chance
from mlmclm.storage.data_files import read_table
from mlmclm.storage.files import stable_hash
from mlmclm.storage.unchanged import check_hashed, marked_hash
from mlmclm.tasks.columns import Columns
from mlmclm.tasks.declaration import Judged
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.families.retrieval import read_judged
from mlmclm.tasks.ndcg import constant_order, expected_ndcg, findable_grades, ndcg_at_10
from mlmclm.tasks.search import BestDocuments

PARTS = ("queries", "corpus", "qrels")
"""Files of a local retrieval set, NAME.parquet, in BEIR's columns, as in the task reqa_squad."""
LARGEST_SCORE = 1_000_000
"""Largest judgement of a document. The evaluation allocates a table with an entry for each smaller value."""


@dataclass(frozen=True)
class SentenceModel:
    """A model that embeds texts."""

    model: SentenceTransformer

    @classmethod
    def load(cls, folder: Path, device: str) -> SentenceModel:
        """Load a sentence-transformers folder; a transformers folder embeds a text as the mean over its tokens."""
        kernels = {**DEFAULT_KERNELS, "use_safetensors": True}
        model = SentenceTransformer(str(folder), device=device, local_files_only=True, model_kwargs=kernels)
        if not (folder / "modules.json").is_file():
            say(f"{folder}: not a sentence-transformers folder; a text's vector is the mean over its tokens.")
            model[0].model = read_base(folder).to(device)  # refuses missing weights
            model[1] = Pooling(model[1].embedding_dimension, "mean")  # a decoder's default is its last token's vector
        # sentence-transformers follows the tokenizer's class, which may make other tokens than tokenizer.json.
        if model.tokenizer is not None and not getattr(model[0], "do_lower_case", False):
            tokenizer = load_tokenizer(folder)
            tokenizer.model_max_length, tokenizer.padding_side = model.max_seq_length, model.tokenizer.padding_side
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            model[0].processor = tokenizer
        check_finite(model, folder)
        return cls(model)


@dataclass(frozen=True)
class MtebTask:
    """A task of MTEB; its data is loaded when it runs."""

    task: AbsTask
    data: str
    """Identifier of its data: the revision of a data set of the Hub, or the hash of files."""
    limit: int | None = None
    requests: int = 0
    chance: Chance | None = None
    """The chance level of its main score, for a local set only: the data of other tasks is not loaded before they run."""

    @property
    def name(self) -> str:
        """Its name in mteb."""
        return str(self.task.metadata.name)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the scores of a given model, mteb's version included."""
        return stable_hash(["mteb", mteb.__version__, self.name, self.data, list(self.task.eval_splits)])

    @property
    def chances(self) -> dict[str, Chance]:
        """The chance level of its main score: known for local retrieval sets, and 0 for correlations."""
        name = str(self.task.metadata.main_score)
        if self.chance is None and not name.endswith(("spearman", "pearson")):
            return {}
        return {name: self.chance or Chance(0.0, "no correlation")}

    def run(self, model: SentenceModel) -> Scores:
        """Return the main score, its mean over splits and languages, and the score of each of these."""
        # An aggregate has no data, only its parts have.
        parts = self.task.metadata.tasks if self.task.is_aggregate else [self.task]
        try:
            for part in parts:
                try:
                    part.load_data()
                except Exception as error:  # datasets raises errors of all kinds
                    raise cannot_load(f"--mteb {self.name}", part.metadata.dataset["path"], error) from error
            result = mteb.evaluate(model.model, self.task, cache=None, show_progress_bar=False).task_results[0]
        finally:
            for part in parts:
                if part.data_loaded:
                    part.unload_data()  # mteb unloads only what it has loaded itself
        scores = [float(entry["main_score"]) for entries in result.scores.values() for entry in entries]
        mean = {"score": finite(sum(scores) / len(scores)), "low": None, "high": None, "examples": None}
        name = str(self.task.metadata.main_score)
        return Scores({name: mean}, {name: scores})


def load_mteb(names: Sequence[str]) -> list[MtebTask]:
    """Return the tasks of these names: tasks, benchmarks, or folders with a local retrieval set.

    Raises:
        UserError: there is no such task or folder, or a file is not in the required form.
    """
    tasks: dict[str, MtebTask] = {}
    for name in names:
        for task in [_local(Path(name))] if Path(name).is_dir() else _of_hub(name):
            first = tasks.setdefault(task.name, task)
            if first.fingerprint != task.fingerprint:
                if "local" in (entry.task.metadata.dataset["revision"] for entry in (first, task)):
                    raise UserError(f"--mteb {name}: another task is called {task.name} too; rename the folder.")
                raise UserError(
                    f"--mteb {name}: its task {task.name} is asked for with other splits, languages or data too; evaluate it in another command."
                )
    return list(tasks.values())


def _of_hub(name: str) -> list[MtebTask]:
    try:
        tasks = list(mteb.get_benchmark(name).tasks)
    except KeyError:
        try:
            tasks = [mteb.get_task(name)]
        except KeyError as error:
            # mteb proposes the nearest name.
            text = str(error.args[0]).removeprefix("KeyError: ").rstrip(".")
            raise UserError(
                f"--mteb {name}: no folder, and no task or benchmark of mteb {mteb.__version__}: {text}."
            ) from None
    return [MtebTask(task, stable_hash([task.metadata.dataset, list(task.hf_subsets)])) for task in tasks]


def _local(folder: Path) -> MtebTask:
    """Return the task of a folder with `queries.parquet`, `corpus.parquet` and `qrels.parquet`."""
    files = {part: folder / f"{part}.parquet" for part in PARTS}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise UserError(f"--mteb {folder}: {', '.join(missing)} is missing; a retrieval set has {', '.join(PARTS)}.")
    hashed = {file: marked_hash(file) for file in files.values()}
    name = folder.resolve().name
    # A query of mteb's task finds the document of its id or not; `_own_documents` decides for all of them.
    task = get_task("reqa_squad").model_copy(update={"name": name, "ignore_identical_ids": False})
    try:
        tables = {part: read_table(file) for part, file in files.items()}
        judged = read_judged(
            task, "test", Judged(), lambda part, split: Columns(task, split, tables[str(part)], str(files[str(part)]))
        )
        largest = pa.compute.max(judged.qrels["score"]).as_py()
        if largest > LARGEST_SCORE:
            raise UserError(f"qrels: the score {largest:g} is more than {LARGEST_SCORE:,}.")
    except UserError as error:
        raise UserError(
            f"--mteb {folder}: {error} queries and corpus have the columns _id and text (and title), "
            "qrels have query-id, corpus-id and score."
        ) from error
    for file, (mark, content) in hashed.items():
        check_hashed(file, mark, content)
    texts = {part: Dataset(getattr(judged, part).combine_chunks()) for part in ("queries", "corpus")}
    if "title" in tables["corpus"].column_names:
        ids, titles = (tables["corpus"][column].to_pylist() for column in ("_id", "title"))
        title_of = dict(zip(map(str, ids), titles, strict=True))
        texts["corpus"] = texts["corpus"].add_column("title", [title_of[row] or "" for row in texts["corpus"]["id"]])
    qrels: dict[str, dict[str, int]] = {}
    for row in judged.qrels.to_pylist():
        qrels.setdefault(row["query_id"], {})[row["corpus_id"]] = max(0, int(row["score"]))
    same = _own_documents(texts, qrels)
    if same:
        say(
            f"--mteb {folder}: {same:,} queries are documents of the corpus, by id and text, which they are not to find."
        )
    split = {**texts, "relevant_docs": qrels, "top_ranked": None}

    class Local(AbsTaskRetrieval):
        ignore_identical_ids = same > 0
        metadata = mteb.TaskMetadata(
            name=name, description=f"retrieval set of {name}", reference=None, dataset={"path": name, "revision": "local"},
            type="Retrieval", category="t2t", modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="ndcg_at_10", date=None, domains=None, task_subtypes=None, license=None, annotations_creators=None,
            dialect=None, sample_creation=None, bibtex_citation=None,
        )  # fmt: skip

        def load_data(self, *_: Any, **__: Any) -> None:
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    data = stable_hash([*(content for _, content in hashed.values()), *([Local.ignore_identical_ids] if same else [])])
    return MtebTask(Local(), data, chance=_chance(texts["corpus"]["id"], qrels, itself=same > 0))


def _own_documents(texts: Mapping[str, Dataset], judged: Mapping[str, Mapping[str, int]]) -> int:
    """Return how many queries have a document's id, if all of these have the document's text too and none is judged
    relevant to itself; else 0."""
    corpus = dict(zip(texts["corpus"]["id"], texts["corpus"]["text"], strict=True))
    queries = zip(texts["queries"]["id"], texts["queries"]["text"], strict=True)
    own = [corpus[query] == text and not judged.get(query, {}).get(query) for query, text in queries if query in corpus]
    return len(own) if all(own) else 0


def _chance(corpus: Sequence[str], judged: Mapping[str, Mapping[str, int]], *, itself: bool = False) -> Chance:
    """Return the chance level of a local set: the expected score of any order, or that of the best order shared by all queries if higher.

    Args:
        itself: whether a query does not find the document of its id.
    """
    qrels = {query: dict(scores) for query, scores in judged.items()}
    places = {document: place for place, document in enumerate(corpus)} if itself else {}
    own = np.array([places.get(query, -1) for query in qrels])
    grades = [list(row.values()) for row in qrels.values()]
    guessed = _mean(expected_ndcg(grades, len(corpus) - (own >= 0), findable_grades(list(qrels), corpus, qrels, own)))
    order = constant_order(list(qrels), corpus, qrels)
    ranks = [order[order != number][:10] for number in own]
    depth = min(map(len, ranks))
    same = BestDocuments(np.stack([rank[:depth] for rank in ranks]), np.tile(-np.arange(float(depth)), (len(qrels), 1)))
    alike = _mean(ndcg_at_10(list(qrels), corpus, same, qrels))
    return max(
        (Chance(guessed, "any order"), Chance(alike, "the same order for every query")), key=lambda level: level.score
    )


def _mean(scores: NDArray[np.float64]) -> float:
    """Return the mean over queries as mteb computes it, with 0 for a query whose documents are all judged irrelevant."""
    return float(np.nan_to_num(scores).mean())
