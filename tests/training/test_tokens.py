"""Tokens of a step: those that an environment wrote move no gradient; tokens.jsonl has the numbers of the others."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import running
from tests.faults.lookup_runs import lookup
from tests.models.building import stir
from tests.training.rows import trained
from tests.training.test_on_policy import samples_of
from tinyrl.algorithms.advantages import gae
from tinyrl.algorithms.masking import masked_whiten
from tinyrl.environments.environment import Episode
from tinyrl.generation.engine import Completion
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.records import pieces, shown_samples, token_lines
from tinyrl.rollout.sample import (
    Sample,
    environment_metrics,
    fill,
    kl,
    kl_per_response,
    loss_mask,
    padded,
    token_rewards_of,
)
from tinyrl.runs.launched import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.grpo import Grpo, group_relative
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.policy_loss import Counts
from tinyrl.training.ppo import Ppo, adapted_kl_coef, explained_variance
from tinyrl.training.step import Pass

GRPO: dict[str, dict[str, Any]] = {
    "gspo": {"preset": "gspo"},
    "reinforce++": {"preset": "reinforce++"},
    "masked by sequence": {"importance_correction": "sequence"},
    "with an entropy bonus": {"entropy_coef": 0.1},
    "KL in the group's scores": {"kl_coef": 0.1, "kl_estimator": "k1"},
}


@pytest.fixture(scope="module")
def collector() -> Collector:
    """A PPO run's models: policy, reference and critic; the adapters are not zero."""
    made = load_collector(lookup("ppo", environment={"max_turns": 4}), options=Options(device="cpu"))
    for parameters in made.policy.parameters.values():
        stir(parameters)
    return made


@pytest.fixture(scope="module")
def samples(collector: Collector) -> list[Sample]:
    """24 episodes, their log-probabilities a little off the policy's, with rewards of turns."""
    out = collector.collect(collector.train_prompts, group_size=4, step=0)
    assert sum(len(sample.response) - sample.num_actions for sample in out) > 30
    noise, mask = torch.Generator().manual_seed(2), loss_mask(out)

    def near(x: Tensor) -> Tensor:
        return torch.where(mask, x + 0.2 * torch.randn(x.shape, generator=noise), 0.0)

    for name in ("old", "ref"):
        fill(out, name, near(padded(out, "logprobs")))
    fill(out, "values", near(torch.zeros(mask.shape)))
    for sample in out:
        assert sample.played is not None
        sample.played.turn_rewards = torch.rand(len(sample.played.turn_ends), generator=noise).tolist()
        sample.reward = float(torch.randn((), generator=noise)) + sum(sample.played.turn_rewards)
    return out


def with_junk(samples: list[Sample]) -> list[Sample]:
    """The same with junk at every token that the policy did not choose."""
    junk, found = torch.Generator().manual_seed(3), []
    for sample in samples:
        mask, fields = torch.tensor(sample.mask), dict[str, Any]()
        for name in ("logprobs", "old", "ref", "values"):
            x = torch.as_tensor(getattr(sample, name))
            fields[name] = torch.where(mask, x, 7.0 * torch.randn(x.shape, generator=junk))
        fields["logprobs"] = fields["logprobs"].tolist()
        found.append(replace(sample, **fields))
    return found


def gradient(method: Any, role: Any, passes: list[Pass]) -> Tensor:
    (one,) = [each for each in passes if each.role == role]
    for parameter in method.policy.parameters[role].values():
        parameter.grad = None
    with method.policy.acting(role):
        one.loss(method.policy.batch_of(one.items))[0].backward()
    return torch.cat([p.grad.flatten() for p in method.policy.parameters[role].values() if p.grad is not None])


def method_on(collector: Collector, kind: type[OnPolicy], **sections: Any) -> Any:
    """A method of these settings on the models of `collector`."""
    method: Any = object.__new__(kind)
    method.collector, method.policy = collector, copy.copy(collector.policy)
    method.policy.config, method.teacher, method.run = lookup(**sections), None, SimpleNamespace(update=0)
    method.temperature, method.group_size = 1.0, 4
    return method


@pytest.mark.parametrize("name", GRPO)
def test_numbers_at_observed_tokens_move_no_gradient_of_grpo(
    name: str, collector: Collector, samples: list[Sample]
) -> None:
    method = method_on(collector, Grpo, grpo={**GRPO[name], "group_size": 4})
    config, found = method.config.grpo, []
    for one in (samples, with_junk(samples)):
        fill(one, "advantage", group_relative(one, config, weights=collector.scorer.weights))
        passes = method.passes(one, kl_coef=max(config.kl_coef, 0.05))
        found.append(gradient(method, "policy", passes))
    assert float(found[0].abs().max()) > 1e-4
    assert torch.equal(found[0], found[1])


def test_numbers_at_observed_tokens_move_no_gradient_of_ppo(collector: Collector, samples: list[Sample]) -> None:
    method = method_on(collector, Ppo, method="ppo", ppo={"kl_estimator": "k3", "entropy_coef": 0.01})
    found = dict[str, list[Tensor]](policy=[], critic=[])
    numbers: list[tuple[float, ...]] = []
    for one in (samples, with_junk(samples)):
        mask, values = loss_mask(one), padded(one, "values")
        rewards = token_rewards_of(one, kl(one, mask), kl_coef=0.1)
        advantages, returns = gae(rewards, values, mask, gamma=0.99, gae_lambda=0.9)
        fill(one, "advantage", masked_whiten(advantages, mask))
        fill(one, "returns", returns)
        passes = method.passes(one, kl_coef=0.1)
        for role, gradients in found.items():
            gradients.append(gradient(method, role, passes))
        explained = explained_variance(values, returns, mask)
        numbers.append((explained, *kl_per_response(one), adapted_kl_coef(one, 1.0, kl_coef=0.1)))
    for ours, theirs in found.values():
        assert float(ours.abs().max()) > 1e-4
        assert torch.equal(ours, theirs)
    assert numbers[0] == numbers[1]


# By hand: two episodes, [chose 2, read 3, chose 1] that ended and [chose 4] that was cut off

MASK = [[True, True, False, False, False, True], [True, True, True, True, False, False]]


@pytest.fixture
def two() -> list[Sample]:
    first = Completion([5, 6, 7, 8, 9, 5], [-1.0, -2.0, 0.0, 0.0, 0.0, -3.0], "stop", MASK[0])
    second = Completion([5, 6, 7, 8], [-1.0] * 4, "length", [True] * 4)
    turns = [Episode(turn_ends=[1, 5], turn_rewards=[0.5, 0.25]), Episode(turn_ends=[3], turn_rewards=[0.0])]
    samples = [Sample.of([4], first, row=0, reward=1.75, played=turns[0])]
    samples.append(Sample.of([4], second, row=0, episode=1, reward=3.0, played=turns[1]))
    fill(samples, "ref", torch.full((2, 6), -1.5))
    return samples


def test_counts_and_means_are_of_chosen_tokens(two: list[Sample]) -> None:
    assert loss_mask(two).tolist() == MASK
    assert [sample.num_actions for sample in two] == [3, 4]
    counts = Counts.of(loss_mask(two))
    assert (counts.tokens, counts.sequences, counts.rows) == (7, 2, 2)
    assert counts.denominator("constant", max_new_tokens=24) == 2 * 24
    assert kl(two, loss_mask(two)).tolist() == [[0.5, -0.5, 0, 0, 0, -1.5], [0.5, 0.5, 0.5, 0.5, 0, 0]]
    assert kl_per_response(two)[0] == pytest.approx((-1.5 + 2.0) / 2)
    assert environment_metrics(two) == {
        "environment/turns": 1.5,
        "environment/invalid_calls": 0.0,
        "environment/observation_tokens": 1.5,
        "environment/out_of_turns": 0.0,
    }


def test_rewards_of_turns_are_on_their_last_tokens_and_the_rest_on_the_last(two: list[Sample]) -> None:
    shaped = token_rewards_of(two, torch.zeros(2, 6), kl_coef=0.0)
    assert shaped.tolist() == [[0, 0.5, 0, 0, 0, 0.25 + 1.0], [0, 0, 0, 3.0, 0, 0]]


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
        (b"ab", ["a", "b"]),
        ("a\u00e9b".encode(), ["a", "", "\u00e9", "b"]),
        ("\U0001f600".encode(), ["", "", "", "\U0001f600"]),
        (b"a\xe2\x82", ["a", "", "\ufffd"]),
        (b"\xff" * 9, ["", "", "", "", "", "", "", "\ufffd" * 8, "\ufffd"]),
    ],
)
def test_each_token_adds_a_piece_and_together_they_are_the_text(text: bytes, expected: list[str]) -> None:
    found = pieces(Bytes(), list(text), before=[ord("x")])
    assert found == expected
    assert "".join(found) == text.decode("utf-8", "replace")


def test_the_best_and_the_worst_of_each_prompt_come_first() -> None:
    def shown(samples: list[Sample], group_size: int) -> list[int]:
        return [samples.index(sample) for sample in shown_samples(samples, group_size=group_size)]

    rewards = [1.0, 3.0, 2.0, 5.0, 5.0, 5.0, NAN, 4.0, 6.0]
    assert shown(samples_of(rewards, [[0.0, 0.0]] * 9, kept=[True] * 6 + [False] * 3), 3) == [1, 0, 3, 2, 4, 5]
    many = samples_of([float(i) for i in range(20)], [[0.0, 0.0]] * 20)
    assert shown(many, 2) == [1, 0, 3, 2, 5, 4, 7, 6]
    assert shown(many, 1) == [*range(8)]


def one_row(**fields: Any) -> Sample:
    """A response "ab", "?" read, "c": three tokens chosen, one only read, after a prompt "x"."""
    mask, logprobs = [True, True, False, True], [-0.12345, -1.0, 0.0, -2.0]
    return Sample([ord("x")], [*b"ab?c"], mask, logprobs, 5, reward=0.75, **fields)


def of_tokens(sample: Sample, rewards: torch.Tensor | None = None) -> dict[str, Any]:
    new = torch.tensor([[-0.1, -0.9, 0.0, -2.5]])
    (line,) = token_lines(
        [sample], new_logprobs=new, rewards=rewards, tokenizer=Bytes(), prompts={5: "x"}, group_size=1
    )
    return line


def test_a_line_has_the_numbers_of_each_token_in_the_update() -> None:
    of_group = one_row(advantage=torch.tensor(0.5), played=Episode(turn_ends=[1, 3], turn_rewards=[0.25, 0.0]))
    nothing = dict.fromkeys(("advantage", "old", "new", "ref", "teacher", "value", "reward"))
    assert of_tokens(of_group) == {
        "kind": "train", "prompt_index": 5, "sample": 0, "prompt": "x", "reward": 0.75,
        "tokens": [
            {"piece": "a", "chosen": True, **nothing, "advantage": 0.5, "old": -0.123, "new": -0.1, "reward": 0.0},
            {"piece": "b", "chosen": True, **nothing, "advantage": 0.5, "old": -1.0, "new": -0.9, "reward": 0.25},
            {"piece": "?", "chosen": False, **nothing},
            {"piece": "c", "chosen": True, **nothing, "advantage": 0.5, "old": -2.0, "new": -2.5, "reward": 0.5},
        ],
    }  # fmt: skip
    columns = {"advantage": [1.0, 2.0, 0.0, 3.0], "old": [-0.5, -0.6, 0.0, -0.7], "ref": [-0.8, -0.9, 0.0, -1.1],
               "values": [0.1, 0.2, 0.0, 0.3]}  # fmt: skip
    of_ppo = one_row(**{name: torch.tensor(column) for name, column in columns.items()})
    tokens = of_tokens(of_ppo, torch.tensor([[-0.01, -0.02, 0.0, 0.9996]]))["tokens"]
    for name, (first, second, _, last) in columns.items():
        assert [t[name.removesuffix("s")] for t in tokens] == [first, second, None, last]
    assert [t["reward"] for t in tokens] == [-0.01, -0.02, None, 1.0]


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
        assert all(t["chosen"] and t["old"] < 0 for t in tokens)
        if method == "grpo":
            assert sum(t["reward"] for t in tokens) == pytest.approx(sample["reward"], abs=1e-3)
            assert {t["advantage"] for t in tokens} == {round(sample["advantage"], 3)}
        else:
            assert all(isinstance(t["value"], float) and isinstance(t["ref"], float) for t in tokens)
    assert max(abs(t["new"] - t["old"]) for line in found for t in line["tokens"]) > 0.002
    tried = {(line["step"], entry[0]): entry[2] for line in lines(run.prompts) for entry in line["prompts"]}
    assert tried.keys() == {(s["step"], s["prompt_index"]) for s in samples if s["kind"] == "train"}
    assert {*tried.values()} == {4 if method == "grpo" else 1}


def test_to_be_shown_changes_nothing_of_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = running.config("grpo", model)
    shown = trained(settings, tmp_path, name="shown")
    monkeypatch.setattr("tinyrl.training.on_policy.shown_samples", lambda samples, group_size: [])
    plain = trained(settings, tmp_path, name="plain")
    assert shown.tokens.exists()
    assert not plain.tokens.exists()
    assert running.lasting(shown) == running.lasting(plain)
    ours, theirs = running.weights(shown, 3), running.weights(plain, 3)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_tokens_stay_within_their_room_and_are_cut_with_the_other_records(tmp_path: Path) -> None:
    run, line = RunDir(tmp_path), {"step": 1, "piece": "x" * 80}
    size = len(json.dumps(line)) + 1
    for _ in range(2):
        run.append_tokens([line] * 3, most_bytes=2 * size)
    assert run.tokens.stat().st_size == 2 * size
    before = run.lengths()
    run.append_tokens([line], most_bytes=1000)
    run.cut(before)
    assert run.tokens.stat().st_size == 2 * size
