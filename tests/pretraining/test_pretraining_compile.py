"""torch.compile of the layers: the same training under every ZeRO stage, with and without what else changes a layer's forward."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_pretraining_engine import ISOLATED, case, losses, run

COMPILED = {"compile": True}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        run(
            folder,
            1,
            [
                case("plain"),
                case("compiled", recipe=COMPILED),
                case("clm", causal=True),
                case("compiled-clm", causal=True, recipe=COMPILED),
                case("isolated", recipe=ISOLATED),
                case("compiled-isolated", recipe=COMPILED | ISOLATED),
                case("modernbert"),
                case("compiled-modernbert", recipe=COMPILED),
            ],
        )
        run(
            folder,
            2,
            [
                *(case(f"compiled-zero{zero}", zero=zero, micro=2, recipe=COMPILED) for zero in (0, 1, 2, 3)),
                case("compiled-isolated-zero3", zero=3, micro=2, again=True, recipe=COMPILED | ISOLATED),
                case("compiled-modernbert-zero3", zero=3, micro=2, again=True, recipe=COMPILED),
            ],
        )
    return folder


@pytest.mark.parametrize(
    ("plain", "compiled"),
    [
        ("plain", "compiled"),
        ("clm", "compiled-clm"),
        ("isolated", "compiled-isolated"),
        ("modernbert", "compiled-modernbert"),
        *(("plain", f"compiled-zero{zero}") for zero in (0, 1, 2, 3)),
        ("isolated", "compiled-isolated-zero3"),
        ("modernbert", "compiled-modernbert-zero3"),
    ],
)
def test_losses_norms_and_evaluation_are_those_without_compilation(runs: Path, plain: str, compiled: str) -> None:
    expected, found = losses(runs, plain), losses(runs, compiled)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-4)
    assert found[2] == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("kind", ["eurobert", "modernbert"])
def test_layers_of_a_kind_are_compiled_once_whatever_the_documents_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import torch
    from torch._dynamo.utils import counters
    from transformers import EuroBertConfig, ModernBertConfig

    from mlmclm.backends.packing import Packing
    from mlmclm.models.build import PretrainingModel, build_model

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    chance = np.random.default_rng(0)
    ids = torch.from_numpy(chance.integers(4, 97, (3, 40)))
    labels = torch.where(torch.from_numpy(chance.random(ids.shape)) < 0.3, ids, -100)

    def graphs(layers: int) -> int:
        """How many were compiled for a model, whose losses are those of the same model without compilation."""
        shape: dict[str, Any] = {
            "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
            "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        kinds: dict[str, Any] = {"eurobert": EuroBertConfig, "modernbert": partial(ModernBertConfig, local_attention=8)}
        torch._dynamo.reset()
        counters.clear()
        compiled, plain = (
            PretrainingModel(build_model(kinds[kind](**shape), 0), precision="fp32", compiled=one)
            for one in (True, False)
        )

        def step(packing: Packing | None) -> None:
            found, expected = (each(ids, labels, False, packing) for each in (compiled, plain))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            found.backward()

        step(None)
        assert not counters["graph_break"], "a layer without packing is one graph"
        step(Packing.of([120]))
        with torch.compiler.set_stance("fail_on_recompile"):
            for lengths in ([1, 119], [60, 10, 50], [2] * 60):
                step(Packing.of(lengths))
        return int(counters["stats"]["unique_graphs"])

    few = graphs(6)
    assert few > 0, "something is compiled"
    assert graphs(9) == few, "layers of a kind share it"


def test_without_a_compiler_the_error_says_what_to_install_or_to_change(tmp_path: Path) -> None:
    script = "import torch; from mlmclm.models.compilation import check_compiler; check_compiler(torch.device('cpu'))"
    environment = {**os.environ, "CXX": str(tmp_path / "no-such-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 1
    message = done.stderr.rpartition("mlmclm.errors.UserError: ")[2]
    assert message.startswith("recipe.compile: torch.compile does not work on this machine for cpu (")
    assert "C++ compiler (g++ or clang++" in message and "set recipe.compile to false" in message
    environment["CXX"] = "g++"
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=1500).returncode == 0


def test_a_stage_on_ray_train_has_the_same_curve_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlmclm.cluster.ray_cluster import prepare_environment, ray_session
    from mlmclm.plans.recipe import Recipe
    from mlmclm.pretraining import states
    from mlmclm.storage.place import Place
    from mlmclm.studies.prepare import prepare_study
    from mlmclm.studies.study_file import load_study
    from mlmclm.studies.work import train_missing_stages
    from small_study import write_study

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    study = load_study(write_study(tmp_path, models=["1m-clm-30"], baseline=None))
    curves = []
    prepare_environment()
    with ray_session(tmp_path / "ray", num_cpus=2):
        for compiled in (False, True):
            recipe = Recipe.model_validate(study.recipe.model_dump() | {"compile": compiled, "zero_stage": 2})
            place = Place(tmp_path / f"store-{compiled}", tmp_path / "data")
            made = prepare_study(study.model_copy(update={"recipe": recipe}), place)
            train_missing_stages(made)
            curves.append(states.curve(place.store, made.plan.targets[0].key(made.fingerprint)))
    for name in ("loss", "validation_loss", "validation_accuracy"):
        plain, compiled_curve = ([row[name] for row in curve if name in row] for curve in curves)
        assert len(plain) == (30 if name == "loss" else 3)
        assert compiled_curve == pytest.approx(plain, abs=0.02)
    assert any((tmp_path / "inductor").rglob("*.so")), "something was compiled"
