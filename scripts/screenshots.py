"""Draws the pictures that README and docs show:  make screenshots

Needs a finished quickstart in the store (`make quickstart`) and Chromium (Debian: apt-get install chromium). For the Ray dashboard a
sweep of the quickstart is begun anew in a store of its own, and ended when the picture is taken.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from mlmclm.service.mlflow_server import running_server
from mlmclm.tracking.saved_views import MODEL_TRAINING, OF_CELLS, OF_GROUPS

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "examples" / "quickstart.yaml"
PICTURES = ROOT / "docs" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT = 60_000
"""Milliseconds for a page to show what is looked for."""
ASSISTANT = "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1"
"""Key under which MLflow's pages remember that their assistant has opened by itself; otherwise it covers a third of a picture."""


def main(store: Path) -> None:
    """Draws all pictures."""
    report = store / "studies" / "quickstart" / "report.html"
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed; on Debian: apt-get install chromium")
    if not report.is_file():
        sys.exit(f"{report}: no such file; run `make quickstart` first")
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        draw_report(browser, report)
        draw_mlflow(browser, store)
        draw_ray(browser, store)


def draw_report(browser: Browser, report: Path) -> None:
    """The report's first page in light, dark and on a telephone, and all of it as it is printed."""
    looks: dict[str, dict[str, Any]] = {
        "light": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "light"},
        "dark": {"viewport": {"width": 1280, "height": 1000}, "color_scheme": "dark"},
        "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "device_scale_factor": 2},
        "print": {"viewport": {"width": 794, "height": 1123}, "color_scheme": "dark"},
    }
    for name, look in looks.items():
        with new_page(browser, **look) as page:
            page.goto(report.as_uri())
            page.wait_for_selector(".plot circle", timeout=WAIT)
            if name == "print":
                page.emulate_media(media="print")
                page.wait_for_timeout(1000)
            save(page, f"report-{name}", full_page=name == "print")


def draw_mlflow(browser: Browser, store: Path) -> None:
    """A study's runs in MLflow: the table, two runs beside each other, charts, parallel coordinates and box plots."""
    with running_server(store) as (links, _), new_page(browser, viewport={"width": 1440, "height": 900}) as page:
        page.set_default_timeout(WAIT)
        page.add_init_script(f"localStorage.setItem({ASSISTANT!r}, 'true')")
        page.goto(links["quickstart"])
        page.wait_for_selector("text=sweep quickstart")
        save(page, "mlflow-runs")
        compare(page, links["quickstart"], f"{OF_GROUPS} and params.task = 'pydocs-kind'")
        page.wait_for_selector("text=Run details")
        page.wait_for_selector(".js-plotly-plot")
        save(page, "mlflow-compare")
        draw_charts(page, links["quickstart, charts"])
        compare(page, links["quickstart"], f"{OF_CELLS} and params.task = 'pydocs-kind'")
        page.click("text=Box Plot")
        for axis, name in (("x", "model"), ("y", "score")):
            page.click(f"#{axis}-axis-selector")
            page.locator("[role=option]").get_by_text(name, exact=True).click()
        page.wait_for_selector(".js-plotly-plot .boxlayer path")
        save(page, "mlflow-boxes")


def draw_charts(page: Page, link: str) -> None:
    """The charts of a study grouped by objective, and its parallel coordinates, which MLflow shows without groups."""
    page.goto(link)
    page.wait_for_selector(".js-plotly-plot .barlayer path")
    save(page, "mlflow-charts")
    page.click("button:has-text('Group by: objective') [role=button]")
    card = page.locator("[data-testid=experiment-view-compare-runs-card]", has_text="Parallel Coordinates")
    card.locator("[data-component-id=fullscreen_button_chartcard]").click()
    page.wait_for_selector("[role=dialog] svg text:has-text('score')")
    save(page, "mlflow-parallel")


def compare(page: Page, link: str, condition: str) -> None:
    """Opens MLflow's comparison of runs of the quickstart, in the order of models and learning rates."""
    base = link.partition("/#/")[0]
    client = mlflow.MlflowClient(base)
    (number,) = [found.experiment_id for found in client.search_experiments() if found.name == "quickstart"]
    runs = client.search_runs([number], condition, order_by=["params.model", "params.learning_rate"])
    ids = [run.info.run_id for run in runs]
    # MLflow reads the runs only where they come first.
    page.goto(f"{base}/#/compare-runs?runs={json.dumps(ids)}&experiments={json.dumps([number])}&{MODEL_TRAINING}")


def draw_ray(browser: Browser, store: Path) -> None:
    """The Ray dashboard while a sweep runs."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "store"
        shutil.copytree(store, copy, symlinks=True, ignore=shutil.ignore_patterns("cells", "mlflow"))
        words = [sys.executable, "-m", "mlmclm", "sweep", str(STUDY), "--store", str(copy)]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as sweep:
            try:
                address = first_match(sweep, r"Ray dashboard: (\S+)")
                first_match(sweep, r"fine-tuning: (?!0/)\d+/")
                with new_page(browser, viewport={"width": 1440, "height": 900}) as page:
                    page.goto(f"{address}/#/cluster")
                    page.fill("input[placeholder*='token']", (copy / "ray" / "auth_token").read_text().strip())
                    page.click("button:has-text('Submit')")
                    page.set_viewport_size({"width": 1440, "height": 560})
                    trials = page.locator("text=/^ray::1m-.*lr/")
                    trials.nth(1).evaluate("element => element.closest('tr').scrollIntoView()", timeout=WAIT)
                    save(page, "ray-workers")
                    page.set_viewport_size({"width": 1440, "height": 900})
                    page.goto(f"{address}/#/jobs/01000000")
                    page.click("text=Task Table", timeout=WAIT)
                    page.mouse.move(0, 0)  # before a row comes under it, which would show a hint
                    page.wait_for_selector("text=Finetune.train", timeout=WAIT)
                    page.locator("text=Task Table").evaluate("element => element.scrollIntoView()")
                    save(page, "ray-cells")
            finally:
                sweep.send_signal(signal.SIGTERM)
                sweep.communicate()


def first_match(process: subprocess.Popen[str], pattern: str) -> str:
    """Waits for a line of a process's errors; its first group, or all of it."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(pattern, line)
        if found:
            return found[1] if found.groups() else found[0]
    sys.exit(f"the sweep ended before a line like {pattern!r}")


@contextmanager
def new_page(browser: Browser, **look: Any) -> Iterator[Page]:
    """A page in a window of its own."""
    context = browser.new_context(**look)
    try:
        yield context.new_page()
    finally:
        context.close()


def save(page: Page, name: str, **more: Any) -> None:
    """Writes a picture."""
    page.wait_for_timeout(1500)  # figures and tables are drawn after their first element is there
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path, **more)
    with Image.open(path) as picture:  # a palette of 256 colours takes a third of the bytes
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{os.path.relpath(path)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "store").resolve())
