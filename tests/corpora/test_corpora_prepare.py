"""From text to blocks, end to end on tiny corpora."""

from __future__ import annotations

import collections
import hashlib
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_corpora import BPE, LIMITS, build, stream, tell

from mlmclm.corpora import filling, tokenising
from mlmclm.corpora import prepare_corpus as prepare
from mlmclm.corpora.chosen_documents import divide, hash_threshold, is_held_out
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.hashing import text_hash
from mlmclm.corpora.prepare_corpus import prepare_corpus
from mlmclm.corpora.prepared_corpus import PreparedCorpus, describe_corpus
from mlmclm.corpora.tokenizer import load_text_tokenizer, special_ids
from mlmclm.errors import UserError
from mlmclm.pydocs import documentation as pydocs


def documents_in(prepared: PreparedCorpus, part: str = "train") -> list[str]:
    """The documents that the blocks hold, the last one (cut by the end) left out."""
    tokens = stream(getattr(prepared, part))
    eos = special_ids(prepared.tokenizer)["eos"]
    tokenizer = load_text_tokenizer(prepared.tokenizer)
    found: list[list[int]] = [[]]
    for token in tokens:
        if token == eos:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(document, skip_special_tokens=False) for document in found[:-1]]


def test_blocks_are_the_documents_joined_by_eos_in_order(lines: Path, texts: list[str], tmp_path: Path) -> None:
    prepared = build(lines, tmp_path, max_validation_tokens=None)
    training = [text for text in texts if not is_held_out(text, below=hash_threshold(0.1), seed=0)]
    assert documents_in(prepared) == training[: len(documents_in(prepared))]
    assert len(documents_in(prepared)) >= len(training) - 1
    assert prepared.documents == len(training)
    assert prepared.tokens == len(prepared.train) * 16
    held = [text for text in texts if text not in set(training)]
    assert documents_in(prepared, "validation") == held[: len(documents_in(prepared, "validation"))]
    assert len(held) - 1 <= len(documents_in(prepared, "validation")) > 10


def test_the_number_of_workers_does_not_change_a_byte(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 3000)
    one, three = (build(lines, tmp_path / str(count), workers=count, max_tokens=9000) for count in (1, 3))
    assert one.key == three.key
    for folder in ("folder", "tokenizer"):
        files = sorted(path.name for path in getattr(one, folder).iterdir())
        assert files == sorted(path.name for path in getattr(three, folder).iterdir())
        for name in files:
            assert (getattr(one, folder) / name).read_bytes() == (getattr(three, folder) / name).read_bytes()


def test_a_limited_corpus_holds_the_documents_with_the_smallest_hashes(
    lines: Path, texts: list[str], tmp_path: Path
) -> None:
    prepared = build(lines, tmp_path, max_documents=50)
    training = [text for text in texts if not is_held_out(text, below=hash_threshold(0.1), seed=0)]
    assert len(training) > 50
    chosen = sorted(training, key=lambda text: text_hash(text, purpose="selection", seed=0))[:50]
    assert prepared.documents == 50
    assert documents_in(prepared) == chosen[: len(documents_in(prepared))]


def test_max_tokens_is_reached_even_if_tokens_are_longer_than_expected(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "CHARACTERS_A_TOKEN", 0.1)
    prepared = build(lines, tmp_path, max_tokens=5000)
    assert prepared.tokens == 5000 // 16 * 16
    monkeypatch.undo()
    plain = build(lines, tmp_path / "b", max_tokens=5000)
    assert plain.folder.name == prepared.folder.name
    assert stream(plain.train) == stream(prepared.train)


@pytest.mark.parametrize(("own_validation", "workers"), [(False, 3), (True, 1)])
def test_a_stream_is_taken_from_its_head(
    texts: list[str], lines: Path, tmp_path: Path, own_validation: bool, workers: int
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines.read_bytes())
    if own_validation:
        (folder / "validation.jsonl").write_text(
            "".join(json.dumps({"text": f"Other {text}"}) + "\n" for text in texts)
        )
    prepared = build(folder, tmp_path, streaming=True, max_tokens=4000, max_validation_tokens=320, workers=workers)
    training = [text for text in texts if own_validation or not is_held_out(text, below=hash_threshold(0.1), seed=0)]
    assert documents_in(prepared) == training[: len(documents_in(prepared))]
    assert prepared.tokens == 4000
    assert len(prepared.validation) > 0
    if not own_validation:
        # The stream ends with the first training document that is not wanted, whoever has read further.
        last = texts.index(training[prepared.documents])
        held = [text for text in texts[:last] if is_held_out(text, below=hash_threshold(0.1), seed=0)]
        assert documents_in(prepared, "validation") == held[: len(documents_in(prepared, "validation"))]
        assert len(documents_in(prepared, "validation")) >= len(held) - 1
    if own_validation:
        assert len(prepared.validation) == 20
        assert all(document.startswith("Other") for document in documents_in(prepared, "validation"))


def test_what_is_prepared_opens_at_once_and_reads_nothing(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(lines, tmp_path)
    monkeypatch.setattr(prepare, "_make", None)
    monkeypatch.setattr(prepare, "prepare_tokenizer", None)
    second = build(lines, tmp_path)
    assert (second.key, second.documents, second.tokens) == (first.key, first.documents, first.tokens)


def test_the_same_text_elsewhere_has_the_same_key_and_other_text_another(lines: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(lines.read_bytes())
    first, second = build(lines, tmp_path), build(copy, tmp_path)
    assert first.folder == second.folder
    copy.write_bytes(lines.read_bytes() + b'{"text": "One more document."}\n')
    assert build(copy, tmp_path).key != first.key


def test_special_tokens_written_in_the_text_stay_text(tmp_path: Path, texts: list[str]) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(f"{text} <|mask|> and <|end_of_text|>" for text in texts))
    prepared = build(source, tmp_path, text_documents="paragraph")
    ids = special_ids(prepared.tokenizer)
    tokens = stream(prepared.train)
    assert ids["mask"] not in tokens
    assert ids["pad"] not in tokens
    assert documents_in(prepared)[0].endswith("<|mask|> and <|end_of_text|>")


def test_the_documentation_corpus_has_training_packages_in_train_only(environment: list[Path], tmp_path: Path) -> None:
    prepared = build("pydocs", tmp_path)
    folder = pydocs.prepare_pydocs(tmp_path)
    for part in ("train", "validation"):
        known = set(pydocs.read_texts(folder, part))
        assert set(documents_in(prepared, part)) <= known
        assert documents_in(prepared, part)


def test_books_are_documents_on_one_side_of_the_division_and_their_number_and_length_are_said(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    books = ["\n\n".join([f"Book {number}.", *texts[number::30]]) for number in range(30)]
    for number, book in enumerate(books):
        (folder / f"{number:02d}.{'txt' if number % 2 else 'md'}").write_text(book + "\n")
    (folder / "cover.png").write_bytes(b"")
    prepared = build(folder, tmp_path)
    held = [book for book in books if is_held_out(book, below=hash_threshold(0.1), seed=0)]
    assert 0 < len(held) < 10
    assert prepared.documents == 30 - len(held)
    assert [book for book in books if book not in held][: len(documents_in(prepared))] == documents_in(prepared)
    facts = describe_corpus(prepared, examples=2)
    assert facts["vocabulary"] == prepared.vocabulary == 320 and len(facts["examples"]) == 2
    assert facts["train"] == {"documents": prepared.documents, "tokens": prepared.tokens, "blocks": len(prepared.train)}
    assert 1 < facts["bytes_per_token"] < 10
    tokenizer = load_text_tokenizer(prepared.tokenizer)
    lengths = sorted(len(tokenizer.encode(book, add_special_tokens=False)) for book in documents_in(prepared))
    assert lengths[0] <= facts["median_document_tokens"] <= lengths[-1]
    assert facts["median_document_tokens"] == int(statistics.median(lengths)) > 100
    assert facts["files_left_out"] == "1 of a kind that is not read (cover.png)"
    said = " ".join(capsys.readouterr().err.split())
    expected = f"{prepared.documents} documents, median length {facts['median_document_tokens']:,} tokens; {len(held)} for validation"
    assert f"{expected}; files left out: 1 of a kind that is not read (cover.png)" in said


def test_progress_names_what_is_going_on_from_the_first_document_to_the_last(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    tell(monkeypatch, lambda *event: seen.append(event))
    monkeypatch.setattr(prepare, "bars", filling.bars)
    config = CorpusConfig(source=str(lines), validation_fraction=0.1, max_tokens=3000, max_validation_tokens=1000)
    trained = TokenizerConfig(train_vocab_size=300)
    prepare_corpus(config, trained, block_length=16, store=tmp_path)
    assert ("tokenising", 3000 // 16 * 16, 3000, "tokens") in seen
    assert list(dict.fromkeys(what for what, *_ in seen)) == [
        "choosing text for the tokenizer", "training the tokenizer",
        "choosing documents", "tokenising", "choosing documents for validation", "tokenising for validation",
    ]  # fmt: skip


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, mlmclm.corpora.prepare_corpus, mlmclm.pydocs.tasks\n"
        "heavy = {'torch', 'transformers', 'datasets', 'tokenizers', 'pyarrow', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_too_little_text_for_one_block_is_an_error(tmp_path: Path, texts: list[str]) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(texts[:60]))
    with pytest.raises(UserError, match=r"train part has .* fewer than one block of 100000") as error:
        build(source, tmp_path, length=100_000, text_documents="paragraph")
    assert "shorter block" in str(error.value)
    assert not [path for path in (tmp_path / "corpora").iterdir() if path.is_dir()]


def test_too_little_validation_text_says_how_to_get_more_before_a_tokenizer_is_trained(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "prepare_tokenizer", None)
    source = tmp_path / "corpus.jsonl"
    rows = [f"Short {number}." for number in range(4)]
    source.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"validation part has at most \d+ tokens, fewer .*validation_fraction"):
        build(source, tmp_path, validation_fraction=0.0001)


def test_of_few_documents_the_one_with_the_smallest_hash_is_held_out(tmp_path: Path, texts: list[str]) -> None:
    few = [f"{text} {' '.join(texts[:40])}" for text in texts[:3]]
    for options in LIMITS:
        source = tmp_path / "corpus.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [few[0], *few]))
        prepared = build(source, tmp_path, validation_fraction=1e-9, **options)
        smallest = min(few, key=lambda text: text_hash(text, purpose="validation", seed=0))
        beginnings = {text[:40] for text in documents_in(prepared, "validation") or [few_tokens(prepared)]}
        assert beginnings == {smallest[:40]}
        assert smallest[:40] not in {text[:40] for text in documents_in(prepared)}


def few_tokens(prepared: PreparedCorpus) -> str:
    """The text of a validation part that is one document without its end."""
    return load_text_tokenizer(prepared.tokenizer).decode(stream(prepared.validation), skip_special_tokens=False)


def test_documents_are_divided_as_before_where_the_fraction_holds_some_out(texts: list[str]) -> None:
    found = divide(texts, fraction=0.1, seed=0, enough=10**9)
    below = hash_threshold(0.1)
    assert found.below == below
    held = [text for text in texts if text_hash(text, purpose="validation", seed=0) < 0.1 * 2.0**64]
    assert [text for text in texts if is_held_out(text, below=below, seed=0)] == held
    assert found.held == sum(len(text.encode()) + 1 for text in held)
    read: list[str] = []
    divide((read.append(text) or text for text in texts), fraction=0.1, seed=0, enough=16)  # type: ignore[func-returns-value]
    assert 1 < len(read) < 100, "the rest is not read"


@pytest.mark.parametrize(("count", "message"), [(1, "single document"), (9, "all of its documents are held out")])
def test_a_source_of_which_nothing_is_left_to_train_on_says_what_to_do(
    tmp_path: Path, texts: list[str], count: int, message: str
) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts[:count], texts[0]]))
    with pytest.raises(UserError, match=message) as error:
        build(source, tmp_path, validation_fraction=0.01 if count == 1 else 0.999999)
    assert "validation_split" in str(error.value) or "Lower validation_fraction" in str(error.value)
    assert not (tmp_path / "tokenizers").exists()


def test_a_stream_is_read_on_until_something_is_held_out(texts: list[str], lines: Path, tmp_path: Path) -> None:
    first = next(number for number, text in enumerate(texts) if is_held_out(text, below=hash_threshold(0.02), seed=0))
    options = {"streaming": True, "max_documents": first // 2, "validation_fraction": 0.02}
    prepared = build(lines, tmp_path, **options)
    assert prepared.documents == first // 2
    tokens = load_text_tokenizer(prepared.tokenizer).decode(stream(prepared.validation), skip_special_tokens=False)
    assert texts[first].startswith(tokens[:40])


def test_a_corpus_without_text_is_an_error(tmp_path: Path, shared_tokenizer: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text('{"text": ""}\n{"text": null}\n{"text": "  "}\n')
    config = CorpusConfig(source=str(source))
    with pytest.raises(UserError, match="it has no text"):
        prepare_corpus(
            config,
            TokenizerConfig(path=str(shared_tokenizer)),
            block_length=8,
            store=tmp_path / "store",
        )


def test_a_vocabulary_that_the_text_cannot_fill_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("only a few words\n\nand no more")
    with pytest.raises(UserError, match=r"train_vocab_size.*smaller vocabulary"):
        build(source, tmp_path, text_documents="paragraph", length=2)


def test_a_name_that_is_nothing_says_where_it_was_looked_for(tmp_path: Path) -> None:
    config = CorpusConfig(source="no-such-corpus")
    with pytest.raises(UserError, match="neither 'pydocs' nor a file or folder") as error:
        prepare_corpus(config, BPE, block_length=16, store=tmp_path, data_root=tmp_path / "data")
    assert str(tmp_path / "data" / "no-such-corpus") in str(error.value)


def test_a_block_of_one_token_is_refused(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 2"):
        build(lines, tmp_path, length=1)


@pytest.fixture
def shared_tokenizer(lines: Path, tmp_path: Path) -> Path:
    """A tokenizer that is there."""
    return build(lines, tmp_path / "tokenizer").tokenizer


def word_level(folder: Path, words: list[str], *, unknown: str | None = "[UNK]", gap: int = 0) -> TokenizerConfig:
    """A tokenizer that knows these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *([unknown] if unknown else [])]
    numbers = {word: number for number, word in enumerate([*special, *words])}
    numbers[words[-1]] += gap
    tokenizer = Tokenizer(models.WordLevel(numbers, unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizerConfig(path=str(path))


def known_words(texts: list[str], share: float) -> list[str]:
    """The most frequent words of the texts that make up at least this share of them."""
    counts = collections.Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text))
    found, so_far = [], 0
    for word, count in counts.most_common():
        if so_far >= share * counts.total():
            break
        found.append(word)
        so_far += count
    return found


def test_a_tokenizer_that_knows_too_little_of_the_text_is_refused_with_the_share(
    texts: list[str], lines: Path, tmp_path: Path
) -> None:
    config = CorpusConfig(source=str(lines), validation_fraction=0.1)
    poor = word_level(tmp_path, known_words(texts, 0.5))
    with pytest.raises(
        UserError, match=r"doesn't fit the text of corpus source .*: (\d\d\.\d)% of .* doesn't know"
    ) as caught:
        prepare_corpus(config, poor, block_length=16, store=tmp_path)
    said = float(re.search(r"([\d.]+)% of", str(caught.value))[1]) / 100  # type: ignore[index]
    known = set(known_words(texts, 0.5))
    words = [
        re.findall(r"\w+|[^\w\s]+", text) for text in texts if not is_held_out(text, below=hash_threshold(0.1), seed=0)
    ]
    unknown = sum(word not in known for text in words for word in text)
    assert said == pytest.approx(unknown / sum(len(text) + 1 for text in words), abs=1e-3)  # an EOS each
    allowed = config.model_copy(update={"max_unknown": 0.9})
    assert prepare_corpus(allowed, poor, block_length=16, store=tmp_path).tokens
    good = word_level(tmp_path, known_words(texts, 0.95))
    assert prepare_corpus(config, good, block_length=16, store=tmp_path).tokens


def test_a_tokenizer_that_drops_what_it_does_not_know_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    alphabet = "".join(map(chr, range(33, 127)))
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate([*special, *alphabet])}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(["日本語の文章です" * 5 + str(n) * (n % 3 == 0) for n in range(200)]))
    config = CorpusConfig(source=str(source), text_documents="paragraph", validation_fraction=0.1)
    with pytest.raises(UserError, match=r"% of the first \d+ documents of the train part have not a single token"):
        prepare_corpus(
            config,
            TokenizerConfig(path=str(tmp_path / "tokenizer.json")),
            block_length=4,
            store=tmp_path,
        )


def test_a_tokenizer_whose_ids_have_gaps_is_refused_before_anything_is_tokenised(
    texts: list[str], lines: Path, tmp_path: Path
) -> None:
    words = known_words(texts, 1.0)
    broken = word_level(tmp_path, words, gap=70_000)
    with pytest.raises(
        UserError, match=rf"token '{re.escape(words[-1])}' has id \d+, but the tokenizer has {len(words) + 5} tokens"
    ):
        prepare_corpus(CorpusConfig(source=str(lines)), broken, block_length=16, store=tmp_path)
    assert not list((tmp_path / "corpora").glob("*/*.bin"))


def test_lone_surrogates_become_question_marks(texts: list[str], tmp_path: Path) -> None:
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": f"{text} \ud800"}) + "\n" for text in texts))
    prepared = build(source, tmp_path)
    assert documents_in(prepared)[0].endswith(". ?")


def test_a_cache_goes_with_an_address() -> None:
    with pytest.raises(ValueError, match="cache goes with an address"):
        CorpusConfig(source="x", shards="/some/folder", cache="/cache")


def test_ray_that_is_asked_for_but_not_there_is_an_error(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no Ray session"):
        build(lines, tmp_path, workers_setting="ray")


def test_every_digit_of_a_large_seed_counts() -> None:
    """BLAKE2b's salt has 16 bytes, which `validation:` and five digits fill."""
    seeds = [12345, 123456, 123457, 2**62]
    assert len({text_hash("a text", purpose="validation", seed=seed) for seed in seeds}) == len(seeds)
    own = hashlib.blake2b(b"a text", digest_size=8, salt=b"validation:7").digest()
    assert text_hash("a text", purpose="validation", seed=7) == int.from_bytes(own, "big"), "as ever"


def test_another_seed_chooses_and_holds_out_others(lines: Path, tmp_path: Path) -> None:
    first, second = (build(lines, tmp_path, max_documents=50, seed=seed) for seed in (0, 1))
    assert first.key != second.key
    assert set(documents_in(first)) != set(documents_in(second))
