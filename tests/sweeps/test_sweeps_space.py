"""Spaces: what is packaged, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.seeds import Seeds
from mlmclm.storage.packaged import SPACES, packaged_names
from mlmclm.sweeps.cells import SweepModel, cell_name, expand
from mlmclm.sweeps.space import Space, find_space
from mlmclm.tasks.declared_tasks import task_names

MINIMAL = "tasks: [sst2]\nlearning_rates: [1e-4]\nseeds: [0]\nprotocol: {max_steps: 10}\n"


def space_from(tmp_path: Path, text: str) -> Space:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return find_space(path)


def test_every_packaged_space_is_valid_and_names_declared_tasks() -> None:
    names = packaged_names(SPACES)
    assert {"quickstart", "paper"} <= set(names)
    for name in names:
        assert set(find_space(name).tasks) <= set(task_names())


def test_the_quickstart_covers_three_families() -> None:
    from mlmclm.tasks.declared_tasks import get_task

    families = {get_task(task).family for task in find_space("quickstart").tasks}
    assert families == {"sequence-classification", "token-classification", "retrieval"}


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
        (("[0]", "[true]"), "seeds.0: a seed is a whole number from 0 on"),
        (("[0]", "{head: [0], ordre: [0], dropout: [0]}"), "seeds: unknown stream 'ordre'. Did you mean 'order'?"),
        (("[0]", "{head: [0], order: [0]}"), "seeds: no seeds for dropout"),
        (("[0]", "{head: [0], order: 1, dropout: [0]}"), "seeds: order is a list of seeds"),
        (("[0]", "{head: [0], order: [0], dropout: [-1]}"), "seeds: a seed is a whole number from 0 on"),
        (("[0]", "{head: [0], order: [1, 1], dropout: [0]}"), "seeds: h0-o1-d0 is listed more than once"),
        (("[0]", "[0, {head: 0, order: 0, dropout: 0}]"), "seeds: 0 is listed more than once"),
        (("[0]", "[{head: 0, order: 0}]"), "seeds.0: no seed for dropout"),
        (("[1e-4]", "[]"), "learning_rates: Tuple should have at least 1 item"),
        (("max_steps: 10", "max_step: 10"), "protocol.max_step"),
        (("seeds: [0]", "seeds: [0]\nper_task: {sst: {max_steps: 5}}"), "unknown task 'sst'. Did you mean 'sst2'?"),
        (("seeds: [0]", "seeds: [0]\nper_task: {sst2: {max_step: 5}}"), "Did you mean 'max_steps'?"),
        (("seeds: [0]", "seeds: [0]\ngpus_per_cell: 1.5"), "gpus_per_cell: a fraction of a GPU, such as 0.25"),
        (("seeds: [0]", "seeds: [0]\ngpus_per_cell: shared"), "or a whole number of GPUs (got 'shared')"),
    ],
)
def test_a_wrong_space_is_one_message_with_the_file_and_the_key(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        space_from(tmp_path, MINIMAL.replace(*change))
    assert "space.yaml" in str(caught.value)
    assert message in str(caught.value)


def test_a_list_with_a_wrong_item_is_not_said_to_be_empty_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"space.yaml: learning_rates\.0: Input should be greater than 0 \(got 0\)\.$"):
        space_from(tmp_path, MINIMAL.replace("1e-4", "0"))


def test_seeds_of_streams_are_a_sweep_of_their_combinations(tmp_path: Path) -> None:
    streams = "{head: [0], order: [0, 1, 2], dropout: [0, 7]}"
    space = space_from(tmp_path, MINIMAL.replace("seeds: [0]", f"seeds: {streams}"))
    assert space.seeds == (0, Seeds(0, 0, 7), Seeds(0, 1, 0), Seeds(0, 1, 7), Seeds(0, 2, 0), Seeds(0, 2, 7))
    assert Space.model_validate(space.model_dump()) == space
    cells = expand(space, [SweepModel("a", tmp_path, "hash of a")], {"sst2": "x"})
    assert len({cell_key(cell) for cell in cells}) == 6
    assert [cell_name(cell) for cell in cells[:2]] == ["a/sst2/lr1e-4/s0", "a/sst2/lr1e-4/h0-o0-d7"]
    plain = expand(space_from(tmp_path, MINIMAL), [SweepModel("a", tmp_path, "hash of a")], {"sst2": "x"})
    assert cell_key(plain[0]) == cell_key(cells[0])


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
    assert cell_name(cells[0]) == "b/sst2/lr1e-3/s0"
