"""The forward pass of a decoder by the library's modules: what models without our layers train with."""

from __future__ import annotations

from torch import Tensor, nn

from tinyrl.models.batch import Batch
from tinyrl.models.packing import attending


def library_states(backbone: nn.Module, batch: Batch) -> Tensor:
    """Compute the hidden states of every position by the library's modules, flat (b * L, H)."""
    with attending(backbone, batch.packing):
        output = backbone(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
            **batch.image_inputs,
        )
    return output.last_hidden_state.flatten(0, 1)
