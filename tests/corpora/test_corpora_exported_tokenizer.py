"""An exported tokenizer adds to a text what the model was trained with, and changes no key."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from mlmclm.backends.packing import Packing
from mlmclm.corpora.corpus_config import TokenizerConfig
from mlmclm.corpora.exported_tokenizer import corpus_tokenizer, write_tokenizer
from mlmclm.corpora.notes import NOTES, note_written
from mlmclm.corpora.tokenizer import SpecialTokens, prepare_tokenizer, save, special_ids, tokenizer_key
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import build_model, load_prepared_tokenizer, model_config
from mlmclm.models.encoder import encode, pack_ids, pool
from mlmclm.models.exported_folder import export_folder
from mlmclm.models.folder import load_encoder, tokenizer_hash, weights_hash
from mlmclm.models.folder import load_tokenizer as loaded_by_fine_tuning
from mlmclm.models.sizes import SIZES, Size
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.storage.files import hash_file
from mlmclm.tasks.texts import ending, token_ids, with_closing_token
from small_models import small_tokenizer

TEXTS = ["Anna was in Paris", "Berta saw the film, and it was so very warm here today", " Oslo "]
PAIRS = [("Anna was", " in Paris"), ("Anna was ", "in Paris"), ("one of a kind:", "\nclever film"), ("a", " b")]


def byte_level(folder: Path, post: object = None, named: SpecialTokens | None = None) -> Path:
    """A prepared byte-level tokenizer, with our own template unless it has another."""
    backend = Tokenizer.from_str(small_tokenizer().backend_tokenizer.to_str())
    if post is not None:
        backend.post_processor = post
    folder.mkdir()
    save(backend, named or SpecialTokens("<pad>", "<bos>", "<eos>", "<mask>"), folder)
    return folder


def like_roberta(folder: Path) -> Path:
    return byte_level(folder, processors.RobertaProcessing(("<eos>", 2), ("<bos>", 1), trim_offsets=True))


def like_llama(folder: Path) -> Path:
    """BOS in front, nothing behind; padded with EOS."""
    post = processors.TemplateProcessing(single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 1)])
    return byte_level(folder, post, SpecialTokens("<eos>", "<bos>", "<eos>", "<mask>"))


def like_bert(folder: Path) -> Path:
    words = sorted({word for text in (*TEXTS, *map(" ".join, PAIRS)) for word in text.lower().split()})
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, ",", ":"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder.mkdir()
    save(backend, SpecialTokens(), folder)
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "own": byte_level, "roberta": like_roberta, "llama": like_llama, "bert": like_bert,
}  # fmt: skip


@pytest.fixture(params=KINDS)
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The tokenizer of a corpus."""
    return KINDS[request.param](tmp_path / "corpus")


def exported(corpus: Path, folder: Path, *, decoder: bool) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "eurobert", "eos_token_id": special_ids(corpus)["eos"]})
    )
    write_tokenizer(corpus, folder, decoder=decoder)
    return folder


def test_the_encoder_s_ends_texts_as_fine_tuning_does(corpus: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported(corpus, tmp_path / "encoder", decoder=False))
    end = special_ids(corpus)["eos"]
    plain = token_ids(loaded_by_fine_tuning(corpus), TEXTS)
    assert tokenizer(TEXTS)["input_ids"] == [[*ids, end] for ids in plain]
    assert tokenizer(TEXTS, truncation=True, max_length=4)["input_ids"] == [
        with_closing_token(ids, end, 4) for ids in plain
    ]
    assert tokenizer(TEXTS[0], TEXTS[1])["input_ids"] == [*plain[0], end, *plain[1], end]
    assert ending(tokenizer) == end


def test_lm_eval_s_pairs_are_the_continuation_s_own_tokens_by_its_defaults(corpus: Path, tmp_path: Path) -> None:
    """`TemplateLM._encode_pair` and `HFLM.tok_encode` of lm-eval 0.4.13, with `add_bos_token=None`."""
    tokenizer = AutoTokenizer.from_pretrained(exported(corpus, tmp_path / "decoder", decoder=True))
    plain = loaded_by_fine_tuning(corpus)
    for context, continuation in PAIRS:
        spaces = len(context) - len(context.rstrip())
        if spaces > 0:
            continuation, context = context[-spaces:] + continuation, context[:-spaces]
        whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context)
        assert whole == token_ids(plain, [context + continuation])[0]
        assert whole[: len(before)] == before
        assert plain.decode(whole[len(before) :]).split() == plain.decode(token_ids(plain, [continuation])[0]).split()
    assert tokenizer.bos_token_id == tokenizer.eos_token_id  # lm-eval's prefix of an empty context


def test_characters_positions_stay(corpus: Path, tmp_path: Path) -> None:
    ways = {"add_special_tokens": False, "return_offsets_mapping": True}
    expected = loaded_by_fine_tuning(corpus)(TEXTS, **ways)
    for decoder in (False, True):
        tokenizer = loaded_by_fine_tuning(exported(corpus, tmp_path / f"{decoder}", decoder=decoder))
        assert dict(tokenizer(TEXTS, **ways)) == dict(expected)


def test_keys_are_those_of_the_corpus_s_tokenizer_until_a_file_is_changed(corpus: Path, tmp_path: Path) -> None:
    folder = exported(corpus, tmp_path / "encoder", decoder=False)
    assert (folder / "tokenizer.json").read_bytes() != (corpus / "tokenizer.json").read_bytes()
    assert tokenizer_hash(folder) == tokenizer_hash(corpus)
    own, of_corpus = (TokenizerConfig(path=str(path)) for path in (folder, corpus))
    assert tokenizer_key(own, "") == tokenizer_key(of_corpus, "")
    again = prepare_tokenizer(own, store=tmp_path / "store")  # of a study that continues from the folder
    assert load_prepared_tokenizer(again)(TEXTS)["input_ids"] == load_prepared_tokenizer(corpus)(TEXTS)["input_ids"]
    file = folder / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert tokenizer_hash(folder) != tokenizer_hash(corpus)
    assert tokenizer_key(own, "") != tokenizer_key(of_corpus, "")


def forged(folder: Path, target: Path, change: Callable[[dict[str, object]], None], name: str) -> Path:
    """A copy whose file is changed, while notes and checksums say that this is what was exported for the corpus."""
    shutil.copytree(folder, target)
    content, notes = json.loads((target / name).read_text()), json.loads((target / NOTES).read_text())
    change(content)
    (target / name).write_text(json.dumps(content))
    notes["tokenizer"]["stands_for"][name][0] = hash_file(target / name)
    (target / NOTES).write_text(json.dumps(notes))
    (target / CHECKSUMS).unlink(missing_ok=True)
    note_written(target)
    return target


def test_forged_notes_and_checksums_give_a_folder_no_other_s_key(tmp_path: Path) -> None:
    corpus = byte_level(tmp_path / "corpus")
    folder = exported(corpus, tmp_path / "encoder", decoder=False)

    def lower(tokenizer: dict[str, object]) -> None:
        tokenizer["normalizer"] = {"type": "Lowercase"}

    def split(settings: dict[str, object]) -> None:
        settings |= {"eos_token": "the", "added_tokens_decoder": {}}

    for change, name in ((lower, "tokenizer.json"), (split, "tokenizer_config.json")):
        other = forged(folder, tmp_path / f"forged {name}", change, name)
        assert tokenizer_hash(other) != tokenizer_hash(corpus)
        keys = [tokenizer_key(TokenizerConfig(path=str(path)), "") for path in (folder, other)]
        assert keys[0] != keys[1]
    # A file that the checksums list counts as much as one that they don't.
    for name in ("added_tokens.json", "vocab.json"):
        other = forged(folder, tmp_path / f"with {name}", lambda _: None, "tokenizer.json")
        (other / name).write_text('{"the": 5}')
        (other / CHECKSUMS).unlink()
        note_written(other)
        assert tokenizer_hash(other) != tokenizer_hash(folder), name
    # Another template in the note, which `special_tokens: tokenizer` uses, is not the corpus's.
    notes = json.loads((folder / NOTES).read_text())
    notes["tokenizer"]["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    (folder / NOTES).write_text(json.dumps(notes))
    assert corpus_tokenizer(folder) is None and tokenizer_hash(folder) != tokenizer_hash(corpus)


def test_a_forged_end_of_texts_changes_the_model_s_key(tmp_path: Path) -> None:
    corpus = like_bert(tmp_path / "corpus")
    model = bert(corpus)
    folder = tmp_path / "model"
    export_folder(folder, weights_of(model), model.config, corpus, card="")
    assert json.loads((folder / "config.json").read_text()).get("eos_token_id") is None

    def end(settings: dict[str, object]) -> None:
        settings["eos_token"] = "[CLS]"

    other = forged(folder, tmp_path / "forged", end, "tokenizer_config.json")
    assert weights_hash(other) != weights_hash(folder)
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert weights_hash(tmp_path / "elsewhere" / "copy") == weights_hash(folder)


def test_a_forged_processor_that_counts_characters_otherwise_gives_a_folder_no_other_s_key(tmp_path: Path) -> None:
    corpus = like_roberta(tmp_path / "corpus")
    folder = exported(corpus, tmp_path / "encoder", decoder=False)

    def untrimmed(tokenizer: dict[str, object]) -> None:
        tokenizer["post_processor"] = None

    other = forged(folder, tmp_path / "forged", untrimmed, "tokenizer.json")
    ways = {"add_special_tokens": False, "return_offsets_mapping": True}
    spans = [loaded_by_fine_tuning(path)(TEXTS, **ways)["offset_mapping"] for path in (folder, other)]
    assert spans[0] != spans[1]
    assert tokenizer_hash(folder) == tokenizer_hash(corpus) != tokenizer_hash(other)


@pytest.mark.parametrize("ends", [[2, 3], None])
def test_an_end_that_no_hashed_file_decides_is_in_the_model_s_key(
    ends: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3's template puts nothing behind a text, and configurations of its chat models name three ends."""
    corpus = like_llama(tmp_path / "corpus")
    monkeypatch.setitem(SIZES, "small", Size(2, 32, 48, 4, 4, 0.3, architecture="eurobert", window=4))
    model = build_model(model_config("small", load_prepared_tokenizer(corpus), 64), 0)
    folder = tmp_path / "model"
    model.config.eos_token_id = ends
    export_folder(folder, weights_of(model), model.config, corpus, card="")

    def end(settings: dict[str, object]) -> None:
        settings["eos_token"] = "<mask>"

    other = forged(folder, tmp_path / "forged", end, "tokenizer_config.json")
    assert weights_hash(other) != weights_hash(folder)


def test_a_configuration_with_another_end_than_the_template_keeps_the_key_of_an_export(tmp_path: Path) -> None:
    """transformers' classes have an end by default, which a small vocabulary may not even have."""
    corpus = like_roberta(tmp_path / "corpus")
    folder = exported(corpus, tmp_path / "encoder", decoder=False)
    (folder / "config.json").write_text('{"model_type": "modernbert", "eos_token_id": 50282}')
    assert tokenizer_hash(folder) == tokenizer_hash(corpus)


@pytest.mark.parametrize("noted", [["x"], {"a": 1}, math.nan])
def test_notes_with_wrong_values_are_no_notes(noted: object, tmp_path: Path) -> None:
    folder = exported(byte_level(tmp_path / "corpus"), tmp_path / "encoder", decoder=False)
    notes = json.loads((folder / NOTES).read_text())
    notes["tokenizer"]["stands_for"]["tokenizer.json"][1] = notes["tokenizer"]["post_processor"] = noted
    (folder / NOTES).write_text(json.dumps(notes))
    assert corpus_tokenizer(folder) is None


def test_a_tokenizer_with_small_numbers_keeps_its_hash(tmp_path: Path) -> None:
    """Python writes 1e-07 where the tokenizers library writes 1e-7."""
    words = [("<unk>", 0.0), ("\u2581a", -1e-7), ("\u2581b", -12.5), ("c", -3.0e16)]
    backend = Tokenizer(models.Unigram(words, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    (tmp_path / "corpus").mkdir()
    save(backend, SpecialTokens(), tmp_path / "corpus")
    folder = exported(tmp_path / "corpus", tmp_path / "encoder", decoder=False)
    assert tokenizer_hash(folder) == tokenizer_hash(tmp_path / "corpus")


def bert(tokenizer: Path) -> BertForMaskedLM:
    size = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(vocab_size=size, max_position_embeddings=64, initializer_range=0.3, **shape))


def model_folder(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An exported folder with a decoder, and the tokenizer of its corpus."""
    corpus = KINDS["bert" if kind == "bert" else "own"](tmp_path / "corpus")
    if kind == "bert":
        model = bert(corpus)
    else:
        monkeypatch.setitem(SIZES, "small", Size(2, 32, 48, 4, 4, 0.3, architecture=kind, window=4))
        model = build_model(model_config("small", load_prepared_tokenizer(corpus), 64), 0)
    folder = tmp_path / "model"
    export_folder(folder, weights_of(model), model.config, corpus, card="A card.", decoder_card="Another.", context=64)
    return folder, corpus


@pytest.mark.parametrize("kind", ["eurobert", "modernbert", "bert"])
def test_mean_pooling_elsewhere_gives_the_vectors_of_fine_tuning(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SentenceTransformer(folder).encode(texts)`: AutoTokenizer, AutoModel, the mean over the attention mask."""
    folder, _ = model_folder(kind, tmp_path, monkeypatch)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(2)
    with torch.no_grad():
        states = model(**batch).last_hidden_state
        vectors = (states * mask).sum(1) / mask.sum(1)
        ours = loaded_by_fine_tuning(folder)
        ids = [np.array(with_closing_token(row, ending(ours), 64)) for row in token_ids(ours, TEXTS)]
        packing = Packing.of([len(row) for row in ids], torch.device("cpu"))
        expected = pool(encode(load_encoder(folder), pack_ids(ids, packing), packing, causal=False), packing, "mean")
    torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["eurobert", "modernbert", "bert"])
def test_exported_settings_are_the_context_and_the_tokenizer_s_own_ids_and_change_no_key(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, corpus = model_folder(kind, tmp_path, monkeypatch)
    for part in (folder, folder / "decoder"):
        tokenizer = AutoTokenizer.from_pretrained(part)
        assert tokenizer.model_max_length == 64
        assert len(tokenizer("Anna was in Paris " * 100, truncation=True)["input_ids"]) == 64
        hashes = weights_hash(part), tokenizer_hash(part)
        (part / CHECKSUMS).unlink()
        settings = part / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace('"model_max_length": 64', '"model_max_length": 1000000'))
        assert (weights_hash(part), tokenizer_hash(part)) == hashes
    assert tokenizer_hash(folder) == tokenizer_hash(corpus)
    config = AutoConfig.from_pretrained(folder / "decoder")
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)


def test_generation_begins_behind_a_document_and_a_prompt_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, corpus = model_folder("eurobert", tmp_path, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(folder / "decoder")
    tokenizer = AutoTokenizer.from_pretrained(folder / "decoder")
    settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    assert model.generate(**settings)[0, 0] == special_ids(corpus)["eos"]
    prompt = tokenizer("Anna was", return_tensors="pt")
    assert tokenizer.decode(model.generate(**prompt, **settings)[0]).startswith("Anna was")


def test_a_published_tokenizer_keeps_its_ids_and_positions(shared_tokenizers: Path, tmp_path: Path) -> None:
    path = shared_tokenizers / "modernbert" / "tokenizer.json"
    corpus = prepare_tokenizer(TokenizerConfig(path=str(path)), store=tmp_path)
    ways = {"add_special_tokens": False, "return_offsets_mapping": True}
    expected = loaded_by_fine_tuning(corpus)(TEXTS, **ways)
    tokenizer = loaded_by_fine_tuning(exported(corpus, tmp_path / "encoder", decoder=False))
    assert dict(tokenizer(TEXTS, **ways)) == dict(expected)
    assert tokenizer(TEXTS)["input_ids"] == [[*ids, special_ids(corpus)["eos"]] for ids in expected["input_ids"]]
