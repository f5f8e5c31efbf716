"""TRL's loss and gradient on the fixed batch, by its own compute_loss, written for our_loss.py to compare with.

The old log-probabilities are the reference's, so that ratios differ from 1 and the clip matters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import measuring
from benchmarks.fixed_batch import GROUP_SIZE, fixed_batch
from benchmarks.fixed_work import SPEED
from benchmarks.peer_grpo import make_trainer


def padded(rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    """(ids, mask), both (rows, longest)."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(width - len(row), None) if left else slice(0, len(row))
        ids[i, where], mask[i, where] = torch.tensor(row), 1
    return ids, mask


def main() -> None:
    settings = measuring.job()
    trainer = make_trainer({**settings, "steps": 1, "micro_batch": 8, "seed": 0})
    model: Any = trainer.model
    set_peft_model_state_dict(model, load_file(Path(settings["files"]) / "adapter" / "adapter_model.safetensors"))
    batch = fixed_batch(model.config.vocab_size, max_new_tokens=SPEED.max_new_tokens)
    prompts = [prompt for prompt in batch.prompts for _ in range(GROUP_SIZE)]
    (prompt_ids, prompt_mask), (ids, mask) = padded(prompts, left=True), padded(batch.responses, left=False)
    with torch.no_grad(), model.disable_adapter():
        reference = trainer._get_per_token_logps_and_entropies(
            model, torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1), ids.shape[1]
        )[0]
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(batch.advantages),
        "old_per_token_logps": reference,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    model.train()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    gradients = {
        name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    save_file(gradients, settings["gradients"])
    measuring.answer(settings, loss=float(loss.detach()))


if __name__ == "__main__":
    main()
