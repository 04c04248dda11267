"""Reading of a tokenizer as its tokenizer.json defines it, whatever class of transformers the settings beside it name.

transformers 5 rebuilds the parts of some classes (GPT-2, Qwen2, BERT, RoBERTa, ...) and ignores the file's normalizer and
pre-tokenizer. The model would then get other tokens than it was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NORMALIZER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""BERT's settings -> their names in tokenizer.json."""
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes without settings of their own: the name in transformers 4 and that in 5."""


def read_tokenizer(place: str, **options: Any) -> PreTrainedTokenizerFast:
    """Read the fast tokenizer of a folder or of a name on the Hub, without running code from there.

    The class of transformers supplies what files of older versions lack: the names of special tokens that are in the
    vocabulary, the names of a model's inputs, and the post-processor if tokenizer.json has none.

    Args:
        options: options of `from_pretrained`.

    Raises:
        Exception: there is no tokenizer.json that the library can parse, or a file beside it can't be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    tokenizer = PreTrainedTokenizerFast.from_pretrained(place, **options)
    settings = get_tokenizer_config(place, **options)
    if settings.get("tokenizer_class") in PLAIN:
        return tokenizer
    _check_normalizer(tokenizer.backend_tokenizer.normalizer, settings)
    # The class may want packages or files that aren't there, or code of the Hub; the tokens don't depend on it.
    with suppress(Exception):
        named = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
        tokenizer.model_input_names = named.model_input_names
        vocabulary = tokenizer.get_vocab()
        for role in ROLES:
            if getattr(tokenizer, role) is None and getattr(named, role) in vocabulary:
                setattr(tokenizer, role, getattr(named, role))
        if not tokenizer("", add_special_tokens=True)["input_ids"]:
            tokenizer.backend_tokenizer.post_processor = named.backend_tokenizer.post_processor
    return tokenizer


def _check_normalizer(normalizer: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if BERT's settings contradict tokenizer.json: its class in transformers follows the settings."""
    for setting, attribute in _NORMALIZER.items() if type(normalizer).__name__ == "BertNormalizer" else ():
        actual, lower = getattr(normalizer, attribute), normalizer.lowercase
        configured = settings.get(setting, actual)
        # Without a setting, accents are stripped if capital letters are lowered.
        if (lower if configured is None else configured) != (lower if actual is None else actual):
            raise ValueError(
                f"tokenizer_config.json says {setting}: {configured}, and tokenizer.json {attribute}: {actual}. Make them equal, as the model was trained"
            )
