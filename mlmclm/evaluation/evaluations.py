"""The result of a model on a zero-shot task: one immutable file, `evaluations/<first two digits of the key>/<key>.json`.

The files form a results store (`sweeps.results_store`): each is complete or absent, and an existing result is never computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mlmclm import versions
from mlmclm.backends.device_kinds import keyed_backend
from mlmclm.errors import UserError
from mlmclm.evaluation.scores import Scores, finite
from mlmclm.models.folder import context_of, tokenizer_hash, weights_hashes
from mlmclm.progress import say_once
from mlmclm.results.chance import Chance
from mlmclm.results.metrics import MAIN_METRICS
from mlmclm.storage.files import hash_file, read_json, stable_hash
from mlmclm.storage.unchanged import Unchanged, changed_file_error
from mlmclm.system import provenance

if TYPE_CHECKING:
    from mlmclm.evaluation.language_model import LanguageModel, Scoring
    from mlmclm.evaluation.likelihoods import Observer
    from mlmclm.evaluation.mteb_tasks import SentenceModel

SENTENCE_FILES = (
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json", "special_tokens_map.json",
    *(f"sentence_{kind}_config.json" for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")),
    "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
"""Files that sentence-transformers reads in a model's folder, besides weights and its modules' files (`1_Pooling`)."""
VERSIONED = "config_sentence_transformers.json"
"""The file among them that names the versions that wrote it. Only a warning depends on these versions."""


class ZeroShotTask(Protocol):
    """A task for a model without fine-tuning: a language model, or a sentence-transformers model (`mteb_tasks`).

    `fingerprint` is a hash of everything that determines the scores of a given model, `limit` the number of examples if
    not all are used, `requests` the number of questions to the model, and `chances` the chance levels of the metrics that
    have one, by name.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def requests(self) -> int: ...
    @property
    def chances(self) -> Mapping[str, Chance]: ...
    def run(self, model: Any) -> Scores: ...


@dataclass(frozen=True)
class Subject:
    """A model to evaluate: its name, the folder whose weights are scored, the kind of scoring, and the hashes of its files.

    `tokenizer` is a hash of everything that decides which tokens the model sees, its context length included. `earlier` has
    pairs of both hashes as earlier versions computed them, under which results may be filed (`filed_as`).
    """

    name: str
    folder: Path
    scoring: Scoring | Literal["embedding"]
    weights: str
    tokenizer: str
    earlier: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, name: str, folder: Path, scoring: Scoring | Literal["embedding"]) -> Subject:
        """Read the hashes of a folder whose sentence vectors are evaluated, or that `language_model.scoring_of` has chosen.

        The tokenizer's hash covers its file as it is: an exported tokenizer adds other special tokens than the corpus's (see
        `tokenizer_hash`), which changes scores.
        """
        parts = [tokenizer_hash(folder), hash_file(folder / "tokenizer.json")]
        if scoring == "embedding":
            tokenizers = [stable_hash([*parts, hashes]) for hashes in _sentence_hashes(folder)]
        else:
            # Besides the tokenizer's file, these decide where texts begin and where generated ones end.
            settings = [_entry(folder / "tokenizer_config.json", entry) for entry in ("add_bos_token", "add_eos_token")]
            settings.append(_entry(folder / "generation_config.json", "eos_token_id"))
            tokenizers = [stable_hash([*parts, context_of(folder), settings])]
        first, *earlier = dict.fromkeys(product(weights_hashes(folder), tokenizers))
        return cls(name, folder, scoring, *first, tuple(earlier))

    def bind(self) -> None:
        """Hash the folder's files again, before they are loaded, and let `compute_evaluation` check that they don't change.

        Raises:
            UserError: the hashes have changed since the evaluation was planned.
        """
        files = Unchanged(self.folder, holds=self._holds)
        if not self._holds():
            raise changed_file_error(self.folder)
        _loaded[self.folder] = files

    def _holds(self) -> bool:
        now = Subject.of(self.name, self.folder, self.scoring)
        return (self.weights, self.tokenizer) in ((now.weights, now.tokenizer), *now.earlier)


_loaded: dict[Path, Unchanged] = {}
"""The state of the files of each model that this process has loaded, at that time, by folder."""


def _entry(file: Path, name: str) -> Any:
    return read_json(file).get(name) if file.is_file() else None


def _sentence_hashes(folder: Path) -> list[dict[str, str]]:
    """Return hashes of sentence-transformers' settings in a folder, by file: by the current definition, and by an earlier one."""
    modules = folder / "modules.json"
    parts = [module["path"] for module in read_json(modules)] if modules.is_file() else []
    files = {folder / name for name in SENTENCE_FILES}
    files |= {file for part in parts if part for file in (folder / part).rglob("*")}
    of_bytes = {file.relative_to(folder).as_posix(): hash_file(file) for file in sorted(files) if file.is_file()}
    meta = {}
    if VERSIONED in of_bytes:
        content = read_json(folder / VERSIONED)
        meta = {VERSIONED: stable_hash({name: value for name, value in content.items() if name != "__version__"})}
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() and not parts else {}
    classes = config.get("architectures") or [""]
    # Earlier results of decoders used the last token's vector. With this entry, results of mean pooling get other keys.
    decodes = classes[0].endswith("ForCausalLM") and config.get("is_causal", True)
    pooled = {"pooling": "mean"} if decodes else {}
    return [of_bytes | meta | pooled, of_bytes | pooled]


class KeptEvaluations(Protocol):
    """A store of results (`sweeps.results_store.Evaluations`)."""

    def ensure(self, key: str, make: Callable[[], dict[str, Any]], *, title: str) -> tuple[dict[str, Any], bool]: ...
    def find(self, key: str) -> dict[str, Any] | None: ...


def evaluation_key(subject: Subject, task: ZeroShotTask) -> str:
    """Return the key of a model's result on a task: a hash of everything that determines the scores."""
    return stable_hash(
        {
            "kind": "zero-shot",
            "engine": versions.EVALUATIONS,
            "weights": subject.weights,
            "tokenizer": subject.tokenizer,
            "scoring": subject.scoring,
            "task": task.fingerprint,
            **keyed_backend(),
        }
    )


def filed_as(subject: Subject, task: ZeroShotTask, results_store: KeptEvaluations) -> Subject:
    """Return the subject with the hashes under which its result on a task is filed; unchanged if there is no result."""
    for weights, tokenizer in ((subject.weights, subject.tokenizer), *subject.earlier) if subject.earlier else ():
        named = replace(subject, weights=weights, tokenizer=tokenizer)
        if results_store.find(evaluation_key(named, task)) is not None:
            return named
    return subject


def compute_evaluation(subject: Subject, task: ZeroShotTask, model: LanguageModel | SentenceModel) -> dict[str, Any]:
    """Evaluate a model on a task; return the result as a JSON object. Raises `UserError` if the model's files have changed meanwhile."""
    from mlmclm.backends.choice import backend_of

    began = time.perf_counter()
    scores = task.run(model)
    if subject.folder in _loaded:
        _loaded[subject.folder].check()
    backend = backend_of(model.model.device)
    return {
        "schema": versions.RESULTS,
        "key": evaluation_key(subject, task),
        "model": subject.name,
        "weights": subject.weights,
        "tokenizer": subject.tokenizer,
        "scoring": subject.scoring,
        "task": task.name,
        "task_data": task.fingerprint,
        "limit": task.limit,
        "requests": task.requests,
        "engine": versions.EVALUATIONS,
        "status": "ok",
        "metrics": scores.metrics,
        "values": {name: list(map(_plain, column)) for name, column in scores.values.items()},
        "parameters": sum(parameter.numel() for parameter in model.model.parameters()),
        "cost": {"seconds": time.perf_counter() - began, **provenance(backend.title(), backend.name)},
    }


def find_or_compute(
    subject: Subject,
    task: ZeroShotTask,
    results_store: KeptEvaluations,
    load: Callable[[], LanguageModel | SentenceModel],
    observe: Observer | None = None,
) -> tuple[dict[str, Any], bool]:
    """Return a model's result on a task, and whether it was computed now. Only then is `load` called and the result filed.

    Raises:
        UserError: it could not be computed; the message names model and task.
    """
    from mlmclm.evaluation.language_model import LanguageModel

    title = f"{subject.name} on {task.name}"

    def make() -> dict[str, Any]:
        try:
            model = load()
            return compute_evaluation(
                subject, task, replace(model, observe=observe) if isinstance(model, LanguageModel) else model
            )
        except UserError as error:
            raise UserError(f"{title}: {error}") from error

    result, computed = results_store.ensure(evaluation_key(subject, task), make, title=title)
    if computed:
        say_once(f"zero-shot evaluation computes with the backend {result['cost']['backend']}")
    return under_names(result, subject.name, task.name, chance_scores(task)), computed


def chance_scores(task: ZeroShotTask) -> dict[str, dict[str, Any]]:
    """Return the chance levels of a task as plain values, `score` and `how`, by metric."""
    return {metric: asdict(level) for metric, level in task.chances.items()}


def under_names(
    result: Mapping[str, Any], model: str, task: str, chances: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a result under these names, with its `main` metric; its file may have been written under other names.

    Each metric gets the task's `chance` level, and `chance_how`, the way to reach it; None where there is none. The
    level is not in the file, as it depends on the task alone.

    Args:
        chances: the task's levels, as `chance_scores` returns them.
    """
    metrics = {}
    for name, entry in result["metrics"].items():
        level = chances.get(name, {})
        metrics[name] = {**entry, "chance": level.get("score"), "chance_how": level.get("how")}
    return {**result, "metrics": metrics, "model": model, "task": task, "main": main_metric(result["metrics"])}


def main_metric(metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of a task's main metric."""
    return next((name for name in MAIN_METRICS if name in metrics), next(iter(metrics), ""))


def _plain(value: Any) -> Any:
    """Return an example's value of a metric in a form that JSON can represent."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    if isinstance(value, float):
        return finite(value)
    return value if isinstance(value, str | int | bool) or value is None else str(value)
