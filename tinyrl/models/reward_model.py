"""Reward models: a classification model of its own, or an adapter and a head on the shared base.

A classification model has its own tokenizer and template (rewards/model_text.py). Decoder models are scored at the last
token of each row, by its length: the library looks for the last token that is not padding, which is the wrong one when
pad == eos. Encoder models (a `classifier` over a pooled state) are called as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tinyrl.models.batch import batch_of, examples
from tinyrl.models.checks import check_head, few_tokens
from tinyrl.models.device import move_to_device
from tinyrl.models.loading import (
    FULL_REPORT,
    NoHead,
    check_sizes,
    check_vocabulary,
    check_weights,
    embedding_rows,
    load_tokenizer,
    read_config,
    resolve_model_path,
    weight_files,
)
from tinyrl.models.logprobs import Head
from tinyrl.models.micro_batches import MicroBatches, SequenceLengths, Work
from tinyrl.models.parallel import ALONE, World
from tinyrl.models.reading import reading
from tinyrl.models.states import backbone_of, last_states

SCORE_HEAD = "score_head.safetensors"
SCORE_OFFSET = "tinyrl_score_offset"  # in a classification model's config: added, so that training rows average 0


class SequenceRewardModel:
    """Any sequence-classification model with one label, or one chosen label of several. Frozen, no dropout."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: int | str | None,
        device: torch.device,
    ) -> None:
        self.model = move_to_device(model, device).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device = device
        self.label = find_label(model.config, label)
        self.offset = float(getattr(model.config, SCORE_OFFSET, 0.0))
        self.max_tokens = classifier_max_tokens(model.config, tokenizer)
        self.num_ids = embedding_rows(model)

    @torch.inference_mode()
    def reward_scores(
        self, tokens: list[list[int]], *, micro_batches: MicroBatches, world: World = ALONE
    ) -> list[float]:
        """Return the chosen label's logit of each row; tokens without an embedding (an image's) are left out."""
        tokens = [[i for i in row if i < self.num_ids] or [0] for row in tokens]
        items = examples(tokens, [[] for _ in tokens])
        scores = torch.zeros(len(tokens), dtype=torch.float64)

        def run(rows: list[int]) -> None:
            batch = batch_of([items[i] for i in rows], device=self.device)
            head = score_head_of(self.model)
            if head is not None:  # in float32: bfloat16 scores of different completions may be equal
                bias = None if head.bias is None else head.bias.float()
                states = last_states(backbone_of(self.model), batch).float()
                logits = nn.functional.linear(states, head.weight.float(), bias)
            else:
                logits = self.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            scores[rows] = (logits[:, self.label].float() + self.offset).double().cpu()

        micro_batches.run(Work(SequenceLengths.of(items, packed=False), run), world=world)
        world.sum(scores)
        return scores.tolist()


def positions_of(config: Any) -> int:
    """Return the most tokens of a row: the model's positions, or 2^20 if its config names none. With longrope the
    original positions: a longer row changes the rotation of all rows of its batch, but not of keys in the cache, so a
    token's probability would depend on the other rows.
    """
    most = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # of all layers, or by their types
    originals = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([most, *originals])


def classifier_max_tokens(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens of a text: the model's positions, or fewer where the tokenizer allows fewer."""
    return min(positions_of(config), int(tokenizer.model_max_length))


def find_label(config: Any, label: int | str | None) -> int:
    """Return the index of `reward.model_label` (an index or a name); a one-label model needs none."""
    names = {int(i): str(name) for i, name in (config.id2label or {}).items()}
    for index in range(config.num_labels):
        if label in (index, names.get(index)) or (label is None and config.num_labels == 1):
            return index
    raise ValueError(f"reward.model_label={label!r} is not one of {names}")


def score_head_of(model: PreTrainedModel) -> nn.Linear | None:
    """Return the layer by which a decoder scores the state of the last token; None for an encoder, called as it is."""
    score = getattr(model, "score", None)
    return score if isinstance(score, nn.Linear) else None


def load_classifier(path: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a sequence-classification model. Raises ValueError when it cannot be read, is incomplete or scores otherwise
    than by its score head, and its subclass NoHead when the folder holds a language model.
    """
    resolved = resolve_model_path(path)
    loaded = None
    with reading(f"cannot load a classification model from {path!r} (config.json, *.safetensors)", resolved):
        config = read_config(resolved, trust_remote_code=trust_remote_code)
        if trust_remote_code or type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            check_sizes(config, weight_files(resolved, config))
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                resolved, dtype=dtype, trust_remote_code=trust_remote_code, **FULL_REPORT
            )
    if loaded is None:
        raise NoHead(f"{path!r} is not a reward model: {type(config).__name__} has no classification model")
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        raise NoHead(f"{path!r} is not a reward model: its weights have no {missing[-1]} (is it a language model?)")
    check_weights(model, found, path=path)
    if (score := score_head_of(model)) is None:
        few_tokens(model, path=path)
    else:
        check_head(model, Head(score.weight, score.bias), backbone_of(model))
    return model


def load_reward_model(
    path: str, *, dtype: torch.dtype, label: int | str | None, device: torch.device, trust_remote_code: bool = False
) -> SequenceRewardModel:
    """Load a sequence-classification model that scores texts. Raises ValueError for what a user can fix."""
    model = load_classifier(path, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, needs_eos=False)
    check_vocabulary(tokenizer, model, path=path)
    return SequenceRewardModel(model, tokenizer, label=label, device=device)
