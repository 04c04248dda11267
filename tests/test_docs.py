"""Pages that are run from their beginning to their end, with the files that they show; links lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shlex
import string
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from mlmclm.studies.new_study import STUDY_HEAD
from small_models import save_small_decoder, save_small_model, write_sentiment

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILES = sorted(file.relative_to(ROOT).as_posix() for file in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
README_LINES = 120
PAGES = [
    "other-tools",
    "claims",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("own-task", "data-file", "use-models", "own-text", "own-model", "hub-model", "given-models")
    ),
]


@pytest.mark.parametrize("page", PAGES)
def test_a_reader_who_does_as_the_page_says_comes_to_its_end(page: str, tmp_path: Path) -> None:
    what_readers_have(tmp_path)
    script = ["set -e"]
    # Fewer steps, so that the test takes less of a minute's training.
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("-200", "-20")
    for number, (language, name, content) in enumerate(BLOCK.findall(text)):
        if name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(
                _more(content) if language == "csv" and page == "own-task" else content, encoding="utf-8"
            )
        elif language == "python":
            (tmp_path / f"{number}.py").write_text(content, encoding="utf-8")
            script.append(f"{sys.executable} {number}.py")
        else:
            assert language == "bash", language
            script.append(content)
    assert len(script) > 2
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLMCLM_")} | {
        "HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **({"MLMCLM_DATA": "datasets"} if page in ("hub-model", "given-models") else {}),
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if page == "own-task":
        assert (tmp_path / "predictions.jsonl").read_text().count('"prediction"') == 40
        assert "(found in the store)" in done.stdout, "the same cell was computed again"


def what_readers_have(folder: Path) -> None:
    """The texts, models and data sets that the pages take for given."""
    chance = random.Random(0)
    # Words enough for the page's vocabulary of 2,048 tokens.
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 9))) for _ in range(3000)]
    for number in range(200):
        file = folder / "my_texts" / f"{number}.md"
        file.parent.mkdir(exist_ok=True)
        file.write_text(" ".join(chance.choices(words, k=chance.randint(20, 200))))
    save_small_model(folder / "my_model")
    save_small_decoder(folder / "my_decoder")
    save_small_model(folder / "other_model", seed=1)
    reviews = (
        f"{'good' if number % 2 else 'bad'} film {number},{'good' if number % 2 else 'bad'}" for number in range(60)
    )
    (folder / "reviews.csv").write_text("\n".join(["text,label", *reviews]))
    save_small_decoder(folder / "datasets" / "HuggingFaceTB" / "SmolLM2-135M")
    write_sentiment(folder / "datasets", train=160, test=40)
    for split in ("train", "test"):
        file = folder / "my_data" / "reviews" / f"{split}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_more('text,label\n"the film was lovely",good\n"a dull evening",bad\n'))
    blocks = BLOCK.findall((ROOT / "docs" / "own-task.md").read_text(encoding="utf-8"))
    (folder / "my_tasks").mkdir()
    (folder / "my_tasks" / "reviews.yaml").write_text(
        {name: content for _, name, content in blocks}["my_tasks/reviews.yaml"]
    )


def _more(table: str) -> str:
    """The rows of a page's example twenty times over: four are too few to train on."""
    header, *rows = table.splitlines(keepends=True)
    return header + "".join(rows) * 20


@pytest.mark.parametrize("page", FILES)
def test_links_to_files_lead_somewhere(page: str) -> None:
    links = [link for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_the_glossary_has_at_most_25_terms_and_all_are_used() -> None:
    rows = re.findall(r"^\| (.+?) \| ", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)[1:]
    terms = [term for row in rows for term in row.split(", ")]
    others = " ".join((ROOT / page).read_text(encoding="utf-8") for page in FILES if page != "docs/glossary.md").lower()
    assert len(rows) <= 25
    assert [term for term in terms if term.lower() not in " ".join(others.split())] == []


@pytest.mark.parametrize("page", FILES)
def test_links_to_headings_lead_to_one(page: str) -> None:
    file = ROOT / page
    links = re.findall(r"\]\(([^)\s:#]*\.md)?#([^)\s]+)\)", FENCED.sub("", file.read_text(encoding="utf-8")))
    assert [(to, part) for to, part in links if part not in _headings(file.parent / to if to else file)] == []


def _headings(file: Path) -> set[str]:
    """The addresses of a page's headings, as hosts of repositories and the site make them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", FILES)
def test_commands_and_options_that_a_page_shows_exist(page: str) -> None:
    from mlmclm.cli.main import app

    for language, _, content in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "bash":
            for command in re.findall(r"^(?:.* -- +)?mlmclm (.+)$", content.replace("\\\n", " "), re.MULTILINE):
                _parse(get_command(app), shlex.split(command, comments=True))


def _parse(command: Any, words: list[str]) -> None:
    """Raise click's error if a verb or an option doesn't exist; nothing is run."""
    verbs = getattr(command, "commands", {})
    if words and words[0] in verbs:
        _parse(verbs[words[0]], words[1:])
    elif verbs and command.name != "mlmclm":
        _parse(next(iter(verbs.values())), words)  # a file or options in place of a verb are those of the first one
    else:
        assert not verbs or words[0].startswith("-"), f"no verb: {words[0]}"
        command.make_parser(command.context_class(command)).parse_args(words)


def test_the_readme_is_short_and_its_commands_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mlmclm.cli.main import main

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= README_LINES
    what_readers_have(tmp_path)
    for page in ("own-text", "own-task"):
        for language, name, content in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")):
            if language == "yaml":
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).write_text(content, encoding="utf-8")
    ((language, _, content),) = BLOCK.findall(readme)
    commands = [line for line in content.splitlines() if line.startswith("mlmclm ")]
    assert language == "bash" and len(commands) == 3
    monkeypatch.chdir(tmp_path)
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main([*command.split()[1:], "--dry-run"])
        assert not ended.value.code, (command, capfd.readouterr())


def test_one_duration_of_the_quickstart_is_said_everywhere() -> None:
    texts = [
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "docs/quickstart.md", "examples/quickstart.ipynb")
    ]
    said = [re.findall(r"about\s+(\w+)\s+minutes", text) for text in (*texts, STUDY_HEAD)]
    assert [set(own) for own in said] == [{"seven"}] * 4


def test_the_site_has_every_page_and_shows_every_file_that_they_link_to(tmp_path: Path) -> None:
    site = _site()
    site.write_pages(tmp_path / "pages")
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    written = {file.name for file in (tmp_path / "pages").glob("*.md")}
    assert sorted(_pages_of(settings["nav"])) == sorted(written), "zensical.toml's nav has each page once"
    assert "offline" in settings["plugins"], "without it, no search from the site's folder"
    for page in (tmp_path / "pages").rglob("*.md"):
        links = LINK.findall(re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S))
        broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
        assert broken == [], page


def test_the_sites_api_page_has_every_public_name() -> None:
    import mlmclm

    entries = re.findall(r"^::: (\S+)$", _site().api_page(), re.MULTILINE)
    assert sorted(entry.rpartition(".")[2] for entry in entries) == sorted(mlmclm.__all__)


def test_a_link_that_leads_out_of_the_repository_is_refused(tmp_path: Path) -> None:
    site = _site()
    with pytest.raises(site.BrokenLink, match="no file of the repository"):
        site.on_site("[a page](missing.md)", ROOT / "docs" / "studies.md", set())


def _site() -> ModuleType:
    """The module that writes the site's pages; `scripts/` is no package."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _pages_of(navigation: list[Any]) -> list[str]:
    """The pages of a navigation, at any depth."""
    return [
        page
        for entry in navigation
        for page in ([entry] if isinstance(entry, str) else _pages_of([own for part in entry.values() for own in part]))
    ]
