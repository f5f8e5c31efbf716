"""Samples of a step: masks from lengths and finish reasons, length rules, duplicate prompts, what a bad batch says."""

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.tiny_models import tiny_model
from tests.training.experiences import experience_of
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardConfig
from tinyrl.environments.environment import Episode
from tinyrl.generation.sample import (
    STOPPED_IN_THOUGHT,
    FinishReason,
    Sample,
    apply_length_rules,
    conversations,
    length_metrics,
    loss_mask,
    rewards_by_turn,
    rewards_of,
    spread_over_turns,
)
from tinyrl.process.launched import Options
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory):
    model = tiny_model(tmp_path_factory.mktemp("model"), "qwen2", pad_is_eos=True)
    loaded = load_collector(prepare(running.config("grpo", model)), options=Options(device="cpu"))
    yield loaded
    loaded.close()


def collect(collector: Collector, **reward: Any) -> list[Sample]:
    samples = collector.collect(collector.train_prompts[:3], group_size=2, step=0)
    return apply_length_rules(samples, RewardConfig(**reward), max_new_tokens=10)


def test_a_sample_is_written_whole(collector: Collector) -> None:
    """As that of a step without a finite gradient is."""
    sample = collect(collector)[0]
    advantage = torch.tensor([0.5])
    [back] = json.loads(json.dumps(experience_of([sample], advantage=advantage).plain()))
    assert (back["response"], back["reward"], back["ref"]) == (sample.response, sample.reward, None)
    assert back["advantage"] == [0.5] * len(sample.response)


def test_mask_and_lengths_agree_when_pad_is_eos(collector: Collector) -> None:
    samples = collect(collector)
    assert loss_mask(samples, "all").sum(1).tolist() == [len(sample.response) for sample in samples]
    assert [sample.row for sample in samples] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("opened", ["<think>\n", ""])
def test_a_stop_string_inside_an_open_thought_is_counted(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, opened: str
) -> None:
    settings = collector.engine.settings.model_copy(update={"stop": [*string.ascii_lowercase]})
    monkeypatch.setattr(collector.engine, "settings", settings)
    prompts = [replace(prompt, opened=opened) for prompt in collector.train_prompts[:3]]
    samples = collector.collect(prompts, group_size=2, step=0)
    stopped = [sample.finish == "stop" for sample in samples]
    assert any(stopped)
    assert [sample.stopped_in_thought for sample in samples] == [bool(opened) and each for each in stopped]
    share = sum(stopped) / len(samples) if opened else 0.0
    assert length_metrics(samples)[STOPPED_IN_THOUGHT] == pytest.approx(share)


def test_truncated_responses_can_be_masked_or_penalised(collector: Collector) -> None:
    kept = collect(collector)
    truncated = torch.tensor([sample.truncated for sample in kept])
    assert truncated.any(), "a random model should run into max_new_tokens"
    masked = collect(collector, truncated="mask")
    assert not loss_mask(masked)[truncated].any()
    assert [sample.in_loss for sample in masked] == (~truncated).tolist()
    assert torch.equal(loss_mask(masked, "all"), loss_mask(kept, "all"))  # what the policy chose is another matter
    torch.testing.assert_close(rewards_of(masked), rewards_of(kept))  # still in the group's statistics
    penalised = collect(collector, truncated="penalize")
    torch.testing.assert_close(rewards_of(penalised), rewards_of(kept) - 1.0 * truncated)


def test_soft_overlong_penalty(collector: Collector) -> None:
    """DAPO Eq. 13 with 10 tokens at most and a buffer of 4: nothing up to 6, then down by a quarter a token to -1."""
    samples = [Sample([1], [5] * n, [True] * n, [0.0] * n, 0, score=0.0) for n in (3, 6, 7, 9, 10)]
    ruled = apply_length_rules(samples, RewardConfig(overlong_tokens=4), max_new_tokens=10)
    assert [sample.reward for sample in ruled] == [0.0, 0.0, -0.25, -0.75, -1.0]


def test_a_prompt_twice_in_a_step_gets_other_samples(collector: Collector) -> None:
    prompt = collector.train_prompts[0]
    samples = collector.collect([prompt, prompt], group_size=2, step=0)
    assert len({tuple(sample.response) for sample in samples}) == 4


def test_tokens_that_were_read_are_no_part_of_the_loss(collector: Collector) -> None:
    """A tool's answer inside a response: the head lists only the other tokens, and token counts include only those."""
    first, second, third, *_ = collect(collector)
    first = replace(first, mask=[True, False, False, *first.mask[3:]])
    batch = collector.policy.batch_of([replace(second, in_loss=False), first, third])
    listed = [(row, column) for row, column in zip(batch.row.tolist(), batch.column.tolist(), strict=True)]
    count, other = len(first.response), len(third.response)
    assert listed == [(1, 0), *((1, t) for t in range(3, count)), *((2, t) for t in range(other))]
    assert first.num_actions == count - 2


# ---- an environment's rewards ----

WORLD = """
from tinyrl.environments import Reply


def respond(prompts, transcripts, **columns):
    replies = []
    for prompt, turns in zip(prompts, transcripts):
        is_first = len(turns) == 1
        if prompt == "paid once":
            replies.append(Reply("x", reward=0.5) if is_first else Reply("x", done=True))
        elif prompt == "paid nothing":
            replies.append(Reply("", done=True, reward=0.0))
        elif prompt == "never paid":
            replies.append("x" if is_first else None)
        else:
            replies.append("x")
    return replies


def not_for_these(prompts, **columns):
    return [None] * len(prompts)
"""
PROMPTS = ["paid once", "paid nothing", "never paid", "cut off"]


# The same as a task of one's own, which has no verifier.
OWN_TASK = """
from tinyrl.tasks import Task

def rows(split):
    return [{"prompt": prompt} for prompt in PROMPTS]

TASK = Task(name="world", rows=rows, prompt=lambda row: row["prompt"], columns=("prompt",), respond=respond)
"""


def played(settings: Config) -> list[Sample]:
    """Return two episodes of each of PROMPTS, whose turns end after a character."""
    loaded = load_collector(prepare(settings), options=Options(device="cpu"))
    try:
        prompts = sorted(loaded.train_prompts, key=lambda prompt: PROMPTS.index(str(prompt.prompt)))
        return loaded.collect(prompts, group_size=2, step=0)
    finally:
        loaded.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("world")
    (folder / "world.py").write_text(WORLD, encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS), encoding="utf-8")
    settings = running.config(
        "grpo",
        tiny_model(folder / "model", "qwen2"),
        task={"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "rows.jsonl")},
        reward={"functions": [{"use": f"{folder / 'world.py'}:not_for_these"}]},
        environment={"name": f"{folder / 'world.py'}:respond", "max_turns": 3, "max_observation_tokens": 4},
        generation={"stop": [*string.printable], "max_new_tokens": 64},
    )
    return played(settings)


def test_replies_of_a_task_of_ones_own_have_rewards_without_a_verifier(tmp_path: Path) -> None:
    file = tmp_path / "world.py"
    file.write_text(f"{WORLD}\nPROMPTS = {PROMPTS}\n{OWN_TASK}", encoding="utf-8")
    settings = running.config(
        "grpo",
        tiny_model(tmp_path / "model", "qwen2"),
        task={"name": f"{file}:TASK"},
        reward={"functions": []},
        environment={"max_turns": 3, "max_observation_tokens": 4},
        generation={"stop": [*string.printable], "max_new_tokens": 64},
        grpo={"credit": "turn"},
    )
    assert [sample.reward for sample in played(settings)[:4]] == [0.5, 0.5, 0.0, 0.0]


def test_an_episode_has_the_rewards_of_the_turns_that_have_one(world: list[Sample]) -> None:
    assert [sample.reward for sample in world[:4]] == [0.5, 0.5, 0.0, 0.0]
    assert [sample.in_loss for sample in world[:4]] == [True] * 4


def test_a_row_for_which_every_reward_says_none_is_not_learnt(world: list[Sample]) -> None:
    """The function does not apply, and the environment gave nothing, also where it had no more turns."""
    assert [len(sample.played.turn_ends) for sample in world[4:] if sample.played] == [2, 2, 3, 3]
    assert [sample.rewarded for sample in world[4:]] == [False] * 4
    assert [sample.in_loss for sample in world[4:]] == [False] * 4
    assert rewards_of(world[4:]).isnan().all()


def episode_of(turns: list[float | None], *, ends: list[int]) -> Sample:
    """An episode whose turns have these rewards and last tokens; the tokens before a turn's last are read."""
    mask = [token in ends for token in range(ends[-1] + 1)]
    played = Episode(turn_ends=ends, turn_rewards=turns)
    return Sample([1], [5] * len(mask), mask, [-1.0] * len(mask), row=0, played=played)


NAN = float("nan")


def test_what_is_left_of_a_reward_is_the_last_turns() -> None:
    """Such as the score of a reward function beside the environment, less a penalty of length."""
    episodes = [
        episode_of([0.5, None, 0.25], ends=[0, 2, 4]),
        episode_of([0.3, 0.4], ends=[0, 1]),
        episode_of([1.0], ends=[2]),
    ]
    found = rewards_by_turn(episodes, torch.tensor([2.75, 0.7, NAN]))
    want = [0.5, 0.0, 2.25, 0.3, 0.4, NAN, NAN, NAN, NAN]
    assert found.flatten().tolist() == pytest.approx(want, nan_ok=True, abs=0)  # 0.3 + 0.4 is 0.7 in float32


def test_all_tokens_of_a_turn_have_what_is_the_turns() -> None:
    episodes = [episode_of([None] * 3, ends=[1, 2, 5]), episode_of([None], ends=[3])]
    found = spread_over_turns(episodes, torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]]))
    assert found.tolist() == [[1.0, 1.0, 2.0, 3.0, 3.0, 3.0], [4.0, 4.0, 4.0, 4.0, 0.0, 0.0]]


@pytest.mark.parametrize(("mask_truncated", "in_loss"), [(True, [True, False, True]), (False, [True, True, True])])
def test_a_further_conversation_that_was_cut_off_is_left_out(*, mask_truncated: bool, in_loss: list[bool]):
    """By itself: its episode's first conversation ended."""

    def said(finish: FinishReason) -> Sample:
        return Sample([1], [5], [True], [-1.0], row=0, finish=finish, reward=1.0)

    first = replace(said("eos"), further=[said("length"), said("stop")])
    found = conversations([first], mask_truncated=mask_truncated)
    assert [one.in_loss for one in found] == in_loss
