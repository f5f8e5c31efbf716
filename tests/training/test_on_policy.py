"""What a samples's metrics describe, and what a step without anything to learn from says."""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.config.method_sections import GrpoConfig
from tinyrl.models.batch import make_batch
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector, load_method
from tinyrl.rollout.sample import Sample, kl, kl_per_response, loss_mask
from tinyrl.runs.launched import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.grpo import group_relative, without_spread
from tinyrl.training.ppo import adapted_kl_coef
from tinyrl.training.run import Run


def samples_of(rewards: list[float], kl: list[list[float]], *, kept: list[bool] | None = None) -> list[Sample]:
    """Responses of two tokens to one prompt, whose k1 against the reference is `kl`."""
    found = []
    for number, (reward, apart) in enumerate(zip(rewards, kl, strict=True)):
        sample = Sample([1], [1, 1], [True, True], [0.0, 0.0], 0, number, scores=[0.0], reward=reward)
        sample.ref, sample.in_loss = -torch.tensor(apart), kept is None or kept[number]
        found.append(sample)
    return found


def test_kl_per_response_is_a_mean_over_the_responses_that_count() -> None:
    samples = samples_of([1.0, 1.0, 1.0], [[1.0, 2.0], [2.0, 3.0], [9.0, 9.0]], kept=[True, True, False])
    assert kl_per_response(samples) == (4.0, 2)  # (3 + 5) / 2
    assert kl_per_response([dataclasses.replace(one, in_loss=False) for one in samples]) == (0.0, 0)
    assert adapted_kl_coef(samples, 4.0, kl_coef=0.5) == 0.5  # on target
    assert adapted_kl_coef(samples, 2.0, kl_coef=0.5) == pytest.approx(0.5 * (1 + 0.2 * 2 / 10_000))  # two samples


def grpo(**settings: object) -> GrpoConfig:
    return GrpoConfig.model_validate({"group_size": 2, **settings})


def test_a_kl_in_the_reward_counts_once_and_only_there() -> None:
    """Two responses with reward 1 and 3, and a KL of 2 and 6 nats."""
    samples = samples_of([1.0, 3.0], [[1.0, 1.0], [3.0, 3.0]])
    in_reward = {"kl_estimator": "k1", "kl_coef": 0.25}
    in_loss = {"kl_estimator": "k3", "kl_coef": 0.25}
    # rewards less KL: 0.5 and 1.5
    assert group_relative(samples, grpo(preset="rloo", **in_reward)).tolist() == [-1.0, 1.0]
    assert group_relative(samples, grpo(preset="rloo", **in_loss)).tolist() == [-2.0, 2.0]
    assert group_relative(samples, grpo(advantage_scale="none", **in_reward)).tolist() == [-0.5, 0.5]
    assert group_relative(samples, grpo(advantage_scale="none", **in_loss)).tolist() == [-1.0, 1.0]
    # REINFORCE++: returns 1 - .25 - .25, 1 - .25 and 3 - .75 - .75, 3 - .75: 0.5, 0.75, 1.5, 2.25; mean 1.25
    std = math.sqrt((0.75**2 + 0.5**2 + 0.25**2 + 1.0) / 3)
    assert group_relative(samples, grpo(preset="reinforce++", **in_reward)).flatten().tolist() == pytest.approx(
        [-0.75 / std, -0.5 / std, 0.25 / std, 1.0 / std]
    )
    # in the loss the returns are the rewards: 1, 1, 3, 3
    std = math.sqrt(4 / 3)
    assert group_relative(samples, grpo(preset="reinforce++", **in_loss)).flatten().tolist() == pytest.approx(
        [-1 / std, -1 / std, 1 / std, 1 / std]
    )


def test_a_kl_in_the_reward_keeps_its_weight_where_rewards_are_scaled() -> None:
    """Rewards 1 and 3 deviate by 2 / sqrt 2; the KL of 2 and 6 nats is centred and weighed, in a flat group too. A
    response without a reward is compared in nothing.
    """
    in_reward = {"kl_estimator": "k1", "kl_coef": 0.25}
    samples = samples_of([1.0, 3.0], [[1.0, 1.0], [3.0, 3.0]])
    scaled = 1 / (math.sqrt(2) + 1e-4)
    assert group_relative(samples, grpo(**in_reward)).tolist() == pytest.approx([0.5 - scaled, scaled - 0.5])
    flat = samples_of([1.0, 1.0], [[1.0, 1.0], [3.0, 3.0]])
    assert group_relative(flat, grpo(**in_reward)).tolist() == pytest.approx([0.5, -0.5])
    lost = samples_of([1.0, math.nan, 3.0], [[1.0, 1.0], [9.0, 9.0], [3.0, 3.0]])
    found = group_relative(lost, grpo(**{**in_reward, "group_size": 3})).tolist()
    assert found == pytest.approx([0.5 - scaled, 0.0, scaled - 0.5])


def test_a_truncated_response_that_is_left_out_still_counts_in_its_group_with_its_kl() -> None:
    """Rewards 1, 3 and 8 with a KL of 2, 6 and 12 nats, the last left out of the loss: 0.5, 1.5 and 5 are compared."""
    samples = samples_of([1.0, 3.0, 8.0], [[1.0, 1.0], [3.0, 3.0], [6.0, 6.0]], kept=[True, True, False])
    in_reward = {"kl_estimator": "k1", "kl_coef": 0.25, "group_size": 3}
    mean = (0.5 + 1.5 + 5.0) / 3
    want = [0.5 - mean, 1.5 - mean, 5.0 - mean]
    assert group_relative(samples, grpo(advantage_scale="none", **in_reward)).tolist() == pytest.approx(want)
    rloo = group_relative(samples, grpo(preset="rloo", **in_reward)).tolist()
    assert rloo == pytest.approx([x * 3 / 2 for x in want])
    assert kl_per_response(samples)[0] == 4.0  # what is logged is of those that count


def test_the_kl_of_a_score_is_computed_also_for_responses_left_out(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Sample]] = []

    def spy(samples: list[Sample], config: GrpoConfig, **weights: torch.Tensor) -> torch.Tensor:
        seen.append(samples)
        return group_relative(samples, config, **weights)

    monkeypatch.setattr("tinyrl.training.grpo.group_relative", spy)
    settings = running.config(
        "grpo",
        tiny("llama"),
        grpo={"kl_coef": 0.1, "kl_estimator": "k1", "num_epochs": 2},
        generation={"stop": [*"abcdefghijklm"]},
        reward={"truncated": "mask"},
        run={"num_steps": 2, "eval_every": 0},
    )
    assert running.train(settings, tmp_path)[0] == 0
    for samples in seen:
        left_out = [sample for sample in samples if not sample.in_loss]
        assert 0 < len(left_out) < len(samples)
        for sample in left_out:
            assert sample.ref is not None
            assert sample.old is not None
            assert (sample.ref < 0).all()
            assert (sample.old < 0).all()
    first, second = (kl(samples, loss_mask(samples, "rewarded")).abs() for samples in seen)
    assert first.max() < 1e-4  # nothing is learnt yet
    assert second[[not sample.in_loss for sample in seen[1]]].max() > 1e-3


def test_each_reward_is_compared_on_its_own() -> None:
    """Two prompts whose sums are flat: right in one way or in the other, which GDPO tells apart, and right in none."""
    samples = samples_of([1.0, 1.0, 0.0, 0.0, math.nan, 1.0], [[0.0, 0.0]] * 6)
    weights = torch.tensor([3.0, 1.0])

    def score(*scores: list[float]) -> None:
        for sample, of in zip(samples, scores, strict=False):
            sample.scores = of

    score([1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0])
    together, each = grpo(), grpo(preset="gdpo")
    assert without_spread(samples, together, weights) == [0, 1, 2]
    assert without_spread(samples, each, weights) == [1, 2]  # the last has one valid row
    shown_only = torch.tensor([0.0, 1.0])
    score([1.0, 0.5], [0.0, 0.5])
    assert without_spread(samples, each, shown_only) == [0, 1, 2]
    assert not group_relative(samples, each, weights=shown_only).any()
    score([1.0, 0.0], [0.0, 1.0])
    assert not group_relative(samples, together).any()
    got = group_relative(samples, each, weights=weights).tolist()
    # 3 a - a and a - 3 a with a = 0.7070; five rows have a score: a variance of 2 (2 a)^2 / 4
    assert got == pytest.approx([math.sqrt(2), -math.sqrt(2), 0.0, 0.0, 0.0, 0.0], rel=1e-3)


def test_the_baseline_of_reinforce_is_the_groups_mean() -> None:
    """Two prompts, one easy: against their groups' means all that is left is which response is the better one."""
    samples = samples_of([0.0, 2.0, 10.0, 12.0], [[0.0, 0.0]] * 4)
    std = math.sqrt(8 / 7)
    assert group_relative(samples, grpo(preset="reinforce++-baseline"))[:, 0].tolist() == pytest.approx(
        [-1 / std, 1 / std, -1 / std, 1 / std]
    )


def write_reward(folder: Path, body: str) -> dict[str, object]:
    (folder / "rewards.py").write_text(f"def score(prompts, completions, **columns):\n    return {body}\n")
    return {"functions": [{"use": f"{folder / 'rewards.py'}:score"}]}


def varied_at_first(folder: Path) -> dict[str, object]:
    """A reward that tells completions apart in the check before the first step and in that step, and then no more."""
    (folder / "rewards.py").write_text(
        "calls = 0\n\ndef score(prompts, completions, **columns):\n    global calls\n    calls += 1\n"
        "    return [float(len(set(c))) if calls <= 2 else 1.0 for c in completions]\n"
    )
    return {"functions": [{"use": f"{folder / 'rewards.py'}:score"}]}


def adapters(run: RunDir, steps: range) -> list[dict[str, torch.Tensor]]:
    return [load_file(run.checkpoints / f"step-{s:06d}" / "adapter_model.safetensors") for s in steps]


def test_a_step_without_a_gradient_moves_nothing(tiny: TinyModels, tmp_path: Path) -> None:
    """Rewards vary in the first step alone; neither Adam's momentum nor weight decay goes on without them."""
    settings = running.config(
        "grpo",
        tiny("llama"),
        reward=varied_at_first(tmp_path),
        optim={"weight_decay": 0.1},
        run={"save_every": 1, "keep_checkpoints": 9, "eval_prompts": 0},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    assert [line["optim/flat_steps"] for line in running.metrics(run)[1:]] == [0, 1, 2]
    start, first, second, third = adapters(run, range(4))
    assert any(not torch.equal(start[name], first[name]) for name in start)
    assert all(torch.equal(first[name], second[name]) and torch.equal(first[name], third[name]) for name in start)


def test_a_kl_in_the_loss_is_something_to_learn_from(tiny: TinyModels, tmp_path: Path) -> None:
    """Rewards that are equal once the policy has left the reference: the loss goes on to have a gradient."""
    settings = running.config(
        "grpo", tiny("llama"), grpo={"kl_coef": 0.1}, reward=varied_at_first(tmp_path), run={"eval_prompts": 0}
    )
    _, run, _ = running.train(settings, tmp_path)
    assert running.metrics(run)[-1]["optim/flat_steps"] == 0


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_where_no_completion_counts_nothing_is_measured(method: str, tiny: TinyModels, tmp_path: Path) -> None:
    settings = running.config(
        method,
        tiny("llama"),
        **({"grpo": {"preset": "grpo"}} if method == "grpo" else {"critic": {"warmup_steps": 0}}),
        generation={"max_new_tokens": 1},
        reward={"truncated": "mask"},
        run={"num_steps": 2, "save_every": 1, "eval_prompts": 0},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    for line in running.metrics(run)[1:]:
        assert line["completion/truncated"] == 1.0
        measured = {name for name in line if name.startswith(("policy/", "value/"))}
        assert measured <= {"value/grad_norm"}
        assert "objective/kl" not in line
    assert running.metrics(run)[-1]["optim/flat_steps"] == 2
    start, _, end = adapters(run, range(3))
    assert all(torch.equal(start[name], end[name]) for name in start)


def test_rewards_are_logged_as_they_were_before_groups_were_replaced(tiny: TinyModels, tmp_path: Path) -> None:
    """Prompts whose first letter is an early one have rewards that vary; the groups of the others are replaced."""
    varied = "float(len(set(c))) if p[9] < 'm' else 5.0"
    reward = write_reward(tmp_path, f"[{varied} for p, c in zip(prompts, completions)]")
    once = {"num_steps": 1, "eval_every": 0}
    lines = []
    for rounds in (0, 3):
        settings = running.config(
            "grpo", tiny("llama"), reward=reward, grpo={"dynamic_sampling_rounds": rounds}, run=once
        )
        _, run, _ = running.train(settings, tmp_path, name=f"rounds-{rounds}")
        lines.append(running.metrics(run)[1])
    plain, refilled = lines
    assert 0 < plain["reward/zero_spread_groups"] < 1
    for name in ("reward/mean", "reward/std", "reward/score", "reward/zero_spread_groups"):
        assert refilled[name] == plain[name]
    assert refilled["reward/zero_spread_kept"] < plain["reward/zero_spread_groups"]
    assert "reward/zero_spread_kept" not in plain


def test_exact_sampling_is_measured_anew_where_a_run_goes_on_in_another_precision(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """model.dtype=auto is float32 on a CPU and half precision on a GPU: there old log-probabilities are rescored."""
    settings = running.config("grpo", tiny("llama"), grpo={"num_epochs": 2}, run={"num_steps": 4, "eval_every": 0})
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"save_every": 1})})
    code, run, looks = running.train(settings, tmp_path, name="whole")
    _, run, _ = running.train(settings, tmp_path, stop_at=looks // 2)
    for module in ("models.device", "rollout.load"):
        monkeypatch.setattr(f"tinyrl.{module}.resolve_dtype", lambda dtype, on_cpu: torch.bfloat16)
    seen: list[Sample] = []
    minibatches = Run.minibatches

    def watched(self: Run, samples: list[Sample], **how: Any) -> Iterator[list[Sample]]:
        seen.append(samples[0])
        return minibatches(self, samples, **how)

    monkeypatch.setattr(Run, "minibatches", watched)
    assert code == running.go_on(run) == 0
    assert seen
    for sample in seen:
        assert sample.old is not None
        assert not torch.equal(sample.old, torch.tensor(sample.logprobs))


def test_a_reward_with_the_name_of_a_metric_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    body = "    return [1.0] * len(prompts)\n"
    (tmp_path / "rewards.py").write_text(f"def std(prompts, completions, **columns):\n{body}")
    reward = {"functions": [{"use": f"{tmp_path / 'rewards.py'}:std"}]}
    with pytest.raises(ValueError, match=r"reward\.functions.*`std`"):
        running.train(running.config("grpo", tiny("llama"), reward=reward), tmp_path)
    assert not (tmp_path / "run").exists()


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": [1.0] * 4,
    "long_factor": [4.0, 4.0, 8.0, 8.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_rows_beyond_what_rotates_alike_are_refused(rope: dict[str, Any], tiny: TinyModels, tmp_path: Path) -> None:
    """A row of more tokens would change the probabilities of the rows beside it."""
    shutil.copytree(tiny("llama"), tmp_path, dirs_exist_ok=True)
    facts = json.loads((tmp_path / "config.json").read_text())
    facts |= {"rope_parameters": rope, "max_position_embeddings": 512 if rope is LONGROPE else 64}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    options = Options(device="cpu")
    with pytest.raises(ValueError, match=r"generation\.max_new_tokens=64.* 64 positions"):
        load_method(running.config("grpo", tmp_path, generation={"max_new_tokens": 64}), options=options)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in [*range(10, 30), 80]))
    with pytest.raises(ValueError, match="64 positions"):
        load_method(running.config("sft", tmp_path, task={"name": None, "data": str(rows)}), options=options)

    parts = load_collector(running.config("grpo", tmp_path), options=options)
    short, long = [5, 9, 30, 31], list(range(20, 84))  # 64 tokens in all
    alone = logprobs_of(parts, [short])
    torch.testing.assert_close(logprobs_of(parts, [short, long])[0], alone[0], atol=1e-6, rtol=1e-6)
    parts.close()


def logprobs_of(parts: Collector, rows: list[list[int]]) -> list[torch.Tensor]:
    batch = make_batch([row[:2] for row in rows], [row[2:] for row in rows])
    with torch.no_grad(), parts.policy.acting("policy"):
        found = parts.policy.logprobs("policy", batch, temperature=1.0)[0]
    return [found[i, : len(row) - 2] for i, row in enumerate(rows)]
