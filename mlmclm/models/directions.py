"""Trial of a transformers model, on a few tokens: can it run in either direction over packed sequences?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError, one_line
from mlmclm.models.architectures import ARCHITECTURES
from mlmclm.models.attention import use_attention
from mlmclm.models.encoder import PADDED, encode, pack_ids

KNOWN = frozenset({*ARCHITECTURES, "llama", "modernbert-decoder"})
"""Model types that the tests compare with transformers, so none of their models is tried."""
TOLERANCE = 1e-3
"""Largest difference between two ways of computing the same in fp32, as a share of the largest number."""


def use_either_direction(model: PreTrainedModel, folder: Path) -> None:
    """Apply `use_attention` to a model in evaluation mode, if that decides what a token sees and changes nothing else.

    An encoder whose attention can't be replaced (a bias by distance, as in DeBERTa) keeps its own forward (`PADDED`).

    Raises:
        UserError: the model's own forward isn't an encoder's: a token sees no later ones, or sees padding.
    """
    if model.config.model_type in KNOWN:
        use_attention(model)
        return
    original = model.config._attn_implementation
    fault = _tried(_fault, model)
    if fault is not None and not model.config.is_encoder_decoder:
        model.set_attn_implementation(original)
        setattr(model, PADDED, True)
        own_fault = _tried(_own_fault, model)
        fault = None if own_fault is None else f"{fault}; in its own forward, {own_fault}"
    if fault is not None:
        raise UserError(
            f"{folder}: a model of the architecture {model.config.model_type!r} cannot be fine-tuned: its "
            f"attention must work in both directions ({fault}). Architectures that can are {', '.join(sorted(KNOWN))}, and "
            "others whose attention transformers can exchange."
        )


def _tried(trial: Callable[[PreTrainedModel], str | None], model: PreTrainedModel) -> str | None:
    try:
        return trial(model)
    except Exception as error:  # whatever a model raises that cannot run so
        return f"{type(error).__name__}: {one_line(error, 200)}"


@torch.no_grad()
def _own_fault(model: PreTrainedModel) -> str | None:
    """Return what is wrong with the states of a model's own forward with padding; None if nothing."""
    first, second = np.array([5, 6, 7, 8]), np.array([9, 10, 11])
    states, changed_states = (_states(model, [first, row], False) for row in (second, np.append(second[:-1], 12)))
    if not _near(states[:4], model(input_ids=torch.from_numpy(first)[None]).last_hidden_state[0]):
        return "what a text gives depends on the texts beside it"
    if not _near(states[4:], _states(model, [second], False)):
        return "what a text gives depends on its padding"
    return "its tokens see no later ones" if torch.equal(states[4:6], changed_states[4:6]) else None


@torch.no_grad()
def _fault(model: PreTrainedModel) -> str | None:
    """Return what is wrong with the model's states under this package's attention; None if nothing."""
    if getattr(model.config, "attn_logit_softcapping", None):
        return "it caps the logits of its attention"
    first, second = np.array([5, 6, 7, 8]), np.array([9, 10, 11])
    expected: Tensor = model(input_ids=torch.from_numpy(first)[None]).last_hidden_state[0]
    use_attention(model)
    changed = np.array([*first[:-1], 12])
    matches = []
    for causal in (False, True):
        # A changed last token must change the states before it if and only if attention is bidirectional; it must never
        # change the sequence beside it.
        states, after = _states(model, [first, second], causal), _states(model, [changed, second], causal)
        if torch.equal(states[0], after[0]) != causal:
            return "its tokens still see later ones" if causal else "its tokens see no later ones"
        if not torch.equal(states[4:], after[4:]) or not _near(states[4:], _states(model, [second], causal)):
            return "sequences side by side are not kept apart"
        # The model's own forward has one direction only, so only that one can match.
        matches.append(_near(states[:4], expected))
    return None if any(matches) else "in neither direction does it compute what transformers does"


def _states(model: PreTrainedModel, sequences: Sequence[np.ndarray], causal: bool) -> Tensor:
    """Compute hidden states [tokens, hidden] of packed sequences."""
    packing = Packing.of([len(ids) for ids in sequences])
    return encode(model, pack_ids(sequences, packing), packing, causal=causal, fused=False)[: packing.tokens]


def _near(states: Tensor, reference: Tensor) -> bool:
    return bool((states - reference).abs().max() <= TOLERANCE * reference.abs().max())
