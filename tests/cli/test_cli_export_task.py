"""`mlmclm export --task` writes the best cell of a sweep as an encoder of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mlmclm.finetuning.cell import cell_key
from mlmclm.finetuning.run import run_cell
from mlmclm.storage.place import Place
from mlmclm.studies.study import Study
from mlmclm.studies.study_file import load_file
from mlmclm.sweeps.results_store import ResultsStore
from small_models import save_small_model, write_retrieval, write_sentiment
from small_study import remember

Run = Callable[..., tuple[int, str]]
SPACE = """
tasks: [reqa_squad, sst2]
learning_rates: [1.0e-5, 3.0e-3]
seeds: [0, 1]
protocol: {base: standard, batch_size: 8, max_steps: 10, max_length: 48}
"""


def test_the_best_seed_of_the_best_rate_is_trained_again_and_written(tmp_path: Path, run: Run) -> None:
    write_retrieval(tmp_path / "data", train=100)
    write_sentiment(tmp_path / "data", train=40, test=20)
    save_small_model(tmp_path / "model")
    (tmp_path / "space.yaml").write_text(SPACE)
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("name: mine\nmodels: {small: model}\nspace: space.yaml\n")
    place = Place(tmp_path / "store", tmp_path / "data")
    results = {}
    made = Study(load_file(sweep), place).sweep(prepare=True)
    remember(made)
    for cell in made.plan().cells:
        if cell.task == "reqa_squad":
            result = run_cell(cell, store=place.store, data_root=place.data_root)
            ResultsStore(place.store).write(result)
            results[cell_key(cell)] = result
    scores = {key: (each["learning_rate"], each["scores"]["validation"]["ndcg@10"]) for key, each in results.items()}
    assert len(scores) == 4 and len({score for _, score in scores.values()}) > 2
    sums = {rate: sum(score for own, score in scores.values() if own == rate) for rate in (1e-5, 3e-3)}
    at_best = {key: score for key, (rate, score) in scores.items() if rate == max(sums, key=sums.__getitem__)}
    best = max(at_best, key=at_best.__getitem__)
    places = ("--store", place.store, "--data", tmp_path / "data")
    code, output = run("export", sweep, "small", "--task", "reqa_squad", "--to", tmp_path / "out", *places, "--json")
    assert code == 0, output
    found = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    assert (found["cell"], found["scores"]) == (best, results[best]["scores"])
    assert "does not score exactly as before" not in output
    assert json.loads((tmp_path / "out" / "modules.json").read_text())[0]["path"] == ""
    for words, message in (
        (("small", "--task", "reqa"), "unknown task 'reqa'. Did you mean 'reqa_squad'?"),
        (("smal", "--task", "reqa_squad"), "unknown model 'smal'. Did you mean 'small'?"),
        (("small", "--task", "sst2"), "no cell of small on sst2 has a score"),
        (("small", "--task", "reqa_squad", "--step", "3"), "leave out --revisions, --repository, --step"),
    ):
        code, output = run("export", sweep, *words, "--to", tmp_path / "other", *places)
        assert code == 2 and message in " ".join(output.split()), output
    assert not (tmp_path / "other").exists()
