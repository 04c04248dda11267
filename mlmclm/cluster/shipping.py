"""Shipping of registered members to workers: other nodes don't have the notebook or script that registered them."""

from __future__ import annotations

import sys

from mlmclm.registry import Shipment, shipment


def registered() -> Shipment:
    """Return the members that are registered in this process, so that Ray sends their code by value.

    Workers may not have the modules that the code is in: they are the user's own, and not installed.
    """
    from ray import cloudpickle

    found = shipment()
    for module in found.modules:
        cloudpickle.register_pickle_by_value(sys.modules[module])
    return found
