"""The arithmetic floor: operations counted by hand on a toy."""

from benchmarks.floor import operations
from benchmarks.work import Grpo, Shape

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
