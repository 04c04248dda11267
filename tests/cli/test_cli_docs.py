"""The pages' blocks run beside a copy of a small study's store, whose names stand for the pages'."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import yaml

from mlmclm.cli.main import main
from mlmclm.registry import KINDS
from mlmclm.tracking.address import VARIABLE
from object_stores import s3_server
from small_hub import Hub
from small_models import save_framed_model, save_pronoun_model, save_small_decoder, write_all
from test_docs import BLOCK, FILES, PAGES, ROOT, what_readers_have
from winogender_files import STATISTICS, TEMPLATES

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in FILES}
RUN_ELSEWHERE = {"README.md", "docs/published-claims.md"} | {
    f"docs/{getattr(page, 'values', [page])[0]}.md" for page in PAGES
}
RUN = [page for page, text in TEXTS.items() if "```" in text and page not in RUN_ELSEWHERE]
NAMES = {
    r"(space[ (=\"]+)quickstart": r"\1my_space.yaml",
    r"((?<!\))\.study\(\"|mlmclm study |pretrain\(\")quickstart(\.yaml)?": r"\1my_study.yaml",
    r"(?<!make )quickstart(?!\.yaml)|my-study|(?<!init )my_study(?![./])|replicate-study-tiny": "small",
    r"my_study/study\.yaml": "my_study.yaml",
    r"1m-clm-1k|1m-untrained": "1m-clm-30",
    r"1m-mlm40-1k": "1m-clm-10-mlm40-30",
    r"step( ?)500": r"step\g<1>10",
    r"my_retrieval": "reqa_squad",
    r"pydocs-kind|my_task\b": "sst2",
    r"--mteb SciFact --mteb \"MTEB\(eng, v2\)\" --mteb my_set": "--mteb datasets/reqa_squad",
    r"MODEL_FOLDER": "my_model",
    r"evaluate \S+ (.* --winogender-rule)": r"evaluate pronouns \1",
    r"winogender FOLDER": "winogender datasets/winogender",
    r"~/datasets": "datasets",
    r"/shared/store": "store",
    r"s3://my-bucket": "s3://bucket",
    r"\"glue\"\)\.run": '"glue").plan',
}
"""Names on the pages and what the tests have in their place."""
NOT_RUN = {
    r"(ray|kubectl|gcloud|sbatch|docker|rsync|python deploy/\S+) ": "needs a cluster, an account or another machine",
    r"mlflow server|export (RAY\w+|\w+)=(token|\.\.\.|http://HOST)": "needs a server",
    r"pip install|scripts/install\.sh|pre-commit|mlmclm --install": "installs",
    r"mlmclm (up|down|status|tracking ui)\b": "serves until it is ended: tests/service and test_cli_shutdown.py run it",
    r"python -m benchmarks\.(?!scale)": "takes minutes to hours",
    r"python -m pytest|\.venv/bin/lint-imports": "is this suite, or a part of make lint",
}
"""Commands of which only files and options are checked, and why."""
COMPUTES = r"mlmclm (study|pretrain|finetune|sweep (?!status|cells|retry|--help)|replicate|bundle verify)"
"""Commands that the quick test gives `--dry-run`."""
HOURS = r"--suite|docs/replication/|mlmclm replicate|\b(quickstart|replicate-study-small)\.yaml"
"""Those that have it in the long test too."""
LONG = (
    r"--figures|tracking sync study|docs/replication/|status \S+ --store|part-[12]|--task reqa|mlmclm evaluate|MLMCLM_BACKEND|scale  "
    r"|(Tuner|SentenceTransformer|figures|evaluate)\("
)
"""Commands and Python that only the long test runs."""
BEFORE = {
    "docs/evaluation.md": "mlmclm export my_study.yaml 1m-clm-30 --to exported",
    "docs/fine-tuning.md": "sed -i 's/- sst2/- sst2\\n- reqa_squad/' my_space.yaml\nmlmclm study my_study.yaml",
    "docs/guarantees.md": "mlmclm bundle small --to published",
    "docs/publish.md": "\n".join(
        f"mlmclm study my_study.yaml --part {name}\nmlmclm bundle small-{name} --to {bundle}"
        for name, bundle in (("short", "part-1"), ("long", "part-2"))
    ),
    "docs/store.md": "mlmclm export my_study.yaml 1m-clm-30 --to my_export",
}
"""Commands of other pages that a page takes for given."""
STUDY = {
    "name": "example",
    "models": ["1m-clm-1k", "2m-clm-1k"],
    "corpus": {"source": "data/texts"},
    "tokenizer": {"train_vocab_size": 400},
    "recipe": {"block_length": 128, "batch": 32, "warmup_steps": 10, "decay_steps": 10},
    "space": "own/space.yaml",
}
SWEEP = {"name": "example", "models": {"big": "my_model"}, "space": "own/space.yaml"}
SPACE = {"tasks": ["sst2", "rte", "mnli"], "learning_rates": [1e-4], "seeds": [0], "protocol": {"max_length": 32}}
TASK = {
    "name": "example",
    "family": "retrieval",
    "title": "An example",
    "source": "local",
    "folder": "reqa_squad",
    "columns": {"id": "_id", "query_id": "query-id", "corpus_id": "corpus-id"},
    "splits": {
        "train": "train",
        "validation_fraction": 0.1,
        "test": {"queries": "queries", "corpus": "corpus", "qrels": "qrels"},
    },
    "metric": "ndcg@10",
    "licence": "none",
    "citation": "none",
}
READ_BY: tuple[tuple[Mapping[str, Any], str], ...] = (
    (STUDY, "study own/example.yaml --dry-run"),
    (SWEEP, "sweep own/example.yaml --dry-run"),
    (SPACE, "sweep --model my_model --space own/example.yaml --dry-run"),
    (TASK, "tasks check example --task-dir own/tasks --model my_model"),
)
"""Files that a block of YAML may be a part of, and the commands that read them."""


@pytest.fixture(scope="module")
def given(finished_study: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what readers have and the small study's files."""
    folder = tmp_path_factory.mktemp("given")
    data = folder / "datasets"
    what_readers_have(folder)
    write_all(data)
    shutil.copytree(finished_study.study.parent / "data", data, dirs_exist_ok=True)
    for name, to in (("data", "datasets"), ("docs", ROOT / "docs"), ("examples", ROOT / "examples")):
        (folder / name).symlink_to(to)
    for name in ("my_model", "my_encoder", "other_encoder", "data/answerdotai/ModernBERT-base", "data/OWNER/NAME"):
        save_framed_model(folder / name, length=512)
    save_small_decoder(data / "HuggingFaceTB" / "SmolLM2-135M", length=512)
    save_pronoun_model(folder / "pronouns")
    _write_texts(folder)
    (zero_shot,) = (content for _, name, content in BLOCK.findall(TEXTS["docs/evaluation.md"]) if name)
    (folder / "last_word.yaml").write_text(zero_shot)
    study = yaml.safe_load(finished_study.study.read_text())
    shutil.copy(study["space"], folder / "my_space.yaml")
    study |= {"space": "my_space.yaml", "parts": {"short": study["models"][:2], "long": study.pop("models")}}
    for name in ("my_study.yaml", "study.yaml"):
        (folder / name).write_text(yaml.safe_dump(study))
    (folder / "my_sweep.yaml").write_text("name: my-sweep\nmodels: {small: my_model}\nspace: my_space.yaml\n")
    return folder


@pytest.fixture
def readers(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    """The working directory is a copy of it."""
    shutil.copytree(given, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MLMCLM_DATA", "datasets")
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    hub.put("EuroBERT/EuroBERT-210m", Path("my_model"))


def _write_texts(folder: Path) -> None:
    """Stand-ins for data sets, with the columns of the published ones."""
    data = folder / "datasets"
    lines = (data / "prose" / "train.txt").read_text().split("\n\n")
    prose = [" ".join(lines[number : number + 5]) for number in range(150)]
    texts: dict[str, dict[str, list[Any]]] = {
        name: {"text": prose, "content": prose}
        for name in (
            "texts",
            "web",
            "books",
            "enwiki2015",
            "wikitext2",
            "HuggingFaceFW/fineweb-edu",
            "EleutherAI/lambada_openai/default",
        )
    }
    label = [number % 2 for number in range(len(prose))]
    texts["rte"] = {"sentence1": prose, "sentence2": prose, "label": label}
    texts["mnli"] = texts["sick"] = {"premise": prose, "hypothesis": prose, "label": label}
    for name, rows in texts.items():
        (data / name).mkdir(parents=True)
        for part in ("train", "validation", "test", "validation_matched", "validation_mismatched"):
            pq.write_table(pa.table(rows), data / name / f"{part}.parquet")
    pq.write_table(pa.table({"context": prose, "word": ["film"] * len(prose)}), folder / "last_words.parquet")
    pairs = pq.read_table(file := data / "reqa_squad" / "train.parquet")
    pq.write_table(pairs.append_column("negative", pa.array(pairs["positive"].to_pylist()[::-1])), file)
    (data / "winogender").mkdir()
    (data / "winogender" / "templates.tsv").write_text(TEMPLATES)
    (data / "winogender" / "occupations-stats.tsv").write_text(STATISTICS)


@pytest.mark.parametrize(
    ("page", "computes"),
    [
        *((page, False) for page in RUN),
        *(
            pytest.param(page, True, marks=pytest.mark.slow)
            for page in RUN
            if any(re.search(rf"^({COMPUTES})|{LONG}", block[-1], re.MULTILINE) for block in BLOCK.findall(TEXTS[page]))
        ),
    ],
)
def test_a_page_s_blocks_run(
    page: str,
    computes: bool,
    readers: None,
    finished_study: Any,
    registers: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = _Place(finished_study.store, monkeypatch, computes=computes, mlflow="import mlflow" in TEXTS[page])
    monkeypatch.setenv(VARIABLE, "")  # a block sets it, and it is to be absent again at the end
    monkeypatch.delenv(VARIABLE)
    with s3_server() if "s3://" in TEXTS[page] else nullcontext() as endpoint:
        if endpoint:
            monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", endpoint)
        try:
            for language, name, content in [("bash", "", BEFORE.get(page, "")), *BLOCK.findall(TEXTS[page])]:
                if not name:  # `last_word.yaml` is there
                    getattr(place, language)(content)
        finally:
            if place.mlflow:  # a block has set its address
                import mlflow

                mlflow.set_tracking_uri("")


class _Place:
    """Runs blocks by language, in the working directory.

    Attributes:
        computes: whether commands compute, in place of dry runs.
        mlflow: whether the store has MLflow's database.
    """

    def __init__(self, finished: Path, monkeypatch: pytest.MonkeyPatch, *, computes: bool, mlflow: bool) -> None:
        self.finished, self.monkeypatch, self.computes, self.mlflow = finished, monkeypatch, computes, mlflow
        self.names: dict[str, Any] = {}
        # Of one task, as only these can be compared.
        of_task = [file.stem for file in finished.glob("cells/*/*.json") if '"task":"sst2"' in file.read_text()]
        self.keys = cycle(sorted(of_task))

    def _fill_store(self) -> None:
        """First, and after a command has deleted the study."""
        if not Path("store", "studies", "small").exists():
            shutil.rmtree("store", ignore_errors=True)
            # A copied database names the original's files, so only pages that read it get it.
            left_out = shutil.ignore_patterns(*() if self.mlflow else ["mlflow"])
            shutil.copytree(self.finished, "store", ignore=left_out)

    def bash(self, content: str) -> None:
        for line in _with_own_names(content).replace("\\\n", " ").splitlines():
            line = re.sub(r"^ray job submit .* -- +", "", line)
            words = shlex.split(line, comments=True)
            if words and re.match("|".join(NOT_RUN), line):
                _check_files(words)
            elif words and (self.computes or not re.search(LONG, line)):
                self._fill_store()
                self._run(line, [next(self.keys) if word == "KEY" else word for word in words])

    def _run(self, line: str, words: list[str]) -> None:
        if words[0] == "export":
            for word in words[1:]:
                name, _, value = word.partition("=")
                self.monkeypatch.setenv(name, value.replace("~", str(Path.home())))
        elif words[0] == "make":
            subprocess.run(["make", "--dry-run", "-C", ROOT, words[1]], check=True)
        elif words[0] != "mlmclm":
            subprocess.run(["bash", "-c", line], check=True, cwd=ROOT if words[0] == "python" else None)
        else:
            computes = self.computes and not re.search(HOURS, line)
            dry = ["--dry-run"] if not computes and re.match(COMPUTES, line) and "--dry-run" not in words else []
            words = words[: words.index(">")] if ">" in words else words
            code = _exit_code([os.path.expandvars(word) for word in (*words[1:], *dry)])
            assert code in ((0, 1, 3) if words[1] == "decide" else (0,)), line

    def python(self, content: str) -> None:
        content = _with_own_names(content)
        if not self.computes:
            content = re.sub(r"\.run\(\)(\.verdict)?", ".plan()", content.replace("study.run()", "study.results"))
        if self.computes or not re.search(LONG, content):
            self._fill_store()
            exec(compile(content, "a block of Python", "exec"), self.names)
            if self.computes:
                ray.shutdown()  # Tune leaves its cluster running

    def yaml(self, content: str) -> None:
        assert _accepted(yaml.safe_load(content)), content

    def toml(self, content: str) -> None:
        groups = tomllib.loads(content)["project"]["entry-points"]
        assert groups.keys() <= {kind.group for kind in KINDS.values()}

    def text(self, content: str) -> None:
        """The layout of the store."""
        assert {part.name for part in self.finished.iterdir()} <= set(
            re.findall(r"^[\w-]+(?=/)|(?<= )[\w-]+(?=/ )", content, re.M)
        )

    def mermaid(self, content: str) -> None:
        """test_packages_layers.py compares the picture with the imports."""


def _with_own_names(content: str) -> str:
    for name, own in NAMES.items():
        content = re.sub(name, own, content)
    return content


def _exit_code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert isinstance(ended.value.code, int | None)
    return ended.value.code or 0


def _check_files(words: list[str]) -> None:
    """Check that the files and packages exist that a command names which is not run."""
    files = [word for word in words if re.match(r"(cluster\.yaml|(deploy|tests|scripts)/)", word)]
    files += [f"{words[2].replace('.', '/')}.py"] if words[:2] == ["python", "-m"] and "benchmarks" in words[2] else []
    assert [file for file in files if not (ROOT / file).is_file()] == []
    if words[:4] == ["pip", "install", "-c", "constraints.txt"]:
        pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
        assert [name for name in words[4:] if f"\n{name}==" not in pinned] == []


def _accepted(block: dict[str, Any]) -> bool:
    """Whether a command accepts a whole file with this part."""
    for whole, command in READ_BY:
        values = _joined(whole, block)
        for given, instead in {"corpora": "corpus", "initial": "tokenizer", "parts": "models"}.items():
            if given in block:
                values.pop(instead, None)
        if phases := block.get("recipe", {}).get("phases"):  # they have schedules of their own
            del values["recipe"]["warmup_steps"], values["recipe"]["decay_steps"]
            values["models"] = block.get("models", [f"1m-clm-{sum(phase['steps'] for phase in phases)}"])
        Path("own", "tasks").mkdir(parents=True, exist_ok=True)
        Path("own", "space.yaml").write_text(yaml.safe_dump(SPACE))
        for file in ("example.yaml", "tasks/example.yaml"):
            Path("own", file).write_text(yaml.safe_dump(values))
        if not _exit_code(command.split()):
            return True
    return False


def _joined(whole: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """The whole file with the block's values; mappings that both have are joined."""
    both = {
        key: _joined(whole[key], value)
        for key, value in block.items()
        if isinstance(value, dict) and isinstance(whole.get(key), dict)
    }
    return {**whole, **block, **both}
