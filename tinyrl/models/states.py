"""Hidden states of a batch from a decoder, by our layers where they agree with the library's, else by the library's."""

from __future__ import annotations

from torch import Tensor, nn

from tinyrl.models.batch import Batch, library_states
from tinyrl.models.checks import supports_fused_layers
from tinyrl.models.device import states_at
from tinyrl.models.layers import fused_states


def backbone_of(model: nn.Module) -> nn.Module:
    """Return the decoder below the language-model head (or below a classification head)."""
    prefix = getattr(model, "base_model_prefix", "")
    backbone = getattr(model, prefix, None) if prefix else None
    if backbone is None or backbone is model:
        raise ValueError(
            f"{type(model).__name__} keeps no separate decoder under `{prefix}` to read hidden states from"
        )
    return backbone


def all_states(backbone: nn.Module, batch: Batch) -> Tensor:
    """Compute the hidden states of every position, flat (b * L, H): the one forward pass of a batch, for all roles."""
    fused = batch.packing is not None and supports_fused_layers(backbone)
    return (fused_states if fused else library_states)(backbone, batch)


def response_states(backbone: nn.Module, batch: Batch) -> Tensor:
    """Compute the hidden states that predict each response token, flat (N, H), in the order of `batch.row`."""
    return states_at(all_states(backbone, batch), batch.state_index)


def last_states(backbone: nn.Module, batch: Batch) -> Tensor:
    """Compute the hidden state of each row's last token, (b, H), which a reward model scores."""
    assert batch.last_index is not None, "the batch was packed without its last tokens"
    return states_at(all_states(backbone, batch), batch.last_index)
