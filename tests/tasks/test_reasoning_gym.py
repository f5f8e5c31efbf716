"""reasoning-gym's families: by name and difficulty, the same every time, held out apart, judged by their verifiers."""

import importlib.util
from typing import Any

import pytest

from tests.running import rows_of
from tinyrl.rewards.functions import FunctionReward
from tinyrl.tasks import load_task

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="the extra `reasoning` is not installed"
)
SPEC = "leg_counting,chain_sum?min_terms=2&max_terms=2&max_digits=2"


def rows(split: str, spec: str | None = SPEC, **options: Any) -> list[dict[str, Any]]:
    return rows_of("reasoning_gym", split, data=spec, **options)


def test_rows_are_of_the_families_named_and_apart() -> None:
    train, held_out = rows("train"), rows("eval")
    assert {row["problem"]["family"] for row in train[:10]} == {"leg_counting", "chain_sum"}
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert rows("train", max_samples=7) == train[:7]


def test_gold_answers_have_full_marks_and_others_less() -> None:
    task = load_task("reasoning_gym")
    some = rows("eval", max_samples=40)
    problems = {"problem": [row["problem"] for row in some]}
    prompts = [task.prompt(row) for row in some]
    with FunctionReward(task.grader or "", timeout_s=60.0) as grader:
        gold = grader(prompts, [task.gold(row) for row in some], problems)
        wrong = grader(prompts, ["<answer>no idea</answer>"] * len(some), problems)
    assert gold.values == [1.0] * len(some)
    assert max(wrong.values) < 0.5
    for spec, named in (("leg_countin", "leg_counting"), ("chain_sum?terms=3", "terms")):
        with pytest.raises(ValueError, match=named):
            rows("train", spec)
