"""The command `mlmclm`: registers every command, and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import typer

from mlmclm.cli import bundle, data, store, sweep, tasks, tracking
from mlmclm.cli.compare import compare
from mlmclm.cli.evaluate import evaluate
from mlmclm.cli.export import export
from mlmclm.cli.finetune import finetune
from mlmclm.cli.import_results import import_results
from mlmclm.cli.interruption import Interrupted, Verbs, ended_by_signals
from mlmclm.cli.look import advise, claims, decide, rank, report
from mlmclm.cli.plan import plan
from mlmclm.cli.study import init, pretrain, replicate, study, try_models
from mlmclm.cli.up import down, status, up
from mlmclm.environment import set_library_defaults
from mlmclm.errors import MlmclmError, printable
from mlmclm.progress import console, starting
from mlmclm.storage.files import disk_fault
from mlmclm.storage.home import some_home
from mlmclm.versions import PACKAGE

app = typer.Typer(
    name="mlmclm",
    cls=Verbs,
    help="How should this text encoder be pretrained, and how sure can we be? Pretrains models that differ in their objective only, "
    "fine-tunes each over a grid of learning rate x seed x task, and reports best rate, score with interval, and stability.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
PANELS: Mapping[str, Mapping[str, Callable[..., None] | typer.Typer]] = {
    "Study": {
        "init": init,
        "try": try_models,
        "study": study,
        "replicate": replicate,
        "sweep": sweep.verbs,
        "pretrain": pretrain,
        "finetune": finetune,
        "evaluate": evaluate,
        "plan": plan,
        "data": data.verbs,
        "tasks": tasks.verbs,
    },
    "Look": {
        "report": report,
        "advise": advise,
        "claims": claims,
        "compare": compare,
        "decide": decide,
        "rank": rank,
    },
    "Store": {
        "store": store.verbs,
        "tracking": tracking.verbs,
        "import": import_results,
        "export": export,
        "bundle": bundle.verbs,
    },
    "Service": {
        "up": up,
        "status": status,
        "down": down,
    },
}
"""The commands by name, in the panels of `--help`."""
for panel, verbs in PANELS.items():
    for name, verb in verbs.items():
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(verb)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlmclm {PACKAGE}")
        raise typer.Exit


@app.callback()
def common(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of every command."""


def main(arguments: list[str] | None = None) -> None:
    """Run a command line; exit with 0, 1 (environment fault), 2 (user error), 130 (Ctrl-C) or 143 (SIGTERM)."""
    set_library_defaults()
    # Otherwise a thread that calls Ray while a session ends or its node dies would start a cluster that nothing ends.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    words = sys.argv[1:] if arguments is None else arguments
    # `--debug` is accepted anywhere, since people add it at the end after something went wrong.
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    with ended_by_signals() as received:
        try:
            with (
                some_home(),
                starting(f"mlmclm {' '.join(words[:1])}: loading libraries and checking the store"),
            ):
                app(args=words)
        except MlmclmError as error:
            sys.exit(_failed(error, str(error), error.exit_code, debug))
        except (Interrupted, KeyboardInterrupt) as error:
            text = (
                f"interrupted ({received.signal.name}); what is finished is kept, and the same command resumes from it."
            )
            sys.exit(_failed(error, text, received.exit_code, debug))
        except OSError as error:
            sys.exit(_failed(error, str(disk_fault(error, Path(error.filename or "."))), 1, debug))
        except Exception as error:
            text = f"unexpected error: {type(error).__name__}: {error}. What is finished is kept. Run again with --debug for the traceback."
            sys.exit(_failed(error, text, 1, debug))


def _failed(error: BaseException, text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    console.print(printable(f"mlmclm: {text}"), soft_wrap=True)
    return code
