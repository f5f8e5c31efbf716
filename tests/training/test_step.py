"""One optimizer step: AdamW by hand, schedules, numbers that are not finite, memory that runs out, float16."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import running
from tests.policies import policy_of
from tests.tiny_models import sharp_model, tiny_model
from tests.training.rows import trained
from tinyrl.config.schema import Config
from tinyrl.models.batch import Batch, Example
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.parallel import World, sum_step
from tinyrl.models.policy import Policy
from tinyrl.process.errors import GuardStop, OutOfRoom
from tinyrl.runs.resolve import config_of
from tinyrl.training.step import (
    Pass,
    RoleOptimizer,
    Updater,
    load_optimizers,
    optimizer_tensors,
    rate_factor,
    role_optimizers,
    schedule_notes,
)


def make(weight_decay: float = 0.0, /, **values: Any) -> RoleOptimizer:
    """An optimizer with a learning rate of 0.1 over parameters of these values."""
    parameters = {name: nn.Parameter(torch.tensor(value)) for name, value in values.items()}
    return RoleOptimizer(parameters, learning_rate=0.1, weight_decay=weight_decay)


def step(role: RoleOptimizer, **gradients: Any) -> None:
    for name, gradient in gradients.items():
        role.parameters[name].grad = torch.tensor(gradient)
    role.optimizer.step()


def test_two_steps_of_adam_by_hand():
    """Bias-corrected moments of one gradient, 0.5 and 0.25, make a step of lr. Matrices decay, vectors do not."""
    role = make(w=[[1.0]])
    step(role, w=[[0.5]])
    assert role.parameters["w"].item() == pytest.approx(1.0 - 0.1, abs=1e-6)
    step(role, w=[[-0.5]])
    m = (0.9 * 0.1 * 0.5 - 0.1 * 0.5) / (1 - 0.9**2)
    v = (0.999 * 0.001 * 0.25 + 0.001 * 0.25) / (1 - 0.999**2)
    assert role.parameters["w"].item() == pytest.approx(0.9 - 0.1 * m / math.sqrt(v), abs=1e-6)
    decays = make(0.5, w=[[1.0]], bias=[1.0], gain=1.0)
    step(decays, w=[[0.0]], bias=[0.0], gain=0.0)
    assert [p.item() for p in decays.parameters.values()] == pytest.approx([1.0 - 0.1 * 0.5, 1.0, 1.0])


def test_betas_are_those_of_both_moments() -> None:
    """Gradients of 0.5 and -0.5 with betas of 0.5 and 0.8: m = (0.125 - 0.25) / 0.75, v = (0.04 + 0.05) / 0.36."""
    w = nn.Parameter(torch.tensor([[1.0]]))
    role = RoleOptimizer({"w": w}, learning_rate=0.1, weight_decay=0.0, betas=(0.5, 0.8))
    step(role, w=[[0.5]])
    step(role, w=[[-0.5]])
    assert w.item() == pytest.approx(0.9 + 0.1 / 6 / 0.5, abs=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_the_betas_of_a_run_are_those_of_policy_and_critic(kind: str) -> None:
    optim = config_of({"method": "ppo", "optim": {"betas": [0.5, 0.8], "optimizer": kind}}).optim
    made = role_optimizers(optim, {role: {"w": nn.Parameter(torch.zeros(2, 2))} for role in ("policy", "critic")})
    betas = {role: tuple(one.optimizer.param_groups[0]["betas"]) for role, one in made.items()}
    assert betas == {"policy": (0.5, 0.8), "critic": (0.5, 0.8)}


def test_a_rate_is_a_factor_of_the_roles_own_and_clipping_is_of_a_role_together() -> None:
    role = make(a=[[3.0]], b=[1.0], without=[1.0])
    for _ in range(2):  # of 0.1 again, not of 0.05
        role.set_rate(0.5)
    assert {group["lr"] for group in role.optimizer.param_groups} == {0.05}
    role.parameters["a"].grad, role.parameters["b"].grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    assert role.clip(10.0) == role.clip(1.0) == pytest.approx(5.0)  # below the limit nothing changes
    gradients = [float(p.grad) for p in (role.parameters["a"], role.parameters["b"]) if p.grad is not None]
    assert gradients == pytest.approx([0.6, 0.8], abs=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_state_goes_through_tensors_and_the_next_step_is_the_same_bit_by_bit(kind: Any) -> None:
    """In eight bits on a tensor large enough to be kept so: in a third of the memory, and nearly the same steps."""
    start, *gradients = torch.randn(5, 64, 128, generator=torch.Generator().manual_seed(0))
    kinds: list[Any] = ["adamw", kind, kind]
    roles = [
        RoleOptimizer({"layer.0|odd": nn.Parameter(start.clone())}, learning_rate=0.1, weight_decay=0.0, kind=one)
        for one in kinds
    ]

    def run(role: RoleOptimizer, which: list[Tensor]) -> Tensor:
        (parameter,) = role.parameters.values()
        for gradient in which:
            parameter.grad = gradient.clone()
            role.optimizer.step()
        return parameter.detach().clone()

    whole, own, resumed = roles
    moved = run(whole, gradients[:3]) - start
    assert (run(own, gradients[:3]) - start - moved).abs().mean() < 0.02 * moved.abs().mean()
    sizes = [sum(v.numel() * v.itemsize for v in optimizer_tensors({"": role}).values()) for role in (whole, own)]
    assert kind == "adamw" or sizes[1] < 0.35 * sizes[0]
    tensors = optimizer_tensors({"policy": own})
    assert "policy|layer.0|odd|step" in tensors
    resumed.parameters["layer.0|odd"].data.copy_(own.parameters["layer.0|odd"])
    load_optimizers({"policy": resumed}, tensors)
    assert torch.equal(run(resumed, gradients[3:]), run(own, gradients[3:]))  # what was loaded is a copy


@pytest.mark.parametrize(
    ("schedule", "warmup", "factors"),
    [
        ("constant", 4, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("linear", 2, [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("cosine", 0, [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]),
    ],
)
def test_a_schedule_is_a_function_of_the_step(schedule: str, warmup: int, factors: list[float]):
    """Four steps (0 to 3) and the one after the last."""
    got = [rate_factor(schedule, step, num_steps=4, warmup_steps=warmup) for step in range(5)]
    assert got == pytest.approx(factors, abs=1e-12)


@pytest.mark.parametrize(("warmup", "said"), [(5, True), (4, False), (0, False)])
def test_a_warm_up_that_outlasts_the_run_is_said(warmup: int, said: bool):
    config = config_of({"method": "grpo", "run": {"num_steps": 4}, "optim": {"warmup_steps": warmup}})
    assert len(schedule_notes(config)) == int(said)


@pytest.mark.parametrize(("warmup", "said"), [(4, True), (3, False)])
def test_a_critic_s_warm_up_as_long_as_the_run_is_said(warmup: int, said: bool):
    config = config_of({"method": "ppo", "run": {"num_steps": 4}, "critic": {"warmup_steps": warmup}})
    assert any("critic.warmup_steps" in note for note in schedule_notes(config)) is said


@pytest.fixture
def updater(tmp_path: Path) -> Updater:
    torch.manual_seed(0)
    model = load_causal_lm(str(tiny_model(tmp_path, "llama")), dtype=torch.float32)
    lora = lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")
    made = policy_of(wrap_in_lora(model, lora), reference=True, run={"micro_batch_tokens": 10_000})
    made.packs = False
    optimizers = {role: RoleOptimizer(p, learning_rate=1e-2, weight_decay=0.0) for role, p in made.parameters.items()}
    return Updater(made, optimizers, max_grad_norm=1.0)


SEQUENCES = [([5, 6, 7], [8, 9, 10]), ([5, 6], [11, 12]), ([7], [8, 9, 10, 11]), ([9, 9], [6])]
EXAMPLES = [Example(prompt, (response,)) for prompt, response in SEQUENCES]


def likelihood(updater: Updater, *, factor: float = 1.0):
    """Mean negative log-likelihood over the ten response tokens of SEQUENCES."""

    def loss_of(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, _ = updater.policy.logprobs("policy", batch, temperature=1.0)
        loss = -factor * logprobs.sum() / 10
        return loss, {"policy/loss": loss.detach()}

    return [Pass("policy", EXAMPLES, loss_of)]


def policy(updater: Updater) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in updater.policy.parameters["policy"].items()}


def test_non_finite_loss_changes_nothing_and_stops_after_three(updater: Updater) -> None:
    kept: list[str] = []
    updater.dump_bad_batch = lambda why: kept.append(why)
    updater.step(likelihood(updater), train=["policy"])
    before = policy(updater)
    for _ in range(2):
        updater.step(likelihood(updater, factor=float("nan")), train=["policy"])
    assert all(torch.equal(before[n], p) for n, p in policy(updater).items())
    updater.step(likelihood(updater), train=["policy"])  # a good one starts the count again
    assert updater.skipped_in_a_row == 0
    assert any(not torch.equal(before[n], p) for n, p in policy(updater).items())
    endless = likelihood(updater, factor=float("inf"))
    for _ in range(2):
        updater.step(endless, train=["policy"])
    with pytest.raises(GuardStop, match="3 optimizer steps in a row"):
        updater.step(endless, train=["policy"])
    assert updater.skipped == 5
    assert len(kept) == 5
    assert "policy/loss" in kept[0]


def test_a_gradient_of_zero_moves_no_weight_though_momentum_would(updater: Updater) -> None:
    updater.step(likelihood(updater), train=["policy"])
    before = policy(updater)
    metrics = updater.step(likelihood(updater, factor=0.0), train=["policy"])
    assert metrics["optim/grad_norm"] == 0.0
    assert all(torch.equal(before[n], p) for n, p in policy(updater).items())
    updater.step(likelihood(updater, factor=1e-3), train=["policy"])
    assert any(not torch.equal(before[n], p) for n, p in policy(updater).items())


def test_one_weight_that_a_step_made_other_than_finite_stops(updater: Updater) -> None:
    last = list(updater.policy.parameters["policy"].values())[-1]

    def spoil(*_: object) -> None:
        with torch.no_grad():
            last.view(-1)[-1] = -torch.inf

    updater.optimizers["policy"].optimizer.register_step_post_hook(spoil)
    with pytest.raises(GuardStop, match="weights of the policy that are not finite"):
        updater.step(likelihood(updater), train=["policy"])


def test_what_is_kept_anew_for_every_step_leads_to_smaller_micro_batches(updater: Updater) -> None:
    """The first time room is made and nothing halved; else every step would fail once, and take from others what they
    make again at some cost.
    """
    kept, made_room, budgets, [passed] = [], [], [], likelihood(updater)

    def tight(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if kept and batch.num_rows > 2:
            raise torch.OutOfMemoryError("full")
        return passed.loss(batch)

    def make_room() -> bool:
        made_room.append(bool(kept))
        kept.clear()
        return made_room[-1]

    updater.policy.micro_batches.when_full(make_room)
    for _ in range(4):
        kept[:] = ["a cache"]
        updater.step([Pass("policy", EXAMPLES, tight)], train=["policy"])
        budgets.append(updater.policy.micro_batches.tokens)
    assert made_room == [True, True]
    assert budgets[0] == 10_000 > budgets[1] == budgets[3]
    assert kept


def test_out_of_memory_redoes_the_step_with_the_same_gradient(updater: Updater) -> None:
    [passed] = likelihood(updater)

    def crowded(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = passed.loss(batch)
        if batch.num_rows > 1:
            loss.backward()  # a trace of the attempt
            raise torch.OutOfMemoryError("no room for more than one row")
        return loss, metrics

    found = []
    for one in (passed, passed._replace(loss=crowded)):
        metrics = updater._accumulate([passed, one])  # the first has left numbers when the second is full
        found.append((metrics, {n: p.grad for n, p in updater.policy.parameters["policy"].items()}))
    assert updater.policy.micro_batches.tokens < 10_000
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-5, atol=1e-6)


def test_out_of_memory_with_one_sequence_says_what_helps(updater: Updater) -> None:
    def full(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(OutOfRoom, match="gradient_checkpointing"):
        updater.step([Pass("policy", EXAMPLES, full)], train=["policy"])


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("sharp"))


def settings(model: Path, dtype: str = "float16", **sections: Any) -> Config:
    run = {"num_steps": 3, "save_every": 1, "keep_checkpoints": 4}
    return running.config("grpo", model, **{"model": {"dtype": dtype}, "run": run, **sections})


def plant(monkeypatch: pytest.MonkeyPatch, value: float, *, steps: int) -> None:
    """Have the gradient of one parameter be `value` in the first steps."""
    calls = [0]

    def planted(world: World, metrics: dict[str, float], parameters: list[torch.nn.Parameter]) -> dict[str, float]:
        calls[0] += 1
        if calls[0] <= steps:
            next(p.grad for p in parameters if p.grad is not None).fill_(value)
        return sum_step(world, metrics, parameters)

    monkeypatch.setattr("tinyrl.training.step.sum_step", planted)


def test_the_first_step_is_close_to_that_of_float32(sharp: Path, tmp_path: Path):
    """But a sample may turn out otherwise, and with it a reward."""
    sections: dict[str, Any] = {"grpo": {"kl_coef": 0.05}, "optim": {"learning_rate": 1e-6}}
    exact, half = (
        running.metrics(trained(settings(sharp, dtype, **sections), tmp_path, name=dtype))[1]
        for dtype in ("float32", "float16")
    )
    assert half["optim/grad_norm"] == pytest.approx(exact["optim/grad_norm"], rel=0.5)
    assert half["policy/sampling_gap"] < 0.02
    assert abs(half["objective/kl"]) < 1e-3
    assert 1024 <= half["optim/loss_scale"] <= 65536
    assert "optim/loss_scale" not in exact


def test_an_overflow_halves_the_scale_and_changes_no_weight(
    sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two planted overflows: steps that change nothing, are not counted as faults, and a run that goes on."""
    plant(monkeypatch, torch.inf, steps=2)
    run = trained(settings(sharp), tmp_path)
    lines = running.metrics(run)[1:]
    assert [line["optim/loss_scale"] for line in lines] == [65536, 32768, 16384]
    assert [line["optim/skipped_steps"] for line in lines] == [0, 0, 0]
    weights = [running.weights(run, step) for step in range(4)]
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(weights)]
    assert same == [True, True, False]


def test_a_gradient_that_no_scale_would_help_is_a_fault(sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its elements are finite and its norm is not, so the scale stays; three such steps stop the run."""
    plant(monkeypatch, 3e30, steps=8)
    code, run, _ = running.train(settings(sharp, run={"num_steps": 8, "save_every": 1}), tmp_path)
    assert code == 3
    lines = running.metrics(run)[1:]
    assert [line["optim/skipped_steps"] for line in lines] == [1, 2]
    assert {line["optim/loss_scale"] for line in lines} == {65536}


# ---- the budget of micro-batches on a GPU, whose memory is told here ----


def on_a_gpu(updater: Updater, monkeypatch: pytest.MonkeyPatch, *, free: int, peaks: list[int]) -> None:
    """Let a policy's budget be unmeasured, and torch report memory of a GPU: 500 bytes before, then these peaks."""
    updater.policy.micro_batches = MicroBatches(torch.device("cuda"))
    left = iter(peaks)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(left))
    monkeypatch.setattr("tinyrl.training.step.reset_peak_memory", lambda device: None)
    monkeypatch.setattr("tinyrl.training.step.free_bytes", lambda device: free)


@pytest.mark.parametrize(("peaks", "tokens"), [([1_500], 240), ([1_500, 2_500], 120)])
def test_the_budget_leaves_room_for_moments_and_is_that_of_the_largest_pass(
    updater: Updater, peaks: list[int], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four padded rows of at most 6 tokens (cost 24) take 1,000 bytes; 0.8 of 12,500 bytes are 10,000, beside 8 for
    each trained parameter.
    """
    moments = 8 * sum(p.numel() for p in updater.policy.parameters["policy"].values())
    on_a_gpu(updater, monkeypatch, free=12_500 + moments, peaks=peaks)
    updater.measure(likelihood(updater) * len(peaks))
    assert (updater.policy.micro_batches.tokens, updater.policy.micro_batches.unmeasured) == (tokens, False)


def test_moments_that_exist_are_not_counted_again_and_8_bits_take_2_bytes() -> None:
    role = make(w=[[1.0, 2.0]], b=[3.0])
    assert role.missing_bytes == 3 * 8
    step(role, w=[[0.5, 0.5]])
    assert role.missing_bytes == 1 * 8
    role.moment_bytes = 2
    assert role.missing_bytes == 2


def test_a_measured_pass_leaves_no_trace_and_is_made_once(updater: Updater, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(updater, monkeypatch, free=10**9, peaks=[1_500])
    before = torch.get_rng_state()
    for _ in range(2):  # a second peak is not told
        updater.measure(likelihood(updater))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in updater.policy.parameters["policy"].values())


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        pytest.param("ppo", {"critic": {"kind": "separate", "warmup_steps": 1}}, id="ppo, two models"),
        pytest.param("ppo", {"critic": {"kind": "shared"}}, id="ppo, one"),
        pytest.param("grpo", {"grpo": {"num_epochs": 2, "kl_coef": 0.1, "entropy_coef": 0.1}}, id="grpo"),
    ],
)
@pytest.mark.wide
def test_the_budget_is_measured_before_what_the_update_is_compared_with(
    method: str, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes without gradient and of the update are of the same budget from the first step on: 0.8 of the free bytes
    are enough for the most there is.
    """
    monkeypatch.setattr("tinyrl.models.policy.MicroBatches", lambda *_, **__: MicroBatches(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1)
    monkeypatch.setattr("tinyrl.training.step.reset_peak_memory", lambda device: None)
    monkeypatch.setattr("tinyrl.training.step.free_bytes", lambda device: 10**12)
    budgets = list[int]()
    passes = list[list[str]]()
    map_samples = Policy.map_samples
    accumulate = Updater._accumulate
    measure = Updater.measure

    def mapped(self: Policy, *args: Any, **options: Any) -> Any:
        budgets.append(self.micro_batches.tokens)
        return map_samples(self, *args, **options)

    def accumulated(self: Updater, given: Any) -> Any:
        budgets.append(self.policy.micro_batches.tokens)
        return accumulate(self, given)

    def measured(self: Updater, given: Any) -> None:
        passes.append([one.role for one in given])
        measure(self, given)

    monkeypatch.setattr(Policy, "map_samples", mapped)
    monkeypatch.setattr(Updater, "_accumulate", accumulated)
    monkeypatch.setattr(Updater, "measure", measured)
    run = {"num_steps": 1, "eval_prompts": 0, "save_every": 0}
    trained(running.config(method, tiny_model(tmp_path, "llama"), run=run, **sections), tmp_path)
    assert len(budgets) > 1
    assert set(budgets) == {32_768}
    separate = sections.get("critic", {}).get("kind") == "separate"
    assert passes == [["policy", "critic"] if separate else ["policy"]]
