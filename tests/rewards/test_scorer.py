"""The scorer: its check before step 1, its metrics, and the guard that stops a run whose rewards keep failing."""

import re
import textwrap
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.tiny_models import tiny_tokenizer
from tinyrl.config.sections import RewardConfig
from tinyrl.environments import Rewards
from tinyrl.environments.environment import Environment
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.process.errors import ExplainedByCheck, GuardStop
from tinyrl.rewards.model_text import TextFormat
from tinyrl.rewards.scorer import Scorer
from tinyrl.tasks import load_task
from tinyrl.tasks.prompts import NO_LIMIT, PreparedPrompt, prepare_prompts
from tinyrl.training.failing_rewards import check_failure_streak, check_outcome, describe_failures

REWARDS = """
    import time

    def in_text(prompts, completions, answer, **columns):
        return [float(a in c) for c, a in zip(completions, answer)]

    def in_message(prompts, completions, answer, **columns):
        return [float(a in c[0]["content"]) for c, a in zip(completions, answer)]

    def whole_answer(prompts, completions, answer, **columns):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        return [float(a == c[0]["content"]) for c, a in zip(completions, answer)]

    def length(prompts, completions, **columns):
        return [{"nan": float("nan"), "none": None}.get(c, len(c)) for c in completions]

    def constant(prompts, completions, **columns):
        return [None if c == "nothing" else 1.0 for c in completions]

    async def flat(prompts, completions, **columns):
        return [1.0 for c in completions]

    def raises(prompts, completions, answer, **columns):
        return [1 / 0 for c in completions]

    def raises_on_gold(prompts, completions, answer, **columns):
        return [1 / (a not in c[0]["content"]) for c, a in zip(completions, answer)]

    clock = [0.0]
    time.perf_counter = lambda: clock[0]  # by which the worker times rows

    def takes_time(prompts, completions, **columns):
        scores = []
        for prompt, completion in zip(prompts, completions):
            clock[0] += 0.5 if completion == "slow" else 0.01
            scores.append(1.0)
        return scores

    def comments(prompts, completions, **columns):
        return [(1.0, "half an emoji: \\ud83d") for c in completions]

    def in_tags(prompts, completions, answer, **columns):
        return [float(f"<answer>{a}</answer>" in c[0]["content"]) for c, a in zip(completions, answer)]

    def any_tags(prompts, completions, answer, **columns):
        return [float("<answer>" in c[0]["content"]) for c in completions]

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
        policy=cast(Any, None),
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


def test_a_reward_that_cannot_be_learnt_from_is_warned_of_or_refused(tmp_path: Path) -> None:
    for function, said in (
        ("flat", r"the reference answer scores 1, no more than"),
        ("raises_on_gold", "gets no score: `raises_on_gold` raised ZeroDivisionError"),
        ("raises_on_one_prompt", "raised ZeroDivisionError"),  # its row is at fault: nothing is refused
    ):
        assert re.search(said, str(warning(tmp_path, function, answer="a", others=1)), re.DOTALL), function
    assert warning(tmp_path, "in_message", answer="a", others=1) is None
    for answer, others in (("a", 0), (None, 5)):
        with pytest.raises(ExplainedByCheck, match=r"the reward fails on .*nonsense.*: `raises` raised ZeroDivision"):
            warning(tmp_path, "raises", answer=answer, others=others)


@pytest.mark.parametrize(("prompt", "is_said"), [([{"role": "user", "content": "say a"}], True), ("say a", False)])
def test_a_reward_that_fails_on_messages_is_refused_with_where_their_text_is(
    tmp_path: Path, prompt: Any, is_said: bool
) -> None:
    scorer = scorer_of(tmp_path, {"raises": 1.0})
    try:
        with pytest.raises(ExplainedByCheck) as refused:
            scorer.check_gold([PreparedPrompt(0, {"prompt": prompt, "answer": "a"}, prompt, "say a", [1, 2], "")])
    finally:
        scorer.close()
    assert ("['content']" in str(refused.value)) is is_said


@pytest.mark.parametrize("others", [0, 1])
def test_a_form_in_which_gold_is_paid_for_is_tried_before_a_warning(tmp_path: Path, others: int) -> None:
    assert warning(tmp_path, "in_tags", answer="a", others=others) is None
    assert "scores 0, no more than" in str(warning(tmp_path, "any_tags", answer="a", others=others))


@pytest.mark.parametrize("answer", ["42", "<think>6 * 7</think>42", "6 * 7</think>42"])
def test_gold_behind_a_prompt_that_opens_a_thought_is_tried_behind_the_thought(answer: str) -> None:
    scorer = Scorer(
        RewardConfig(),
        load_task("sums"),
        tokenizer=tiny_tokenizer(),
        policy=cast(Any, None),
        policy_format=TextFormat(),
        micro_batches=MicroBatches(torch.device("cpu")),
    )
    row = {"prompt": "6 * 7?", "answer": answer}
    opened = PreparedPrompt(0, row, "6 * 7?", "6 * 7? <think>\n", [1, 2], "<think>\n")
    try:
        assert scorer.check_gold([opened]) is None
    finally:
        scorer.close()


def test_a_reward_gets_the_question_and_the_whole_answer_that_the_prompt_begins(tmp_path: Path) -> None:
    scorer = scorer_of(tmp_path, {"whole_answer": 1.0})
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    prompt = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "<answer>"}]
    how: Any = {"chat": "auto", "system_prompt": None, "variables": {}, "limit": NO_LIMIT}
    rows = [{"prompt": prompt, "answer": "<answer>Paris</answer>"}]
    (one,) = prepare_prompts(load_task("rows"), rows, tokenizer=tokenizer, on_overlong_prompt="error", **how)
    texts = ["Paris</answer>", "<answer>Paris</answer>", "Rome</answer>"]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    try:
        assert scorer([one] * 3, tokens).rewards.tolist() == [1.0, 0.0, 0.0]
        assert scorer.check_gold([one]) is None
    finally:
        scorer.close()


def test_the_warning_of_a_gold_answer_names_the_row_by_the_end_of_its_question(tmp_path: Path) -> None:
    """Not by the system prompt that all rows share, nor by the answer to an earlier question."""
    scorer = scorer_of(tmp_path, {"flat": 1.0})
    prompt = [
        {"role": "system", "content": "You are a careful assistant. " * 20},
        {"role": "user", "content": "earlier"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "story " * 50 + "how many apples?"},
    ]
    try:
        _, warnings = scorer.check([PreparedPrompt(0, {"prompt": prompt, "answer": "a"}, prompt, "x", [1, 2], "")])
    finally:
        scorer.close()
    assert "how many apples?" in warnings[0]
    assert "careful" not in warnings[0]


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


def scorer_beside(rewards: Rewards) -> Scorer:
    """Return the rewards of task `rows` beside an environment that rewards such episodes."""
    environment = Environment()
    environment.rewards = rewards
    return Scorer(
        RewardConfig(),
        load_task("rows"),
        tokenizer=tiny_tokenizer(),
        policy=cast(Any, None),
        policy_format=TextFormat(),
        micro_batches=MicroBatches(torch.device("cpu")),
        environment=environment,
    )


@pytest.mark.parametrize(
    ("rewards", "names", "noted"),
    [
        ("none", ["rows"], []),
        ("some", ["rows", "environment"], ["added"]),
        ("all", ["environment"], ["in place of"]),
    ],
)
def test_an_environment_that_rewards_every_episode_replaces_the_verifier(
    rewards: Rewards, names: list[str], noted: list[str]
) -> None:
    """Replies that may hold rewards are added to it, as nobody knows before whether they do."""
    scorer = scorer_beside(rewards)
    assert scorer.names == names
    notes, warnings = scorer.check([PreparedPrompt(0, {"prompt": "a", "answer": "b"}, "a", "a", [1], "")])
    assert [word for word in ("added", "in place of") if any(word in note for note in notes)] == noted
    assert not warnings  # gold is no episode, which alone an environment rewards


def test_an_environment_that_rewards_replaces_no_verifier_of_rows_without_answers() -> None:
    notes, _ = scorer_beside("all").check([PreparedPrompt(0, {"prompt": "a"}, "a", "a", [1], "")])
    assert notes == []


def test_metrics_time_the_slowest_row_and_count_completions_that_differ_in_white_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyrl.rewards.scorer.SLOW_ROW_S", 0.1)
    scorer, texts = scorer_of(tmp_path, {"takes_time": 1.0}), ["a b", "a  b\n", "slow", "ab c", "a b"]
    prompts = [PreparedPrompt(i, {"prompt": f"p{i}"}, f"p{i}", f"p{i}", [1], "") for i in (5, 5, 7, 7, 5)]
    scorer.text = lambda tokens: texts[tokens[0]]
    try:
        scorer(prompts, [[i] for i in range(5)])
        found = scorer.metrics()
        assert found.pop("reward/slowest_seconds") == 0.5
        assert found == {"completion/whitespace_duplicates": 3 / 5}
        assert scorer.metrics() == {}  # each step anew
        scorer(prompts[:2], [[0], [4]])  # equal
        assert scorer.metrics()["completion/whitespace_duplicates"] == 0.0
        [line] = scorer.functions[0].printed.kept
        assert "prompt 7 (p7), 0.5 s" in line
    finally:
        scorer.close()


def test_comments_are_texts_that_can_be_written(tmp_path: Path) -> None:
    scorer = scorer_of(tmp_path, {"comments": 1.0})
    try:
        scores = scorer([PreparedPrompt(0, {"prompt": "p"}, "p", "p", [1], "")], [[5]])
        assert scores.comments == ["half an emoji: \ufffd"]
    finally:
        scorer.close()


# ---- the guard ----


def counted(*batches: tuple[int, int, int], before: int = 0) -> int:
    """After batches of (rows, failed, rewarded)."""
    for rows, failed, rewarded in batches:
        why = f"{failed} of them"
        before = check_failure_streak(before, rows=rows, failed=failed, rewarded=rewarded, failures=why)
    return before


def test_three_bad_batches_in_a_row_trip():
    """Of failures, or without any reward."""
    assert counted((10, 3, 7), (10, 10, 0)) == counted((10, 0, 0), (10, 1, 0)) == 2
    with pytest.raises(GuardStop, match=r"3 batches in a row \(last: 4 of 10\).*4 of them"):
        counted((10, 4, 6), before=2)
    with pytest.raises(GuardStop, match=r"3 batches in a row \(last: 16 rows\)"):
        counted((16, 0, 0), before=2)
    assert counted(*[(10, 2, 8)] * 10) == 0  # a fifth is not more than a fifth
    assert counted(*[(10, n, 10 - n) for n in (10, 10, 0, 10, 10, 2, 10, 10)]) == 2  # a good one starts it again
    assert counted(*[(0, 0, 0)] * 5) == counted(*[(10, 0, 1)] * 5) == 0  # an empty one is not bad, one reward enough


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_never_had_a_reward_trips_at_its_end(steps: int):
    with pytest.raises(GuardStop, match="`run` died"):
        check_outcome(steps=steps, unrewarded=steps, failures="`run` died")
    check_outcome(steps=steps, unrewarded=steps - 1, failures="`run` died")  # one step had one
    check_outcome(steps=0, unrewarded=0, failures="")  # nothing was tried


def test_failures_are_counted_by_kind_whatever_their_messages_hold():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "second"}]
    raised = ("first", "`run` raised KeyError: 'a' (agent.py, line 3)")
    others = [(chat, f"`run` raised KeyError: 'b{i}' (agent.py, line {i})") for i in range(2)]
    late = (chat, "`run` gave no answer within 60 s (agent.py, line 9)")
    said = describe_failures([late, raised, *others])
    counts = ("3 x `run` raised KeyError", "1 x `run` gave no answer within 60 s")
    assert all(count in said for count in counts)
    assert said.endswith("'second': `run` gave no answer within 60 s (agent.py, line 9)")  # the first
    of_one_kind = describe_failures([raised, *others])
    assert " x " not in of_one_kind
    assert of_one_kind.endswith("'first': `run` raised KeyError: 'a' (agent.py, line 3)")
    many = describe_failures([("p", f"reason {i}: x") for i in range(6)])
    assert "1 x reason 3 and 2 more" in many
    assert "reason 4" not in many
