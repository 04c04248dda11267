"""Keys follow from the roles of settings' fields, and are today what they were when results were filed under them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from mlmclm.configuration import Enters, Frozen, Role
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.documents import HubSource
from mlmclm.corpora.prepare_corpus import text_key
from mlmclm.corpora.tokenizer import tokenizer_key
from mlmclm.finetuning.cell import Cell, cell_key, training_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.plans.names import parse_name
from mlmclm.plans.phases import CARRIED, ResolvedPhase, TrainingPhase
from mlmclm.plans.recipe import LossWeights, Recipe
from mlmclm.plans.stages import SHAPE, history, study_fingerprint
from mlmclm.storage.files import stable_hash
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.load import check_pin
from mlmclm.tasks.prepared_task import prepared_key
from mlmclm.tasks.settings import TaskSettings

RECIPES: dict[str, Any] = {
    "": ({}, "edc8d3a6b7b7"),
    "block_length": ({"block_length": 512}, "f94c8b12926e"),
    "batch": ({"batch": 96}, "22f4e8326963"),
    "peak_learning_rate": ({"peak_learning_rate": 0.001}, "c76a2bc324c3"),
    "warmup_steps": ({"warmup_steps": 100}, "87605d6c61ba"),
    "decay_steps": ({"decay_steps": 300}, "c185c64545f2"),
    "decay": ({"decay": "cosine"}, "a9219fb86a80"),
    "rewarmup_steps": ({"rewarmup_steps": 50}, "d041391c4df4"),
    "optimizer": ({"optimizer": "stable-adamw", "zero_stage": 0}, "d87a34f108e2"),
    "adam_betas": ({"adam_betas": (0.8, 0.99)}, "1c762367e363"),
    "adam_eps": ({"adam_eps": 1e-08}, "32df1ae63a9c"),
    "weight_decay": ({"weight_decay": 0.2}, "54c2562d18f8"),
    "clip": ({"clip": 0.0}, "87e99859e826"),
    "precision": ({"precision": "fp32"}, "283c513d90e1"),
    "corruption": ({"corruption": {"mask": 0.8, "random": 0.1, "keep": 0.1}}, "07ca09eff8e4"),
    "loss_weights": ({"loss_weights": {"mlm": 0.5}}, "2c02e2ef1533"),
    "isolate_documents": ({"isolate_documents": True}, "6e1ea157509b"),
    "rows": ({"rows": "chunks"}, "74acfe5eca73"),
    "rope_base": ({"rope_base": 160000.0}, "49c27cd9d693"),
    "local_rope_base": ({"local_rope_base": 10.5}, "a75e55258e12"),
    "mix": ({"mix": {"web": 3, "books": 1}}, "787adbc2ebbc"),
    "phases": ({"phases": [{"name": "pre", "steps": 4000}, {"name": "last", "steps": 3000}]}, "81c2d053f611"),
    "phases_by_size": (
        {
            "phases": [{"name": "pre", "steps": 7000}],
            "phases_by_size": {"2m": [{"name": "pre", "steps": 7000, "moments": "new", "warmup_steps": 5}]},
        },
        "c1dbf5a43ea4",
    ),
    "callbacks": ({"callbacks": ()}, "edc8d3a6b7b7"),
    "seed": ({"seed": 7}, "5d52a83e8042"),
    "pretraining_seeds": ({"pretraining_seeds": {"masks": 7}}, "fe11a1ee63b0"),
    "workers": ({"workers": 1}, "edc8d3a6b7b7"),
    "device": ({"device": "cpu"}, "edc8d3a6b7b7"),
    "micro_batch": ({"micro_batch": 12}, "edc8d3a6b7b7"),
    "micro_batch_tokens": ({"micro_batch_tokens": 8192}, "edc8d3a6b7b7"),
    "zero_stage": ({"zero_stage": 3}, "edc8d3a6b7b7"),
    "activation_checkpointing": ({"activation_checkpointing": True}, "edc8d3a6b7b7"),
    "compile": ({"compile": True}, "edc8d3a6b7b7"),
    "deterministic": ({"deterministic": True}, "edc8d3a6b7b7"),
    "fewest_workers": ({"fewest_workers": 1}, "edc8d3a6b7b7"),
    "checkpoint_every": ({"checkpoint_every": 7}, "edc8d3a6b7b7"),
    "keep_checkpoints": ({"keep_checkpoints": 3}, "edc8d3a6b7b7"),
    "revisions_every": ({"revisions_every": 100}, "edc8d3a6b7b7"),
    "revisions_every_tokens": ({"revisions_every_tokens": 1000000}, "edc8d3a6b7b7"),
    "evaluate_every": ({"evaluate_every": 9}, "edc8d3a6b7b7"),
    "evaluation_blocks": ({"evaluation_blocks": 4}, "edc8d3a6b7b7"),
    "max_failures": ({"max_failures": 1}, "edc8d3a6b7b7"),
    "deepspeed": ({"deepspeed": {"wall_clock_breakdown": True}}, "edc8d3a6b7b7"),
}
"""Field -> recipe in which it is not the default, and the first digits of the key of a state."""
PHASES: dict[str, Any] = {
    "": ({}, "e62255dd486c"),
    "name": ({"name": "other"}, "e62255dd486c"),
    "steps": ({"steps": 2000}, "e62255dd486c"),
    "tokens": ({"tokens": 9437184000, "steps": None}, "e62255dd486c"),
    "block_length": ({"block_length": 1024}, "0ce37133b538"),
    "batch": ({"batch": 192}, "cd71a6e05bad"),
    "batch_warmup": ({"batch_warmup": {"steps": 20, "first": 48}}, "fd5159236d00"),
    "peak_learning_rate": ({"peak_learning_rate": 0.0001}, "41c237d3da47"),
    "weight_decay": ({"weight_decay": 0.01}, "e17a529d827f"),
    "warmup_steps": ({"warmup_steps": 10}, "487e81d5c38e"),
    "decay": ({"decay": "1-sqrt"}, "2832eb1aec70"),
    "decay_steps": ({"decay": "linear", "decay_steps": 77}, "b333c12acc20"),
    "final_share": ({"decay": "linear", "final_share": 0.3}, "abd91904dec7"),
    "rope_base": ({"rope_base": 99.0}, "24148de82534"),
    "local_rope_base": ({"local_rope_base": 98.0}, "4f4fed24cc8d"),
    "mix": ({"mix": {"web": 1}}, "41ca05cc63c6"),
    "moments": ({"moments": "new"}, "71985c405c44"),
}
"""Field of the second of three phases -> its value, and the first digits of the key of a state after the last."""
PROTOCOLS: dict[str, Any] = {
    "": ({}, "d92a08ee d86210c5 64c686e5"),
    "max_length": ({"max_length": 256}, "460f21f0 a96484fa 53c80e20"),
    "max_train_examples": ({"max_train_examples": 5}, "1a9bc465 b0111a60 83cf35f2"),
    "max_evaluation_examples": ({"max_evaluation_examples": 6}, "b598fae8 d86210c5 5a367861"),
    "max_evaluation_documents": ({"max_evaluation_documents": "judged"}, "f1d424ba d86210c5 6469b54c"),
    "special_tokens": ({"special_tokens": "tokenizer"}, "07310e7b 17593fbd 3e392ae4"),
    "pair_truncation": ({"pair_truncation": "joined"}, "d92a08ee d86210c5 1e90224a"),
    "pooling": ({"pooling": "last"}, "1e2df15f 9255b14a 64c686e5"),
    "classifier": ({"classifier": "linear"}, "ecfa80a2 13e8c737 64c686e5"),
    "head_dropout": ({"head_dropout": 0.0}, "d0a4769c 1d0f937a 64c686e5"),
    "label_sub_tokens": ({"label_sub_tokens": "first"}, "7c44433f e0cb20b6 64c686e5"),
    "stride": ({"stride": 64}, "86f73961 4e76f534 f117db67"),
    "max_answer_tokens": ({"max_answer_tokens": 20}, "8f1fe769 d86210c5 64c686e5"),
    "query_prefix": ({"query_prefix": "q"}, "e1e6ce62 3a42e83f 4d66a93b"),
    "document_prefix": ({"document_prefix": "d"}, "632053c0 e1731fec 15db8d38"),
    "temperature": ({"temperature": 0.1}, "c598ffd1 4bcc3ca1 64c686e5"),
    "symmetric": ({"symmetric": True}, "bed0fa7b 85d6768f 64c686e5"),
    "distinct_batches": ({"distinct_batches": True}, "ab07dcda 21677928 64c686e5"),
    "batch_size": ({"batch_size": 16}, "f4df7187 e5f0ff09 64c686e5"),
    "max_steps": ({"max_steps": 10}, "bfa7f3c2 d0e8e65e 64c686e5"),
    "epochs": ({"epochs": 2.0}, "07189d77 47abe37c 64c686e5"),
    "warmup_ratio": ({"warmup_ratio": 0.2}, "73fe4c84 8f2ea2e1 64c686e5"),
    "adam_beta1": ({"adam_beta1": 0.8}, "45c47a34 10bb76f6 64c686e5"),
    "adam_beta2": ({"adam_beta2": 0.9}, "b3935e41 f8ac7b12 64c686e5"),
    "adam_epsilon": ({"adam_epsilon": 1e-08}, "83457452 b406ca23 64c686e5"),
    "weight_decay": ({"weight_decay": 0.0}, "39e9f31a c6f7932a 64c686e5"),
    "clip_norm": ({"clip_norm": None}, "e3e7c6b1 a8b0a763 64c686e5"),
    "precision": ({"precision": "bf16"}, "13406666 8d2142ff 64c686e5"),
    "attention": ({"attention": "causal"}, "81efbb4b 47879aa9 64c686e5"),
    "length_share": ({"length_share": 0.5}, "4cb3cc31 af33c016 1f873a3c"),
    "evaluation_batch_tokens": ({"evaluation_batch_tokens": 64}, "0cfc429e d86210c5 64c686e5"),
    "decoupled_weight_decay": ({"decoupled_weight_decay": True}, "29f6e43d 8b926b2a 64c686e5"),
    "decay": ({"decay": "cosine"}, "e5ebfa6e ae577a00 64c686e5"),
    "optimizer": ({"optimizer": "stable-adamw"}, "eb77ca48 f7f3263f 64c686e5"),
    "evaluate_every": ({"evaluate_every": 5}, "764af018 764af018 64c686e5"),
    "patience": ({"patience": 2, "evaluate_every": 5}, "bea1b01e bea1b01e 64c686e5"),
    "chunk_tokens": ({"chunk_tokens": 128}, "c25ac3fe 757ff50c 64c686e5"),
    "deterministic": ({"deterministic": True}, "d92a08ee d86210c5 64c686e5"),
}
"""Field -> protocol in which it is not the default, and the first digits of the keys of a cell, its training and its
task's data."""
CORPORA: dict[str, Any] = {
    "": ({}, "e7114fcc1a9e"),
    "source": ({"source": "o"}, "383a37e352d6"),
    "max_left_out": ({"max_left_out": 0.5}, "e7114fcc1a9e"),
    "config_name": ({"config_name": "c"}, "c07fb74c3ec5"),
    "revision": ({"revision": "r"}, "da95d98d8d35"),
    "split": ({"split": "s"}, "a5dc45d8dd54"),
    "validation_split": ({"validation_split": "v"}, "a4431c14c3fb"),
    "text_column": ({"text_column": "t"}, "57bb065f1398"),
    "text_documents": ({"text_documents": "paragraph"}, "e7114fcc1a9e"),
    "streaming": ({"streaming": True}, "ff3fe1f43b83"),
    "validation_fraction": ({"validation_fraction": 0.1}, "7af0e59a2a55"),
    "max_documents": ({"max_documents": 3}, "bdce22df081f"),
    "max_tokens": ({"max_tokens": 1000}, "59d827bcb426"),
    "max_validation_tokens": ({"max_validation_tokens": None}, "3c70de537ba6"),
    "seed": ({"seed": 3}, "082f4faf6e04"),
    "workers": ({"workers": "ray"}, "e7114fcc1a9e"),
    "shards": ({"shards": "s3://x"}, "e7114fcc1a9e"),
    "cache": ({"shards": "s3://x", "cache": "y"}, "e7114fcc1a9e"),
    "cache_gib": ({"cache_gib": 3.0}, "e7114fcc1a9e"),
    "shard_mib": ({"shard_mib": 3.0}, "e7114fcc1a9e"),
    "max_unknown": ({"max_unknown": 0.5}, "e7114fcc1a9e"),
}
"""Field -> configuration in which it is not the default, and the first digits of the hash of its corpus's keys."""
TOKENIZERS: list[Any] = [
    ({"name": "a/b"}, "35d76b4f8320d9fc"),
    ({"name": "a/b", "revision": "r"}, "b3c5df1ed40f2719"),
    ({"train_vocab_size": 5000}, "9ba33d2e15ba5e2f"),
]
TASKS: dict[str, Any] = {
    "": ({}, "0524cb0d660a"),
    "source": ({"source": "a/b"}, "42d192d00e08"),
    "config_name": ({"config_name": "c"}, "d1a243ae2c00"),
    "revision": ({"revision": "r"}, "d5218ab88472"),
    "data_dir": ({"data_dir": "d"}, "fba143f6804a"),
    "folder": ({"folder": "f"}, "0524cb0d660a"),
    "columns": ({"columns": {"text": "t", "text_pair": "u"}}, "db2611737dea"),
    "splits": (
        {
            "splits": {
                "train": {"split": "a", "columns": {"text": "t"}, "revision": "rr"},
                "validation_fraction": 0.1,
                "test": "b",
            }
        },
        "870ec1abf6ad",
    ),
    "label_names": ({"label_names": ["a", "b"]}, "c715dded0612"),
    "pair_template": ({"pair_template": "{text} and {text_pair}"}, "24611a89c19c"),
    "title": ({"title": "x"}, "0524cb0d660a"),
    "metric": ({"metric": "f1"}, "0524cb0d660a"),
    "licence": ({"licence": "l"}, "0524cb0d660a"),
    "citation": ({"citation": "c"}, "0524cb0d660a"),
}
"""Field -> its value in a declaration, and the first digits of the name of its pin."""


def state_key(values: dict[str, Any]) -> str:
    recipe = Recipe.model_validate(values)
    name = "2m-clm-4k-mlm40-7k" if recipe.has_phases else "2m-clm-dec4k-mlm40-9k"
    state = history(parse_name(name), recipe, None, (("books", "b"), ("web", "w")))
    return state.key(study_fingerprint(recipe, "corpus", 5000))[:12]


def three_phases(change: dict[str, Any]) -> dict[str, Any]:
    second = {"name": "ext", "steps": 2000, "block_length": 4096, "rope_base": 160_000.0, **change}
    return {"phases": [{"name": "pre", "steps": 4000}, second, {"name": "last", "steps": 1000, "decay": "linear"}]}


def keys_of_cell(values: dict[str, Any]) -> str:
    protocol, task = Protocol.model_validate(values).at_context(512), get_task("rte")
    cell = Cell("model", Path("folder"), "weights", "rte", "data", protocol, 1e-4, 3, task, training_data="rows")
    made = cell_key(cell), training_key(cell), prepared_key(task, "data", "tokenizer", protocol)
    return " ".join(key[:8] for key in made)


def corpus_key(values: dict[str, Any]) -> str:
    corpus = CorpusConfig.model_validate({"source": "owner/name", **values})
    return stable_hash(
        [corpus.identity(), text_key(corpus, "o"), HubSource(corpus, [], Path("no-store")).fingerprint()]
    )[:12]


def pin_of(change: dict[str, Any], store: Path) -> str:
    check_pin(Task.model_validate({**get_task("rte").model_dump(), "revision": "main", **change}), "f" * 64, store)
    (path,) = (store / "task-data").iterdir()
    return path.stem.removeprefix("rte-")


@pytest.mark.parametrize(
    ("settings", "known", "key_of"),
    [
        (Recipe, RECIPES, state_key),
        (TrainingPhase, PHASES, lambda change: state_key(three_phases(change))),
        (Protocol, PROTOCOLS, keys_of_cell),
        (CorpusConfig, CORPORA, corpus_key),
    ],
)
def test_keys_are_what_they_were_whatever_is_set(settings: type[Frozen], known: dict[str, Any], key_of: Any) -> None:
    assert set(known) == {"", *settings.model_fields}
    assert {name: key_of(values) for name, (values, _) in known.items()} == {
        name: key for name, (_, key) in known.items()
    }


def test_the_keys_of_tokenizers_are_what_they_were() -> None:
    for values, key in TOKENIZERS:
        assert tokenizer_key(TokenizerConfig.model_validate(values), "corpus") == key


@pytest.mark.parametrize("name", TASKS)
def test_the_pins_of_tasks_data_are_where_they_were(name: str, tmp_path: Path) -> None:
    change, pin = TASKS[name]
    assert pin_of(change, tmp_path) == pin


def test_what_phases_carry_on_and_models_are_shaped_by_is_what_it_was() -> None:
    assert set(CARRIED) == {
        "block_length", "batch", "peak_learning_rate", "weight_decay", "rope_base", "local_rope_base", "mix",
    }  # fmt: skip
    assert SHAPE == ("block_length", "rope_base", "local_rope_base")
    assert set(CARRIED) <= set(Recipe.model_fields) & set(ResolvedPhase.model_fields)


def test_a_field_without_a_role_fails_at_import() -> None:
    with pytest.raises(TypeError, match=r"Smoothed\.label_smoothing: a field of settings declares what it changes"):

        class Smoothed(Recipe):
            label_smoothing: float = 0.0


def test_a_field_that_counts_where_it_is_changed_needs_a_default() -> None:
    with pytest.raises(TypeError, match=r"Shifted\.shift: Enters.IF_CHANGED needs a default"):

        class Shifted(Frozen):
            shift: Annotated[int, Role.TOKENS, Enters.IF_CHANGED]


def test_a_new_field_that_changes_weights_changes_the_keys_of_states() -> None:
    class Smoothed(Recipe):
        label_smoothing: Annotated[float, Role.WEIGHTS, Enters.IF_CHANGED] = 0.0
        logging_level: Annotated[int, Role.WORK] = 0

    before = study_fingerprint(Recipe(), "corpus", 5000)
    assert study_fingerprint(Smoothed(), "corpus", 5000) == before
    assert study_fingerprint(Smoothed(logging_level=1), "corpus", 5000) == before
    assert study_fingerprint(Smoothed(label_smoothing=0.1), "corpus", 5000) != before


def test_a_new_field_of_a_phase_changes_the_keys_of_its_states() -> None:
    class Smoothed(ResolvedPhase):
        label_smoothing: Annotated[float, Role.WEIGHTS, Enters.IF_CHANGED] = 0.0

    (phase, *_) = Recipe.model_validate(three_phases({})).phases_of("2m")
    assert Smoothed(**dict(phase)).identity() == phase.identity()
    assert Smoothed(**dict(phase), label_smoothing=0.1).identity() != phase.identity()


def test_a_new_field_that_changes_tokens_changes_the_keys_of_prepared_data_and_cells() -> None:
    class Lowered(TaskSettings):
        lower_case: Annotated[bool, Role.TOKENS, Enters.IF_CHANGED] = False

    class LoweredProtocol(Protocol, Lowered):
        pass

    task = get_task("sst2")
    before = prepared_key(task, "data", "tokenizer", TaskSettings())
    assert prepared_key(task, "data", "tokenizer", Lowered()) == before
    assert prepared_key(task, "data", "tokenizer", Lowered(lower_case=True)) != before
    changed = LoweredProtocol(lower_case=True)
    cells = [Cell("m", Path("f"), "w", "sst2", "data", each, 1e-4, 3) for each in (Protocol(), changed)]
    assert cell_key(cells[0]) != cell_key(cells[1])


def test_a_new_field_that_changes_evaluation_changes_a_cell_but_not_its_training() -> None:
    class Scored(Protocol):
        threshold: Annotated[float, Role.EVALUATION, Enters.IF_CHANGED] = 0.5

    cells = [
        Cell("m", Path("f"), "w", "sst2", "data", each, 1e-4, 3, training_data="rows")
        for each in (Protocol(), Scored(), Scored(threshold=0.4))
    ]
    plain, same, other = map(cell_key, cells)
    assert plain == same != other
    assert len({training_key(cell) for cell in cells}) == 1


def test_new_fields_of_corpora_tokenizers_and_tasks_change_their_keys(tmp_path: Path) -> None:
    class Deduplicated(CorpusConfig):
        deduplicate: Annotated[bool, Role.TEXT, Enters.IF_CHANGED] = False

    class Splitting(TokenizerConfig):
        digits: Annotated[int, Role.TOKENS, Enters.IF_CHANGED] = 1

    class Filtered(Task):
        filter: Annotated[str | None, Role.SOURCE, Enters.IF_CHANGED] = None

    plain, changed = CorpusConfig(source="a/b"), Deduplicated(source="a/b", deduplicate=True)
    assert plain.identity() != changed.identity() and text_key(plain, "o") != text_key(changed, "o")
    trained = Splitting(train_vocab_size=5000, digits=3)
    assert tokenizer_key(TokenizerConfig(train_vocab_size=5000), "c") != tokenizer_key(trained, "c")
    values = {**get_task("rte").model_dump(), "revision": "main"}
    for filter in (None, "label > 0"):
        check_pin(Filtered.model_validate({**values, "filter": filter}), "f" * 64, tmp_path)
    assert len(list((tmp_path / "task-data").iterdir())) == 2


def test_nested_settings_count_by_their_own_fields_roles() -> None:
    class Weights(LossWeights):
        note: Annotated[str, Role.DISPLAY] = ""
        span: Annotated[float, Role.WEIGHTS] = Field(1.0, gt=0)

    plain = Recipe(loss_weights=Weights())
    assert Recipe(loss_weights=Weights(note="a note")).identity() == plain.identity()
    changed = Recipe(loss_weights=Weights(note="a note", span=2.0)).identity()
    assert changed["loss_weights"] == {"clm": 1.0, "mlm": 1.0, "span": 2.0}
