"""`mlmclm claims`: say which claims of papers, or of your own, a study's results show."""

from __future__ import annotations

from mlmclm.cli import options
from mlmclm.cli.output import claims_as_json, print_json, show_claims


def claims(
    file: options.StudyOrSweep,
    claims: options.Claims = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    as_json: options.Json = False,
) -> None:
    """Says of each claim whether the results so far show it: seen, contradicted, too small to tell, or not tested here, and why.

    By default the claims are those of the study file, or all packaged ones. The report has the same table. Nothing is computed or written.

    Example: mlmclm claims quickstart
    """
    from mlmclm.studies.api import open as open_store

    verdicts = open_store(store, data=data, task_dirs=task_dir).results(file, rule=rule).claims(*claims or ())
    if as_json:
        print_json({"claims": claims_as_json(verdicts)})
    else:
        show_claims(verdicts)
