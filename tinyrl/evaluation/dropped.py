"""Samples of an evaluation without a reward, as a sentence for people. Nothing here imports torch."""

from typing import Any


def dropped_warning(metrics: dict[str, Any], why: str) -> str:
    """Return a sentence about the samples of an evaluation without a reward, sampled and greedy; "" for none."""
    greedy = metrics.get("greedy", {}).get("dropped", 0)
    sampled = metrics.get("dropped", 0)
    if not sampled + greedy:
        return ""
    prompts = metrics["num_prompts"]
    counts = f"{sampled} of {prompts * metrics['num_samples']} samples and {greedy} of {prompts} greedy ones"
    return f"{counts} have no reward: {why or 'every score was None, so no reward applies'}"
