"""`mlmclm up`, `status` and `down`: the service of a store on one machine."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.errors import UserError
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
    given = {name: port for name, port in ports.items() if port is not None}
    settings = ServiceSettings(store.resolve(), given, cpus, mlflow)
    if foreground:
        run(settings, lambda state: _print(ServiceStatus(state), settings.store))
        return
    state, started = start(settings)
    if not started:
        say("the service of this store runs already")
    _print(ServiceStatus(state), settings.store)


def status(store: options.Store = options.DEFAULT_STORE, json: options.Json = False) -> None:
    """Says which parts of the service run, since when, where, and with which resources and jobs.

    The exit code is 0 if all parts answer, 1 if there is no service, and 2 if a part is missing.

    Example: mlmclm status
    """
    from mlmclm.service.run_service import look
    from mlmclm.service.service_token import RESTART

    found = look(store.resolve())
    if found is None:
        print_json({"running": False}) if json else show(f"No service of {store} runs. `mlmclm up` starts one.")
        raise typer.Exit(NOT_RUNNING)
    print_json(_about(found, store.resolve())) if json else _print(found, store.resolve())
    if found.faults:
        raise UserError(f"The service is incomplete: {' '.join(found.faults)} {RESTART}")


def down(store: options.Store = options.DEFAULT_STORE) -> None:
    """Ends the service that `mlmclm up` started, and the jobs in it. What they have finished is kept.

    Example: mlmclm down
    """
    from mlmclm.service.run_service import end

    ended = end(store.resolve())
    show(f"Ended: {', '.join(ended)}." if ended else f"No service of {store} runs.")


def _about(found: ServiceStatus, store: Path) -> dict[str, Any]:
    """Return what is known of a service, for programs."""

    from mlmclm.cluster.ray_cluster import token_path
    from mlmclm.service.run_service import study_links, submit_command

    return {
        "running": not found.faults,
        "faults": found.faults,
        "since": datetime.fromtimestamp(found.state.since).astimezone().isoformat(timespec="seconds"),
        "store": str(store),
        "token": str(token_path(store)),
        "addresses": found.state.addresses,
        "studies": study_links(found.state, store),
        "resources": found.resources,
        "jobs": [{name: job[name] for name in ("submission_id", "status", "entrypoint")} for job in found.jobs],
        "submit": submit_command(found.state, store) if found.state.ready and not found.faults else None,
    }


def _print(found: ServiceStatus, store: Path) -> None:
    """Print a service's addresses, its resources and jobs, and how to submit a job."""
    from mlmclm.service.run_service import SERVERS

    about = _about(found, store)
    lines = {name: about["addresses"].get(server) for server, name in SERVERS.items()} | about["studies"]
    lines |= {name: about[name] for name in ("token", "store", "since")}
    for name, (used, total) in found.resources.items():
        scale, unit = (1 << 30, " GiB") if "memory" in name.lower() else (1, "")
        lines[name] = f"{used / scale:.3g} of {total / scale:.3g}{unit} in use"
    lines |= {f"job {job['submission_id']}": f"{job['status']}: {job['entrypoint']}" for job in about["jobs"]}
    for name, text in lines.items():
        show(f"{name:<18} {text or 'not started'}")
    if about["submit"]:
        show(f"\nSubmit from any shell; the same command again resumes:\n{about['submit']}")
