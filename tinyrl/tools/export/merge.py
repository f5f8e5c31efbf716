"""A policy merged in float32 into a freshly read base, saved, read back, and compared with what was merged.

Nothing of a training process is used: not its copy of the base (which may be 4-bit or bfloat16), nor its merged copies
for sampling. What is compared is what another program will read: the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.generation.engine import end_at_turn_end
from tinyrl.models.build import load_base
from tinyrl.models.loading import load_causal_lm, load_model_config, save_tokenizer
from tinyrl.models.lora import load_start_adapter
from tinyrl.models.roles import weight_bytes
from tinyrl.models.tokens import token_ids
from tinyrl.runs.checkpoint import check_room
from tinyrl.runs.records import samples_of
from tinyrl.runs.run_dir import RunDir

MOST_POSITIONS, MOST_LOGITS = 4096, 80_000_000  # compared, and the numbers that they may have together
LONGEST = 256  # tokens of a sequence
MADE_UP = 16  # sequences, where the run has no samples
MOST_GAP = 5e-4  # nats, mean over the vocabulary, merged and not, both in float32
MOST_CHANGED = 0.01  # share of greedy tokens that may change when the merged weights are rounded


Sequence = tuple[list[int], int]  # tokens, and the place of the first that the policy wrote: what counts begins there


@dataclass(frozen=True)
class Fidelity:
    """Mean difference of a position's log-probabilities, where it is largest (a single token that hardly ever comes may
    be further off); share of positions with another likeliest token; number of positions.
    """

    gap: float
    changed: float
    positions: int


def dtype_of(config: Config, wanted: str, *, trust_remote_code: bool) -> torch.dtype:
    """The dtype to save in; `auto` is that of the base's own files."""
    if wanted != "auto":
        return getattr(torch, wanted)
    path, revision = config.model.path, config.model.revision
    own = load_model_config(path, revision=revision, trust_remote_code=trust_remote_code)
    named = getattr(own.get_text_config(), "dtype", None) or getattr(own, "dtype", None)
    return named if isinstance(named, torch.dtype) else torch.float32


def write_merged(
    config: Config,
    checkpoint: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    run: RunDir,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
) -> Fidelity:
    """Save the policy of a checkpoint as one model in `dtype`, read it back, and say how near it is."""
    policy = read_policy(config, checkpoint, trust_remote_code=trust_remote_code)
    sequences = sequences_of(run, tokenizer, vocabulary=policy.get_input_embeddings().weight.shape[0])  # pyright: ignore
    wanted = distributions(policy, sequences)
    merged: Any = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
    merged.to(dtype)
    end_at_turn_end(merged, tokenizer, config.task)
    check_room(folder, needed=weight_bytes(merged.parameters()))
    merged.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, revision=config.model.revision)
    del policy, merged
    trust = trust_remote_code
    saved = load_causal_lm(str(folder), dtype=dtype, trust_remote_code=trust)
    return compared(wanted, distributions(saved, sequences))


def read_policy(config: Config, checkpoint: Path, *, trust_remote_code: bool) -> PreTrainedModel | PeftModel:
    """Load the policy in float32: the unquantised base with the checkpoint's adapter, or the checkpoint's own model."""
    if not config.lora.enabled:
        return load_causal_lm(str(checkpoint), dtype=torch.float32)
    plain = config.model_copy(update={"model": config.model.model_copy(update={"quantization": None})})
    base = load_base(plain, config.model.path, dtype=torch.float32, trust_remote_code=trust_remote_code)
    return load_start_adapter(base, str(checkpoint)).eval()  # pyright: ignore[reportReturnType]


def sequences_of(run: RunDir, tokenizer: PreTrainedTokenizerBase, *, vocabulary: int) -> list[Sequence]:
    """Prompts of the run and what its policy wrote to them last; made-up tokens where it has kept no samples."""
    rows = list(samples_of(run.samples, [], kind="eval"))
    last = max((row["step"] for row in rows), default=0)
    written = []
    for row in (row for row in rows if row["step"] == last):
        before = token_ids(tokenizer, str(row.get("prompt", "")))[-LONGEST:] or [0]
        if after := token_ids(tokenizer, str(row.get("completion", "")))[:LONGEST]:
            written.append((before + after, len(before)))
    made_up = [([(7 * i + 13 * j + 1) % vocabulary for i in range(32)], 1) for j in range(MADE_UP)]
    most = max(64, min(MOST_POSITIONS, MOST_LOGITS // vocabulary))
    sequences = written or made_up
    positions = accumulate(len(tokens) - first for tokens, first in sequences)
    return sequences[: max(1, sum(count <= most for count in positions))]


@torch.inference_mode()
def distributions(model: PreTrainedModel | PeftModel, sequences: list[Sequence]) -> list[Tensor]:
    """Log-probabilities (n, V) in float32 of the next token, before each of the n tokens that count."""
    found = []
    for tokens, first in sequences:
        logits = model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1]
        found.append(logits.float().log_softmax(-1))
    return found


def compared(wanted: list[Tensor], saved: list[Tensor]) -> Fidelity:
    positions = sum(len(each) for each in wanted)
    pairs = list(zip(wanted, saved, strict=True))
    changed = sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in pairs)
    gap = max(float((a - b).abs().mean(-1).max()) for a, b in pairs)
    return Fidelity(gap, changed / positions, positions)
