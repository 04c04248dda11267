"""`mlmclm up`, `status` and `down`: the service of a store on one machine."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import MlmclmError, UserError
from mlmclm.progress import say

if TYPE_CHECKING:
    from mlmclm.service.run_service import ServiceStatus

NOT_RUNNING = 1
"""Exit code of `status` if there is no service."""


def up(
    store: options.Store = options.DEFAULT_STORE,
    dashboard_port: options.Port = None,
    mlflow_port: options.Port = None,
    prometheus_port: options.Port = None,
    mlflow: Annotated[
        str | None,
        Option(metavar="URL", help="A running MLflow server to use; by default, one is started on the store."),
    ] = None,
    cpus: Annotated[int | None, Option(min=1, help="CPUs that Ray gives out; all by default.")] = None,
    foreground: Annotated[
        bool, Option("--foreground", help="Run until Ctrl-C or SIGTERM, for systemd and containers.")
    ] = False,
) -> None:
    """Starts Ray with its dashboard, the MLflow server, and Prometheus if it is installed, for jobs on this machine.

    All of them listen on loopback only, and Ray requires a token. The command returns when everything answers.

    Example: mlmclm up, then submit with the command that it prints
    """
    from mlmclm.service.run_service import ServiceSettings, ServiceStatus, run, start

    ports = {"dashboard": dashboard_port, "mlflow": mlflow_port, "prometheus": prometheus_port}
    chosen_ports = {name: port for name, port in ports.items() if port is not None}
    settings = ServiceSettings(store.resolve(), chosen_ports, cpus, mlflow)
    if foreground:
        run(settings, lambda state: _print(ServiceStatus(state), settings.store))
        return
    state, started = start(settings)
    if not started:
        say("the service of this store runs already")
    _print(ServiceStatus(state), settings.store)


def status(store: options.Store = options.DEFAULT_STORE, json: options.Json = False) -> None:
    """Says which parts of the service run, where, and how far each job is.

    A job's user is the `user` in its metadata (`ray job submit --metadata-json '{"user": "ada"}'`).

    The exit code is 0 if all parts answer, 1 if there is no service, and 2 if a part is missing.

    Example: mlmclm status
    """
    from mlmclm.service.run_service import service_status
    from mlmclm.service.service_token import RESTART

    service = service_status(store.resolve())
    if service is None:
        print_json({"running": False}) if json else show(f"No service of {store} runs. `mlmclm up` starts one.")
        raise typer.Exit(NOT_RUNNING)
    print_json(_about(service, store.resolve())) if json else _print(service, store.resolve())
    if service.faults:
        raise UserError(f"The service is incomplete: {' '.join(service.faults)} {RESTART}")


def down(store: options.Store = options.DEFAULT_STORE) -> None:
    """Ends the service that `mlmclm up` started, and the jobs in it. What they have finished is kept.

    Example: mlmclm down
    """
    from mlmclm.service.run_service import end

    ended = end(store.resolve())
    show(f"Ended: {', '.join(ended)}." if ended else f"No service of {store} runs.")


def _about(service: ServiceStatus, store: Path) -> dict[str, Any]:
    """Return the facts about a service for `--json`."""
    from mlmclm.cluster.ray_cluster import token_path
    from mlmclm.service.run_service import study_links, submit_command

    links = study_links(service.state, store)
    return {
        "running": not service.faults,
        "faults": service.faults,
        "since": datetime.fromtimestamp(service.state.since).astimezone().isoformat(timespec="seconds"),
        "store": str(store),
        "token": str(token_path(store)),
        "addresses": service.state.addresses,
        "studies": links,
        "resources": service.resources,
        "jobs": [_job(job, store, links) for job in service.jobs],
        "submit": submit_command(service.state, store) if service.state.ready and not service.faults else None,
    }


def _job(job: Mapping[str, Any], store: Path, links: Mapping[str, str]) -> dict[str, Any]:
    """Return what is known of a job; `done`, `cells` and `seconds_left` count the trials of the study that it runs now."""
    from mlmclm.studies.study_record import watch_of

    started, ended = job.get("start_time"), job.get("end_time")
    facts: dict[str, Any] = {
        **{name: job[name] for name in ("submission_id", "status", "entrypoint")},
        "user": (job.get("metadata") or {}).get("user"),
        "seconds": None if started is None else (ended or 1000 * time.time()) / 1000 - started / 1000,
        **dict.fromkeys(("study", "done", "cells", "seconds_left", "link")),
    }
    try:
        facts["study"] = _study_of(shlex.split(job["entrypoint"]))
        if facts["study"] is not None:
            facts["link"] = links.get(facts["study"])
            if ended is None:
                now = watch_of(facts["study"], store).look()
                facts |= {"done": now.done, "cells": now.total, "seconds_left": now.seconds_left}
    except (MlmclmError, ValueError):  # quotes don't match, the file is gone, or the study has no trials yet
        pass
    return facts


def _study_of(words: Sequence[str]) -> str | None:
    """Return the name of the study that a command line runs; None if it runs none, or doesn't name it."""
    from mlmclm.cli import study, sweep
    from mlmclm.studies.study_record import name_of

    start = next((index for index, word in enumerate(words) if Path(word).name == "mlmclm"), len(words))
    verb, *rest = [word for word in words[start + 1 :] if word != "--debug"] or [""]
    if verb not in ("study", "sweep"):
        return None
    app = typer.Typer()
    app.command()(study.study if verb == "study" else sweep.run)
    command: Any = typer.main.get_command(app)
    parser = command.make_parser(command.context_class(command, resilient_parsing=True))
    arguments, *_ = parser.parse_args(rest[rest[:1] == ["run"] :])
    names = [word.removeprefix("name=") for word in arguments.get("overrides") or () if word.startswith("name=")]
    name = names[-1] if names else arguments.get("name") or (verb if arguments.get("model") else None)
    name = name_of(arguments["file"]) if name is None and arguments.get("file") else name
    return f"{name}-{arguments['part']}" if name and arguments.get("part") else name


def _duration(seconds: float | None) -> str:
    return "–" if seconds is None else str(timedelta(seconds=round(seconds)))


def _print(service: ServiceStatus, store: Path) -> None:
    """Print a service's addresses, its resources and jobs, and how to submit a job."""
    from mlmclm.service.run_service import SERVERS

    facts = _about(service, store)
    lines = {name: facts["addresses"].get(server) for server, name in SERVERS.items()} | facts["studies"]
    lines |= {name: facts[name] for name in ("token", "store", "since")}
    for name, (used, total) in service.resources.items():
        scale, unit = (1 << 30, " GiB") if "memory" in name.lower() else (1, "")
        lines[name] = f"{used / scale:.3g} of {total / scale:.3g}{unit} in use"
    width = max(map(len, lines))
    for name, text in lines.items():
        show(f"{name:<{width}} {text or 'not started'}")
    if facts["jobs"]:
        rows = [
            (
                *(job["submission_id"], job["user"] or "–", job["status"].lower(), _duration(job["seconds"])),
                "–" if job["cells"] is None else f"{job['done']:,} of {job['cells']:,}",
                *(_duration(job["seconds_left"]), job["study"] or job["entrypoint"]),
            )
            for job in facts["jobs"]
        ]
        header = ("job", "user", "state", "time", "trials", "time left", Column("study or command", min_width=10))
        show_table(header, rows, drop=("user", "time", "time left", "state"))
    if facts["submit"]:
        show(f"\nSubmit from any shell; the same command again resumes:\n{facts['submit']}")
