"""Exported folders load in transformers by themselves and compute what the trained model computes, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
)

from mlmclm.models.architectures import final_states, weights_of
from mlmclm.models.attention import use_attention
from mlmclm.models.build import build_model, model_config
from mlmclm.models.exported_folder import export_folder
from mlmclm.models.folder import load_encoder
from mlmclm.models.sizes import SIZES, Size
from small_models import small_tokenizer

SMALL = {
    "eurobert": Size(2, 32, 48, 4, 2, 0.3),
    "modernbert": Size(4, 32, 48, 4, 4, 0.3, architecture="modernbert", window=4),
}


@pytest.fixture(params=SMALL)
def trained(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setitem(SIZES, "small", SMALL[request.param])
    model = build_model(model_config("small", small_tokenizer(), 64), 0)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    return model


def export(model: PreTrainedModel, folder: Path, *, decoder: bool) -> Path:
    small_tokenizer().save_pretrained(folder / "tokenizer")
    own = "Another." if decoder else None
    export_folder(
        folder / "model", weights_of(model), model.config, folder / "tokenizer", card="A card.", decoder_card=own
    )
    return folder / "model"


def test_both_folders_give_the_trained_model_s_outputs(trained: PreTrainedModel, tmp_path: Path) -> None:
    folder = export(trained, tmp_path, decoder=True)
    ids = torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(1))
    masked = AutoModelForMaskedLM.from_pretrained(folder)
    causal = AutoModelForCausalLM.from_pretrained(folder / "decoder")
    assert type(masked) is type(trained)
    base, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    use_attention(trained)
    with torch.no_grad():
        for direction, loaded in ((False, masked), (True, causal)):
            hidden = final_states(trained.model, ids, causal=direction)
            torch.testing.assert_close(loaded.model(ids).last_hidden_state, hidden, rtol=1e-4, atol=1e-4)
            mixed = trained.head(hidden) if hasattr(trained, "head") else hidden
            logits = trained.get_output_embeddings()(mixed)
            torch.testing.assert_close(loaded(ids).logits, logits, rtol=1e-4, atol=1e-4)
            if not direction:
                torch.testing.assert_close(base(ids).last_hidden_state, hidden, rtol=1e-4, atol=1e-4)
                found = final_states(load_encoder(folder), ids, causal=False)
                torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder / "decoder").mask_token == "<mask>"


def test_weights_are_written_once_where_the_decoder_has_the_same(trained: PreTrainedModel, tmp_path: Path) -> None:
    folder = export(trained, tmp_path, decoder=True)
    same = (folder / "model.safetensors").samefile(folder / "decoder" / "model.safetensors")
    assert same == (trained.config.model_type == "eurobert")


def test_a_masked_model_has_no_decoder_folder_and_a_folder_that_is_there_stays(
    trained: PreTrainedModel, tmp_path: Path
) -> None:
    folder = export(trained, tmp_path, decoder=False)
    assert not (folder / "decoder").exists()
    (folder / "README.md").write_text("mine")
    assert (export(trained, tmp_path, decoder=True) / "README.md").read_text() == "mine"
    assert not (folder / "decoder").exists()
