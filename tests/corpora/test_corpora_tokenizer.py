"""Tokenizers: trained here, or brought into one form."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlmclm.corpora import tokenizer as module
from mlmclm.corpora.corpus_config import TokenizerConfig
from mlmclm.corpora.tokenizer import load_text_tokenizer, prepare_tokenizer, special_ids, vocabulary
from mlmclm.errors import EnvironmentFault, UserError

SAMPLE = "Hello wörld, it's 12345 tokens!\n\n\tdef f(x):  return x_1 <|mask|> 日本 \U0001f600"


def trained(texts: list[str], store: Path, size: int = 400) -> Path:
    return prepare_tokenizer(TokenizerConfig(train_vocab_size=size), store=store, corpus_key="x", texts=texts)


def brought(path: Path, store: Path) -> Path:
    return prepare_tokenizer(TokenizerConfig(path=str(path)), store=store)


def test_a_trained_tokenizer_is_lossless_and_splits_digits(texts: list[str], tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(trained([*texts, "1234 1234 1234"] * 3, tmp_path))
    encoding = tokenizer.encode(SAMPLE, add_special_tokens=False)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == SAMPLE
    assert not any(len(token) > 1 and token.isdigit() for token in tokenizer.get_vocab())
    assert tokenizer.get_vocab_size() == 400


def test_training_gives_the_same_bytes_in_another_process_with_other_threads(texts: list[str], tmp_path: Path) -> None:
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    here = trained(texts, tmp_path / "here")
    code = (
        "import json, sys, pathlib\nfrom mlmclm.corpora.tokenizer import prepare_tokenizer\n"
        "from mlmclm.corpora.corpus_config import TokenizerConfig\n"
        "texts = json.load(open(sys.argv[1] + '/texts.json'))\n"
        "print(prepare_tokenizer(TokenizerConfig(train_vocab_size=400), store=pathlib.Path(sys.argv[2]), "
        "corpus_key='x', texts=texts))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "there")]
    environment = {**os.environ, "RAYON_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "true"}
    there = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()
    assert (Path(there) / "tokenizer.json").read_bytes() == (here / "tokenizer.json").read_bytes()


def test_every_tokenizer_has_four_special_tokens_and_marks_the_ends(texts: list[str], tmp_path: Path) -> None:
    folder = trained(texts, tmp_path)
    ids = special_ids(folder)
    assert ids == {"pad": 0, "bos": 1, "eos": 2, "mask": 3}
    tokenizer = load_text_tokenizer(folder)
    first = tokenizer.encode("a", add_special_tokens=False).ids
    second = tokenizer.encode("b", add_special_tokens=False).ids
    assert tokenizer.encode("a").ids == [1, *first, 2]
    assert tokenizer.encode("a", "b").ids == [1, *first, 2, *second, 2]


def test_offsets_leave_out_the_space_before_a_word(texts: list[str], tmp_path: Path) -> None:
    text = f"{texts[0]}"
    encoding = load_text_tokenizer(trained(texts, tmp_path)).encode(text)
    pieces = [text[start:end] for start, end in encoding.offsets[1:-1]]
    assert all(piece == piece.strip() for piece in pieces)


def test_transformers_loads_the_folder_and_gives_the_same_ids(texts: list[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = trained(texts, tmp_path)
    loaded = AutoTokenizer.from_pretrained(folder)
    ids = special_ids(folder)
    assert [loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id, loaded.mask_token_id] == list(ids.values())
    assert len(loaded) == 400
    assert loaded(texts[0])["input_ids"] == load_text_tokenizer(folder).encode(texts[0]).ids


def test_a_file_and_a_folder_give_the_same_tokens(texts: list[str], tmp_path: Path) -> None:
    folder = trained(texts, tmp_path)
    for path in (folder, folder / "tokenizer.json"):
        again = brought(path, tmp_path / "other")
        assert special_ids(again) == special_ids(folder)
        assert load_text_tokenizer(again).encode(SAMPLE).ids == load_text_tokenizer(folder).encode(SAMPLE).ids


def test_llama3_ranks_get_eurobert_special_ids(shared_tokenizers: Path, tmp_path: Path) -> None:
    folder = brought(shared_tokenizers / "llama3" / "tokenizer.model", tmp_path)
    tokenizer = load_text_tokenizer(folder)
    assert special_ids(folder) == {"pad": 128001, "bos": 128000, "eos": 128001, "mask": 128002}
    assert tokenizer.get_vocab_size() == 128_256
    # tiktoken's own ids of these texts.
    assert tokenizer.encode("Hello world", add_special_tokens=False).ids == [9906, 1917]
    assert tokenizer.encode("The quick brown fox", add_special_tokens=False).ids == [791, 4062, 14198, 39935]
    encoding = tokenizer.encode(SAMPLE, add_special_tokens=False)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == SAMPLE


def test_gpt2_files_get_a_mask_and_a_pad_token(shared_tokenizers: Path, tmp_path: Path) -> None:
    folder = brought(shared_tokenizers / "gpt2", tmp_path)
    tokenizer = load_text_tokenizer(folder)
    assert special_ids(folder) == {"pad": 50257, "bos": 50256, "eos": 50256, "mask": 50258}
    assert tokenizer.encode("Hello world", add_special_tokens=False).ids == [15496, 995]
    assert tokenizer.encode("Hello world").ids == [50256, 15496, 995, 50256]


def test_modernbert_keeps_its_own_special_tokens(shared_tokenizers: Path, tmp_path: Path) -> None:
    folder = brought(shared_tokenizers / "modernbert" / "tokenizer.json", tmp_path)
    assert special_ids(folder) == {"pad": 50283, "bos": 50281, "eos": 50282, "mask": 50284}
    assert load_text_tokenizer(folder).get_vocab_size() == 50_368


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        ({"tokenizer.json": "{}"}, "tokenizer.json", "tokenizer.json: not a tokenizer file"),
        ({"bad.model": "not base64!"}, "bad.model", "bad.model: not a file of tiktoken ranks"),
        ({"short.model": "YQ== 0\nYg== 1\n"}, "short.model", "short.model: .*all 256 bytes"),
        ({"vocab.json": "[]", "merges.txt": "a b c d"}, "", "not a BPE vocabulary"),
        ({}, "", r"needs tokenizer.json, or vocab.json and merges.txt"),
        ({}, "nothing", "nothing: no such file or folder"),
    ],
)
def test_what_is_no_tokenizer_is_named(files: dict[str, str], given: str, message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        brought(tmp_path / given, tmp_path / "store")
    assert not list((tmp_path / "store").glob("tokenizers/*"))


def test_a_hub_name_without_the_hub_is_an_environment_fault(tmp_path: Path) -> None:
    config = TokenizerConfig(name="nobody/no-such-model")
    with pytest.raises(EnvironmentFault, match=r"nobody/no-such-model.*is not in the cache"):
        prepare_tokenizer(config, store=tmp_path)


def test_a_hub_tokenizer_comes_out_in_the_same_form(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(texts, tmp_path)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **options: loaded)
    again = prepare_tokenizer(TokenizerConfig(name="some/model"), store=tmp_path)
    assert again != folder
    assert special_ids(again) == special_ids(folder)
    assert load_text_tokenizer(again).encode(SAMPLE).ids == load_text_tokenizer(folder).encode(SAMPLE).ids


def test_keys_follow_what_matters(texts: list[str], tmp_path: Path) -> None:
    bpe = TokenizerConfig(train_vocab_size=400)
    keys = [
        module.tokenizer_key(bpe, "a"),
        module.tokenizer_key(bpe, "b"),
        module.tokenizer_key(TokenizerConfig(train_vocab_size=401), "a"),
        module.tokenizer_key(TokenizerConfig(name="a"), "a"),
        module.tokenizer_key(TokenizerConfig(name="a", revision="1"), "a"),
    ]
    assert len(set(keys)) == len(keys)
    assert module.tokenizer_key(TokenizerConfig(name="a"), "a") == module.tokenizer_key(TokenizerConfig(name="a"), "b")


@pytest.mark.parametrize("role", ["mask", "eos", "pad", "bos"])
def test_a_tokenizer_folder_that_lacks_a_special_token_is_named(texts: list[str], tmp_path: Path, role: str) -> None:
    folder = trained(texts, tmp_path)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    for change, words in (
        ({f"{role}_token": "<|none|>"}, "names '<|none|>' as"),
        ({f"{role}_token": None}, "names no"),
    ):
        path.write_text(json.dumps(settings | change))
        with pytest.raises(UserError, match=f"{re.escape(words)} {role}_token"):
            special_ids(folder)


def test_the_ordinary_tokens_are_all_but_those_that_tokenizer_json_calls_special(
    shared_tokenizers: Path, tmp_path: Path
) -> None:
    for name in ("gpt2", "llama3", "modernbert"):
        folder = brought(shared_tokenizers / name, tmp_path)
        found = vocabulary(folder)
        added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        assert found.special == tuple(sorted(token["id"] for token in added if token["special"]))
        assert set(special_ids(folder).values()) <= set(found.special)
        assert set(found.ordinary.tolist()) == set(range(found.size)) - set(found.special)
        assert found.size == load_text_tokenizer(folder).get_vocab_size(with_added_tokens=True)
