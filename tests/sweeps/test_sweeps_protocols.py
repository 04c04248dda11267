"""Protocols: what the packaged ones say, and what a space that names one makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Start, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.seeds import Seeds
from mlmclm.storage.packaged import PROTOCOLS, packaged_names
from mlmclm.sweeps.cells import SweepModel, cell_name, expand
from mlmclm.sweeps.space import Space, find_protocol, find_space
from mlmclm.tasks.declared_tasks import get_task, task_names

SPACE: dict[str, Any] = {"tasks": ["sst2", "conll2003"], "protocol": "study"}


def space_of(tmp_path: Path, content: dict[str, Any], tasks: list[str] | None = None) -> Space:
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(content))
    return find_space(path, tasks)


def test_the_study_protocol_has_the_published_numbers() -> None:
    study = find_protocol("study")
    assert study.learning_rates == (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
    assert study.seeds == (0, 1, 2, 3, 4)
    found = study.protocol_for("sst2")
    assert (found.batch_size, found.max_steps, found.epochs) == (32, 1000, None)
    assert (found.adam_beta1, found.adam_beta2, found.adam_epsilon, found.weight_decay) == (0.9, 0.95, 1e-5, 0.1)
    assert (found.warmup_ratio, found.precision, found.attention) == (0.1, "bf16", "bidirectional")
    assert found.at_context(2048).max_length == 2028  # round(0.99 x 2048)
    assert found.at_context(512).max_length == 507
    # CoNLL-2003 has 14,041 training sentences.
    assert study.protocol_for("conll2003").steps(14_041) == 439
    assert (study.protocol_for("uner").epochs, study.protocol_for("uner").max_steps) == (1, None)


def test_the_paper_s_space_is_the_twelve_data_sets_by_the_study_s_protocol() -> None:
    space = find_space("paper")
    families = {task: get_task(task).family for task in space.tasks}
    assert families == {
        **dict.fromkeys(["sst2", "mnli", "qqp"], "sequence-classification"),
        **dict.fromkeys(["conll2003", "ontonotes", "uner"], "token-classification"),
        **dict.fromkeys(["squad", "squad_v2", "record"], "question-answering"),
        **dict.fromkeys(["msmarco", "nq", "mldr"], "retrieval"),
    }
    assert [task for task in space.tasks if space.protocol_for(task).epochs] == ["conll2003", "uner"]
    assert (space.rule, space.metrics, space.cells_a_model) == ("per_seed", "study", 12 * 6 * 5)


def test_the_rule_of_choice_is_the_space_s_else_its_protocol_s_and_no_part_of_a_cell(tmp_path: Path) -> None:
    assert {name: find_protocol(name).rule for name in packaged_names(PROTOCOLS)} == {
        "glue": "mean", "standard": "mean", "study": "per_seed",
    }  # fmt: skip
    keys = []
    for rule in ("mean", "per_seed"):
        space = space_of(tmp_path, {**SPACE, "rule": rule})
        assert space.rule == rule
        declarations = {task: get_task(task) for task in space.tasks}
        cells = expand(space, [SweepModel("a", tmp_path, "w")], dict.fromkeys(space.tasks, "data"), declarations)
        keys.append([cell_key(cell) for cell in cells])
    assert keys[0] == keys[1]
    assert space_of(tmp_path, SPACE).rule == "per_seed"
    with pytest.raises(UserError, match=r"space\.yaml: rule: .*'mean', 'per_seed' or 'on_test'"):
        space_of(tmp_path, {**SPACE, "rule": "median"})


def test_the_standard_protocol_differs_from_the_study_s_in_precision_pairs_searched_documents_metrics_and_rule_only() -> (
    None
):
    assert packaged_names(PROTOCOLS) == ["glue", "standard", "study"]
    study, standard = find_protocol("study"), find_protocol("standard")
    assert (standard.learning_rates, standard.seeds) == (study.learning_rates, study.seeds)
    assert (standard.metrics, study.metrics) == ("standard", "study")
    for task in task_names():
        same = {**study.protocol_for(task).model_dump(), "precision": "bf16-autocast"}
        same["pair_truncation"] = "longest_first"
        assert same["max_evaluation_documents"] == ("judged" if task in ("msmarco", "nq", "mldr") else None)
        same["max_evaluation_documents"] = None
        assert standard.protocol_for(task).model_dump() == same


def test_metrics_choose_the_main_score_and_are_not_part_of_a_cell(tmp_path: Path) -> None:
    tasks = ["sst2", "cola", "mrpc", "stsb", "conll2003", "squad_4k", "squad_v2", "reqa_squad", "mnli"]
    main, keys = {}, {}
    for metrics in ("standard", "study", "glue"):
        space = space_of(tmp_path, {"tasks": tasks, "protocol": "study", "metrics": metrics})
        declarations = {task: get_task(task).measured_by(space.metrics) for task in tasks}
        cells = expand(space, [SweepModel("a", tmp_path, "w")], dict.fromkeys(tasks, "data"), declarations)
        keys[metrics] = [cell_key(cell) for cell in cells]
        main[metrics] = {cell.task: cell.declared.metric for cell in cells}
    assert keys["standard"] == keys["study"] == keys["glue"]
    assert main["standard"] == {task: get_task(task).metric for task in tasks}
    assert main["study"] == {
        "sst2": "accuracy", "cola": "accuracy", "mrpc": "accuracy", "mnli": "accuracy", "stsb": "spearman",
        "conll2003": "study.f1", "squad_4k": "study.f1", "squad_v2": "study.f1", "reqa_squad": "study.ndcg@10",
    }  # fmt: skip
    assert main["glue"] == main["standard"] | {"mrpc": "accuracy+f1", "stsb": "pearson+spearman"}
    assert space_of(tmp_path, SPACE).metrics == "study"  # the named protocol's
    assert space_of(tmp_path, {**SPACE, "protocol": {"base": "study", "batch_size": 8}}).metrics == "study"
    with pytest.raises(UserError, match=r"space\.yaml: metrics: .*'standard', 'study' or 'glue'"):
        space_of(tmp_path, {**SPACE, "metrics": "stduy"})


def test_a_space_takes_what_it_does_not_say_from_the_protocol_that_it_names(tmp_path: Path) -> None:
    study = find_protocol("study")
    space = space_of(tmp_path, SPACE)
    assert (space.learning_rates, space.seeds, space.protocol) == (study.learning_rates, study.seeds, study.protocol)
    assert space.protocol_for("conll2003").epochs == 1
    changed = {
        **SPACE, "seeds": {"head": [0], "order": [1, 2], "dropout": [0]}, "protocol": {"base": "study", "batch_size": 8},
        "per_task": {"conll2003": {"batch_size": 4}, "sst2": {"max_steps": 7}},
    }  # fmt: skip
    space = space_of(tmp_path, changed)
    assert space.seeds == (Seeds(0, 1, 0), Seeds(0, 2, 0))
    assert (space.protocol_for("sst2").batch_size, space.protocol_for("sst2").max_steps) == (8, 7)
    own = space.protocol_for("conll2003")
    assert (own.batch_size, own.epochs, own.max_steps, own.precision) == (4, 1, None, "bf16")


def test_a_protocol_of_the_users_own_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("learning_rates: [1e-3]\nprotocol: {max_steps: 5}\nper_task: {sst2: {max_steps: 6}}\n")
    space = space_of(tmp_path, {**SPACE, "protocol": str(path), "seeds": [4]})
    assert (space.learning_rates, space.seeds) == ((1e-3,), (4,))
    assert (space.protocol_for("sst2").max_steps, space.protocol_for("conll2003").max_steps) == (6, 5)
    with pytest.raises(UserError, match="key 'seeds' is missing"):
        space_of(tmp_path, {**SPACE, "protocol": str(path)})


def test_a_study_s_tasks_in_place_of_the_space_s_keep_the_protocol_s_settings_for_them(tmp_path: Path) -> None:
    content = {**SPACE, "tasks": ["sst2"], "per_task": {"sst2": {"max_steps": 7}}}
    space = space_of(tmp_path, content, ["conll2003", "squad_4k"])
    assert space.tasks == ("conll2003", "squad_4k")
    assert space.protocol_for("conll2003").epochs == 1
    assert set(space.per_task) == {"conll2003"}


def test_the_glue_protocol_is_the_published_grid() -> None:
    """ModernBERT's and Ettin's: {1,3,5,8}e-5 x {1,5,8,10}e-6 x {1,2,3} or {2,5,10} epochs, 384 runs a model."""
    glue = find_protocol("glue")
    assert (glue.learning_rates, glue.metrics) == ((1e-5, 3e-5, 5e-5, 8e-5), "glue")
    short = ("sst2", "mnli", "rte")
    epochs = {
        task: [1, 2, 3] if task in short else [2, 5, 10] for task in (*short, "qnli", "qqp", "cola", "mrpc", "stsb")
    }
    space = find_space("glue")
    assert set(space.tasks) == set(epochs)
    for task, own in epochs.items():
        found = [(point.weight_decay, point.epochs) for point in space.settings_for(task).values()]
        assert found == [(decay, count) for decay in (1e-6, 5e-6, 8e-6, 1e-5) for count in own]
        assert all(point.batch_size == 64 and point.max_steps is None for point in space.settings_for(task).values())
    assert space.cells_a_model == 384
    assert next(iter(space.settings_for("mnli"))) == "weight decay 1e-06, epochs 1"
    starts = {("a", "mnli"): Start("key of a's best cell", "mnli")}
    cells = expand(space, [SweepModel("a", Path("a"), "w")], dict.fromkeys(space.tasks, "data"), starts=starts)
    assert {cell.task for cell in cells if cell.start} == {"rte", "mrpc", "stsb"}
    assert len(cells) == len({cell_key(cell) for cell in cells}) == len({cell_name(cell) for cell in cells}) == 384
    assert cell_name(cells[1]) == "a/cola/lr3e-5/weightdecay1e-06-epochs2/s0"


def test_a_grid_can_be_had_without_a_named_protocol_and_in_place_of_its_own(tmp_path: Path) -> None:
    content = {
        "tasks": ["sst2", "qnli"], "learning_rates": [1e-3], "seeds": [0, 1], "protocol": {"max_steps": 5},
        "grid": {"batch_size": [8, 16]}, "task_grids": {"qnli": {"batch_size": [4], "classifier": ["linear", "dense-gelu"]}},
    }  # fmt: skip
    space = space_of(tmp_path, content)
    assert list(space.settings_for("sst2")) == ["batch size 8", "batch size 16"]
    assert list(space.settings_for("qnli")) == [
        "batch size 4, classifier linear",
        "batch size 4, classifier dense-gelu",
    ]
    assert space.cells_a_model == 8
    assert list(space_of(tmp_path, content, ["sst2"]).task_grids) == []
    own = {"tasks": ["mnli", "qnli"], "protocol": "glue", "grid": {"epochs": [1]}}
    assert [list(space_of(tmp_path, own).settings_for(task)) for task in own["tasks"]] == [["epochs 1"]] * 2
    named = {**own, "task_grids": {"mnli": {"epochs": [4]}}}
    del named["grid"]
    assert len(space_of(tmp_path, named).settings_for("mnli")) == 4
    assert len(space_of(tmp_path, named).settings_for("qnli")) == 12
    near = {**content, "grid": {"weight_decay": [0.1, 0.1000001]}, "task_grids": {}}
    assert list(space_of(tmp_path, near).settings_for("sst2")) == ["weight decay 0.1", "weight decay 0.1000001"]
    plain = space_of(tmp_path, SPACE)
    assert list(plain.settings_for("sst2").items()) == [("", plain.protocol_for("sst2"))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": {"epoch": [1]}}, "grid: unknown axis 'epoch'. Did you mean 'epochs'?"),
        ({"grid": {"max_length": [64, 128]}}, "grid: unknown axis 'max_length'"),
        ({"grid": {"epochs": []}}, "grid.epochs"),
        ({"grid": {"epochs": [1, 1]}}, "1 is listed more than once"),
        ({"grid": {"epochs": [-1]}}, "grid: epochs"),
        ({"task_grids": {"sst": {"epochs": [1]}}}, "task_grids: unknown task 'sst'. Did you mean 'sst2'?"),
        ({"task_grids": {"sst2": {"epochs": [0]}}}, "task_grids.sst2: epochs"),
        ({"per_task": {"sst2": {"epochs": 2}}}, "per_task.sst2: epochs is an axis of the grid"),
        ({"protocol": {"base": "glue", "epochs": 2}}, "protocol.epochs: it is an axis of the grid of protocol 'glue'"),
    ],
)
def test_what_is_wrong_with_a_grid_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        space_of(tmp_path, {"tasks": ["sst2", "qnli"], "protocol": "glue", **change})
    assert message in str(caught.value)
    assert "space.yaml" in str(caught.value)


def test_a_length_that_is_a_share_of_the_context_becomes_a_number(tmp_path: Path) -> None:
    content = {
        "tasks": ["sst2", "conll2003", "squad_4k"], "protocol": "study",
        "per_task": {"conll2003": {"length_share": 0.5}, "squad_4k": {"max_length": 40, "stride": 8}},
    }  # fmt: skip
    space = space_of(tmp_path, content).at_context(128)
    lengths = {task: space.protocol_for(task).max_length for task in space.tasks}
    assert lengths == {"sst2": 127, "conll2003": 64, "squad_4k": 40}
    assert all(space.protocol_for(task).length_share is None for task in space.tasks)
    fixed = space_of(tmp_path, {**SPACE, "protocol": {"base": "study", "max_length": 60, "stride": 16}}).at_context(128)
    assert fixed.protocol_for("sst2").max_length == 60
    assert [find_protocol("study").protocol.at_context(context).stride for context in (128, 2048)] == [31, 128]
    with pytest.raises(UserError, match=r"length_share 0.99 of a context of 6 tokens \(max_length 6\): max_length"):
        space_of(tmp_path, SPACE).at_context(6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"protocol": "stdy"},
            "protocol: unknown protocol 'stdy'. Did you mean 'study'? Allowed: glue, standard, study.",
        ),
        ({"protocol": "none/mine.yaml"}, "none/mine.yaml: no such file"),
        ({"protocol": {"base": 3}}, "protocol.base is the name of a protocol"),
        (
            {"protocol": {"base": "study", "batch": 3}},
            "unknown key 'protocol.batch'. Did you mean 'protocol.batch_size'?",
        ),
        ({"protocol": {"base": "study", "pooling": "max"}}, "protocol.pooling"),
        ({"protocol": {"base": "study", "length_share": 1.5}}, "protocol.length_share"),
        ({"per_task": {"ss2": {}}}, "per_task: unknown task 'ss2'. Did you mean 'sst2'?"),
        ({"per_task": {"sst2": 3}}, "per_task.sst2"),
        ({"learning_rates": [1e-3, 1e-3]}, "learning_rates: 0.001 is listed more than once"),
    ],
)
def test_what_is_wrong_with_a_named_protocol_is_said(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        space_of(tmp_path, {**SPACE, **change})
    assert message in str(caught.value)
    assert "space.yaml" in str(caught.value)


def test_a_task_misspelt_in_a_protocol_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("protocol: {max_steps: 5}\nper_task: {conl2003: {max_steps: 6}}\n")
    with pytest.raises(UserError, match=r"mine\.yaml: per_task: unknown task 'conl2003'. Did you mean 'conll2003'?"):
        find_protocol(path)


def test_a_later_setting_is_part_of_the_key_where_it_is_not_the_default() -> None:
    assert "length_share" not in Protocol().identity()
    assert Protocol(length_share=0.5).identity() == {**Protocol().identity(), "length_share": 0.5}


def test_the_space_in_the_docs_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    (example,) = (block for block in text.split("```yaml\n")[1:] if "protocol: {base:" in block)
    path = tmp_path / "docs.yaml"
    path.write_text(example.partition("```")[0])
    space = find_space(path)
    assert (space.rule, space.seeds, space.protocol.batch_size) == ("mean", (0, 1, 2), 16)
    assert space.cells_a_model == 4 * 6 * 3
