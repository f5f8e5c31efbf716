"""Exact probabilities of right answers: against every completion of a toy, against samples of it, and the starter's."""

from argparse import Namespace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.judge import answer_probabilities, held_out
from benchmarks.learning import prepare_sorting
from tests.tiny_models import TinyModels

EOS, OTHERS = 1, (0, 2, 3, 4)  # the toy's five tokens
PROMPT = [3, 4, 4]


@pytest.fixture(scope="module")
def toy(tiny: TinyModels) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny("llama", vocabulary=("a", "b"))).eval()


def test_probabilities_of_everything_that_can_be_said_sum_to_one(toy: Any):
    """Completions of at most three tokens: 21 that end, of three lengths, and 64 that do not."""
    ended = [[*words, EOS] for length in range(3) for words in product(OTHERS, repeat=length)]
    cut = [list(words) for words in product(OTHERS, repeat=3)]
    exact, _ = answer_probabilities(toy, [PROMPT] * 85, ended + cut)
    assert float(exact.sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(exact.max()) < 0.9  # a toy that only ever says one thing would show nothing


def test_the_embedded_model_before_training(tmp_path: Path):
    """`tinyrl eval starter --task sort` decodes 202 of 512 right greedily, and samples 0.39 to 0.43 right by seed."""
    files = prepare_sorting(Namespace(out=tmp_path))
    assert held_out(files, None) == {"exact": pytest.approx(0.41293, abs=2e-5), "greedy": 202 / 512}
