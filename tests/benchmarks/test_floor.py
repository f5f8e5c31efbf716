"""The arithmetic floor: operations counted by hand on a toy, and by torch on a model of the same shape."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2ForCausalLM

from benchmarks.floor import operations
from benchmarks.work import SIZES, Grpo, Shape

TOY = Shape("toy", hidden=2, layers=1, intermediate=3, heads=1, kv_heads=1, head_size=2, vocabulary=5)


def test_operations_of_a_toy_by_hand():
    """One prompt of 4 tokens, two completions of 3: 6 completion tokens, 10 with the prompt, which counts once.

    Matrices: four of 2 x 2 and three of 2 x 3, 34 weights: 2 * 34 * 10 = 680. Head: 2 * 5 * 2 * 6 = 120. Pairs of a
    query and a key: 6 * (4 + 1.5) of completions and 4 * 4 / 2 of the prompt, 41, each 4 * 2: 328. LoRA of rank 1 has
    4 * (2 + 2) + 3 * (2 + 3) = 31 weights: 2 * 31 * 10 = 620, and twice that backward.
    """
    found = operations(TOY, 3, work=Grpo(num_prompts=1, group_size=2), prompt=4, lora_rank=1)
    assert found == {
        "sampling": 680 + 120 + 328,
        "reference": 680 + 120 + 328,
        "forward": 680 + 120 + 328 + 620,
        "backward": 680 + 120 + 2 * 328 + 2 * 620,
    }


def test_products_of_a_real_forward_pass_are_the_floor_s():
    """torch's counter on one prompt of 7 with one completion of 5: linear layers and head, whatever attention takes."""
    shape = SIZES["xs"]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        Qwen2ForCausalLM(shape.qwen2())(input_ids=torch.zeros(1, 12, dtype=torch.long), logits_to_keep=5)
    counts = {str(operation): count for operation, count in counter.get_flop_counts()["Global"].items()}
    linear = sum(count for operation, count in counts.items() if operation in ("aten.mm", "aten.addmm"))
    found = operations(shape, 5, work=Grpo(num_prompts=1, group_size=1), prompt=7)
    pairs = 5 * (7 + 2.5) + 7 * 7 / 2
    assert found["sampling"] - 4 * 2 * 16 * 2 * pairs == pytest.approx(linear)
