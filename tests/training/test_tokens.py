"""Tokens of a step: those that the policy chose count; tokens.jsonl has their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.training.experiences import experience_of
from tests.training.rows import trained
from tests.training.test_on_policy import samples_of
from tinyrl.environments.environment import Episode
from tinyrl.generation.sample import (
    Logprobs,
    Sample,
    environment_metrics,
    kl_per_response,
    loss_mask,
    sampled_logprobs,
    token_rewards_of,
)
from tinyrl.models.batch import batch_of
from tinyrl.rollout.records import TokenColumns, pieces, shown_samples, token_lines
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.policy_loss import Counts
from tinyrl.training.ppo import adapted_kl_coef

# By hand: two episodes, [chose 2, read 3, chose 1] that ended and [chose 4] that was cut off

MASK = [[True, True, False, False, False, True], [True, True, True, True, False, False]]


def test_counts_means_and_rewards_are_of_chosen_tokens() -> None:
    """Rewards of turns are on their last tokens, and the rest on the last."""
    turns = [Episode(turn_ends=[1, 5], turn_rewards=[0.5, 0.25], cut=1), Episode(turn_ends=[3], turn_rewards=[None])]
    first = Sample(
        prompt=[4],
        response=[5, 6, 7, 8, 9, 5],
        mask=MASK[0],
        logprobs=[-1.0, -2.0, 0.0, 0.0, 0.0, -3.0],
        row=0,
        finish="stop",
        reward=1.75,
        played=turns[0],
    )
    second = Sample(
        prompt=[4],
        response=[5, 6, 7, 8],
        mask=[True] * 4,
        logprobs=[-1.0] * 4,
        row=0,
        episode=1,
        finish="length",
        reward=3.0,
        played=turns[1],
    )
    two = [first, second]
    logprobs = Logprobs(sampled_logprobs(two), reference=torch.full((2, 6), -1.5))
    assert loss_mask(two).tolist() == MASK
    counts = Counts.of(experience_of(two))
    assert counts == Counts(tokens=7, sequences=2, rows=2, taught=7, episodes=2)
    assert counts.denominator("constant", max_new_tokens=24) == 2 * 24
    assert logprobs.kl(loss_mask(two)).tolist() == [[0.5, -0.5, 0, 0, 0, -1.5], [0.5, 0.5, 0.5, 0.5, 0, 0]]
    assert kl_per_response(two, logprobs)[0] == pytest.approx((-1.5 + 2.0) / 2)
    assert environment_metrics(two) == {
        "environment/turns": 1.5,
        "environment/invalid_calls": 0.0,
        "environment/tool_errors": 0.0,
        "environment/cut_observations": 0.5,
        "environment/observation_tokens": 1.5,
        "environment/out_of_turns": 0.0,
    }
    shaped = token_rewards_of(two, torch.zeros(2, 6), kl_coef=0.0)
    assert shaped.tolist() == [[0, 0.5, 0, 0, 0, 0.25 + 1.0], [0, 0, 0, 3.0, 0, 0]]


def test_a_micro_batch_has_the_inputs_of_its_rows_as_wide_as_its_longest_response() -> None:
    """Rows 3 and 1 of four, of 2 and 1 tokens, beside one of 3."""
    lengths = [3, 1, 1, 2]
    samples = [Sample([4], [5] * n, [True] * n, [-1.0] * n, row=0) for n in lengths]
    advantage = torch.arange(12.0).view(4, 3)
    minibatch = experience_of(samples, advantage=advantage).rows([3, 0, 1])
    batch = batch_of([minibatch.samples[0], minibatch.samples[2]], rows=[0, 2])
    inputs = minibatch.inputs.of(batch)
    assert inputs.advantage.tolist() == [[9.0, 10.0], [3.0, 4.0]]
    assert inputs.mask.tolist() == batch.mask.tolist() == [[True, True], [True, False]]
    assert inputs.old is None


@pytest.mark.parametrize(("ref", "moves"), [(-2.0, True), (-math.inf, False), (math.nan, False)])
def test_a_kl_that_is_not_finite_leaves_its_weight(*, ref: float, moves: bool) -> None:
    """Such a rollout changes no weight of the policy either."""
    sample = Sample([4], [5], [True], [-1.0], row=0, reward=1.0)
    logprobs = Logprobs(torch.tensor([[-1.0]]), reference=torch.tensor([[ref]]))
    assert (adapted_kl_coef([sample], logprobs, 6.0, kl_coef=0.5) != 0.5) is moves


NAN = float("nan")


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\u00e9b".encode(), ["a", "", "\u00e9", "b"]),
        (b"a\xe2\x82", ["a", "", "\ufffd"]),
        (b"\xff" * 9, ["", "", "", "", "", "", "", "\ufffd" * 8, "\ufffd"]),
    ],
)
def test_each_token_adds_a_piece_and_together_they_are_the_text(text: bytes, expected: list[str]) -> None:
    tokenizer: Any = Bytes()
    assert pieces(tokenizer, list(text), before=[ord("x")]) == expected
    assert "".join(expected) == text.decode("utf-8", "replace")


def test_the_best_and_the_worst_of_each_prompt_come_first() -> None:
    rewards = [1.0, 3.0, 2.0, 5.0, 5.0, 5.0, NAN, 4.0, 6.0]
    few = samples_of(rewards, kept=[True] * 6 + [False] * 3)
    assert shown_samples(few, group_size=3) == [1, 0, 3, 2, 4, 5]
    many = samples_of([float(i) for i in range(20)])
    assert shown_samples(many, group_size=2) == [1, 0, 3, 2, 5, 4, 7, 6]
    assert shown_samples(many, group_size=1) == [*range(8)]


X = PreparedPrompt(5, {}, "x", "x", [ord("x")], "")


def line_of(rewards: torch.Tensor, *, played: Episode | None = None, **columns: torch.Tensor) -> dict[str, Any]:
    """The line of a response "ab", "?" read, "c": three tokens chosen, one only read, after a prompt "x"."""
    mask, logprobs = [True, True, False, True], [-0.12345, -1.0, 0.0, -2.0]
    sample = Sample([ord("x")], [*b"ab?c"], mask, logprobs, 5, reward=0.75, played=played)
    new = torch.tensor([[-0.1, -0.9, 0.0, -2.5]])
    given: dict[str, Any] = {"old": torch.tensor([logprobs]), "ref": None, "value": None, "teacher": None, **columns}
    how: dict[str, Any] = {"tokenizer": Bytes(), "prompts": {5: X}, "group_size": 1}
    (line,) = token_lines([sample], TokenColumns(reward=rewards, new=new, **given), **how)
    return line


def test_a_line_has_the_numbers_of_each_token_in_the_update() -> None:
    nothing = dict.fromkeys(("advantage", "old", "new", "ref", "teacher", "value", "reward"))
    of_turns = torch.tensor([[0.0, 0.25, 0.0, 0.5]])
    assert line_of(of_turns, advantage=torch.full((1, 4), 0.5)) == {
        "kind": "train", "prompt_index": 5, "sample": 0, "prompt": "x", "reward": 0.75,
        "tokens": [
            {"piece": "a", "chosen": True, **nothing, "advantage": 0.5, "old": -0.123, "new": -0.1, "reward": 0.0},
            {"piece": "b", "chosen": True, **nothing, "advantage": 0.5, "old": -1.0, "new": -0.9, "reward": 0.25},
            {"piece": "?", "chosen": False, **nothing},
            {"piece": "c", "chosen": True, **nothing, "advantage": 0.5, "old": -2.0, "new": -2.5, "reward": 0.5},
        ],
    }  # fmt: skip
    columns = {"advantage": [1.0, 2.0, 0.0, 3.0], "old": [-0.5, -0.6, 0.0, -0.7], "ref": [-0.8, -0.9, 0.0, -1.1],
               "value": [0.1, 0.2, 0.0, 0.3]}  # fmt: skip
    of_ppo: dict[str, Any] = {name: torch.tensor([column]) for name, column in columns.items()}
    tokens = line_of(torch.tensor([[-0.01, -0.02, 0.0, 0.9996]]), **of_ppo)["tokens"]
    for name, (first, second, _, last) in columns.items():
        assert [t[name] for t in tokens] == [first, second, None, last]
    assert [t["reward"] for t in tokens] == [-0.01, -0.02, None, 1.0]


def test_rewards_of_turns_are_on_the_last_token_of_each_and_the_rest_on_the_last() -> None:
    mask = [True, True, False, True]
    played = Episode(turn_ends=[1, 3], turn_rewards=[0.25, 0.0])
    sample = Sample([1], [5, 6, 7, 8], mask, [-1.0] * 4, row=0, reward=0.75, played=played)
    assert token_rewards_of([sample], torch.zeros(1, 4), kl_coef=0.0).tolist() == [[0.0, 0.25, 0.0, 0.5]]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.wide
def test_a_run_records_eight_completions_of_the_steps_that_are_evaluated(
    method: str, model: Path, tmp_path: Path
) -> None:
    """Evaluated after steps 2 and 3 of three; they are in samples.jsonl too. Every step records its prompts."""
    run = trained(running.config(method, model, critic={"warmup_steps": 0}), tmp_path)
    found, samples = lines(run.tokens), lines(run.samples)
    assert [line["step"] for line in found] == [2] * 8 + [3] * 8
    names = ("step", "kind", "prompt_index", "sample", "prompt", "reward")
    kept = {tuple(s[n] for n in names): s for s in samples}
    for line in found:
        sample, tokens = kept[tuple(line[n] for n in names)], line["tokens"]
        assert "".join(t["piece"] for t in tokens).startswith(sample["completion"])
        if method == "grpo":
            assert sum(t["reward"] for t in tokens) == pytest.approx(sample["reward"], abs=1e-3)
            assert {t["advantage"] for t in tokens} == {round(sample["advantage"], 3)}
        else:
            assert all(isinstance(t["value"], float) and isinstance(t["ref"], float) for t in tokens)
    tried = {(line["step"], entry[0]) for line in lines(run.prompts) for entry in line["prompts"]}
    assert tried == {(s["step"], s["prompt_index"]) for s in samples if s["kind"] == "train"}
