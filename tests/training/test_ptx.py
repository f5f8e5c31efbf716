"""PPO-ptx: whose rows a step takes, what its loss adds to the gradient, and what is wrong with a text."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import running
from tests.tiny_models import POSITIONS, TinyModels
from tinyrl.data.rows import batch_indices
from tinyrl.generation.engine import Completion
from tinyrl.models.batch import Batch
from tinyrl.models.policy import Policy
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_method
from tinyrl.rollout.sample import Sample
from tinyrl.runs.launched import Options
from tinyrl.training.ppo import Ppo, ptx_pass
from tinyrl.training.rows import Example
from tinyrl.training.run import Run
from tinyrl.training.state import RunState
from tinyrl.training.step import Pass, Updater

TEXT = Path(__file__).parents[1] / "text_rows.jsonl"  # ten rows, of `text` and of `prompt` and `completion`


def with_text(coef: float = 0.5, **fields: Any) -> dict[str, Any]:
    return {"ppo": {"ptx_coef": coef, "ptx_data": str(TEXT), **fields}}


@pytest.fixture(scope="module")
def parts(tiny: TinyModels):
    """Eight prompts in two minibatches, two epochs; three rows of text in each optimizer step."""
    loaded = load_method(running.config("ppo", tiny("llama"), **with_text()), options=Options(device="cpu"))
    yield loaded
    loaded.close()


def drawn(parts: Ppo, monkeypatch: pytest.MonkeyPatch, *, step: int, epoch: int, minibatch: int) -> list[int]:
    """The rows of one optimizer step, read off the loss of its pass."""
    seen: list[int] = []

    def noted(_: Any, batch: Batch) -> Tensor:
        seen.extend(parts.text.index([one]) for one in batch.items)
        return torch.zeros(())

    monkeypatch.setattr("tinyrl.training.ppo.negative_log_likelihood", noted)
    monkeypatch.setattr("tinyrl.training.ppo.PTX_ROWS", 3)
    run: Any = SimpleNamespace(state=RunState(step=step), update=2 * epoch + minibatch)
    one = ptx_pass(parts, run)
    one.loss(parts.policy.batch_of(one.items))
    return seen


def test_rows_are_a_stream_of_shuffled_epochs_keyed_by_where_the_update_stands(
    parts: Ppo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of two epochs of two minibatches of three rows are 24 rows: all ten, all ten, and four."""
    at = [(step, epoch, minibatch) for step in (0, 1) for epoch in (0, 1) for minibatch in (0, 1)]
    rows = [row for s, e, m in at for row in drawn(parts, monkeypatch, step=s, epoch=e, minibatch=m)]
    assert len(rows) == 24
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))
    assert len(set(rows[20:])) == 4
    assert rows[:10] != rows[10:20]
    assert drawn(parts, monkeypatch, step=1, epoch=0, minibatch=1) == rows[15:18]  # again, and nothing else before


def test_further_conversations_of_agents_add_no_minibatch_and_repeat_no_text(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five further conversations of eight episodes: still two minibatches an epoch, each with what its episodes said.
    So the numbers of text batches stay apart, and no optimizer step is left with a row or two.
    """
    further = Completion([7, 8], [-1.0, -2.0], "eos")

    collect = Collector.collect

    def sampled(*args: Any, **options: Any) -> list[Sample]:
        samples = collect(*args, **options)
        for episode in (0, 0, 3, 5, 5):
            samples[episode].further.append(Sample.of([5, 6], further, row=samples[episode].row))
        return samples

    numbers: list[int] = []
    steps: list[list[Sample]] = []
    minibatches = Run.minibatches

    def batch(seed: int, number: int, **sizes: int) -> list[int]:
        numbers.append(number)
        return batch_indices(seed, number, **sizes)

    def watched(self: Run, samples: list[Sample], **how: Any) -> Iterator[list[Sample]]:
        for minibatch in minibatches(self, samples, **how):
            steps.append(minibatch)
            yield minibatch

    monkeypatch.setattr(Collector, "collect", sampled)
    monkeypatch.setattr("tinyrl.training.ppo.batch_indices", batch)
    monkeypatch.setattr(Run, "minibatches", watched)
    settings = running.config(
        "ppo", tiny("llama"), **with_text(), critic={"warmup_steps": 0}, run={"num_steps": 2, "eval_every": 0}
    )
    assert running.train(settings, tmp_path)[0] == 0
    assert len(set(numbers)) == len(numbers) == len(steps) == 2 * 2 * 2
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert len(first) + len(second) == 13
        assert {sample.episode for sample in first} ^ {sample.episode for sample in second} == {*range(8)}
        assert len({sample.episode for sample in first}) == 4


def plain_nll(roles: Policy, text: Sequence[Example]) -> Tensor:
    """Mean over target tokens of -log p, row by row through the model's own forward pass."""
    total, count = torch.zeros(()), 0
    for prompt, (target,), *_ in text:
        logits = roles.causal(input_ids=torch.tensor([prompt + target])).logits[0]
        for t, token in enumerate(target):
            total = total - logits[len(prompt) - 1 + t].log_softmax(-1)[token]
            count += 1
    return total / count


@pytest.mark.parametrize(("kind", "micro_batch_tokens"), [("adapter", 40), ("shared", 10_000)])
def test_it_adds_its_gradient_to_that_of_ppo_and_no_other(
    kind: str, micro_batch_tokens: int, tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every optimizer step of a run, accumulated with and without the text (all ten rows): the policy's gradients
    differ by the coefficient times that of the plain mean, the critic's not at all.
    """
    parts: list[Ppo] = []
    accumulate, seen = Updater._accumulate, []

    def noted(self: Updater, passes: Sequence[Pass]) -> dict[str, float]:
        said = accumulate(self, passes[:-1])
        without = {r: [p.grad.clone() for p in ps.values() if p.grad is not None] for r, ps in parameters(self)}
        said_with = accumulate(self, passes)
        policy = list(self.policy.parameters["policy"].values())
        with self.policy.acting("policy"):
            loss = plain_nll(self.policy, [one for row in parts[0].text for one in row])
            wanted = torch.autograd.grad(loss, policy)
        for parameter, before, text in zip(policy, without["policy"], wanted, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad - before, 0.5 * text, rtol=1e-3, atol=2e-6)
        for parameter, before in zip(self.policy.parameters["critic"].values(), without["critic"], strict=True):
            assert torch.equal(parameter.grad, before)  # pyright: ignore[reportArgumentType]
        assert said_with.pop("policy/ptx_loss") == pytest.approx(float(loss.detach()), rel=1e-5)
        assert said_with == said
        seen.append(float(loss.detach()))
        return {**said_with, "policy/ptx_loss": seen[-1]}

    def parameters(updater: Updater):
        return updater.policy.parameters.items()

    monkeypatch.setattr(Updater, "_accumulate", noted)
    monkeypatch.setattr("tinyrl.training.ppo.Ppo", lambda *a: parts.append(Ppo(*a)) or parts[0])
    settings = running.config(
        "ppo",
        tiny("llama"),
        **with_text(num_epochs=1),
        critic={"kind": kind, "warmup_steps": 0},
        run={"num_steps": 2, "micro_batch_tokens": micro_batch_tokens, "eval_prompts": 0},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    assert len(seen) == 4
    assert [line["policy/ptx_loss"] for line in running.metrics(run)[1:]] == pytest.approx(
        [(seen[0] + seen[1]) / 2, (seen[2] + seen[3]) / 2]
    )


def test_while_only_the_critic_trains_there_is_no_text(tiny: TinyModels, tmp_path: Path) -> None:
    settings = running.config("ppo", tiny("llama"), **with_text(), critic={"warmup_steps": 2})
    _, run, _ = running.train(settings, tmp_path)
    assert ["policy/ptx_loss" in line for line in running.metrics(run)[1:]] == [False, False, True]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"text": "a"}, {"txt": "b"}], "{file}:2: "),
        ([{"text": "a" * POSITIONS}], "{file}:1: "),
    ],
)
def test_a_text_that_cannot_be_learnt_is_refused_with_its_place(
    rows: list[dict[str, Any]], sentence: str, tiny: TinyModels, tmp_path: Path
) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = running.config("ppo", tiny("llama"), ppo={"ptx_coef": 1.0, "ptx_data": str(file)})
    with pytest.raises(ValueError, match=r"\S") as caught:
        load_method(settings, options=Options(device="cpu"))
    assert sentence.format(file=file) in str(caught.value)


def test_another_text_is_not_gone_on_with(tiny: TinyModels, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    settings = running.config("ppo", tiny("llama"), ppo={"ptx_coef": 1.0, "ptx_data": str(file)})
    _, run, _ = running.train(settings, tmp_path, stop_at=60)
    file.write_text('{"text": "a"}\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=r"ppo\.ptx_data rows: the data has changed"):
        running.go_on(run)
