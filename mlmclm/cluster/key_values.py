"""Notes that processes of a Ray cluster leave each other in Ray's key-value store.

They need neither storage that the processes share nor an actor that somebody has to run. All calls raise whatever Ray
raises if the cluster does not answer.
"""

from __future__ import annotations

NAMESPACE = b"mlmclm"


def put(key: bytes, value: bytes) -> None:
    """Write a note, in place of an earlier one."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, namespace=NAMESPACE)


def get_all(prefix: bytes) -> dict[bytes, bytes]:
    """Return all notes whose keys begin with `prefix`, by key; in two requests, however many there are."""
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list, internal_kv_get_gcs_client

    keys = _internal_kv_list(prefix, namespace=NAMESPACE)
    client = internal_kv_get_gcs_client()
    if client is None:  # through ray://, whose server answers for one key at a time
        each = {key: _internal_kv_get(key, namespace=NAMESPACE) for key in keys}
        return {key: value for key, value in each.items() if value is not None}
    # A note may be deleted between the two requests.
    found: dict[bytes, bytes] = client.internal_kv_multi_get(keys, NAMESPACE) if keys else {}
    return found


def delete(prefix: bytes) -> None:
    """Delete all notes whose keys begin with `prefix`."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(prefix, del_by_prefix=True, namespace=NAMESPACE)
