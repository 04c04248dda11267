"""All that is loaded from a model folder is covered by its hashes, whichever files transformers finds in it."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.models
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, PreTrainedConfig

from mlmclm.corpora.tokenizer import SpecialTokens, save
from mlmclm.errors import UserError
from mlmclm.evaluation.evaluations import Subject
from mlmclm.evaluation.language_model import LanguageModel
from mlmclm.models.architectures import weights_of
from mlmclm.models.exported_folder import export_folder
from mlmclm.models.folder import content_hashes, load_encoder, load_tokenizer, read_model, tokenizer_hash, weights_hash
from mlmclm.models.given import read_initial
from mlmclm.models.tokenizer_settings import SETTINGS, VOCABULARIES, wrote_settings
from mlmclm.storage.files import read_json, write_json
from small_models import as_written_by_5_23, save_small_decoder, save_small_model, small_tokenizer

TEXTS = ["Anna was in Paris", "a lovely <new> film <eos> here", " Oslo"]
FIRST = ("model.safetensors", "model.safetensors.index.json")


def changed_tensors(file: Path) -> None:
    """Add 1 to all weights of a file."""
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def changed_json(file: Path, **values: Any) -> None:
    write_json(file, {**(read_json(file) if file.is_file() else {}), **values})


def shard(folder: Path, *, index: str = "model.safetensors.index.json", prefix: str = "part") -> list[Path]:
    """Move the weights into two files with an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {f"{prefix}-{number}.safetensors": names[number::2] for number in range(2)}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file, metadata={"format": "pt"})
    write_json(folder / index, {"weight_map": {name: file for file, own in parts.items() for name in own}})
    (folder / "model.safetensors").unlink()
    return [folder / file for file in parts]


def single(folder: Path) -> None:
    """Nothing else."""


def saved_by_transformers(folder: Path) -> None:
    small_tokenizer().save_pretrained(folder)


def sharded(folder: Path) -> None:
    shard(folder)


def named_weights(folder: Path) -> None:
    """transformers_weights names one file, and another one lies beside it."""
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    changed_tensors(folder / "model.safetensors")
    changed_json(folder / "config.json", transformers_weights="other.safetensors")


def named_index(folder: Path) -> None:
    shard(folder, index="other.safetensors.index.json")
    changed_json(folder / "config.json", transformers_weights="other.safetensors.index.json")


def older_tokenizer(folder: Path) -> None:
    """Special and added tokens in files of their own, as before transformers 4.34."""
    (folder / SETTINGS).unlink()
    write_json(folder / "special_tokens_map.json", {"eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"})
    write_json(folder / "added_tokens.json", {"<new>": 399})


def full_settings(folder: Path) -> None:
    """As since then: the settings list added tokens, and the older files are there for older versions."""
    added = {str(number): {"content": text, "special": True} for number, text in enumerate(("<pad>", "<bos>", "<eos>"))}
    changed_json(folder / SETTINGS, added_tokens_decoder=added, chat_template="{{ messages }}")
    write_json(folder / "special_tokens_map.json", {"eos_token": "<eos>"})
    write_json(folder / "added_tokens.json", {})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")


def versioned_tokenizer(folder: Path) -> None:
    shutil.copy(folder / "tokenizer.json", folder / "tokenizer.4.0.json")
    changed_json(folder / SETTINGS, fast_tokenizer_files=["tokenizer.json", "tokenizer.4.0.json"])


def of_class(folder: Path) -> None:
    """A tokenizer whose class, with a vocabulary of its own, follows from the model's type."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["anna", "was", "in", "paris", "a", "lovely", "film", "here", "oslo"],
    ]
    for file in folder.iterdir():
        file.unlink()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertForMaskedLM(config).save_pretrained(folder)


def exported(folder: Path) -> None:
    """An export of this package, to which somebody has added older files."""
    config, weights = read_written(folder)
    shutil.rmtree(folder)
    corpus = folder.with_name("corpus")
    corpus.mkdir()
    save(small_tokenizer().backend_tokenizer, SpecialTokens("<pad>", "<bos>", "<eos>", "<mask>"), corpus)
    export_folder(folder, weights, config, corpus, card="a card", context=64)
    shutil.rmtree(corpus)
    write_json(folder / "added_tokens.json", {"<new>": 399})


def read_written(folder: Path) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
    from transformers import EuroBertForMaskedLM

    model = EuroBertForMaskedLM.from_pretrained(folder)
    return model.config, weights_of(model)


FORMS = [
    single, saved_by_transformers, sharded, named_weights, named_index, older_tokenizer, full_settings, versioned_tokenizer, of_class, exported,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_small_model(tmp_path / "model")


def loaded(folder: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The weights of an encoder, and all that its tokenizer does."""
    tokenizer = load_tokenizer(folder)
    roles = ("bos", "eos", "sep", "cls", "pad", "mask")
    ids = [tokenizer(text)["input_ids"] for text in TEXTS] + [tokenizer.encode(text) for text in TEXTS]
    does = [
        tokenizer.backend_tokenizer.to_str(), [getattr(tokenizer, f"{role}_token_id") for role in roles], ids,
        [tokenizer.decode(each) for each in ids],
    ]  # fmt: skip
    return load_encoder(folder).state_dict(), does


def same(one: tuple[dict[str, torch.Tensor], list[Any]], other: tuple[dict[str, torch.Tensor], list[Any]]) -> bool:
    weights = one[0].keys() == other[0].keys() and all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    return weights and one[1] == other[1]


def mutations(file: Path) -> Iterator[Callable[[], object]]:
    """Changes of a file, each of which could change what is loaded."""
    name = file.name
    # Without the settings that earlier versions exported, a cell has the same tokens, or none to end a text with.
    if name != SETTINGS or not wrote_settings(file.parent):
        yield file.unlink
    if name.endswith(".safetensors"):
        yield lambda: changed_tensors(file)
    elif name == "config.json":
        yield lambda: changed_json(file, rms_norm_eps=0.1, layer_norm_eps=0.1)
        yield lambda: changed_json(file, model_type="modernbert")
    elif name.endswith("index.json"):
        yield lambda: write_json(file, {"weight_map": {"embed": "part-0.safetensors"}})
    elif name.startswith("tokenizer") and name != SETTINGS:
        yield lambda: file.write_text(file.read_text().replace('"special": true', '"special": false').replace("Ġ", "Ą"))
    elif name == "added_tokens.json":
        yield lambda: write_json(file, {"<new>": 398, "lovely": 399})
    elif name in (SETTINGS, "special_tokens_map.json"):
        yield lambda: changed_json(file, eos_token="<pad>")
        yield lambda: changed_json(file, sep_token="film")
        yield lambda: changed_json(file, cls_token=None, pad_token=None)
        yield lambda: changed_json(file, extra_special_tokens=["lovely"])
        yield lambda: changed_json(file, tokenizer_class="BertTokenizer")
        yield lambda: changed_json(file, clean_up_tokenization_spaces=True, split_special_tokens=True)
        yield lambda: changed_json(file, chat_template="{{ other }}", model_max_length=7)
    else:
        yield lambda: file.write_text(file.read_text() + "\nmore\n")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_no_file_changes_what_is_loaded_and_not_the_hash(form: Callable[[Path], None], folder: Path) -> None:
    form(folder)
    before, weights, tokenizer = loaded(folder), weights_hash(folder), tokenizer_hash(folder)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        for number, _ in enumerate(mutations(file)):
            copy = folder.with_name("copy")
            shutil.copytree(folder, copy)
            list(mutations(copy / file.relative_to(folder)))[number]()
            with suppress(UserError):  # refused
                hashes = weights_hash(copy), tokenizer_hash(copy)
                if weights in hashes or tokenizer in hashes:
                    now = loaded(copy)
                    assert weights != hashes[0] or same(now, before), (file.name, number)
                    assert tokenizer != hashes[1] or now[1] == before[1], (file.name, number)
            shutil.rmtree(copy)


WATCH = """
import json, os, sys
from pathlib import Path
from transformers import AutoModelForMaskedLM
from mlmclm.models.folder import load_encoder, load_tokenizer, read_model, weights_hash
folders, found = [Path(name) for name in sys.argv[1:]], {}

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        path = Path(os.path.realpath(arguments[0]))
        for folder in folders:
            if path.is_relative_to(folder):
                found.setdefault(folder.name, []).append(path.relative_to(folder).as_posix())

sys.addaudithook(watch)
for folder in folders:
    load_encoder(folder), load_tokenizer(folder), read_model(AutoModelForMaskedLM, folder)
loaded = {name: sorted(set(opened)) for name, opened in found.items()}
print(json.dumps(loaded))
"""
READ_IN_VAIN = {"chat_template.jinja", "additional_chat_templates/tool.jinja"}
"""Read by transformers, and used only for chats."""


def test_every_file_that_is_opened_while_loading_is_covered_by_the_hash(tmp_path: Path) -> None:
    folders = []
    for form in FORMS:
        folder = tmp_path / form.__name__ / form.__name__
        form(save_small_model(folder))
        folders.append(folder)
    run = subprocess.run(
        [sys.executable, "-c", WATCH, *map(str, folders)], capture_output=True, text=True, timeout=1500
    )
    assert run.returncode == 0, run.stderr[-2000:]
    opened = json.loads(run.stdout.splitlines()[-1])
    assert opened.keys() == {form.__name__ for form in FORMS}
    for folder in folders:
        before = weights_hash(folder), tokenizer_hash(folder)
        for name in set(opened[folder.name]) - READ_IN_VAIN:
            file = folder / name
            kept = file.read_bytes()
            covered = False
            for change in mutations(file):
                change()
                try:
                    covered |= (weights_hash(folder), tokenizer_hash(folder)) != before
                except UserError:
                    covered = True  # refused
                file.write_bytes(kept)
            # The older files are read although they have no effect beside newer ones; the test above sees to that.
            assert covered or (
                folder.name == "full_settings" and name in ("special_tokens_map.json", "added_tokens.json")
            ), name


def test_weights_beside_an_index_of_others_are_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.with_name("kept"))
    shard(folder)
    shutil.copy(folder.with_name("kept"), folder / "model.safetensors")
    for use in (weights_hash, load_encoder, content_hashes, read_initial):
        with pytest.raises(
            UserError, match=r"it has model.safetensors, and model.safetensors.index.json.*Delete the one"
        ):
            use(folder)


def test_an_index_of_the_one_file_beside_it_is_no_contradiction(folder: Path) -> None:
    before = weights_hash(folder)
    write_json(folder / FIRST[1], {"weight_map": dict.fromkeys(load_file(folder / FIRST[0]), FIRST[0])})
    assert weights_hash(folder) == before
    load_encoder(folder)


def test_the_weights_that_the_configuration_names_are_loaded_and_hashed(folder: Path) -> None:
    original = load_encoder(folder).state_dict()
    named_weights(folder)
    found, before = load_encoder(folder).state_dict(), (weights_hash(folder), content_hashes(folder)[0])
    assert all(torch.equal(found[name], original[name]) for name in original)
    changed_tensors(folder / "model.safetensors")
    assert (weights_hash(folder), content_hashes(folder)[0]) == before
    changed_tensors(folder / "other.safetensors")
    assert weights_hash(folder) != before[0] and content_hashes(folder)[0] != before[1]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("../other.safetensors", "outside of the folder"),
        ("absent.safetensors", r"the weights absent.safetensors that config\.json names are missing"),
        ("weights.bin", "a safetensors file or an index"),
        (3, "a safetensors file or an index"),
    ],
)
def test_weights_that_cannot_be_named_are_refused(folder: Path, named: Any, message: str) -> None:
    changed_json(folder / "config.json", transformers_weights=named)
    with pytest.raises(UserError, match=message):
        weights_hash(folder)


def test_an_index_that_leads_out_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.with_name("model.safetensors"))
    write_json(folder / FIRST[1], {"weight_map": {"a": "../model.safetensors"}})
    with pytest.raises(UserError, match="outside of the folder"):
        weights_hash(folder)


def test_a_distributed_checkpoint_beside_the_weights_is_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match="distributed checkpoint shard-00001-model-00001-of-00001"):
        weights_hash(folder)


def test_other_configurations_that_transformers_would_read_are_refused(folder: Path) -> None:
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    changed_json(folder / "config.json", configuration_files=["config.4.0.0.json"])
    for use in (weights_hash, load_encoder, read_initial):
        with pytest.raises(UserError, match="configuration_files"):
            use(folder)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("added_tokens.json", {"lovely": 399}),
        ("special_tokens_map.json", {"eos_token": "<pad>"}),
        (SETTINGS, {"eos_token": "<pad>"}),
        (SETTINGS, {"tokenizer_class": "BertTokenizer"}),
    ],
)
def test_what_changes_tokens_changes_the_hashes(folder: Path, file: str, values: dict[str, Any]) -> None:
    before, initial = (weights_hash(folder), tokenizer_hash(folder)), content_hashes(folder)[0]
    changed_json(folder / file, **values)
    assert weights_hash(folder) != before[0] and tokenizer_hash(folder) != before[1]
    assert content_hashes(folder)[0] != initial


@pytest.mark.parametrize(
    "named", [["sub/tokenizer.4.0.json"], ["../tokenizer.4.0.json"], ["mine.tokenizer.4.0.json"], "x", [1]]
)
def test_a_tokenizer_for_other_versions_that_no_hash_covers_is_refused(folder: Path, named: Any) -> None:
    changed_json(folder / SETTINGS, fast_tokenizer_files=named)
    for key in (weights_hash, tokenizer_hash, content_hashes):
        with pytest.raises(UserError, match="fast_tokenizer_files names"):
            key(folder)


def test_what_changes_no_token_changes_no_hash(folder: Path) -> None:
    before = weights_hash(folder), tokenizer_hash(folder)
    changed_json(folder / SETTINGS, chat_template="{{ messages }}", model_max_length=17)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    settings = read_json(folder / SETTINGS)
    write_json(folder / "special_tokens_map.json", {"eos_token": settings["eos_token"]})
    assert (weights_hash(folder), tokenizer_hash(folder)) == before


def test_the_same_tokenizer_with_a_model_of_another_type_is_another(folder: Path) -> None:
    saved_by_transformers(folder)
    before = tokenizer_hash(folder)
    changed_json(folder / "config.json", model_type="modernbert")
    assert tokenizer_hash(folder) != before


def test_the_hash_of_an_export_is_that_of_configuration_weights_and_the_corpus_s_tokenizer(folder: Path) -> None:
    corpus = folder.with_name("corpus")
    corpus.mkdir()
    save(small_tokenizer().backend_tokenizer, SpecialTokens("<pad>", "<bos>", "<eos>", "<mask>"), corpus)
    config, weights = read_written(folder)
    target = folder.with_name("export")
    export_folder(target, weights, config, corpus, card="a card", context=64)
    parts = [as_written_by_5_23(target / "config.json")]
    parts += [file.read_bytes() for file in (target / "model.safetensors", corpus / "tokenizer.json")]
    expected = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    assert weights_hash(target) == expected
    assert tokenizer_hash(target) == tokenizer_hash(corpus)
    (target / "checksums.json").unlink()
    assert weights_hash(target) == expected and tokenizer_hash(target) == tokenizer_hash(corpus)
    changed_json(target / SETTINGS, eos_token="<pad>")
    assert weights_hash(target) != expected


def test_where_generated_text_ends_is_in_the_key_of_an_evaluation(tmp_path: Path) -> None:
    folder = save_small_decoder(tmp_path / "decoder")
    before = Subject.of("model", folder, "causal")
    assert LanguageModel.load(folder, "causal").model.generation_config.eos_token_id == 2
    changed_json(folder / "generation_config.json", eos_token_id=[2, 3], repetition_penalty=3.0)
    assert Subject.of("model", folder, "causal").tokenizer != before.tokenizer
    generation = LanguageModel.load(folder, "causal").model.generation_config
    assert generation.eos_token_id == [2, 3] and generation.repetition_penalty in (None, 1.0)
    (folder / "generation_config.json").unlink()
    assert LanguageModel.load(folder, "causal").model.generation_config.eos_token_id == 2


def test_a_loaded_model_says_where_it_came_from(folder: Path) -> None:
    model, _ = read_model(transformers.AutoModel, folder)
    assert model.name_or_path == model.config.name_or_path == str(folder)


def test_every_file_that_a_tokenizer_of_transformers_reads_is_known() -> None:
    names: set[str] = set()
    for file in Path(transformers.models.__path__[0]).glob("*/tokenization_*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and "VOCAB_FILES_NAMES" in ast.unparse(node.targets[0]):
                with suppress(ValueError):  # a few are not literals
                    names |= set(ast.literal_eval(node.value).values())
    names -= {"tokenizer.json", SETTINGS}
    assert len(names) > 10
    assert not {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in VOCABULARIES)}
