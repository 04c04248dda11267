"""Pretraining of a study's models: runs the missing stages, side by side where there is room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlmclm.backends.device_kinds import Device
from mlmclm.cluster.cluster import await_nodes, cluster_view, report_waits
from mlmclm.cluster.placement import check_workers, choose_device, worker_bundle
from mlmclm.cluster.ray_cluster import check_node, explain_ray_failures
from mlmclm.launches.run_stage import run_stage, set_aside_damaged, stage_leases
from mlmclm.launches.side_by_side import run_stages, stages_at_once
from mlmclm.plans.stages import Stage
from mlmclm.pretraining import states
from mlmclm.progress import Bar, say
from mlmclm.storage.addresses import leases_of
from mlmclm.studies.facts import tokens_by_source
from mlmclm.studies.prepare import PreparedStudy


def train_missing_stages(prepared: PreparedStudy, wait_for_nodes: float = 0.0) -> int:
    """Train the missing stages in the current Ray session, as many at once as the cluster can hold or scale up to.

    Returns their number.

    Args:
        wait_for_nodes: seconds to wait for nodes that may still join, if those of the cluster cannot hold a stage's workers.

    Raises:
        UserError: the cluster can never hold a stage's workers (`placement.check_workers`). Also whatever
            `run_stage` raises.
        LostNode: the Ray node of this machine has died.
    """
    store, recipe = prepared.place.store, prepared.study.recipe
    leases = leases_of(store)
    # `unfinished` checks the sizes of files only; this also verifies the checksums of states to start from.
    set_aside_damaged(prepared.plan.stages, store, prepared.fingerprint)
    unfinished = prepared.unfinished()
    if not unfinished:
        return 0
    view, fewest = cluster_view(), recipe.possible_workers[0]
    device = choose_device(recipe.device, view())  # chosen once: all stages use the same, even if nodes come and go
    if wait_for_nodes:
        await_nodes(view, wait_for_nodes, lambda _: worker_bundle(device), places=fewest)
    check_workers(fewest, recipe.device, device, view())

    def train(stage: Stage) -> None:
        title = f"pretraining {unfinished.index(stage) + 1}/{len(unfinished)}: {stage.title}"
        _train(prepared, stage, title, device)

    def ready(stage: Stage) -> bool:
        # A start without segments is the initialisation, which needs no earlier stage.
        return not stage.start.segments or states.exists(store, stage.start.key(prepared.fingerprint))

    def held(stage: Stage) -> str | None:
        # Another study on this store may be training the same states.
        names = stage_leases(stage, store, prepared.fingerprint)
        return next((holder for holder in map(leases.holder, names) if holder is not None), None)

    def at_once(running: int) -> int:
        return stages_at_once(view(), worker_bundle(device), workers=recipe.workers, running=running)

    with explain_ray_failures(), report_waits("pretraining", view):
        run_stages(unfinished, run=train, ready=ready, at_once=at_once, held=held, check=check_node)
    return len(unfinished)


def _train(prepared: PreparedStudy, stage: Stage, title: str, device: Device) -> None:
    """Train one stage, and show its progress."""
    left = prepared.left(stage)
    if not left:
        say(f"{title}: another process has trained it")
        return
    recipe = prepared.study.recipe

    total = sum(tokens_by_source(stage.end, recipe, prepared.corpus).values())
    filled = total / stage.end.tokens(recipe)

    def tokens(step: int) -> int:
        return round(filled * sum(segment.tokens(step, recipe) for segment in stage.end.segments))

    with Bar(title, total, unit="tokens") as bar:
        bar.start_at(tokens(left[0].start.step))

        def follow(records: list[dict[str, Any]]) -> None:
            trained = [record for record in records if record.get("loss") is not None]  # a validation's record has none
            if trained:
                last = trained[-1]
                note = f"loss {last['loss']:.3f}, {last['tokens_per_second']:,.0f} tokens/s"
                if device != "cpu":
                    note += f", {utilisation(last)}"
                bar.update(tokens(last["step"]), note=note, rate=last["tokens_per_second"])

        run_stage(
            stage,
            store=prepared.place.store,
            corpus=prepared.corpus,
            recipe=recipe,
            fingerprint=prepared.fingerprint,
            device=device,
            initial=prepared.initial.get(stage.end.size),
            observer=follow,
        )


def utilisation(record: Mapping[str, Any]) -> str:
    """Return the share of the GPUs' peak that a step of `metrics.jsonl` reached, in words."""
    text = f"{record['utilisation']:.0%} of the measured peak"
    share = record.get("published_utilisation")
    return text + (", no published one is known" if share is None else f", {share:.0%} of the published one")
