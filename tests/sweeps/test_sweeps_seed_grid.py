"""Seeds of a space by power: how they are read, what is refused, and that they begin every list of the same seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlmclm.configuration import parse
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.studies.last_grid import difference, grid_of
from mlmclm.sweeps.cells import SweepModel, expand, seeds_by_task
from mlmclm.sweeps.seed_grid import SeedGrid
from mlmclm.sweeps.space import Space, find_space
from mlmclm.tasks.declared_tasks import get_task

VALUES: dict[str, Any] = {
    "tasks": ["mnli", "rte"],
    "learning_rates": [1e-3, 2e-3],
    "seeds": {"power": 0.8, "difference": 0.5},
    "protocol": {"max_steps": 5},
}


def space_of(**changes: Any) -> Space:
    return parse(Space, {**VALUES, **changes}, where="space.yaml")


def by_power(**changes: Any) -> Space:
    return space_of(seeds={**VALUES["seeds"], **changes})


def test_a_space_begins_with_the_least_seeds_and_has_bounds() -> None:
    space = space_of()
    assert space.seeds == (0, 1, 2) and space.seeds.power is not None and len(space.seeds.power.every) == 20
    assert space.seeds.of("rte") == (0, 1, 2) and space.seeds.most_of("rte") == 20
    assert space.cells_of("rte") == 2 * 3 and space.cells_added_at_most("rte") == 2 * (20 - 3)
    decided = space.seeds.allotted({"rte": 5})
    assert decided.of("rte") == (0, 1, 2, 3, 4) and decided.of("mnli") == (0, 1, 2)
    assert decided.undecided(space.tasks) == ("mnli",) and decided.most_of("rte") == 5
    plain = space_of(seeds=[4, 2]).seeds
    assert plain.of("rte") == (4, 2) and plain.undecided(space.tasks) == () and plain.most_of("rte") == 2
    assert by_power(values=[7, 5, 3, 1], least=2).seeds == (7, 5)
    assert by_power(per_task={"rte": 2.0}).seeds.power.difference_on("rte") == 0.02  # type: ignore[union-attr]
    every = by_power(values={"head": [0], "order": [0, 1, 2], "dropout": [0]}).seeds.power.every  # type: ignore[union-attr]
    assert len(every) == 3


def test_a_space_with_other_tasks_keeps_what_is_about_them() -> None:
    values = {
        **VALUES,
        "seeds": {**VALUES["seeds"], "per_task": {"rte": 1.0, "mnli": 0.3}},
        "noise": {"rte": {"seeds": 2}},
    }
    found = find_space(values, ["mnli"])
    assert found.noise == {} and found.seeds.power is not None and found.seeds.power.per_task == {"mnli": 0.3}
    assert values["seeds"]["per_task"] == {"rte": 1.0, "mnli": 0.3}


def test_a_named_protocol_s_seeds_give_way() -> None:
    assert find_space({**VALUES, "protocol": "standard"}).seeds.power is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"power": 1.0}, "power: Input should be less than 1"),
        ({"power": 0.2}, "power: Input should be greater than or equal to 0.5"),
        ({"difference": 0}, "difference: Input should be greater than 0"),
        ({"difference": -0.5}, "difference: Input should be greater than 0"),
        ({"per_task": {"rte": 0}}, r"per_task\.rte: Input should be greater than 0"),
        ({"per_task": {"rt": 1}}, r"seeds\.per_task: unknown task 'rt'\. Did you mean 'rte'"),
        ({"least": 1}, "least: Input should be greater than or equal to 2"),
        ({"least": 30}, "least: 30 is more than most, which is 20"),
        ({"values": [0, 1]}, "least: 3 is more than the 2 seeds of values"),
        ({"values": [0, 1, 2], "most": 4}, "most: 4 is more than the 3 seeds of values"),
        ({"values": [0, 0, 1]}, "0 is listed more than once"),
        ({"powr": 0.9}, "unknown key 'powr'. Did you mean 'power'"),
    ],
)
def test_wrong_seeds_by_power_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"space\.yaml: seeds.*{message}|space\.yaml: {message}"):
        by_power(**changes)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UserError, match="key 'difference' is missing"):
        space_of(seeds={"power": 0.9})
    with pytest.raises(UserError, match="allocation: race: with seeds by power"):
        space_of(allocation="race")
    with pytest.raises(UserError, match="start_from: with seeds by power"):
        space_of(start_from={"rte": "mnli"})
    with pytest.raises(UserError, match=r"noise: unknown task 'mnl'\. Did you mean 'mnli'"):
        space_of(noise={"mnl": {"seeds": 1.0}})
    with pytest.raises(UserError, match=r"noise\.rte\.seeds: Input should be greater than 0"):
        space_of(noise={"rte": {"seeds": 0.0}})
    with pytest.raises(UserError, match="noise: Input should be a valid dictionary"):
        find_space({**VALUES, "noise": [1]}, ["rte"])


def test_cells_have_the_keys_that_they_have_in_a_list(tmp_path: Path) -> None:
    models, data = [SweepModel("a", tmp_path, "weights")], dict.fromkeys(VALUES["tasks"], "data")
    declared = {task: get_task(task) for task in VALUES["tasks"]}
    space = space_of()
    allotted = space.model_copy(update={"seeds": space.seeds.allotted({"rte": 5, "mnli": 4})})
    cells = expand(allotted, models, data, declared)
    assert seeds_by_task(cells) == {"mnli": (0, 1, 2, 3), "rte": (0, 1, 2, 3, 4)}
    listed = {cell_key(cell) for cell in expand(space_of(seeds=[*range(5)]), models, data, declared)}
    assert len(cells) == 2 * 9 and {cell_key(cell) for cell in cells} < listed
    assert isinstance(space.for_model("a").seeds, SeedGrid) and space.for_model("a").seeds.power is not None


def test_a_grid_that_finds_more_only_grew() -> None:
    def grid(space: Space) -> dict[str, Any]:
        return grid_of(space, {"a": "weights"})

    before = grid(space_of())
    assert difference(before, grid(space_of())) == difference(grid(space_of(seeds=[0])), grid(space_of(seeds=[0])))
    listed = difference(grid(space_of(seeds=[0, 1])), before)
    assert listed.lost == () and listed.added[1:] == (
        "seeds for 0.5 points at 80 % power, from 3 to 20 by task (was the same seeds on all tasks)",
    )
    for more in ({"most": 30}, {"difference": 0.4}, {"power": 0.9}):
        found = difference(before, grid(by_power(**more)))
        assert found.lost == () and len(found.added) == 1
    for other in (
        by_power(most=10),
        by_power(difference=1),
        space_of(noise={"rte": {"seeds": 2}}),
        space_of(seeds=[0, 1, 2]),
    ):
        assert len(difference(before, grid(other)).lost) == 1
