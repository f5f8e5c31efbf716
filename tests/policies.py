"""Policies of models that are loaded already, for tests that need no run."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.tiny_models import tiny_tokenizer
from tinyrl.models.device import Device
from tinyrl.models.policy import Policy
from tinyrl.runs.resolve import config_of

CPU = torch.device("cpu")


def policy_of(
    model: PreTrainedModel | PeftModel,
    *,
    device: torch.device = CPU,
    reference: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **sections: Any,
) -> Policy:
    """Make the policy of a GRPO run with these settings around a model, computing in the dtype of its weights."""
    values = {"method": "grpo", "reference": {"kind": "auto" if reference else "none"}, **sections}
    return Policy(
        model,
        config=config_of(values),
        tokenizer=tokenizer or tiny_tokenizer(),
        device=Device(device, model.dtype),
    )
