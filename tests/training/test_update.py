"""One optimizer step: the plan of micro-batches, and what happens when numbers are not finite or memory runs out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_model
from tinyrl.errors import GuardStop, OutOfRoom
from tinyrl.models.batch import Batch, Example
from tinyrl.models.device import make_accelerator
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.micro_batches import MicroBatches, SequenceLengths
from tinyrl.models.policy import Policy
from tinyrl.training.step import Pass, RoleOptimizer, Updater


def test_plan_packs_by_padded_tokens_longest_first() -> None:
    sizes = SequenceLengths.alone([3, 10, 4, 10, 2], packed=False)
    assert sizes.plan(range(5), max_tokens=20) == [[1, 3], [2, 0, 4]]
    assert sizes.plan([0, 2], max_tokens=4) == [[2], [0]]
    assert sizes.plan(range(5), max_tokens=1) == [
        [1],
        [3],
        [2],
        [0],
        [4],
    ]  # too long goes alone


@pytest.fixture
def updater(tmp_path: Path) -> Updater:
    torch.manual_seed(0)
    accelerator = make_accelerator("cpu", dtype="float32")
    model = load_causal_lm(str(tiny_model(tmp_path, "llama")), dtype=torch.float32)
    lora = lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")
    roles = Policy(wrap_in_lora(model, lora), device=accelerator.device)
    roles.packs = False
    optimizers = {
        role: RoleOptimizer.make(p, learning_rate=1e-2, weight_decay=0.0) for role, p in roles.parameters.items()
    }
    roles.accelerator, roles.micro_batches = accelerator, MicroBatches(accelerator.device, 10_000)
    return Updater(roles, optimizers, max_grad_norm=1.0)


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_weight_that_a_step_made_other_than_finite_stops(updater: Updater, bad: float) -> None:
    optimizer = updater.optimizers["policy"].optimizer
    last = list(updater.policy.parameters["policy"].values())[-1]

    def spoil(*_: object) -> None:
        with torch.no_grad():
            last.view(-1)[-1] = bad

    updater.step(likelihood(updater), train=["policy"])
    optimizer.register_step_post_hook(spoil)
    with pytest.raises(GuardStop, match="weights of the policy that are not finite"):
        updater.step(likelihood(updater), train=["policy"])


def test_out_of_memory_takes_what_other_phases_keep_before_it_halves(updater: Updater) -> None:
    tokens, kept, [passed] = updater.policy.micro_batches.tokens, ["a cache"], likelihood(updater)

    def tight(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if kept:
            raise torch.OutOfMemoryError("full")
        return passed.loss(batch)

    updater.policy.micro_batches.make_room = lambda: bool(kept) and kept.pop() == "a cache"
    updater.step([Pass("policy", EXAMPLES, tight)], train=["policy"])
    assert updater.policy.micro_batches.tokens == tokens
    assert not kept


def test_what_is_kept_anew_for_every_step_leads_to_smaller_micro_batches(updater: Updater) -> None:
    """Else every step would fail once, and take from others what they make again at some cost."""
    kept, made_room, [passed] = [], [], likelihood(updater)

    def tight(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if kept and batch.num_rows > 2:
            raise torch.OutOfMemoryError("full")
        return passed.loss(batch)

    def make_room() -> bool:
        made_room.append(bool(kept))
        kept.clear()
        return made_room[-1]

    updater.policy.micro_batches.make_room = make_room
    for _ in range(4):
        kept[:] = ["a cache"]
        updater.step([Pass("policy", EXAMPLES, tight)], train=["policy"])
    assert made_room == [True, True]
    assert kept


def test_a_row_that_fits_alone_once_there_is_room_is_no_failure(updater: Updater) -> None:
    kept, [passed] = [], likelihood(updater)

    def tight(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if kept or batch.num_rows > 1:
            raise torch.OutOfMemoryError("full")
        return passed.loss(batch)

    updater.policy.micro_batches.make_room = lambda: bool(kept) and kept.pop() == "a cache"
    for _ in range(3):
        kept[:] = ["a cache"]
        updater.step([Pass("policy", EXAMPLES, tight)], train=["policy"])
    assert not kept


def test_out_of_memory_redoes_the_step_with_the_same_gradient(
    updater: Updater, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient() -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)
        start = policy(updater)
        norm = updater.step(likelihood(updater), train=["policy"])["optim/grad_norm"]
        end = policy(updater)
        with torch.no_grad():
            for name, parameter in updater.policy.parameters["policy"].items():
                parameter.copy_(start[name])
        updater.optimizers["policy"].optimizer.state.clear()
        return norm, end

    whole, end = gradient()
    logprobs = updater.policy.logprobs

    def crowded(role, batch, **options):
        if len(batch.input_ids) > 1:
            raise torch.OutOfMemoryError("no room for more than one row")
        return logprobs(role, batch, **options)

    monkeypatch.setattr(updater.policy, "logprobs", crowded)
    split, end_again = gradient()
    assert split == pytest.approx(whole, rel=1e-5)
    assert updater.policy.micro_batches.tokens < 10_000
    for name in end:
        torch.testing.assert_close(end[name], end_again[name], rtol=1e-5, atol=1e-6)


def test_out_of_memory_with_one_sequence_says_what_helps(updater: Updater) -> None:
    def full(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(OutOfRoom, match=r"one sequence of 6 tokens.*\n.*gradient_checkpointing"):
        updater.step([Pass("policy", EXAMPLES, full)], train=["policy"])
