"""Builds the documentation site in build/site, and fails if a link leads nowhere:  make docs

The pages are those of docs/, with README.md as the first one, CONTRIBUTING.md, CHANGELOG.md and SECURITY.md, and a page
of the Python API. On any host of repositories the same files are read as they are. Two things differ on the site:

- a link to a file outside docs/ leads to a page that shows it, below files/, as the site has no repository beside it;
- `api.md` is made from the names in `mlmclm.__all__`, whose docstrings mkdocstrings reads.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "build" / "docs"
PAGES = {
    "README.md": "index.md",
    **{f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")},
}
"""Pages outside docs/, by their names on the site."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# A fence with a file's name (```yaml my_study.yaml) is one that a test writes; the site shows the name as its title.
NAMED = re.compile(r"^```(\w+) (\S+)$", re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".ipynb": "json"}


class BrokenLink(Exception):
    """A link leads to no file of the repository."""


def main() -> None:
    """Write the pages and build the site."""
    write_pages(TARGET)
    command = [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict"]
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def write_pages(target: Path) -> None:
    """Write the site's pages in Markdown to an empty folder.

    Raises:
        BrokenLink: a link leads to no file.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    shown: set[Path] = set()
    for source in [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PAGES)]:
        text = on_site(source.read_text(encoding="utf-8"), source, shown)
        (target / site_name(source)).write_text(text, encoding="utf-8")
    (target / "api.md").write_text(api_page(), encoding="utf-8")
    while left := [file for file in sorted(shown) if not (target / site_name(file)).exists()]:
        for file in left:
            page = target / site_name(file)
            page.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix == ".md":
                page.write_text(on_site(file.read_text(encoding="utf-8"), file, shown), encoding="utf-8")
            elif file.suffix in (".png", ".svg"):
                shutil.copy(file, page)
            else:
                page.write_text(shown_file(file, shown), encoding="utf-8")


def site_name(file: Path) -> str:
    """Return the path that a file of the repository has on the site."""
    name = file.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if file.suffix in (".md", ".png", ".svg"):
        return f"files/{name}"
    return f"files/{name}/index.md" if file.is_dir() else f"files/{name}.md"


def on_site(text: str, source: Path, shown: set[Path]) -> str:
    """Return a page with its links as they are on the site; files that it links to are added to `shown`."""
    here = Path(site_name(source)).parent

    def link(match: re.Match[str]) -> str:
        address, _, anchor = match[2].partition("#")
        if not address or "://" in address or address.startswith("mailto:"):
            return match[0]
        file = (source.parent / address).resolve()
        if not file.exists() or not file.is_relative_to(ROOT):
            raise BrokenLink(f"{source.relative_to(ROOT)}: {address} is no file of the repository")
        shown.add(file)
        return f"{match[1]}{os.path.relpath(site_name(file), here)}{'#' + anchor if anchor else ''}{match[3]}"

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[end : fence.start()]), NAMED.sub(r'```\1 title="\2"', fence[0])]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, text[end:])])


def shown_file(file: Path, shown: set[Path]) -> str:
    """Return a page that shows a file, or lists the files of a folder."""
    title = f"# {file.relative_to(ROOT)}\n\n"
    if not file.is_dir():
        fence = "`" * 6
        return f"{title}{fence}{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}\n{fence}\n"
    files = [own for own in sorted(file.iterdir()) if own.is_file() and not own.name.startswith((".", "__"))]
    shown |= set(files)
    names = {own: os.path.relpath(site_name(own), f"{site_name(file)}/..") for own in files}
    return title + "".join(f"- [{own.name}]({name})\n" for own, name in names.items())


def api_page() -> str:
    """Return the page of all public names: functions, then classes, then errors."""
    tree = ast.parse((ROOT / "mlmclm" / "__init__.py").read_text(encoding="utf-8"))
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("_MODULES", "__all__")
    }
    modules = {name: module for module, names in constants["_MODULES"].items() for name in names}
    names = sorted(
        constants["__all__"], key=lambda name: (modules.get(name) == "mlmclm.errors", not name.islower(), name)
    )
    entries = [f"::: {modules.get(name, 'mlmclm')}.{name}" for name in names]
    head = "# Python API\n\nWhat `import mlmclm` has. [From Python](python.md) shows how the parts go together.\n\n"
    return head + "\n\n".join(entries) + "\n"


if __name__ == "__main__":
    main()
