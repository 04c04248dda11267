"""Two texts that are too long together lose tokens of the longer one, and stand in the form that the protocol says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from mlmclm.backends.packing import Packing
from mlmclm.corpora.exported_tokenizer import write_tokenizer
from mlmclm.errors import UserError
from mlmclm.models.attention import use_attention
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.folder import load_tokenizer
from mlmclm.sweeps.space import find_protocol
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import encode_texts, longest_first, token_ids, with_closing_token
from small_models import NAMES, save_small_model, small_tokenizer

TEMPLATE = "Question: {text}\nContext: {text_pair}"
PAIRS = [
    ("Anna was very warm", "Oslo"),
    (" ".join(NAMES * 3), "so very kind"),
    ("Berta", " ".join(NAMES * 3)),
    (" ".join(NAMES), " ".join(NAMES)),
    ("", "Emil Fritz"),
]
TEXTS, SECONDS = [first for first, _ in PAIRS], [second for _, second in PAIRS]


def bert_tokenizer(post: object) -> PreTrainedTokenizerFast:
    words = dict.fromkeys(" ".join((*TEXTS, *SECONDS)).lower().split())
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = post
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "token_type_ids"], **names
    )


POSTS = {
    "bert": processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "roberta": processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    "template": processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    ),
    "llama": processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [CLS]:1 $B:1", special_tokens=[("[CLS]", 2)]
    ),
}


def test_tokens_are_kept_as_transformers_longest_first_keeps_them() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for room in range(1, 12):
        tokenizer.enable_truncation(room, strategy="longest_first")
        for first in range(10):
            for second in range(10):
                owner = tokenizer.encode("a " * first, "a " * second).sequence_ids
                assert longest_first(first, second, room) == (owner.count(0), owner.count(1))


@pytest.mark.parametrize("kind", POSTS)
@pytest.mark.parametrize("length", [8, 13, 14, 40])
def test_the_tokenizer_s_own_form_is_that_of_transformers(kind: str, length: int) -> None:
    tokenizer = bert_tokenizer(POSTS[kind])
    settings = TaskSettings(special_tokens="tokenizer", max_length=length, stride=1)
    found = encode_texts(TEXTS, SECONDS, TEMPLATE, tokenizer, settings)
    expected = tokenizer(TEXTS, SECONDS, truncation="longest_first", max_length=length)
    assert found["input_ids"].to_pylist() == expected["input_ids"]
    types = expected["token_type_ids"]
    assert ("token_types" in found) == any(map(any, types))
    assert "token_types" not in found or found["token_types"].to_pylist() == types
    alone = encode_texts(TEXTS, None, None, tokenizer, settings)
    assert (
        alone["input_ids"].to_pylist() == tokenizer(TEXTS, truncation="longest_first", max_length=length)["input_ids"]
    )


def test_a_tokenizer_without_the_form_is_refused() -> None:
    settings = TaskSettings(special_tokens="tokenizer")
    with pytest.raises(UserError, match=r"adds no token to a text\. Use special_tokens: end"):
        encode_texts(TEXTS, None, None, small_tokenizer(), settings)
    seamless = processors.TemplateProcessing(single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 2)])
    with pytest.raises(UserError, match=r"puts no token between two texts\. Use special_tokens: end"):
        encode_texts(TEXTS, SECONDS, TEMPLATE, bert_tokenizer(seamless), settings)


def test_types_that_tell_no_parts_of_a_pair_apart_are_left_out_and_the_other_order_is_refused() -> None:
    """Examples with them would differ from those that stores have under the same key."""
    settings = TaskSettings(special_tokens="tokenizer")
    special = [("[CLS]", 2), ("[SEP]", 3)]
    ones = processors.TemplateProcessing(
        single="[CLS]:1 $A:1 [SEP]:1", pair="[CLS]:1 $A:1 [SEP]:1 $B:1 [SEP]:1", special_tokens=special
    )
    assert "token_types" not in encode_texts(TEXTS, SECONDS, TEMPLATE, bert_tokenizer(ones), settings)
    xlnet = processors.TemplateProcessing(
        single="$A [SEP] [CLS]:2", pair="$A [SEP] $B:1 [SEP]:1 [CLS]:2", special_tokens=special
    )
    for post in (ones, xlnet):
        assert "token_types" not in encode_texts(TEXTS, None, None, bert_tokenizer(post), settings)
    assert "token_types" in encode_texts(TEXTS, SECONDS, TEMPLATE, bert_tokenizer(xlnet), settings)
    turned = processors.TemplateProcessing(single="[CLS] $A", pair="[CLS] $B [SEP] $A:1", special_tokens=special)
    with pytest.raises(UserError, match=r"puts the second text before the first\. Use special_tokens: end"):
        encode_texts(TEXTS, SECONDS, TEMPLATE, bert_tokenizer(turned), settings)


@pytest.mark.parametrize("template", [TEMPLATE, "Context: {text_pair}\nQuestion: {text}"])
def test_of_joined_texts_the_longer_one_is_cut_and_the_template_stays(template: str) -> None:
    tokenizer = small_tokenizer()
    joined = [template.replace("{text}", first).replace("{text_pair}", second) for first, second in PAIRS]
    whole = token_ids(tokenizer, joined)
    settings = TaskSettings(max_length=24, stride=1)
    found = encode_texts(TEXTS, SECONDS, template, tokenizer, settings)
    cut = encode_texts(TEXTS, SECONDS, template, tokenizer, settings.model_copy(update={"pair_truncation": "joined"}))
    assert cut["input_ids"].to_pylist() == [with_closing_token(ids, 2, 24) for ids in whole]
    assert cut["lost"].to_pylist()[1 if template == TEMPLATE else 2] and not any(cut["recut"].to_pylist())
    assert not any(found["lost"].to_pylist()) and any(found["recut"].to_pylist())
    for ids, full, pair, recut, before in zip(
        found["input_ids"].to_pylist(),
        whole,
        PAIRS,
        found["recut"].to_pylist(),
        cut["input_ids"].to_pylist(),
        strict=True,
    ):
        assert recut == (ids != before)
        assert len(ids) == min(24, len(full) + 1) and ids[-1] == 2
        if len(full) < 24:
            assert ids[:-1] == full
            continue
        text = tokenizer.decode(ids[:-1])
        names = [piece.strip() for piece in template.replace("{text_pair}", "{text}").split("{text}") if piece]
        assert all(name in text for name in names)
        first, second = (text.split(name)[1].split("\n")[0].split() for name in ("Question:", "Context:"))
        assert pair[0].split()[: len(first) - 1] == first[:-1] and pair[1].split()[: len(second) - 1] == second[:-1]
        sizes = [len(ids) for ids in token_ids(tokenizer, [f" {own}" for own in pair])]
        kept = longest_first(*sizes, 23 - (len(full) - sum(sizes)))
        found_sizes = [len(ids) for ids in token_ids(tokenizer, [f" {' '.join(own)}" for own in (first, second)])]
        assert found_sizes == [size if own else 0 for size, own in zip(kept, pair, strict=True)]


def test_a_text_that_was_empty_is_not_lost() -> None:
    settings = TaskSettings(max_length=16, stride=1)
    found = encode_texts([""], [" ".join(NAMES * 3)], TEMPLATE, small_tokenizer(), settings)
    assert len(found["input_ids"][0].as_py()) == 16 and found["lost"].to_pylist() == [False]


def test_the_second_text_is_found_behind_a_first_one_that_names_it() -> None:
    """The joined text has the second text twice then, and the first copy belongs to the first text."""
    tokenizer, settings = small_tokenizer(), TaskSettings(max_length=24, stride=1)
    second = " ".join(NAMES)
    found = encode_texts(["Anna {text_pair} Berta"], [second], TEMPLATE, tokenizer, settings)
    same = encode_texts([f"Anna {second} Berta"], [second], TEMPLATE, tokenizer, settings)
    assert found["recut"].to_pylist() == [True] and found["input_ids"].equals(same["input_ids"])


def test_a_limit_without_room_for_two_texts_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"max_length 8 leaves no room for two texts: the pair_template .* tokens of its"
    ):
        encode_texts(
            TEXTS,
            SECONDS,
            f"Anna Berta Carl Dora Emil {TEMPLATE}",
            small_tokenizer(),
            TaskSettings(max_length=8, stride=1),
        )


def test_a_model_with_token_types_is_given_them() -> None:
    tokenizer = bert_tokenizer(POSTS["bert"])
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = BertModel(config, add_pooling_layer=False).eval()
    own = BertModel(config, add_pooling_layer=False).eval()
    own.load_state_dict(stock.state_dict())
    use_attention(own)
    columns = encode_texts(
        TEXTS, SECONDS, TEMPLATE, tokenizer, TaskSettings(special_tokens="tokenizer", max_length=16, stride=1)
    )
    ids, types = ([np.array(row) for row in columns[name].to_pylist()] for name in ("input_ids", "token_types"))
    packing = Packing.of([len(row) for row in ids], torch.device("cpu"))
    with torch.no_grad():
        found = encode(own, pack_ids(ids, packing), packing, causal=False, token_types=pack_ids(types, packing))
        expected = [
            stock(torch.from_numpy(row)[None], token_type_ids=torch.from_numpy(kinds)[None]).last_hidden_state[0]
            for row, kinds in zip(ids, types, strict=True)
        ]
    torch.testing.assert_close(found[: packing.tokens], torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_an_exported_folder_gives_the_form_of_the_corpus_s_tokenizer(tmp_path: Path) -> None:
    corpus = save_small_model(tmp_path / "corpus")
    file = corpus / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    file.write_text(tokenizer.to_str())  # as a corpus's tokenizer is written
    exported = tmp_path / "exported"
    exported.mkdir()
    write_tokenizer(corpus, exported, decoder=False)
    anna, oslo = token_ids(tokenizer := load_tokenizer(exported), ["Anna", "Oslo"])
    assert tokenizer("Anna", "Oslo")["input_ids"] == [*anna, 2, *oslo, 2]
    assert load_tokenizer(exported, own_template=True)("Anna", "Oslo")["input_ids"] == [1, *anna, 2, *oslo, 2]


def test_glue_is_given_both_texts_and_the_study_s_pairs_are_one_text() -> None:
    assert find_protocol("glue").protocol.special_tokens == "tokenizer"
    assert find_protocol("study").protocol.pair_truncation == "joined"
    assert find_protocol("standard").protocol.cuts_longest
