"""Freshly initialised models of named sizes, and a model's loss at the labelled positions."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from mlmclm.backends.choice import autocast, backend_of
from mlmclm.backends.compute_type import compute_type
from mlmclm.backends.packing import Chosen, Packing
from mlmclm.models.architectures import ARCHITECTURES, FRESH, before_head, final_states, layers_of
from mlmclm.models.attention import use_attention
from mlmclm.models.compilation import compile_layers
from mlmclm.models.cross_entropy import LabelledCrossEntropyHead
from mlmclm.models.encoder import encode
from mlmclm.models.sizes import SIZES

MOST_CHOSEN = 0.75
"""Largest share of labelled tokens for which the last layer computes them alone; selecting them has a price too."""


def load_prepared_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a prepared tokenizer folder (tokenizer.json); pad, bos, eos and mask tokens are set."""
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def model_config(size: str, tokenizer: PreTrainedTokenizerFast, length: int) -> PreTrainedConfig:
    """Return the configuration of a size of `SIZES` for its architecture, with a longest sequence in tokens."""
    shape = SIZES[size]
    return FRESH[shape.architecture](shape, tokenizer, length)


def build_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Build the model in fp32 on the CPU, with weights that depend on the configuration and the seed only.

    Weights are normal (`Size.initial_deviation`). transformers sets the pad token's row of the embedding to 0. If EOS
    is also the pad token, as in Llama 3's tokenizer, the row is drawn like any other, because EOS separates documents.
    """
    padding = config.pad_token_id
    drawn = copy.deepcopy(config)
    if padding == config.eos_token_id:
        drawn.pad_token_id = None
    # Building a model must not advance the global random generator.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[config.model_type].model(drawn)
    model.config.pad_token_id = padding
    return model


def hollow(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model without weights: parameters are on the `meta` device until `load_weights`; buffers are real."""

    def shape_of(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter.is_meta:  # a tied one stays the same
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    # A default device of `meta` would make buffers hollow too, such as the frequencies of the rotary embedding.
    hook = register_module_parameter_registration_hook(shape_of)  # type: ignore[arg-type]  # it may return a parameter
    try:
        with torch.random.fork_rng(devices=[]):
            return ARCHITECTURES[config.model_type].model(config)
    finally:
        hook.remove()


def round_states(_: nn.Module, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round the states that go into a model's first layer to the dtype of products. Each layer adds to them in that dtype."""
    return states[0].to(compute_type(states[0])), *states[1:]


class PretrainingModel(nn.Module):
    """A model with its loss, a sum over labelled positions; logits exist at those positions only, a chunk at a time.

    The weights keep the names of the Hugging Face model (`weights_of(.model)`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        precision: str,
        activation_checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """Take over `model`; if `compiled`, with torch.compile (`compile_layers`) in place of the backend's blocks."""
        super().__init__()
        use_attention(model, compiled=compiled)
        self.residual_bf16 = precision == "bf16-residual"
        if self.residual_bf16:
            # Don't round the embedding's output: transformers computes the rotary embedding's angles in its dtype.
            layers_of(model.base_model)[0].register_forward_pre_hook(round_states)
        # No batch has padding, and the pad token may be EOS, whose row would get no gradient.
        model.get_input_embeddings().padding_idx = None
        linear = model.get_output_embeddings()
        model.set_output_embeddings(LabelledCrossEntropyHead(linear.weight, linear.bias))
        self.model = model
        self.bf16 = precision != "fp32"
        self.compiled = compiled
        self.fused = not compiled and not activation_checkpointing
        """The backend may compute whole blocks at once."""
        if compiled:
            compile_layers(layers_of(model.base_model), again=activation_checkpointing)
        elif activation_checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        causal: bool,
        packing: Packing | None = None,
        count: bool = False,
        where: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of -ln p(label) in nats over the positions whose label isn't -100, an fp32 scalar.

        Args:
            input_ids: int64 [sequences, length].
            labels: int64 [sequences, length], aligned with the position whose output predicts them.
            causal: hide later positions.
            packing: layout of the documents in the concatenated sequences (a `Packing.of`): attention stays within
                each, and positions start anew. By default a sequence is one document.
            count: return fp64 [2] without a gradient: that sum, and the number of these positions whose most probable
                token is the label.
            where: which positions have labels, int64 [labelled] in rising order. Without it the host waits for the
                device to find them.
        """
        where, hidden = self._predicting(input_ids, labels, causal, packing, where)
        return self._losses(hidden, labels.flatten()[where], count)

    def _predicting(
        self,
        input_ids: Tensor,
        labels: Tensor,
        causal: bool,
        packing: Packing | None,
        where: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the labelled positions, int64 [labelled], and the LM head's input at them, [labelled, hidden]."""
        # From here on only labelled positions are computed; in MLM they are a minority.
        if where is None:
            where = (labels.flatten() != -100).nonzero().flatten()
        with autocast(input_ids.device, self.bf16):
            hidden = self._final_states(input_ids, where, causal, packing)  # [labelled, hidden]
            return where, before_head(self.model, hidden)

    def _losses(self, hidden: Tensor, labels: Tensor, count: bool) -> Tensor:
        head = self.model.get_output_embeddings()
        summed: Tensor = head(hidden, labels, bf16=self.bf16, count=count)
        return summed

    def _final_states(self, input_ids: Tensor, where: Tensor, causal: bool, packing: Packing | None) -> Tensor:
        """Compute the final hidden states [labelled, hidden] at `where`, int64 [labelled], in the concatenated
        sequences."""
        longest = input_ids.shape[1] if packing is None else int(packing.lengths.max())
        backend = backend_of(input_ids.device)
        kind = torch.bfloat16 if self.bf16 and backend.has_bf16() else self.model.dtype
        residual = kind if self.residual_bf16 else None
        fused = self.fused and backend.fuses(self.model.base_model, longest, kind, residual)
        # Equally long sequences need no packing in the model's own forward.
        if packing is None and not fused:
            return final_states(self.model.base_model, input_ids, causal=causal).flatten(0, 1)[where]
        packing = packing or Packing.uniform(*input_ids.shape, input_ids.device)
        if self.compiled:
            packing.settle()
        row = functional.pad(input_ids.reshape(1, -1), (0, packing.padded_tokens - packing.tokens))
        # The last layer's queries are needed at labelled positions only. Selecting them saves most where few are
        # labelled.
        if fused and not causal and 0 < len(where) <= MOST_CHOSEN * packing.tokens:
            return backend.blocks(self.model.base_model, row, packing, causal=causal, chosen=Chosen(packing, where))
        return encode(self.model.base_model, row, packing, causal=causal, fused=fused)[where]
