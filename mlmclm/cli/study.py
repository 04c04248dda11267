"""`mlmclm study`: run a whole study, from its file to its report."""

from __future__ import annotations

from mlmclm.cli import options
from mlmclm.sweeps.cluster_terms import ClusterTerms


def study(
    file: options.Study,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    ledger: options.Ledger = None,
    wait_for_storage: options.WaitForStorage = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = options.DEFAULT_TERMS.wait_for_nodes,
    priority: options.Priority = options.DEFAULT_TERMS.priority,
    replace: options.Replace = False,
    dry_run: options.DryRun = False,
    workers: options.Workers = None,
    price: options.Price = None,
    as_json: options.Json = False,
) -> None:
    """Runs a whole study: prepares the data, pretrains, fine-tunes the grid, chooses, reports.

    What the store already has is not computed again: after a crash, a kill or a change of the file, the same command computes
    only what is missing. A change that leaves out or alters a part of the grid needs another name, or --replace.

    Examples:

    mlmclm study quickstart

    mlmclm study my_study.yaml --data ~/datasets
    """
    from mlmclm.cli.shared import run_study
    from mlmclm.cli.study_report import command_of
    from mlmclm.studies.study_file import load_study

    loaded, place = load_study(file), options.place(store, data, task_dir, ledger, wait_for_storage)
    dry = options.assumed(workers, price, dry_run=dry_run)
    command = command_of("study", [str(file)], data, task_dir)
    terms = ClusterTerms(wait_for_nodes, priority)
    run_study(loaded, place, ray, command=command, replace=replace, dry=dry, as_json=as_json, terms=terms)
