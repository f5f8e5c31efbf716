"""The check before step 1, with a real scorer: what it says of a reward that cannot be learnt from."""

import textwrap
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.tiny_models import tiny_tokenizer
from tinyrl.config.sections import RewardConfig
from tinyrl.errors import ExplainedByCheck
from tinyrl.models.batches import MicroBatches
from tinyrl.rewards.model_text import TextFormat
from tinyrl.rewards.scorer import Scorer
from tinyrl.tasks import load_task
from tinyrl.tasks.prompts import PreparedPrompt

REWARDS = """
    def in_text(prompts, completions, answer, **columns):
        return [float(a in c) for c, a in zip(completions, answer)]

    def in_message(prompts, completions, answer, **columns):
        return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

    def length(prompts, completions, **columns):
        return [{"nan": float("nan"), "none": None}.get(c, len(c)) for c in completions]

    def constant(prompts, completions, **columns):
        return [None if c == "nothing" else 1.0 for c in completions]

    def flat(prompts, completions, **columns):
        return [1.0 for c in completions]

    def raises(prompts, completions, answer, **columns):
        return [1 / 0 for c in completions]

    def raises_on_gold(prompts, completions, answer, **columns):
        return [1 / (a not in c[0]["content"]) for c, a in zip(completions, answer)]

    def raises_on_one_prompt(prompts, completions, answer, **columns):
        return [1 / (a != "a") for a in answer]
"""


def scorer_of(folder: Path, weights: dict[str, float]) -> Scorer:
    (folder / "rewards.py").write_text(textwrap.dedent(REWARDS))
    functions = [{"use": f"{folder / 'rewards.py'}:{name}", "weight": weight} for name, weight in weights.items()]
    return Scorer(
        RewardConfig.model_validate({"functions": functions}),
        load_task("rows"),
        tokenizer=tiny_tokenizer(),
        roles=cast(Any, None),
        policy_format=TextFormat(),
        micro_batches=MicroBatches(torch.device("cpu")),
    )


def warning(folder: Path, function: str, *, answer: str | None, others: int = 0) -> str | None:
    scorer = scorer_of(folder, {function: 1.0})
    prompt = [{"role": "user", "content": "say a"}]
    rows = [{"prompt": prompt, "answer": answer}, *({"prompt": prompt, "answer": "b"} for _ in range(others))]
    try:
        return scorer.check_gold([PreparedPrompt(i, row, prompt, "say a", [1, 2], "") for i, row in enumerate(rows)])
    finally:
        scorer.close()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("in_text", ["`in_text` compares a completion with text", 'its text is completion[0]["content"]']),
        ("in_message", []),
        ("flat", ["the gold answer scores 1, no more than an empty one (1) or nonsense (1)"]),
        (
            "raises_on_gold",
            ["the gold answer gets no score: `raises_on_gold` raised ZeroDivisionError", "rewards.py, line"],
        ),
        ("raises_on_one_prompt", ["raised ZeroDivisionError"]),  # its row is at fault: nothing is refused
    ],
)
def test_a_reward_that_cannot_be_learnt_from_is_warned_of(function: str, said: list[str], tmp_path: Path) -> None:
    found = warning(tmp_path, function, answer="a", others=1)
    assert (found is None) == (not said)
    assert all(part in str(found) for part in said)


@pytest.mark.parametrize("others", [0, 5])
@pytest.mark.parametrize("answer", ["a", None])
def test_one_that_always_raises_is_refused(others: int, answer: str | None, tmp_path: Path) -> None:
    with pytest.raises(ExplainedByCheck, match=r"the reward fails on .*nonsense.*: `raises` raised ZeroDivisionError"):
        warning(tmp_path, "raises", answer=answer, others=others)


@pytest.mark.parametrize("metric", [0.0, 0.5])
def test_a_function_that_weighs_nothing_drops_no_row_and_saves_none(tmp_path: Path, metric: float) -> None:
    scorer = scorer_of(tmp_path, {"constant": 1.0, "length": metric})
    texts = ["nan", "none", "nothing", "ab"]
    prompts = [PreparedPrompt(i, {"prompt": "p"}, "p", "p", [1], "") for i in range(len(texts))]
    scorer.text = lambda tokens: texts[tokens[0]]
    try:
        sheet = scorer(prompts, [[i] for i in range(len(texts))])
    finally:
        scorer.close()
    nan = float("nan")
    wanted = {0.0: [1.0, 1.0, nan, 1.0], 0.5: [nan, 1.0, 3.5, 2.0]}[metric]
    assert [failure.row for failure in sheet.failures] == [0]
    torch.testing.assert_close(sheet.rewards, torch.tensor(wanted), equal_nan=True)
    torch.testing.assert_close(sheet.scores[:, 1], torch.tensor([nan, nan, 7.0, 2.0]), equal_nan=True)
