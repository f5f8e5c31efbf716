"""Exact probability that a policy gives the right answer, where that is one string: its tokens' product, EOS included.

It needs no samples, so two policies are not compared by the luck of one set of random numbers. Whatever else the
verifier would pass (a letter without its space, or the right letters and no EOS) is not counted. transformers and PEFT
alone load and run the model, whichever side trained it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import measuring, processes
from benchmarks.work import read_rows

ROWS_AT_ONCE = 64


@torch.no_grad()
def answer_probabilities(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """(probabilities, greedy), each (n,): of answer i after prompt i when sampled at temperature 1, and whether it is
    what greedy decoding gives. An answer's tokens end with EOS. Log-probabilities are in float64.
    """
    probabilities, greedy = [], []
    for start in range(0, len(prompts), ROWS_AT_ONCE):
        rows = list(zip(prompts[start : start + ROWS_AT_ONCE], answers[start : start + ROWS_AT_ONCE], strict=True))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
        for i, (prompt, answer) in enumerate(rows):
            ids[i, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            mask[i, : len(prompt) + len(answer)] = 1
        output = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device))
        logprobs = output.logits.cpu().double().log_softmax(-1)
        for i, (prompt, answer) in enumerate(rows):
            said = logprobs[i, len(prompt) - 1 : len(prompt) + len(answer) - 1]  # position t predicts token t + 1
            targets = torch.tensor(answer)
            probabilities.append(said.gather(1, targets.unsqueeze(1)).sum().exp())
            greedy.append((said.argmax(1) == targets).all())
    return torch.stack(probabilities), torch.stack(greedy)


def held_out(files: Path, adapter: str | None, *, device: str = "cpu", most: int | None = None) -> dict[str, float]:
    """Means over the held-out rows (None: all of them), of a prompt and its right completion: `exact` probability, and
    share that greedy decoding gets right.
    """
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    model = (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval().to(device)
    rows = read_rows(files / "eval.jsonl")[:most]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [[*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    exact, greedy = answer_probabilities(model, prompts, answers)
    return {"exact": float(exact.mean()), "greedy": float(greedy.double().mean())}


def judged(files: Path, adapter: str | None, *, options: Namespace) -> dict[str, Any]:
    """`held_out`, in a process of its own."""
    return processes.run("judge", {"files": str(files), "adapter": adapter}, options=options)


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(settings["threads"])
    return held_out(Path(settings["files"]), settings["adapter"])


if __name__ == "__main__":
    measuring.serve(measure)
