"""Notes in Ray's key-value store."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.experimental import internal_kv

from mlmclm.cluster import key_values
from mlmclm.cluster.ray_cluster import ray_session


def test_all_notes_with_a_prefix_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_session(tmp_path, num_cpus=1):
        assert key_values.get_all(b"note:") == {}
        for key in (b"note:a", b"note:b", b"other:c"):
            key_values.put(key, key[-1:])
        with monkeypatch.context() as patched:
            patched.setattr(internal_kv, "_internal_kv_get", lambda *args, **options: pytest.fail("read one by one"))
            assert key_values.get_all(b"note:") == {b"note:a": b"a", b"note:b": b"b"}
        # Through ray:// there is no client for several keys.
        monkeypatch.setattr(internal_kv, "internal_kv_get_gcs_client", lambda: None)
        assert key_values.get_all(b"note:") == {b"note:a": b"a", b"note:b": b"b"}
        key_values.delete(b"note:a")
        assert key_values.get_all(b"note:") == {b"note:b": b"b"}
