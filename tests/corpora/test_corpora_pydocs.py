"""The documentation of an environment as a corpus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlmclm.corpora import process_map
from mlmclm.errors import UserError
from mlmclm.pydocs import documentation as pydocs
from mlmclm.pydocs.documentation import docstrings, environment_fingerprint, prepare_pydocs, read_group, topics
from mlmclm.pydocs.package_splits import PackageGroup, are_copies, split_groups

SOURCE = b'''"""The module's own text."""
import nothing_of_this_name

class Thing(Base):
    """A thing of some kind."""

    def act(self):
        """Does what things do."""
        def inner():
            """Not reached from outside."""

    @property
    def size(self):
        """How large it is."""

    class Part:
        """A part of a thing."""

try:
    async def go(x):
        r"""Goes \\alpha far.

            Indented text.
        """
except ImportError:
    def go(x):
        """Goes another way."""

def short():
    """Two words"""

def odd():
    """A lone \\ud800 surrogate here."""
'''


def installed(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Put a folder in the place of the installed packages."""
    monkeypatch.setattr(pydocs, "installed_roots", lambda: [root / "no standard library", root])


def rows(folder: Path) -> list[dict[str, str]]:
    return [row for number in range(pydocs.read_groups(folder)) for row in read_group(folder, number)]


def test_docstrings_of_modules_classes_functions_and_properties_are_found() -> None:
    found = {(doc.name, doc.kind): doc.text for doc in docstrings(SOURCE, "package.module")}
    assert found == {
        ("", "module"): "The module's own text.",
        ("Thing", "class"): "A thing of some kind.",
        ("Thing.act", "method"): "Does what things do.",
        ("Thing.size", "property"): "How large it is.",
        ("Thing.Part", "class"): "A part of a thing.",
        ("go", "function"): "Goes another way.",
        ("odd", "function"): "A lone ? surrogate here.",
    }
    first = next(doc for doc in docstrings(SOURCE, "package.module") if doc.name == "go")
    assert first.text == "Goes \\alpha far.\n\nIndented text."
    assert {doc.package for doc in docstrings(SOURCE, "package.module")} == {"package"}


def test_topics_are_read_from_their_source() -> None:
    found = topics(b"# -*- coding: utf-8 -*-\ntopics = {'b': 'About b.\\n', 'a': 'About a.'}\n")
    assert [(doc.name, doc.text, doc.kind) for doc in found] == [
        ("a", "About a.", "topic"),
        ("b", "About b.", "topic"),
    ]


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("Does.\n\nParameters\n----------\nx : int\n    A number.", "numpydoc"),
        ("Does.\n\nArgs:\n    x: A number.", "google"),
        ("Does.\n\n:param x: A number.", "sphinx"),
        ("Does what it says.", "plain"),
    ],
)
def test_the_style_of_a_docstring_is_recognised(text: str, style: str) -> None:
    assert pydocs.style_of(text) == style


def test_splits_are_disjoint_by_package_and_by_text(environment: list[Path], tmp_path: Path) -> None:
    found = rows(prepare_pydocs(tmp_path))
    packages = {split: {row["package"] for row in found if row["split"] == split} for split in pydocs_splits()}
    assert all(packages.values())
    assert not packages["train"] & packages["validation"]
    assert not packages["train"] & packages["test"]
    assert not packages["validation"] & packages["test"]
    assert len({" ".join(row["text"].split()) for row in found}) == len(found)
    for split in pydocs_splits():
        assert {"numpydoc", "google"} <= {row["style"] for row in found if row["split"] == split}


def pydocs_splits() -> list[str]:
    return ["train", "validation", "test"]


def test_the_number_of_workers_does_not_change_a_byte(
    environment: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for count in (1, 2):
        monkeypatch.setattr(process_map, "usable_cpus", lambda count=count: count)
        folders.append(prepare_pydocs(tmp_path / str(count)))
    for name in ("documents.parquet", "meta.json"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_copies_are_removed_and_broken_sources_are_counted(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for name in ("package00", "package01"):
        shutil.copytree(packages / name, root / name)
    shutil.copytree(packages / "package00", root / "copied")
    (root / "broken.py").write_text('"""Unfinished text here."""\ndef f(:\n')
    (root / "package00" / "tests").mkdir()
    (root / "package00" / "tests" / "test_x.py").write_text('"""Never reached by extraction."""\n')
    installed(monkeypatch, root)
    facts = json.loads((prepare_pydocs(tmp_path / "store") / "meta.json").read_text())
    assert facts["unparsable_files"] == 1
    assert facts["files"] == 7
    assert facts["found"] - facts["distinct"] == 16


def test_sources_without_docstrings_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path / "root")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="no docstring"):
        prepare_pydocs(tmp_path)


def test_the_fingerprint_follows_distributions_but_not_this_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path)
    (tmp_path / "one-1.0.dist-info").mkdir()
    first = environment_fingerprint()
    (tmp_path / "mlmclm-0.1.0.dist-info").mkdir()
    assert environment_fingerprint() == first
    (tmp_path / "two-2.0.dist-info").mkdir()
    assert environment_fingerprint() != first


def test_packages_of_one_distribution_stay_together(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    shutil.copytree(packages, site)
    record = site / "both-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("".join(f"package{n:02d}/__init__.py,sha256=x,1\n" for n in range(20)))
    installed(monkeypatch, site)
    found = rows(prepare_pydocs(tmp_path))
    assert {row["split"] for row in found} == {"train"}


def groups(count: int, style: str, size: int = 100) -> list[PackageGroup]:
    return [PackageGroup(f"{style}{number}", size, style) for number in range(count)]


def test_splits_are_balanced_within_each_style() -> None:
    members = [*groups(30, "google"), *groups(20, "numpydoc", 50), PackageGroup("huge", 20_000, "google")]
    splits = split_groups(members)
    for style in ("google", "numpydoc"):
        assert {splits[group.name] for group in members if group.style == style} == set(pydocs_splits())
    assert splits["huge"] == "train"
    numpydoc = [splits[group.name] for group in members if group.style == "numpydoc"]
    assert numpydoc.count("train") == 16
    assert numpydoc.count("validation") == numpydoc.count("test") == 2


def test_splits_do_not_depend_on_the_order_of_the_list() -> None:
    members = [*groups(30, "google"), *groups(20, "numpydoc", 50)]
    assert split_groups(members) == split_groups(members[::-1])


def test_three_groups_are_enough_for_three_splits_and_topics_stay_in_train() -> None:
    splits = split_groups(
        [PackageGroup("a", 3, "plain"), PackageGroup("b", 2, "plain"), PackageGroup("topics", 900, "plain", True)]
    )
    assert splits == {"a": "train", "b": "validation", "topics": "train"}
    assert set(split_groups(groups(3, "plain")).values()) == set(pydocs_splits())


def test_an_evaluation_text_that_is_mostly_a_copy_of_training_text_is_dropped() -> None:
    shared = "This paragraph is long enough to be recognised again elsewhere."
    own = "This one is found only here, however long it is."
    longer = f"{own} And it goes on and on for some more words than the copied paragraph."
    training = ("train", f"{shared}\n\nParameters")
    assert are_copies([training, ("validation", f"  {shared.upper()}\n\n{own}")]) == [False, True]
    assert are_copies([training, ("validation", f"{shared}\n\n{longer}")]) == [False, False]
    assert are_copies([training, ("test", f"{own}\n\nParameters")]) == [False, False]
    assert are_copies([training, ("train", shared)]) == [False, False]
