#!/bin/bash
# transformers 5.23.0 and 4.57.6, as in tools that still require version 4.
# Guess: a folder that version 5 saved is read rightly by version 4, or is an error there.
# In fact version 5 writes RoPE's bases into `rope_parameters` only, and version 4 ignores that key without a word: it
# takes the architecture's default, 10,000 for Llama and Qwen, 160,000 and 10,000 for ModernBERT, and no scaling.
# Hurts: whoever loads weights that version 5 saved with version 4. They are read whole, and the states are wrong.
# Source: vllm-project/vllm#42624 describes it.
# Output seen: Llama saved 250000.0, read 10000.0; ModernBERT saved (10000.0, 10000.0), read (160000.0, 10000.0);
# yarn with factor 4.0 read as no scaling.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
for version in 5.23.0 4.57.6; do
    "${PYTHON:-python3}" -m venv "$place/$version" && "$place/$version/bin/pip" install -q "transformers==$version" || exit 2
done
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
"$place/5.23.0/bin/python" - "$place" <<'PYTHON' || exit 2
import sys

from transformers import LlamaConfig, ModernBertConfig

default = {"rope_type": "default", "rope_theta": 10_000.0}
LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 250_000.0}).save_pretrained(f"{sys.argv[1]}/llama")
yarn = {"rope_type": "yarn", "rope_theta": 250_000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
LlamaConfig(rope_parameters=yarn).save_pretrained(f"{sys.argv[1]}/yarn")
ModernBertConfig(
    rope_parameters={"full_attention": dict(default), "sliding_attention": dict(default)}
).save_pretrained(f"{sys.argv[1]}/modernbert")
PYTHON
"$place/4.57.6/bin/python" - "$place" <<'PYTHON'
import sys
import warnings

warnings.simplefilter("error")  # any word about it would end this
import transformers
from transformers import AutoConfig

llama, yarn, modernbert = (AutoConfig.from_pretrained(f"{sys.argv[1]}/{name}") for name in ("llama", "yarn", "modernbert"))
bases = modernbert.global_rope_theta, modernbert.local_rope_theta
print(f"saved by transformers 5.23.0, read by {transformers.__version__}:")
print(f"Llama: saved 250000.0, read {llama.rope_theta}")
print(f"Llama with yarn: saved factor 4.0, read {yarn.rope_scaling}, base {yarn.rope_theta}")
print(f"ModernBERT: saved (10000.0, 10000.0), read {bases}")
same = llama.rope_theta == 10_000.0 and yarn.rope_scaling is None and bases == (160_000.0, 10_000.0)
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON
