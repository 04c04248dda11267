"""The optimizer of a fine-tuning cell."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from mlmclm.backends.adamw import Optimizer, Settings
from mlmclm.backends.choice import backend_of
from mlmclm.finetuning.protocol import Protocol


def optimizer_for(encoder: PreTrainedModel, head: nn.Module, protocol: Protocol, peak: float, steps: int) -> Optimizer:
    """Return the device backend's AdamW over the parameters of the encoder and the head.

    Args:
        peak: the cell's learning rate, the peak of its schedule. A decoupled weight decay is relative to it.
        steps: total number of optimizer steps.
    """
    decay = protocol.optimizer_weight_decay(peak)
    settings = Settings(protocol.adam_beta1, protocol.adam_beta2, protocol.adam_epsilon, decay)
    parameters = [*encoder.parameters(), *head.parameters()]
    return backend_of(encoder.device).adamw(parameters, encoder.get_input_embeddings(), settings, steps)
