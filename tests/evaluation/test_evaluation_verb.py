"""`mlmclm evaluate`: tasks of local files on both kinds of model, results that are found again, mistakes that are named."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pandas
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import mlmclm
from mlmclm.backends.choice import backend_of
from mlmclm.cli.main import main
from mlmclm.corpora.notes import read_notes
from mlmclm.errors import UserError
from mlmclm.evaluation.evaluations import Subject
from mlmclm.evaluation.language_model import LanguageModel, scoring_of
from mlmclm.models.exported_folder import export_folder
from small_models import save_small_decoder, save_small_model, write_table
from winogender_files import STATISTICS, TEMPLATES

Run = Callable[..., tuple[int, str, str]]
ROWS = {
    "question": ["Anna was in", "the film was", "so very", "Carl was in", "one of a"],
    "choices": [[" Paris", " Oslo today"], [" lovely", " dull"], [" cold", " warm"], [" Rome", " Lima"], [" kind", " film"]],
    "answer": [0, 1, 1, 0, 0],
}  # fmt: skip
CHOICE = {
    "task": "cities",
    "dataset_path": "parquet",
    "dataset_kwargs": {"data_files": {"test": "rows/test.parquet"}},
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
LIKELIHOOD = {
    "task": "made", "output_type": "loglikelihood", "test_split": "test", "metric_list": [{"metric": "perplexity"}],
}  # fmt: skip
needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="lm-eval is not installed: pip install 'mlmclm[evaluation]'",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rows/, three tasks, an encoder and a decoder."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_table(folder / "rows", "test", ROWS)
    (folder / "cities.yaml").write_text(yaml.safe_dump(CHOICE))
    mean = {"aggregation": "mean", "higher_is_better": True}
    last = {
        **{name: CHOICE[name] for name in ("dataset_path", "dataset_kwargs", "test_split", "target_delimiter")},
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
    }
    written = {**last, "task": "written", "output_type": "generate_until", "metric_list": [{"metric": "exact_match", **mean}],
               "generation_kwargs": {"until": ["."], "max_gen_toks": 4}}  # fmt: skip
    rolled = {**last, "task": "rolled", "output_type": "loglikelihood_rolling", "doc_to_target": "{{question}}",
              "metric_list": [{"metric": "word_perplexity"}]}  # fmt: skip
    last_word = {**last, "task": "last_word", "output_type": "loglikelihood", "metric_list": [{"metric": "perplexity"}]}
    for task in (written, rolled, last_word):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    save_small_model(folder / "encoder")
    save_small_decoder(folder / "decoder")
    return folder


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in ("evaluate", *words, "--store", tmp_path / "store")])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def results(output: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output)["results"]
    return found


@needs_harness
def test_both_kinds_choose_the_likelier_answer_and_are_not_computed_twice(
    place: Path, run: Run, tmp_path: Path
) -> None:
    words = (place / "encoder", place / "decoder", "--task", place / "cities.yaml", "--json")
    code, output, errors = run(*words)
    assert code == 0, errors
    found = results(output)
    assert [(each["model"], each["scoring"], each["computed"]) for each in found] == [
        ("encoder", "masked", True),
        ("decoder", "causal", True),
    ]
    for each in found:
        model = LanguageModel.load(place / each["model"], each["scoring"])
        right = []
        for question, choices, answer in zip(*ROWS.values(), strict=True):
            totals = [model.likelihoods([(question, choice)])[0].total for choice in choices]
            right.append(float(totals.index(max(totals)) == answer))
        filed = json.loads(Path(each["file"]).read_text())
        assert filed["values"]["acc"] == right
        metric = each["metrics"]["acc"]
        assert metric["score"] == pytest.approx(sum(right) / 5)
        assert metric["low"] <= metric["score"] <= metric["high"]
        assert each["cost"]["seconds"] > 0
        assert each["cost"]["backend"] == backend_of("cpu").name
        assert each["cost"]["versions"]["lm-eval"]
    again = results(run(*words)[1])
    assert [each.pop("computed") for each in again] == [False, False]
    assert [each["key"] for each in again] == [each["key"] for each in found]
    models = [str(place / each["model"]) for each in found]
    table = mlmclm.evaluate(models, tasks=[str(place / "cities.yaml")], store=tmp_path / "store").table()
    rows = table[table.metric == "acc"][["model", "score"]].to_dict("records")
    assert rows == [{"model": each["model"], "score": each["metrics"]["acc"]["score"]} for each in found]
    assert again[0]["cost"] == found[0]["cost"]
    code, output, _ = run(*words[:-1])
    assert output.count("(found)") == 2
    # Fewer documents, another way to score, other data: other results.
    assert results(run(*words, "--limit", "3")[1])[0]["metrics"]["acc"]["examples"] == 3
    other = results(run(place / "encoder", "--task", place / "cities.yaml", "--scoring", "mntp", "--json")[1])[0]
    assert other["computed"]
    assert other["key"] != found[0]["key"]


@needs_harness
@pytest.mark.parametrize("folder", [False, True])
def test_a_csv_file_is_read_as_it_is_written(tmp_path: Path, folder: bool) -> None:
    from mlmclm.evaluation.harness import load_tasks

    gold = ["NA", "null", "nan", "None", "n/a", "007", "1.50", "true", "word"]
    numbers = {"number": list(range(9)), "half": [0.5] * 9, "some": [1, "", *[2] * 7]}
    place = tmp_path / "owner" if folder else tmp_path
    place.mkdir(exist_ok=True)
    for split, codes in (("test", [f"{n:03d}" for n in range(9)]), ("train", ["7"] * 9)):
        # A column has one type in all splits.
        pandas.DataFrame({"gold": gold, "code": codes, **numbers}).to_csv(place / f"{split}.csv", index=False)
    data = {"dataset_path": "owner"} if folder else {
        "dataset_path": "csv", "dataset_kwargs": {"data_files": {"test": "test.csv", "train": ["train.csv"]}}
    }  # fmt: skip
    task = LIKELIHOOD | data | {"doc_to_text": "code {{code}}", "doc_to_target": "gold"}
    (tmp_path / "made.yaml").write_text(yaml.safe_dump(task))
    (made,) = load_tasks([str(tmp_path / "made.yaml")])
    written = pandas.read_csv(place / "test.csv", dtype=str, keep_default_na=False)
    asked = [tuple(request.args) for request in made.task.instances]
    assert asked == [(f"code {code}", word) for code, word in zip(written["code"], written["gold"], strict=True)]
    docs = list(made.task.test_docs())
    # Numbers that lose no character stay numbers, such as the place of the right choice.
    assert [doc["number"] for doc in docs] == list(range(9)) and docs[0]["half"] == 0.5
    assert [doc["some"] for doc in docs] == [text or None for text in written["some"]]  # an empty field is a gap


@needs_harness
@pytest.mark.parametrize(
    ("gold", "lines"),
    [
        (["2020-01-02", "x"], True),
        (["007", "7"], False),
        ([10**22 + 1, 7], True),
        (["NA", "nan"], False),
        ([3, 4], True),
    ],
)
def test_a_json_file_is_read_as_it_is_written(tmp_path: Path, gold: list[Any], lines: bool) -> None:
    from mlmclm.evaluation.harness import load_tasks

    rows = [json.dumps({"question": f"q{n}", "gold": word}) for n, word in enumerate(gold)]
    (tmp_path / "test.json").write_text("\n".join(rows) if lines else f"[{','.join(rows)}]")
    files = {"data_files": {"test": "test.json"}}
    task = LIKELIHOOD | {
        "dataset_path": "json",
        "dataset_kwargs": files,
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{gold}}",
    }
    (tmp_path / "made.yaml").write_text(yaml.safe_dump(task))
    (made,) = load_tasks([str(tmp_path / "made.yaml")])
    assert [request.args[1] for request in made.task.instances] == [str(word) for word in gold]


@needs_harness
def test_a_key_is_of_the_data_and_not_of_its_place(place: Path, run: Run, tmp_path: Path) -> None:
    first = results(run(place / "decoder", "--task", place / "cities.yaml", "--json")[1])[0]
    write_table(tmp_path / "rows", "test", ROWS)
    (tmp_path / "again.yaml").write_text((place / "cities.yaml").read_text())
    again = results(run(place / "decoder", "--task", tmp_path / "again.yaml", "--json")[1])[0]
    assert (again["key"], again["computed"]) == (first["key"], False)
    write_table(tmp_path / "rows", "test", {**ROWS, "answer": [1, 1, 1, 0, 0]})
    changed = results(run(place / "decoder", "--task", tmp_path / "again.yaml", "--json")[1])[0]
    assert changed["key"] != first["key"]


def test_a_key_has_what_a_folder_says_of_context_and_ends_and_generation_stays_greedy(tmp_path: Path) -> None:
    keys, texts = [], []
    save_small_decoder(tmp_path / "0")
    known = json.loads((tmp_path / "0" / "generation_config.json").read_text())
    settings = json.loads((tmp_path / "0" / "tokenizer_config.json").read_text())
    for number, (file, content) in enumerate(
        (
            ("generation_config.json", known | {"transformers_version": "0"}),
            ("generation_config.json", known | {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1}),
            ("mlmclm.json", {"context": 8}),
            ("generation_config.json", known | {"eos_token_id": 7}),
            ("tokenizer_config.json", settings | {"add_bos_token": True}),
        )
    ):
        folder = shutil.copytree(tmp_path / "0", tmp_path / f"m{number}")
        (folder / file).write_text(json.dumps(content))
        keys.append(Subject.of("m", folder, "causal").tokenizer)
        if number < 2:
            texts.append(LanguageModel.load(folder, "causal").generate(["the film was"], stop=[], most=20))
    assert keys[0] == keys[1] == Subject.of("m", tmp_path / "0", "causal").tokenizer
    assert len(set(keys[1:])) == 4
    assert texts[0] == texts[1] != [""]


@needs_harness
def test_texts_are_written_and_rolled_over_by_both_kinds(place: Path, run: Run) -> None:
    tasks = ("--task", place / "written.yaml", "--task", place / "rolled.yaml")
    code, output, errors = run(place / "encoder", place / "decoder", *tasks, "--json")
    assert code == 0, errors
    found = results(output)
    assert [each["task"] for each in found] == ["written", "rolled"] * 2
    for each in found[1::2]:
        model = LanguageModel.load(place / each["model"], each["scoring"])
        words = sum(len(question.split()) for question in ROWS["question"])
        perplexity = 2.718281828459045 ** (-sum(model.rolling(ROWS["question"])) / words)  # type: ignore[arg-type]
        metric = each["metrics"]["word_perplexity"]
        assert metric["score"] == pytest.approx(perplexity, rel=1e-4)
        assert metric["low"] is None, "a perplexity is no mean over documents"


@needs_harness
@pytest.mark.parametrize(("folder", "scoring"), [("encoder", "masked"), ("encoder", "mntp"), ("decoder", "causal")])
def test_a_perplexity_has_no_token_behind_the_text(place: Path, run: Run, folder: str, scoring: str) -> None:
    """Where a task compares nothing, only the text's own tokens count, so that encoders and decoders can be compared."""
    code, output, errors = run(place / folder, "--task", place / "last_word.yaml", "--scoring", scoring, "--json")
    assert code == 0, errors
    kind = AutoModelForCausalLM if scoring == "causal" else AutoModelForMaskedLM
    plain, tokenizer = kind.from_pretrained(place / folder).eval(), AutoTokenizer.from_pretrained(place / folder)
    behind = [] if scoring == "causal" else [3, 3, 3, 2]  # three masks and the end token
    total = 0.0
    for question, choices, _ in zip(*ROWS.values(), strict=True):
        before = tokenizer.encode(question, add_special_tokens=False)
        for token in tokenizer.encode(question + choices[0], add_special_tokens=False)[len(before) :]:
            with torch.no_grad():
                logits = plain(torch.tensor([before + behind])).logits[0, len(before) - (scoring != "masked")]
            total += float(logits.double().log_softmax(-1)[token])
            before = [*before, token]
    assert results(output)[0]["metrics"]["perplexity"]["score"] == pytest.approx(math.exp(-total / 5), rel=1e-4)


@needs_harness
def test_mistakes_are_named(place: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load((place / "written.yaml").read_text())
    task["generation_kwargs"] |= {"do_sample": True, "temperature": 0.7}
    (place / "sampled.yaml").write_text(yaml.safe_dump(task))
    (place / "lost.yaml").write_text(
        yaml.safe_dump({**CHOICE, "dataset_kwargs": {"data_files": {"test": "no.parquet"}}})
    )
    (place / "odd.yaml").write_text(yaml.safe_dump({**CHOICE, "num_fewshot": 9, "fewshot_split": "test"}))
    model = place / "decoder"

    def wrong(**changes: Any) -> Path:
        file = place / f"wrong-{next(iter(changes))}.yaml"
        file.write_text(yaml.safe_dump({**CHOICE, **changes}))
        return file

    for words, text in (
        ((model, "--task", place / "odd.yaml"), "its requests cannot be built (ValueError"),
        ((model, "--task", place / "sampled.yaml"), "samples its answers"),
        ((model, "--task", place / "none.yaml"), "no such file"),
        ((model, "--task", place / "lost.yaml"), "data file no.parquet does not exist"),
        ((model, "--task", wrong(doc_to_txt="x")), "unknown key 'doc_to_txt'. Did you mean 'doc_to_text'?"),
        (
            (model, "--task", wrong(metric_list=[{"metric": "acc_nrm"}])),
            "unknown metric 'acc_nrm'. Did you mean 'acc_norm'?",
        ),
        ((model, "--task", wrong(test_split="tst")), "test_split: unknown split 'tst'. Did you mean 'test'?"),
        ((model, "--winogender", place, "--limit", 3), "--limit belongs to --task"),
        ((model, "--task", place / "cities.yaml", "--winogender-rule", "published"), "--winogender-rule belongs to"),
        ((model, "--winogender", place, "--winogender-rule", "publshed"), "winogender_rule: "),
        ((model, "--task", place / "cities.yaml", "--scoring", "masked"), "cannot be scored as masked"),
        ((model, "--task", place / "cities.yaml", "--scoring", "casual"), "Did you mean 'causal'"),
        ((model,), "nothing to evaluate on"),
    ):
        code, _, errors = run(*words)
        assert code == 2, errors
        assert text in errors
    (place / "own.py").write_text("def scored(document, results):\n    return {'my_metric': results[0][0]}\n")
    own = wrong(metric_list=[{"metric": "my_metric", "aggregation": "mean", "higher_is_better": True}])
    own.write_text(own.read_text() + "process_results: !function own.scored\n")
    code, output, errors = run(model, "--task", own, "--json")
    assert code == 0 and "my_metric" in json.loads(output)["results"][0]["metrics"], errors
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = {name: value for name, value in CHOICE.items() if name != "dataset_kwargs"} | {
        "dataset_path": "someone/cities"
    }
    (place / "hub.yaml").write_text(yaml.safe_dump(hub))
    code, _, errors = run(model, "--task", place / "hub.yaml")
    assert code == 2, errors
    assert "data set someone/cities cannot be loaded" in errors
    assert "someone___cities, which is missing" in errors
    # A folder under --data stands in for the Hub.
    write_table(tmp_path / "data" / "someone" / "cities", "test", ROWS)
    code, _, errors = run(model, "--task", place / "hub.yaml", "--data", tmp_path / "data", "--json")
    assert code == 0, errors


SCORED = """
FACTOR = 1

def helper(x):
    return FACTOR * x

def scored(document, results):
    return {"acc": helper(1)}

def chosen(answers, documents):
    return [helper(each) for each in answers]
"""


@needs_harness
@pytest.mark.parametrize(
    "entry",
    [
        "process_results: !function own.scored",
        "filter_list: [{name: f, filter: [{function: custom, filter_fn: !function own.chosen}]}]",
    ],
)
def test_what_a_function_of_one_s_own_calls_is_in_the_key_of_its_task(place: Path, tmp_path: Path, entry: str) -> None:
    from mlmclm.evaluation.harness import load_tasks

    kwargs = {"data_files": {"test": str(place / "rows" / "test.parquet")}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**CHOICE, "task": "own", "dataset_kwargs": kwargs}) + entry)
    found = []
    for edited in (SCORED, SCORED.replace("= 1", "= 2"), f"# The same.\n{SCORED}"):
        (tmp_path / "own.py").write_text(edited)
        found.append(load_tasks([str(tmp_path / "own.yaml")])[0].fingerprint)
    assert found[0] == found[2] != found[1]


@needs_harness
def test_every_model_gets_the_same_examples_before_a_question(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmclm.evaluation.harness import HarnessModel, load_tasks

    few = {**CHOICE, "task": "few", "num_fewshot": 2, "fewshot_split": "test"}
    (place / "few.yaml").write_text(yaml.safe_dump(few))
    asked: list[list[tuple[str, str]]] = []

    def loglikelihood(self: HarnessModel, requests: Any) -> list[tuple[float, bool]]:
        asked.append([request.args for request in requests])
        return [(0.0, False) for _ in requests]

    monkeypatch.setattr(HarnessModel, "loglikelihood", loglikelihood)
    (task,) = load_tasks([str(place / "few.yaml")])
    built = [instance.args for instance in task.task.instances]
    for _ in range(2):
        task.run(None)  # type: ignore[arg-type]  # whose likelihoods are not asked for
    assert asked == [built, built]
    assert built[0][0].count("\n\n") == 2, "two examples and the question"


@needs_harness
def test_an_unknown_task_has_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmclm.evaluation import harness

    class Few:
        """A manager that needn't read the harness's thousands of files."""

        all_tasks = ("hellaswag", "piqa", "sciq")
        task_index: ClassVar[dict[str, Any]] = {}

    monkeypatch.setattr(harness, "_index", Few)
    with pytest.raises(UserError, match=r"unknown task of lm-evaluation-harness 'helaswag'\. Did you mean 'hellaswag'"):
        harness.load_tasks(["helaswag"])


def test_without_the_harness_the_extra_is_named(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlmclm.evaluation.zero_shot_config.find_spec", lambda name: None)
    code, _, errors = run(place / "decoder", "--task", place / "cities.yaml")
    assert code == 2
    assert "pip install 'mlmclm[evaluation]'" in errors


def test_winogender_needs_no_harness(place: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "templates.tsv").write_text(TEMPLATES)
    (tmp_path / "occupations.tsv").write_text(STATISTICS)
    code, output, errors = run(place / "decoder", "--winogender", tmp_path, "--json")
    assert code == 0, errors
    (found,) = results(output)
    scores = [found["metrics"][name]["score"] for name in ("masculine", "feminine", "neutral")]
    assert sum(scores) == pytest.approx(1)
    other = results(run(place / "decoder", "--winogender", tmp_path, "--winogender-rule", "published", "--json")[1])[0]
    assert other["key"] != found["key"]
    assert "(found)" in run(place / "decoder", "--winogender", tmp_path)[1]


@pytest.mark.parametrize(("objective", "expected"), [
    ("mlm40", "masked"), ("mntp15", "mntp"), ("clm", "causal"), ("untrained", "masked"),
])  # fmt: skip
def test_an_exported_folder_says_how_it_is_scored(
    tmp_path: Path, objective: str, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForMaskedLM

    save_small_model(tmp_path / "model")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "model")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    target = tmp_path / "exported"
    export_folder(target, weights, model.config, tmp_path / "model", card="", decoder_card="" if objective == "clm" else None, objective=objective)  # fmt: skip
    assert scoring_of(target) == (target / "decoder" if expected == "causal" else target, expected)
    loaded = LanguageModel.load(*scoring_of(target))
    # The exported encoder has no start token and ends with EOS; the decoder adds nothing.
    assert (loaded.texts.start, loaded.texts.end) == ([], [] if expected == "causal" else [2])
    assert read_notes(target)["objective"] == objective


def test_a_model_without_a_head_for_tokens_is_refused(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for names, text in ((["EuroBertModel"], "EuroBertModel"), ([], "of no model")):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": names}))
        with pytest.raises(UserError, match=text):
            scoring_of(folder)


def test_a_model_that_has_diverged_is_refused(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[-1] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="have values that are infinite or no numbers"):
        LanguageModel.load(folder, "masked")
