"""`mlmclm ui`: serve a store's MLflow records."""

from __future__ import annotations

from typing import Annotated

import typer

from mlmclm.cli import options


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("ui")(ui)


def ui(
    store: options.Store = options.DEFAULT_STORE,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="Port to listen on; a free one by default.")
    ] = None,
) -> None:
    """Starts the MLflow server on the store's own records (on loopback), prints the link, and runs until Ctrl-C.

    Example: mlmclm ui --port 5000
    """
    from mlmclm.service.mlflow_server import serve

    serve(store.resolve(), port=port)
