"""A policy merged in float32 into a freshly loaded base, saved, loaded back, and compared with what was merged.

Nothing of a training process is used: not its copy of the base (which may be 4-bit or bfloat16), nor its merged copies
for sampling. The files are compared, since another program will read those.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from tinyrl.config.schema import Config
from tinyrl.generation.engine import end_at_turn_end
from tinyrl.models.build import load_base
from tinyrl.models.loading import load_causal_lm, load_model_config, load_tokenizer, save_tokenizer
from tinyrl.models.lora import load_start_adapter
from tinyrl.models.roles import weight_bytes
from tinyrl.models.tokens import token_ids
from tinyrl.runs.checkpoint import check_room
from tinyrl.runs.records import samples_of
from tinyrl.runs.run_dir import RunDir

MAX_POSITIONS, MAX_LOGITS = 4096, 80_000_000  # compared, and the numbers that they may have together
MAX_TOKENS = 256  # of a prompt, and of a completion
MAX_LOGPROB_DIFF = 5e-4  # nats, mean over the vocabulary, merged and not, both in float32
MAX_CHANGED = 0.01  # share of greedy tokens that may change when the merged weights are rounded


@dataclass(frozen=True)
class MergeCheck:
    """gap: mean difference of a position's log-probabilities, at the position where it is largest (a single rare token
    may be further off); changed: share of positions with another likeliest token.
    """

    gap: float
    changed: float
    positions: int


def write_merged(
    config: Config,
    checkpoint: Path,
    folder: Path,
    *,
    dtype: str,
    run: RunDir,
    accept_changes: bool,
    trust_remote_code: bool,
) -> tuple[str, list[str]]:
    """Save the policy of a checkpoint as one model and load it back. dtype: auto is that of the base's own files.
    Returns the dtype's name, and notes on the difference; raises ValueError where that is too large.
    """
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    path, own = config.model.path, {"revision": config.model.revision, **trust}
    saved = None if dtype == "auto" else getattr(torch, dtype)
    if saved is None:
        of_base = load_model_config(path, **own)
        saved = getattr(of_base.get_text_config(), "dtype", None) or getattr(of_base, "dtype", None) or torch.float32
    tokenizer = load_tokenizer(path, **own)
    if config.lora.enabled:
        plain = config.model_copy(update={"model": config.model.model_copy(update={"quantization": None})})
        base = load_base(plain, path, dtype=torch.float32, **trust)
        policy: Any = load_start_adapter(base, str(checkpoint)).eval()
    else:
        policy = load_causal_lm(str(checkpoint), dtype=torch.float32)
    sequences = sequences_of(run, tokenizer, vocabulary=policy.get_input_embeddings().weight.shape[0])
    wanted = distributions(policy, sequences)
    merged: Any = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
    merged.to(saved)
    end_at_turn_end(merged, tokenizer, config.task)
    check_room(folder, needed=weight_bytes(merged.parameters()))
    merged.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, revision=config.model.revision)
    del policy, merged
    found = compared(wanted, distributions(load_causal_lm(str(folder), dtype=saved, **trust), sequences))
    name, quantization = str(saved).removeprefix("torch."), config.model.quantization
    differ = f"log-probabilities differ by at most {found.gap:.2g} on average over the vocabulary"
    change = f"{found.changed:.2%} of {found.positions} greedy tokens change"
    if name == "float32" and not found.gap <= MAX_LOGPROB_DIFF:
        raise ValueError(f"the saved model is not the policy: {differ}, over {MAX_LOGPROB_DIFF:g}; it is not kept")
    if not found.changed <= MAX_CHANGED and not accept_changes:
        raise ValueError(
            f"in {name} {change}, more than {MAX_CHANGED:.0%}, so it is not kept: --dtype float32 keeps them, "
            "--accept-changes keeps this all the same"
        )
    merged_into = f"trained on a {quantization} base and merged into the unquantised one: outputs differ a little"
    return name, [f"{name}: {differ}, {change}", *([merged_into] if quantization else [])]


def sequences_of(run: RunDir, tokenizer: Any, *, vocabulary: int) -> list[tuple[list[int], int]]:
    """Return tokens, and the place of the first that the policy wrote: held-out prompts and completions of the last
    evaluation; made-up tokens where the run has no samples.
    """
    rows, sequences = list(samples_of(run.samples, [], kind="eval")), []
    last = max((row["step"] for row in rows), default=0)
    for row in (row for row in rows if row["step"] == last):
        before = token_ids(tokenizer, str(row.get("prompt", "")))[-MAX_TOKENS:] or [0]
        if after := token_ids(tokenizer, str(row.get("completion", "")))[:MAX_TOKENS]:
            sequences.append((before + after, len(before)))
    sequences = sequences or [([(7 * i + 13 * j + 1) % vocabulary for i in range(32)], 1) for j in range(16)]
    most = max(64, min(MAX_POSITIONS, MAX_LOGITS // vocabulary))
    positions = accumulate(len(tokens) - first for tokens, first in sequences)
    return sequences[: max(1, sum(count <= most for count in positions))]


@torch.inference_mode()
def distributions(model: Any, sequences: list[tuple[list[int], int]]) -> list[Tensor]:
    """Return the log-probabilities (n, V) in float32 of the next token before each of the n written tokens."""
    logits = (model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1] for tokens, first in sequences)
    return [each.float().log_softmax(-1) for each in logits]


def compared(wanted: list[Tensor], saved: list[Tensor]) -> MergeCheck:
    pairs, positions = list(zip(wanted, saved, strict=True)), sum(map(len, wanted))
    changed = sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in pairs)
    return MergeCheck(max(float((a - b).abs().mean(-1).max()) for a, b in pairs), changed / positions, positions)
