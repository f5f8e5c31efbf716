"""Policy losses, advantages and metrics by hand; prompt samplers; steps without anything to learn from."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.training.experiences import experience_of
from tests.training.rows import loaded, trained
from tinyrl.config.method_sections import GrpoConfig
from tinyrl.environments.environment import Episode
from tinyrl.generation.cached_engine import CachedEngine
from tinyrl.generation.sample import Logprobs, Sample, kl_per_response
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.training.grpo import Grpo, group_relative, loss_options, turn_metrics, without_spread
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts, Experience, LossInputs, only_rounding, policy_loss, sampling_gap
from tinyrl.training.ppo import adapted_kl_coef
from tinyrl.training.prompt_sampler import PassRates, PassRecord
from tinyrl.training.run import Run
from tinyrl.training.run_state import RunState

LENGTHS = 8


def counted(tokens: int, sequences: int, rows: int) -> Counts:
    return Counts(tokens=tokens, sequences=sequences, rows=rows, taught=0, episodes=sequences)


def loss_of(
    logprobs: torch.Tensor,
    inputs: LossInputs,
    counts: Counts,
    preset: str,
    *,
    entropy: torch.Tensor | None = None,
    **fields: Any,
) -> Any:
    section = config_of({"method": "grpo", "grpo": {"preset": preset, "kl_coef": 0.0, **fields}}).grpo
    options = loss_options(section, max_new_tokens=LENGTHS, inexact=True)
    return policy_loss(logprobs, torch.zeros_like(logprobs) if entropy is None else entropy, inputs, counts, options)


@pytest.mark.parametrize(
    ("given", "several"),
    [
        ({}, False),
        ({"minibatch_size": 16}, False),
        ({"minibatch_size": 64}, False),
        ({"minibatch_size": 8}, True),
        ({"num_epochs": 2}, True),
    ],
)
def test_old_log_probabilities_are_computed_where_several_optimizer_steps_use_a_sample(
    given: dict[str, int], several: bool
) -> None:
    grpo = {"num_prompts": 4, "group_size": 4, **given}
    trainer: Any = SimpleNamespace(config=config_of({"method": "grpo", "grpo": grpo}))
    assert OnPolicy.uses_old_logprobs.fget(trainer) is several  # pyright: ignore[reportOptionalCall]


def stopping(theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A policy that goes on with probability sigmoid(theta) and stops after at most LENGTHS tokens: log-probabilities
    of the responses of every length (LENGTHS, LENGTHS), and which tokens they have.
    """
    go_on, stop = torch.nn.functional.logsigmoid(theta), torch.nn.functional.logsigmoid(-theta)
    column, length = torch.arange(LENGTHS), torch.arange(1, LENGTHS + 1).unsqueeze(1)
    logprobs = torch.where(column < length - 1, go_on, stop)
    logprobs = torch.where((length == LENGTHS) & (column == LENGTHS - 1), torch.zeros(()), logprobs)  # no choice left
    return logprobs, column < length


def test_rloo_has_the_gradient_of_the_expected_reward() -> None:
    """Every length once, weighted by its probability: the mean over sequences is then an expectation. A mean within
    each sequence would weigh a token of a long response less, which is another gradient.
    """
    theta = torch.tensor(0.4, requires_grad=True)
    logprobs, mask = stopping(theta)
    probability = (logprobs * mask).sum(1).exp()
    rewards = torch.arange(1.0, LENGTHS + 1).sqrt()
    expected = (probability * rewards).sum()
    (truth,) = torch.autograd.grad(expected, theta, retain_graph=True)
    assert probability.sum().item() == pytest.approx(1.0)

    weights = (probability * LENGTHS).detach()
    advantages = weights * (rewards - expected.detach())
    inputs = LossInputs(mask, logprobs.detach(), advantages.unsqueeze(1).expand(mask.shape))
    gradients = {}
    for preset in ("rloo", "grpo"):
        loss, _ = loss_of(logprobs, inputs, counted(int(mask.sum()), LENGTHS, LENGTHS), preset)
        (gradients[preset],) = torch.autograd.grad(-loss, theta, retain_graph=True)
    assert gradients["rloo"].item() == pytest.approx(truth.item(), rel=1e-5)
    assert gradients["grpo"].item() < 0.5 * truth.item()


@pytest.mark.parametrize(
    ("fields", "weights", "capped"),
    [
        ({}, [2 / 3, 1.5, 2.0], 1 / 3),
        ({"preset": "cispo"}, [2 / 3, 1.5, 2.0], 1 / 3),
        ({"importance_correction": "none"}, [1.0, 1.0, 1.0], None),
        ({"importance_correction": "token-mask"}, [2 / 3, 1.5, 0.0], 1 / 3),
        ({"importance_correction": "sequence"}, [2.0, 2.0, 2.0], 1.0),
        ({"importance_correction": "sequence-mask"}, [0.0, 0.0, 0.0], 1.0),
    ],
)
def test_the_mismatch_is_corrected_as_configured(
    fields: dict[str, Any], weights: list[float], capped: float | None
) -> None:
    """Old over sampling probability is 2/3, 3/2 and 4, of the sequence 4: the factor of each token's gradient."""
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    logprobs = old.clone().requires_grad_()
    sampled = old - torch.tensor([[2 / 3, 1.5, 4.0]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    inputs = LossInputs(mask, sampled, torch.ones(1, 3), old=old)
    loss, metrics = loss_of(logprobs, inputs, counted(3, 1, 1), **{"preset": "dapo", "aggregation": "token", **fields})
    loss.backward()
    assert logprobs.grad is not None
    assert (-3 * logprobs.grad[0]).tolist() == pytest.approx(weights)
    assert metrics.get("policy/capped_weights") == (None if capped is None else pytest.approx(capped))
    gap = sampling_gap(logprobs, inputs, counted(3, 1, 1))["policy/sampling_gap"]
    assert gap.item() == pytest.approx((math.log(1.5) * 2 + math.log(4)) / 3)


@pytest.mark.parametrize("episodes", [1, 2])
def test_the_kl_that_the_update_measures_is_summed_over_an_episode(episodes: int) -> None:
    """k1 is 0.5 and -0.1 in one response and 0.2 in another: not over three tokens, nor over two conversations of one
    episode.
    """
    mask = torch.tensor([[True, True], [True, False]])
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.9], [-3.2, 9.0]])
    inputs = LossInputs(mask, logprobs.detach(), torch.zeros(2, 2), reference=ref)
    options = loss_options(grpo(preset="grpo"), max_new_tokens=LENGTHS, inexact=False)
    counts = dataclasses.replace(counted(tokens=3, sequences=2, rows=2), episodes=episodes)
    _, metrics = policy_loss(logprobs, torch.zeros(2, 2), inputs, counts, options)
    assert metrics["objective/kl"].item() == pytest.approx(0.6 / episodes)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo"])
def test_an_entropy_bonus_is_a_mean_over_tokens_whatever_the_aggregation(preset: str) -> None:
    """d loss / d entropy = -entropy_coef / tokens for each of the tokens of the step that count."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    entropy = torch.rand(2, 3, requires_grad=True)
    zeros = torch.zeros(2, 3)
    loss, _ = loss_of(
        zeros, LossInputs(mask, zeros, zeros), counted(12, 5, 6), preset, entropy=entropy, entropy_coef=0.3
    )
    loss.backward()
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.where(mask, -0.3 / 12, 0.0))


def samples_of(
    rewards: list[float], *, scores: list[list[float]] | None = None, kept: list[bool] | None = None
) -> list[Sample]:
    """Responses of two tokens to one prompt, which were sampled with probability 1."""
    return [
        Sample(
            prompt=[1],
            response=[1, 1],
            mask=[True, True],
            logprobs=[0.0, 0.0],
            row=0,
            episode=number,
            scores=[0.0] if scores is None else scores[number],
            score=reward,
            reward=reward,
            in_loss=kept is None or kept[number],
        )
        for number, reward in enumerate(rewards)
    ]


def apart(kl: list[list[float]]) -> Logprobs:
    """Log-probabilities of such samples, whose k1 against the reference is `kl`."""
    return Logprobs(torch.zeros(len(kl), 2), reference=-torch.tensor(kl))


def none_apart(count: int) -> Logprobs:
    return apart([[0.0, 0.0]] * count)


def test_kl_per_response_is_a_mean_over_the_responses_that_count() -> None:
    samples = samples_of([1.0, 1.0, 1.0], kept=[True, True, False])
    logprobs = apart([[1.0, 2.0], [2.0, 3.0], [9.0, 9.0]])
    assert kl_per_response(samples, logprobs) == (4.0, 2)  # (3 + 5) / 2
    assert kl_per_response([dataclasses.replace(one, in_loss=False) for one in samples], logprobs) == (0.0, 0)
    assert adapted_kl_coef(samples, logprobs, 4.0, kl_coef=0.5) == 0.5  # on target
    assert adapted_kl_coef(samples, logprobs, 2.0, kl_coef=0.5) == pytest.approx(
        0.5 * (1 + 0.2 * 2 / 10_000)
    )  # two samples


def grpo(**settings: object) -> GrpoConfig:
    return config_of({"method": "grpo", "grpo": {"group_size": 2, **settings}}).grpo


def test_a_kl_in_the_reward_counts_once_and_only_there() -> None:
    """Two responses with reward 1 and 3, and a KL of 2 and 6 nats."""
    samples = samples_of([1.0, 3.0])
    logprobs = apart([[1.0, 1.0], [3.0, 3.0]])
    in_reward = {"kl_estimator": "k1", "kl_coef": 0.25}
    in_loss = {"kl_estimator": "k3", "kl_coef": 0.25}
    # rewards less KL: 0.5 and 1.5
    assert group_relative(samples, grpo(preset="rloo", **in_reward), logprobs).tolist() == [-1.0, 1.0]
    assert group_relative(samples, grpo(preset="rloo", **in_loss), logprobs).tolist() == [-2.0, 2.0]
    assert group_relative(samples, grpo(advantage_scale="none", **in_reward), logprobs).tolist() == [-0.5, 0.5]
    assert group_relative(samples, grpo(advantage_scale="none", **in_loss), logprobs).tolist() == [-1.0, 1.0]
    # REINFORCE++: returns 1 - .25 - .25, 1 - .25 and 3 - .75 - .75, 3 - .75: 0.5, 0.75, 1.5, 2.25; mean 1.25
    std = math.sqrt((0.75**2 + 0.5**2 + 0.25**2 + 1.0) / 3)
    assert group_relative(
        samples, grpo(preset="reinforce++", **in_reward), logprobs
    ).flatten().tolist() == pytest.approx([-0.75 / std, -0.5 / std, 0.25 / std, 1.0 / std])
    # in the loss the returns are the rewards: 1, 1, 3, 3
    std = math.sqrt(4 / 3)
    assert group_relative(samples, grpo(preset="reinforce++", **in_loss), logprobs).flatten().tolist() == pytest.approx(
        [-1 / std, -1 / std, 1 / std, 1 / std]
    )


def test_a_kl_in_the_reward_keeps_its_weight_where_rewards_are_scaled() -> None:
    """Rewards 1 and 3 deviate by 2 / sqrt 2; the KL of 2 and 6 nats is centred and weighed, in a flat group too. A
    response without a reward is compared in nothing; one that is left out of the loss counts in its group.
    """
    in_reward = {"kl_estimator": "k1", "kl_coef": 0.25}
    scaled = 1 / (math.sqrt(2) + 1e-4)
    flat = samples_of([1.0, 1.0])
    of_flat = apart([[1.0, 1.0], [3.0, 3.0]])
    assert group_relative(flat, grpo(**in_reward), of_flat).tolist() == pytest.approx([0.5, -0.5])
    lost = samples_of([1.0, math.nan, 3.0])
    of_lost = apart([[1.0, 1.0], [9.0, 9.0], [3.0, 3.0]])
    found = group_relative(lost, grpo(**{**in_reward, "group_size": 3}), of_lost).tolist()
    assert found == pytest.approx([0.5 - scaled, 0.0, scaled - 0.5])
    cut = samples_of([1.0, 3.0, 8.0], kept=[True, True, False])
    of_cut = apart([[1.0, 1.0], [3.0, 3.0], [6.0, 6.0]])
    want = [x - (0.5 + 1.5 + 5.0) / 3 for x in (0.5, 1.5, 5.0)]
    plain = group_relative(cut, grpo(advantage_scale="none", **in_reward, group_size=3), of_cut)
    assert plain.tolist() == pytest.approx(want)
    rloo = group_relative(cut, grpo(preset="rloo", **in_reward, group_size=3), of_cut).tolist()
    assert rloo == pytest.approx([x * 3 / 2 for x in want])


def test_the_kl_of_a_score_is_computed_also_for_responses_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Experience] = []
    monkeypatch.setattr(Grpo, "record", lambda self, run, step, experience, *args: seen.append(experience))
    in_score = {"kl_coef": 0.1, "kl_estimator": "k1", "num_epochs": 2}
    cut = {"generation": {"stop": [*"abcdefghijklm"]}, "reward": {"truncated": "mask"}}
    trained(running.config("grpo", model, grpo=in_score, run={"num_steps": 1, "eval_every": 0}, **cut), tmp_path)
    samples = seen[0].samples
    left_out = [row for row, sample in enumerate(samples) if not sample.in_loss]
    assert 0 < len(left_out) < len(samples)
    assert seen[0].inputs.old is not None
    assert seen[0].inputs.reference is not None
    for row in left_out:
        length = len(samples[row].response)
        assert (seen[0].inputs.reference[row, :length] < 0).all()
        assert (seen[0].inputs.old[row, :length] < 0).all()


def test_each_reward_is_compared_on_its_own() -> None:
    """Two prompts whose sums are flat: right in one way or in the other, which GDPO tells apart, and right in none."""
    scores = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    samples = samples_of([1.0, 1.0, 0.0, 0.0, math.nan, 1.0], scores=scores)
    logprobs = none_apart(6)
    weights, together, each = torch.tensor([3.0, 1.0]), grpo(), grpo(preset="gdpo")
    assert without_spread(samples, together, weights) == [0, 1, 2]
    assert without_spread(samples, each, weights) == [1, 2]  # the last has one valid row
    assert not group_relative(samples, together, logprobs).any()
    # 3 a - a and a - 3 a with a = 0.7070; five rows have a score: a variance of 2 (2 a)^2 / 4
    want = [math.sqrt(2), -math.sqrt(2), 0.0, 0.0, 0.0, 0.0]
    assert group_relative(samples, each, logprobs, weights=weights).tolist() == pytest.approx(want, rel=1e-3)
    samples[2] = dataclasses.replace(samples[2], scores=[0.5, 0.0])
    assert without_spread(samples, each, weights) == [2]
    assert without_spread(samples, each, torch.tensor([0.0, 1.0])) == [1, 2]  # the first is only shown


def games(turns: list[list[float]], *, outcomes: list[float] | None = None) -> list[Sample]:
    """Episodes whose turns have two tokens each and these rewards; outcomes are rewards of something else."""
    samples = list[Sample]()
    for number, own in enumerate(turns):
        score = sum(own) + (0.0 if outcomes is None else outcomes[number])
        tokens = 2 * len(own)
        played = Episode(turn_ends=[*range(1, tokens, 2)], turn_rewards=[*own])
        samples.append(
            Sample(
                prompt=[1],
                response=[1] * tokens,
                mask=[True] * tokens,
                logprobs=[0.0] * tokens,
                row=0,
                episode=number,
                score=score,
                reward=score,
                played=played,
            )
        )
    return samples


BY_TURN = {"credit": "turn", "advantage_scale": "none"}


def by_turn(**settings: object) -> GrpoConfig:
    environment = {"name": "game.py:respond"}
    return config_of({"method": "grpo", "environment": environment, "grpo": {"group_size": 2, **settings}}).grpo


def test_a_turn_has_the_advantage_of_its_return_over_the_groups() -> None:
    """Two groups of two: returns 1 + 2, 2 and 3 + 0, 0; and 1 + 4 * 2 beside 5, which has one turn."""
    samples = games([[1.0, 2.0], [3.0, 0.0], [1.0, 4.0], [5.0]], outcomes=[0.0, 0.0, 4.0, 0.0])
    found = group_relative(samples, by_turn(**BY_TURN), none_apart(4))
    assert found.tolist() == [[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, -1.0, -1.0], [2.0, 2.0, 0.0, 0.0], [-2.0, -2.0, 0, 0]]
    own = group_relative(samples, by_turn(**BY_TURN, turn_gamma=0.0), none_apart(4))
    assert own.tolist() == [[-1.0, -1.0, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0], [-2.0, -2.0, 0.0, 0.0], [2.0, 2.0, 0, 0]]


def test_a_group_of_equal_totals_teaches_where_its_turns_differ() -> None:
    """Totals of 3 and 3, and then turns that are the same; the first of these groups is not refilled."""
    samples = games([[1.0, 2.0], [3.0, 0.0], [1.0, 2.0], [1.0, 2.0], [1.0], [1.0, 0.0]])
    assert without_spread(samples, by_turn(**BY_TURN), torch.ones(1)) == [1, 2]
    assert without_spread(samples, grpo(), torch.ones(1)) == [0, 1, 2]


def test_turns_without_spread_are_counted_among_those_that_were_reached() -> None:
    """Of seven turns in two groups the first ones of group 1 have equal returns; one was reached by one alone."""
    samples = games([[1.0, 2.0], [3.0, 0.0], [1.0, 4.0], [2.0]])
    found = turn_metrics(samples, by_turn(**BY_TURN))
    assert found == {"turn/reward_1": 7 / 4, "turn/reward_2": 2.0, "turn/zero_spread": pytest.approx(3 / 7)}
    assert turn_metrics(samples, grpo()) == {}


def test_the_baseline_of_reinforce_is_the_groups_mean() -> None:
    """Two prompts, one easy: against their groups' means all that is left is which response is the better one."""
    samples = samples_of([0.0, 2.0, 10.0, 12.0])
    found = group_relative(samples, grpo(preset="reinforce++-baseline"), none_apart(4))[:, 0]
    assert found.tolist() == pytest.approx([-1 / math.sqrt(8 / 7), 1 / math.sqrt(8 / 7)] * 2)


def test_minibatches_are_of_episodes_with_all_their_conversations() -> None:
    """Eight episodes, some with further conversations of an agent: two minibatches of four."""
    episodes = samples_of([0.0] * 8)
    samples = episodes + [dataclasses.replace(episodes[i], row=1) for i in (0, 0, 3, 5, 5)]
    run: Any = object.__new__(Run)
    run.config, run.state, run.update = running.config("ppo", Path("m")), RunState(), 0
    partition = run.partition(samples, size=4)
    first, second = ([samples[row] for row in rows] for rows in partition)
    assert len(first) + len(second) == 13
    assert len({sample.episode for sample in first}) == len({sample.episode for sample in second}) == 4
    assert {sample.episode for sample in first + second} == {*range(8)}
    assert first != samples[:4]  # shuffled


def test_an_epoch_takes_the_same_minibatches_in_an_order_of_its_own() -> None:
    samples = samples_of([0.0] * 8)
    run: Any = object.__new__(Run)
    run.config, run.state, run.update = running.config("ppo", Path("m")), RunState(), 0
    partition = run.partition(samples, size=2)
    of_place = [[samples[row] for row in rows] for rows in partition]
    experience = experience_of(samples)
    minibatches = run.minibatches(experience, partition, num_epochs=3)
    made = [(run.update, of_place.index(minibatch.samples)) for minibatch in minibatches]
    assert [number for number, _ in made] == [*range(12)]
    epochs = [[place for _, place in made[start : start + 4]] for start in (0, 4, 8)]
    assert epochs[0] == [0, 1, 2, 3]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3]] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1


def varied_at_first(folder: Path) -> dict[str, object]:
    """A reward that tells completions apart in the check before the first step (gold, which does not win, then in
    forms) and in that step, and then no more.
    """
    (folder / "rewards.py").write_text(
        "calls = 0\n\ndef score(prompts, completions, **columns):\n    global calls\n    calls += 1\n"
        "    return [float(len(set(c))) if calls <= 3 else 1.0 for c in completions]\n"
    )
    return {"functions": [{"use": f"{folder / 'rewards.py'}:score"}]}


def adapters(run: RunDir, steps: range) -> list[dict[str, torch.Tensor]]:
    return [load_file(run.checkpoints / f"step-{s:06d}" / "adapter_model.safetensors") for s in steps]


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.wide
def test_the_times_of_a_step_add_up_to_all_of_it(method: str, model: Path, tmp_path: Path) -> None:
    run = trained(running.config(method, model), tmp_path)
    for line in running.metrics(run)[1:]:
        phases = {n: v for n, v in line.items() if n.startswith("time/") and n not in ("time/total", "time/evaluation")}
        assert sum(phases.values()) == pytest.approx(line["time/total"])
        assert line["time/other"] > 0
        assert line["tokens_per_second"] == pytest.approx(line["completion/tokens"] / line["time/total"])


def test_records_are_flushed_by_a_checkpoint_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each of metrics, samples, tokens and prompts, at the end; not in the three steps."""
    flushed, fsync = Counter[str](), os.fsync

    def noted(number: int) -> None:
        flushed[Path(os.readlink(f"/proc/self/fd/{number}")).name] += 1
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    trained(running.config("grpo", model, run={"save_every": 0}), tmp_path)
    assert {name: count for name, count in flushed.items() if name.endswith(".jsonl")} == {
        "metrics.jsonl": 1,
        "samples.jsonl": 1,
        "tokens.jsonl": 1,
        "prompts.jsonl": 1,
    }


@pytest.mark.parametrize(
    ("preset", "dtype"), [("grpo", "float32"), ("reinforce++", "bfloat16"), ("reinforce++", "float32")]
)
@pytest.mark.wide
def test_a_kl_that_is_not_0_pulls_without_advantages(preset: str, dtype: str, model: Path, tmp_path: Path) -> None:
    """Rewards vary in the first step alone; after it the policy is away from its reference."""
    settings = running.config(
        "grpo",
        model,
        model={"dtype": dtype},
        grpo={"preset": preset, "minibatch_size": 8},
        reward=varied_at_first(tmp_path),
        run={"eval_prompts": 0},
    )
    lines = running.metrics(trained(settings, tmp_path))[1:]
    assert [line["optim/flat_steps"] for line in lines] == [0, 0, 0]
    assert lines[1]["optim/grad_norm"] > 1e-4


def test_a_kl_in_the_reward_takes_a_pass_of_its_own_only_where_the_policy_may_be_its_reference(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling is exact, so once the policy has moved the sampled log-probabilities serve: a pass is time."""
    roles: list[str] = []
    logprobs = OnPolicy.logprobs
    monkeypatch.setattr(OnPolicy, "logprobs", lambda *args, **named: roles.append(args[3]) or logprobs(*args, **named))
    steps = {"num_steps": 2, "eval_every": 0, "eval_prompts": 0}
    trained(running.config("grpo", model, grpo={"preset": "reinforce++"}, run=steps), tmp_path)
    assert roles[:3] == ["reference", "policy", "reference"]
    assert "policy" not in roles[3:]


@pytest.mark.parametrize(
    ("ref", "kl_coef", "only"),
    [
        ([-1.0, -1.00009, 5.0], 0.04, True),  # what was only read does not count
        ([-1.0, -1.0002, 5.0], 0.04, False),
        ([-1.0, -1.0002, 5.0], 0.0, True),
    ],
)
def test_a_kl_is_only_rounding(ref: list[float], kl_coef: float, only: bool) -> None:
    """Log-probabilities of the three tokens are -1, and the last one is only read."""
    logprobs = torch.full((1, 3), -1.0)
    mask = torch.tensor([[True, True, False]])
    inputs = LossInputs(mask, logprobs, torch.zeros(1, 3), reference=torch.tensor([ref]))
    assert only_rounding(logprobs, inputs, kl_coef=kl_coef) is only


@pytest.mark.parametrize(
    ("changed", "learns"),
    [
        ({}, False),
        ({"advantage": 1e-9}, True),
        ({"advantage_outside": 1.0}, False),
        ({"entropy_coef": 0.1}, True),
        ({"teacher_coef": 0.1}, True),
        ({"teacher_coef": 0.1, "untaught": 1}, False),
    ],
)
def test_a_micro_batch_with_nothing_but_rounding_has_no_gradient(
    changed: dict[str, float], learns: bool, model: Path
) -> None:
    """The policy is its reference, whatever the weight of its KL. An advantage of a token outside of the loss teaches
    nothing, as where a response was cut off and is left out, nor does a teacher that had no hint for the response.
    """
    names = ("advantage", "advantage_outside", "entropy_coef", "teacher_coef", "untaught")
    given = {**dict.fromkeys(names, 0.0), **changed}
    own = {"preset": "grpo", "entropy_coef": given["entropy_coef"]}
    teacher = {"teacher": {"path": str(model), "kl_coef": given["teacher_coef"]}} if given["teacher_coef"] else {}
    trainer: Any = loaded(running.config("grpo", model, grpo=own, **teacher))
    samples = [Sample([1], [1, 1, 1], [True, True, False], [-1.0] * 3, row=0, in_loss=True)]
    with torch.no_grad(), trainer.policy.acting("policy"):
        batch = trainer.policy.batch_of(samples)
        now = trainer.policy.logprobs("policy", batch, temperature=1.0)[0]
    prompts = [None] if given["untaught"] else [samples[0].prompt]
    outputs = trainer.teacher.score(samples, prompts) if teacher else None
    advantage = torch.tensor([[given["advantage"], given["advantage"], given["advantage_outside"]]])
    experience = experience_of(samples, advantage=advantage, reference=now)
    experience = dataclasses.replace(experience, teacher=outputs)
    options = loss_options(trainer.config.grpo, max_new_tokens=LENGTHS, inexact=False)
    counts = Counts.of(experience)
    with trainer.policy.acting("policy"):
        loss, _ = trainer.policy_terms(batch, minibatch=experience, counts=counts, options=options, measure_gap=False)
    assert loss.requires_grad is learns
    trainer.close()


def test_sampling_that_is_measured_to_be_inexact_is_corrected_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that calls itself exact records log-probabilities that are 0.01 too low. From the second step on they
    are no longer taken for the policy's, and a resume goes on like that, to the same bits.
    """
    sample = CachedEngine.sample

    def shifted(self: CachedEngine, *args: Any, **options: Any) -> Any:
        samples = sample(self, *args, **options)
        for completion in samples:
            completion.logprobs[:] = [logprob - 0.01 for logprob in completion.logprobs]
        return samples

    monkeypatch.setattr(CachedEngine, "sample", shifted)
    twice = {"grpo": {"num_epochs": 2}, "run": {"num_steps": 4, "save_every": 1, "keep_checkpoints": 9}}
    run = trained(running.config("grpo", model, **twice), tmp_path)
    lines = running.metrics(run)[1:]
    assert ["policy/capped_weights" in line for line in lines] == [False, True, True, True]
    assert [line["policy/sampling_gap"] for line in lines] == pytest.approx([0.01] * 4, abs=1e-4)
    states = [json.loads((run.checkpoints / f"step-{step:06d}" / "state.json").read_text()) for step in (0, 1, 4)]
    assert [state["run"]["controllers"]["inexact_sampling"] for state in states] == [False, True, True]

    whole = running.weights(run, 4)
    for step in (2, 3, 4):
        shutil.rmtree(run.checkpoints / f"step-{step:06d}")
    assert running.go_on(run) == 0
    assert all(torch.equal(tensor, whole[name]) for name, tensor in running.weights(run, 4).items())


def test_exact_sampling_stays_exact(model: Path, tmp_path: Path) -> None:
    run = trained(running.config("grpo", model, grpo={"num_epochs": 2}), tmp_path)
    for line in running.metrics(run)[1:]:
        assert "policy/capped_weights" not in line
        assert line["policy/sampling_gap"] < 1e-5


def test_a_step_without_a_gradient_moves_nothing(model: Path, tmp_path: Path) -> None:
    """Rewards vary in the first step alone; neither Adam's momentum nor weight decay goes on without them."""
    often = {"save_every": 1, "keep_checkpoints": 9, "eval_prompts": 0}
    decay = {"optim": {"weight_decay": 0.1}, "reward": varied_at_first(tmp_path)}
    run = trained(running.config("grpo", model, run=often, **decay), tmp_path)
    assert [line["optim/flat_steps"] for line in running.metrics(run)[1:]] == [0, 1, 2]
    start, first, second, third = adapters(run, range(4))
    assert any(not torch.equal(start[name], first[name]) for name in start)
    assert all(torch.equal(first[name], second[name]) and torch.equal(first[name], third[name]) for name in start)


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_where_no_completion_counts_nothing_is_measured(method: str, model: Path, tmp_path: Path) -> None:
    cut: dict[str, Any] = {"generation": {"max_new_tokens": 1}, "reward": {"truncated": "mask"}}
    cut |= {"grpo": {"preset": "grpo"}, "critic": {"warmup_steps": 0}, "run": {"save_every": 3, "eval_prompts": 0}}
    run = trained(running.config(method, model, **cut), tmp_path)
    for line in running.metrics(run)[1:]:
        assert line["completion/truncated"] == 1.0
        measured = {name for name in line if name.startswith(("policy/", "value/"))}
        assert measured <= {"value/grad_norm"}
        assert "objective/kl" not in line
    assert running.metrics(run)[-1]["optim/flat_steps"] == 3
    start, end = adapters(run, range(0, 4, 3))
    assert all(torch.equal(start[name], end[name]) for name in start)


def test_rewards_are_logged_as_they_were_before_groups_were_replaced(model: Path, tmp_path: Path) -> None:
    """Prompts whose first letter is an early one have rewards that vary; the groups of the others are replaced."""
    varied = "float(len(set(c))) if p[9] < 'm' else 5.0"
    body = f"    return [{varied} for p, c in zip(prompts, completions)]\n"
    (tmp_path / "rewards.py").write_text(f"def score(prompts, completions, **columns):\n{body}")
    reward = {"functions": [{"use": f"{tmp_path / 'rewards.py'}:score"}]}
    few = {"task": {"max_samples": 10}, "run": {"num_steps": 1, "eval_every": 0}}
    lines = []
    for rounds in (0, 3):
        settings = running.config("grpo", model, reward=reward, grpo={"dynamic_sampling_rounds": rounds}, **few)
        run = trained(settings, tmp_path, name=f"rounds-{rounds}")
        lines.append(running.metrics(run)[1])
    plain, refilled = lines
    assert 0 < plain["reward/zero_spread_groups"] < 1
    for name in ("reward/mean", "reward/std", "reward/score", "reward/zero_spread_groups"):
        assert refilled[name] == plain[name]
    assert refilled["reward/zero_spread_kept"] < plain["reward/zero_spread_groups"]
    assert "reward/zero_spread_kept" not in plain
    tried = [entry[2] for entry in json.loads(run.prompts.read_text())["prompts"]]
    assert len(tried) > 4 == max(tried)  # fresh prompts, none twice


@pytest.mark.wide
@pytest.mark.parametrize(
    ("rule", "rounds"),
    [({"overlong_tokens": 6}, 1), ({"truncated": "penalize"}, 1), ({"truncated": "penalize"}, 0)],
)
def test_length_makes_no_group_worth_keeping_and_no_prompt_unsolved(
    rule: dict[str, Any], rounds: int, model: Path, tmp_path: Path
) -> None:
    """Every answer is right, and lengths differ: no group has spread and every prompt is solved. The advantages keep
    the penalty, which is learnt from unless such groups were to be replaced.
    """
    (tmp_path / "rewards.py").write_text("def score(prompts, **columns):\n    return [1.0] * len(prompts)\n")
    settings = running.config(
        "grpo",
        model,
        reward={"functions": [{"use": f"{tmp_path / 'rewards.py'}:score"}], **rule},
        generation={"stop": [*"abcdefghijklm"]},
        grpo={"dynamic_sampling_rounds": rounds},
        task={"sampler": "difficulty"},
        run={"num_steps": 1, "eval_every": 0},
    )
    run = trained(settings, tmp_path)
    line = running.metrics(run)[1]
    assert line["reward/zero_spread_groups"] == line.get("reward/zero_spread_kept", 1.0) == 1.0
    assert line["optim/flat_steps"] == rounds
    assert (line["optim/grad_norm"] == 0.0) is (rounds == 1)
    assert line["reward/mean"] < 1.0
    tried = json.loads(run.prompts.read_text())["prompts"]
    assert len(tried) == 4 + 4 * rounds  # four of the step, four in their place
    assert all(count == right == 4 for _, _, count, right in tried)
    shown = [json.loads(sample) for sample in run.samples.read_text().splitlines()]
    assert len({sample["reward"] for sample in shown if sample["kind"] == "train"}) > 1
    assert all(sample.get("score", sample["reward"]) == 1.0 for sample in shown)
    assert all(("score" in sample) == (sample["reward"] < 1.0) for sample in shown)
    assert any(sample["advantage"] for sample in shown if sample["kind"] == "train")


def test_what_is_left_out_of_the_loss_divides_it_by_a_constant_only() -> None:
    """Two groups of two responses with two tokens each, one of them left out."""
    samples = samples_of([0.0, 1.0, 5.0, 5.0], kept=[True, True, False, False])
    counts = Counts.of(experience_of(samples))
    divisors = [counts.denominator(by, max_new_tokens=LENGTHS) for by in ("token", "sequence", "sequence-sum")]
    assert divisors == [4, 2, 2]
    assert counts.denominator("constant", max_new_tokens=LENGTHS) == 4 * LENGTHS


def test_an_episode_counts_once_if_one_of_its_conversations_is_in_the_loss() -> None:
    """Three episodes: of two conversations, one of which is left out; of one; and of one that is left out."""
    kept = {0: [True, False], 1: [True], 2: [False]}
    samples = [Sample([1], [1], [True], [0.0], row=0, episode=e, in_loss=x) for e, each in kept.items() for x in each]
    assert Counts.of(experience_of(samples)).episodes == 2


PROMPTS = [PreparedPrompt(i, {"prompt": f"p{i}"}, f"p{i}", f"p{i}", [1], "") for i in range(60)]


def rates_of(prompts: list[PreparedPrompt] = PROMPTS) -> PassRates:
    return PassRates(prompts, num_prompts=10, seed=0, solved_reward=1.0)


def see(rates: PassRates, record: PassRecord, step: int, prompts: list[PreparedPrompt], rewards: torch.Tensor) -> None:
    """A step in which these prompts had such rewards; 1 is right."""
    rates.update(prompts, rewards)
    rates.drain(step, record)


def test_what_it_is_worth_is_the_expectation_under_the_posterior() -> None:
    rates = rates_of(PROMPTS[:3])
    record: PassRecord = {}
    assert [*rates.worth(5, record)] == [1.0] * 3
    see(rates, record, 5, PROMPTS[:2], torch.tensor([1.0, 0.0, 0.5, float("nan"), 1.0, 1.0, 1.0, 1.0]))
    assert [*record.values()] == [[1.0, 2.0, 5.0], [4.0, 0.0, 5.0]]
    samples = np.random.default_rng(0).beta([1.1, 4.1], [2.1, 0.1], size=(400_000, 2))
    expected = (samples * (1 - samples)).mean(0)
    assert rates.worth(5, record) == pytest.approx([*expected, expected.mean()], abs=1e-3)


def test_a_weighted_sum_that_misses_a_solved_reward_by_rounding_reaches_it() -> None:
    """0.02 + 0.53 + 0.45 is 0.99999994 in float32."""
    sums = (torch.ones(2, 3) * torch.tensor([[0.02, 0.53, 0.45], [0.02, 0.53, 0.449]])).sum(1)
    assert sums.max() < 1
    rates = rates_of(PROMPTS[:1])
    rates.update(PROMPTS[:1], sums)
    assert [tried[1:] for tried in rates.drain(0, {})[0]] == [[rates.keys[0], 2, 1]]


def test_what_was_seen_fades() -> None:
    rates = rates_of(PROMPTS[:1])
    record: PassRecord = {}
    see(rates, record, 0, PROMPTS[:1], torch.zeros(8))
    worths = [rates.worth(step, record)[0] for step in (0, 200, 400, 20_000)]
    assert worths == sorted(worths)
    assert worths[-1] == pytest.approx(0.1 * 0.1 / (0.2 * 1.2), rel=0.01)  # nothing is known but that it was seen
    see(rates, record, 200, PROMPTS[:1], torch.ones(8))
    assert [*record.values()] == [[8.0, 4.0, 200]]


def test_a_probed_rate_is_where_it_begins() -> None:
    rows = [{"prompt": "a", "pass_rate": rate} for rate in (0.0, 0.5, 1.0, None, "x", 7)]
    prompts = [PreparedPrompt(i, row, "a", "a", [1], "") for i, row in enumerate(rows)]
    zero, half, one, *unknown = rates_of(prompts).worth(0, {})
    assert zero == one < half
    assert len({*unknown}) == 1
    assert half > 5 * zero
    assert unknown[0] == pytest.approx((zero + half + one) / 3)


def test_a_draw_follows_from_seed_step_and_record() -> None:
    rates = rates_of()
    record: PassRecord = {}
    for step in range(7):
        drawn = [rates.prompts[i] for i in rates.draw(step, record)]
        see(rates, record, step, drawn, torch.tensor([float((p.index + n) % 3 == 0) for p in drawn for n in range(4)]))
    again = rates_of().draw(7, json.loads(json.dumps(record)))
    assert again == rates.draw(7, record) == rates.draw(7, record)
    assert rates.draw(8, record) != again
    assert len({*again}) == 10
    few = rates_of(PROMPTS[:4])
    assert Counter(few.draw(0, {}) + few.draw(1, {})) == dict.fromkeys(range(4), 5)
