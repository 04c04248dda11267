"""Spaces: what is packaged, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.errors import UserError
from mlmclm.sweeps.cells import SweepModel, cell_name, expand, learning_rate_label
from mlmclm.sweeps.space import Space, find_space, space_names
from mlmclm.tasks.registry import task_names

MINIMAL = "tasks: [sst2]\nlearning_rates: [1e-4]\nseeds: [0]\nprotocol: {max_steps: 10}\n"


def space_from(tmp_path: Path, text: str) -> Space:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return find_space(path)


def test_every_packaged_space_is_valid_and_names_declared_tasks() -> None:
    assert {"quickstart", "paper"} <= set(space_names())
    for name in space_names():
        assert set(find_space(name).tasks) <= set(task_names())


def test_the_quickstart_covers_the_four_families() -> None:
    from mlmclm.tasks.registry import get_task

    families = {get_task(task).family for task in find_space("quickstart").tasks}
    assert families == {"sequence-classification", "token-classification", "question-answering", "retrieval"}


def test_a_misspelt_name_is_told_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"unknown search space 'quikstart'. Did you mean 'quickstart'?"):
        find_space("quikstart")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.yaml: no such file"):
        find_space(tmp_path / "mine.yaml")


def test_a_rate_written_without_a_point_is_a_number(tmp_path: Path) -> None:
    assert space_from(tmp_path, MINIMAL).learning_rates == (1e-4,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("seeds: [0]", "sedes: [0]"), "unknown key 'sedes'. Did you mean 'seeds'?"),
        (("seeds: [0]", "seeds: [0, 0]"), "seeds: 0 is listed more than once"),
        (("seeds: [0]", "seeds: [-1]"), "seeds"),
        (("[1e-4]", "[0]"), "learning_rates"),
        (("[1e-4]", "[]"), "learning_rates"),
        (("max_steps: 10", "max_step: 10"), "protocol.max_step"),
        (("seeds: [0]", "seeds: [0]\nper_task: {sst: {max_steps: 5}}"), "unknown task 'sst'. Did you mean 'sst2'?"),
        (("seeds: [0]", "seeds: [0]\nper_task: {sst2: {max_step: 5}}"), "Did you mean 'max_steps'?"),
        (("seeds: [0]", "seeds: [0]\ngpus_per_cell: 1.5"), "gpus_per_cell"),
    ],
)
def test_a_wrong_space_is_one_message_with_the_file_and_the_key(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        space_from(tmp_path, MINIMAL.replace(*change))
    assert "space.yaml" in str(caught.value)
    assert message in str(caught.value)


def test_overrides_apply_to_their_task_only(tmp_path: Path) -> None:
    space = space_from(tmp_path, MINIMAL.replace("[sst2]", "[sst2, squad_4k]") + "per_task: {sst2: {max_steps: 5}}\n")
    assert space.protocol_for("sst2").max_steps == 5
    assert space.protocol_for("squad_4k").max_steps == 10


def test_cells_come_model_by_model_and_task_by_task_without_duplicates(tmp_path: Path) -> None:
    text = MINIMAL.replace("[sst2]", "[sst2, squad_4k]").replace("[1e-4]", "[1e-3, 2e-3]").replace("[0]", "[0, 1]")
    models = [SweepModel(name, tmp_path, f"hash of {name}") for name in ("b", "a", "a")]
    cells = expand(space_from(tmp_path, text), models, {"sst2": "x", "squad_4k": "y"})
    assert len(cells) == 16
    assert [(cell.model, cell.task) for cell in cells[::4]] == [
        ("b", "sst2"), ("b", "squad_4k"), ("a", "sst2"), ("a", "squad_4k"),
    ]  # fmt: skip
    assert cell_name(cells[0]) == "b/sst2/lr1e-03/s0"


@pytest.mark.parametrize(
    ("rate", "label"), [(1e-3, "1e-03"), (3.5e-4, "3.5e-04"), (1e-5, "1e-05"), (0.0123, "1.23e-02")]
)
def test_a_learning_rates_label_is_short_and_exact(rate: float, label: str) -> None:
    assert learning_rate_label(rate) == label
    assert float(label) == rate
