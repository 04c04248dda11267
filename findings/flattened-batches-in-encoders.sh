#!/bin/bash
# transformers 5.23.0 with torch 2.13.0.
# Guess: where a flattened batch (DataCollatorWithFlattening) keeps its sequences apart in a decoder, by position_ids that
# begin again and attention in torch (eager, sdpa), it does so in an encoder too.
# In fact bidirectional masks never look at position_ids: in EuroBERT and ModernBERT each sequence attends to all others, and
# so does a Llama that config.is_causal = False made an encoder. A decoder does so too while use_cache is on, the default.
# Hurts: whoever trains or embeds without padding under such attention: a text's states depend on its neighbours.
# Source: huggingface/transformers#39194 added it to causal masks; the collator only asks that attention can handle it.
# Output seen, largest difference to alone: Llama 0.0 (with cache 1.89, as an encoder 0.82), EuroBERT 0.80, ModernBERT 0.004.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 || exit 2
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
"$place/venv/bin/python" -W ignore - 2>"$place/log" <<'PYTHON'
import sys

import torch
import transformers
from transformers import AutoModel, DataCollatorWithFlattening, EuroBertConfig, LlamaConfig, ModernBertConfig

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
as_encoder = LlamaConfig(**SMALL)
as_encoder.is_causal = False
MODELS = {
    "Llama, use_cache=False": (LlamaConfig(**SMALL), {"use_cache": False}),
    "Llama": (LlamaConfig(**SMALL), {}),
    "Llama, is_causal=False": (as_encoder, {"use_cache": False}),
    "EuroBERT": (EuroBertConfig(**SMALL, **TOKENS, mask_token_id=3), {}),
    "ModernBERT": (ModernBertConfig(**SMALL, **TOKENS, cls_token_id=1, sep_token_id=2), {}),
}
torch.manual_seed(0)
first, second = torch.randint(5, 64, (7,)), torch.randint(5, 64, (9,))
batch = DataCollatorWithFlattening()([{"input_ids": ids.tolist()} for ids in (first, second)])
del batch["labels"]
print(f"transformers {transformers.__version__}, torch {torch.__version__}: second of two flattened sequences, against it alone")
print("position_ids", batch["position_ids"].tolist())
found = {}
for name, (config, more) in MODELS.items():
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        with torch.no_grad():
            alone = model(input_ids=second[None], **more).last_hidden_state[0]
            beside = model(**batch, **more).last_hidden_state[0][len(first) :]
        found[name, kind] = float((alone - beside).abs().max())
        print(f"{name}, {kind}: largest difference {found[name, kind]:.4f}")
same = all((gap < 1e-5) == (name == "Llama, use_cache=False") for (name, _), gap in found.items())
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON
