"""A folder's tokenizer gives the ids that its tokenizer.json gives, whatever class it is said to be of."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlmclm.corpora.tokenizer import _from_hub
from mlmclm.errors import UserError
from mlmclm.models.folder import load_tokenizer
from mlmclm.storage.files import write_json
from tokenizer_kinds import KINDS, text_of

CLASSES = {
    "GPT2TokenizerFast": ("Llama 3", "GPT-2", "RobBERT", "lower case, ByteLevel"),
    "Qwen2TokenizerFast": ("Qwen2", "Llama 3", "GPT-2 trimmed", "Digits, ByteLevel"),
    "BertTokenizer": ("BERT", "WordPiece, Whitespace"),
    "RobertaTokenizerFast": ("RoBERTa with a prefix", "NFKC, ByteLevel", "RobBERT", "Llama 3"),
    "XLMRobertaTokenizer": ("XLM-R", "T5"),
    "AlbertTokenizerFast": ("ALBERT", "Metaspace never"),
    "DebertaV2Tokenizer": ("DeBERTa-v2",),
    "LlamaTokenizerFast": ("Llama 2", "Llama 3"),
    "CLIPTokenizer": ("CLIP",),
    "NobodysTokenizer": ("Qwen2",),
}
TYPES = {
    "GPT2TokenizerFast": "gpt2",
    "Qwen2TokenizerFast": "qwen2",
    "BertTokenizer": "bert",
    "RobertaTokenizerFast": "roberta",
}


CASES = [
    (name, kind, said)
    for name, kinds in CLASSES.items()
    for kind in kinds
    for said in ("settings", *(["model"] if name in TYPES else []))
]


@pytest.mark.parametrize(("name", "kind", "said"), CASES)
def test_ids_are_those_of_tokenizer_json_and_stay_so_when_saved(
    name: str, kind: str, said: str, tmp_path: Path
) -> None:
    """The class stands in tokenizer_config.json or follows from the model's type."""
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    write_json(
        tmp_path / "tokenizer_config.json",
        {"eos_token": "</s>"} | ({"tokenizer_class": name} if said == "settings" else {}),
    )
    write_json(tmp_path / "config.json", {"model_type": TYPES.get(name, "bert")})
    plain, draw = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), random.Random(1)
    texts = [text_of(draw) for _ in range(40)] + ["  two  spaces\t12345 ÉÅ ﬁ\n\n", "<mask> </s>x"]
    tokenizer = load_tokenizer(tmp_path)
    expected = [each.ids for each in plain.encode_batch(texts, add_special_tokens=False)]
    assert tokenizer(texts, add_special_tokens=False)["input_ids"] == expected
    named, _ = _from_hub(str(tmp_path), None)
    assert [each.ids for each in named.encode_batch(texts, add_special_tokens=False)] == expected
    assert tokenizer.eos_token == "</s>"
    assert len(tokenizer) == plain.get_vocab_size(), "no token of the class's own has been added"
    tokenizer.save_pretrained(tmp_path / "saved")
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")
    assert again(texts, add_special_tokens=False)["input_ids"] == expected


def test_special_tokens_that_settings_leave_out_are_those_of_the_class_where_the_vocabulary_has_them(
    tmp_path: Path,
) -> None:
    KINDS["RobBERT"]().save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "config.json", {"model_type": "roberta"})
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.bos_token, tokenizer.sep_token, tokenizer.mask_token] == ["<s>", "</s>", "<mask>"]
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    assert load_tokenizer(tmp_path).eos_token is None


@pytest.mark.parametrize("setting", ["do_lower_case", "strip_accents", "tokenize_chinese_chars"])
def test_settings_that_contradict_tokenizer_json_are_refused_as_transformers_would_tokenise_otherwise(
    tmp_path: Path, setting: str
) -> None:
    tokenizer = KINDS["BERT"]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    text, made = "ÉTÉ Zürich 東京", []
    for value in (True, False):
        write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", setting: value})
        made.append(AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.normalizer.normalize_str(text))
        if made[-1] == tokenizer.normalizer.normalize_str(text):
            assert load_tokenizer(tmp_path).backend_tokenizer.normalizer.normalize_str(text) == made[-1]
        else:
            with pytest.raises(UserError, match=f"tokenizer_config.json says {setting}: {value}, and tokenizer.json"):
                load_tokenizer(tmp_path)
    assert made[0] != made[1]
