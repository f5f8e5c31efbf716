"""PPO: A2C's gradient by hand, text beside the rewards (PPO-ptx), critics that start from a run or a reward model."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import running
from tests.tiny_models import POSITIONS, TinyModels
from tests.training.rows import loaded, trained, write_rows
from tinyrl.config.schema import Config
from tinyrl.generation.sample import Sample
from tinyrl.models.batch import examples
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.policy import Policy
from tinyrl.models.policy_files import restore_policy
from tinyrl.models.reward_model import load_reward_model
from tinyrl.models.states import last_states
from tinyrl.process.launched import Options
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.policy_loss import Experience
from tinyrl.training.ppo import Ppo
from tinyrl.training.rows import Example
from tinyrl.training.run import Run
from tinyrl.training.run_state import RunState
from tinyrl.training.step import Pass, Updater

A2C = {"preset": "a2c", "num_epochs": 1, "minibatch_size": None}
KL_COEF = 0.05


def hand_written(policy: Policy, samples: list[Sample]) -> dict[str, list[Tensor]]:
    """Gradients of A2C, a response at a time, by the model's own forward pass: that of the mean over tokens of
    -(G - V) log pi for the policy, of 0.5 (V - G)^2 for the critic; G is what a token is followed by, KL to the
    reference included.
    """
    tokens = sum(sample.num_actions for sample in samples)
    totals = {role: [torch.zeros_like(p) for p in policy.parameters[role].values()] for role in ("policy", "critic")}
    assert policy.value_head is not None

    def add(role: str, loss: Tensor) -> None:
        for total, part in zip(
            totals[role], torch.autograd.grad(loss / tokens, list(policy.parameters[role].values())), strict=True
        ):
            total += part

    for sample in samples:
        prompt, response = sample.prompt, sample.response
        ids, at = torch.tensor([prompt + response]), slice(len(prompt) - 1, -1)
        with torch.no_grad(), policy.acting("reference") as model:
            reference = model(input_ids=ids).logits[0, at].log_softmax(-1)
        with torch.no_grad(), policy.acting("critic"):
            values = policy.value_head(policy.backbone("critic")(input_ids=ids).last_hidden_state[0, at])
        with policy.acting("policy") as model:
            logprobs = model(input_ids=ids).logits[0, at].log_softmax(-1)
            returns, to_come = [0.0] * len(response), sample.reward
            for t in reversed(range(len(response))):
                to_come -= KL_COEF * float(logprobs[t, response[t]].detach() - reference[t, response[t]])
                returns[t] = to_come
            terms = [-(returns[t] - float(values[t])) * logprobs[t, response[t]] for t in range(len(response))]
            add("policy", torch.stack(terms).sum())
        with policy.acting("critic"):
            values = policy.value_head(policy.backbone("critic")(input_ids=ids).last_hidden_state[0, at])
            add("critic", (0.5 * (values - torch.tensor(returns)).square()).sum())
    return totals


def test_a2c_is_the_gradient_of_a2c(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each of three steps, so against a critic that has learnt and at a KL that is not 0."""
    steps: list[list[Sample]] = []
    norms: list[float] = []
    minibatches, accumulate = Run.minibatches, Updater._accumulate

    def watched(self: Run, experience: Experience, partition: list[list[int]], **how: Any) -> Iterator[Experience]:
        assert len(partition) == 1
        steps.append(experience.samples)
        return minibatches(self, experience, partition, **how)

    def compared(self: Updater, passes: Sequence[Pass]) -> dict[str, float]:
        said = accumulate(self, passes)
        for role, wanted in hand_written(self.policy, steps[-1]).items():
            for (name, parameter), gradient in zip(self.policy.parameters[role].items(), wanted, strict=True):
                assert parameter.grad is not None, name
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: n + m)
            norms.append(float(torch.cat([g.flatten() for g in wanted]).norm()))
        return said

    monkeypatch.setattr(Run, "minibatches", watched)
    monkeypatch.setattr(Updater, "_accumulate", compared)
    settings = running.config("ppo", model, ppo={**A2C, "kl_coef": KL_COEF}, critic={"warmup_steps": 0})
    run = trained(settings, tmp_path)
    assert len(norms) == 2 * 3  # one optimizer step a rollout, of policy and critic
    assert min(norms) > 1e-2
    for line in running.metrics(run)[1:]:
        assert line["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert line["policy/clipfrac"] == 0.0
        assert "value/clipfrac" not in line
    assert running.metrics(run)[-1]["objective/kl"] > 1e-4


def test_neither_the_weight_of_the_kl_nor_text_moves_while_the_critic_warms_up(model: Path, tmp_path: Path) -> None:
    """The policy does not move, so its KL of 0 says nothing of the weight, and no time goes into its gradient."""
    own = with_text(target_kl=6.0)
    run = trained(running.config("ppo", model, critic={"warmup_steps": 2}, run={"num_steps": 4}, **own), tmp_path)
    lines = running.metrics(run)[1:]
    assert [line["objective/kl_coef"] for line in lines][:3] == [0.05] * 3
    assert lines[3]["objective/kl_coef"] != 0.05
    assert ["policy/ptx_loss" in line for line in lines] == [False, False, True, True]
    assert ["policy/loss" in line for line in lines] == [False, False, True, True]


TEXT = Path(__file__).parents[1] / "text_rows.jsonl"  # ten rows, of `text` and of `prompt` and `completion`


def test_a_prompt_has_as_many_completions_as_group_size(model: Path, tmp_path: Path) -> None:
    for size, counts in ((1, [1, 1, 1, 1]), (2, [2, 2, 2, 2])):
        fields = {"num_prompts": 4, "group_size": size, "num_epochs": 1, "minibatch_size": None}
        run = trained(running.config("ppo", model, ppo=fields, run={"num_steps": 1}), tmp_path / str(size))
        lines = [json.loads(line) for line in run.samples.read_text().splitlines()]
        prompts = Counter(line["prompt"] for line in lines if line["kind"] == "train" and line["step"] == 1)
        assert [*prompts.values()] == counts


def with_text(coef: float = 0.5, **fields: Any) -> dict[str, Any]:
    return {"ppo": {"ptx_coef": coef, "ptx_data": str(TEXT), **fields}}


@pytest.fixture(scope="module")
def method(model: Path) -> Iterator[Ppo]:
    """Eight prompts in two minibatches, two epochs; three rows of text in each optimizer step."""
    made = loaded(running.config("ppo", model, **with_text()))
    yield made
    made.close()


def drawn(method: Ppo, *, step: int, update: int) -> list[int]:
    """The rows of one optimizer step."""
    run: Any = SimpleNamespace(state=RunState(step=step), update=update)
    chosen = method.text_batch(run)
    return [method.text.index([one]) for one in chosen]


def test_rows_are_a_stream_of_shuffled_epochs_keyed_by_where_the_update_stands(
    method: Ppo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of two epochs of two minibatches of three rows are 24 rows: all ten, all ten, and four."""
    monkeypatch.setattr("tinyrl.training.ppo.PTX_ROWS", 3)
    rows = [row for step in (0, 1) for update in range(4) for row in drawn(method, step=step, update=update)]
    assert len(rows) == 24
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))
    assert len(set(rows[20:])) == 4
    assert rows[:10] != rows[10:20]
    assert drawn(method, step=1, update=1) == rows[15:18]  # again, and nothing else before
    assert "ppo.ptx_data" in method.row_fingerprints  # a resume with another text is refused


def plain_nll(policy: Policy, text: Sequence[Example]) -> Tensor:
    """Mean over target tokens of -log p, row by row through the model's own forward pass."""
    total, count = torch.zeros(()), 0
    for prompt, (target,), *_ in text:
        logits = policy.causal(input_ids=torch.tensor([prompt + target])).logits[0]
        for t, token in enumerate(target):
            total = total - logits[len(prompt) - 1 + t].log_softmax(-1)[token]
            count += 1
    return total / count


@pytest.mark.parametrize(("kind", "micro_batch_tokens"), [("adapter", 40), ("shared", 10_000)])
@pytest.mark.wide
def test_it_adds_its_gradient_to_that_of_ppo_and_no_other(
    kind: str, micro_batch_tokens: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every optimizer step of a run, accumulated with and without the text (all ten rows): the policy's gradients
    differ by the coefficient times that of the plain mean, the critic's not at all.
    """
    method: list[Ppo] = []
    accumulate, seen = Updater._accumulate, []

    def noted(self: Updater, passes: Sequence[Pass]) -> dict[str, float]:
        said = accumulate(self, passes[:-1])
        without = {r: [p.grad.clone() for p in ps.values() if p.grad is not None] for r, ps in parameters(self)}
        said_with = accumulate(self, passes)
        policy = list(self.policy.parameters["policy"].values())
        with self.policy.acting("policy"):
            loss = plain_nll(self.policy, [one for row in method[0].text for one in row])
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
    monkeypatch.setattr("tinyrl.training.load.Ppo", lambda *a: method.append(Ppo(*a)) or method[0])
    own: dict[str, Any] = {**with_text(num_epochs=1), "critic": {"kind": kind, "warmup_steps": 0}}
    steps = {"num_steps": 2, "micro_batch_tokens": micro_batch_tokens, "eval_prompts": 0}
    run = trained(running.config("ppo", model, run=steps, **own), tmp_path)
    assert len(seen) == 4
    assert [line["policy/ptx_loss"] for line in running.metrics(run)[1:]] == pytest.approx(
        [(seen[0] + seen[1]) / 2, (seen[2] + seen[3]) / 2]
    )


@pytest.mark.parametrize(("text", "place"), [("a", 2), ("a" * POSITIONS, 1)], ids=["no column", "too long"])
def test_a_text_that_cannot_be_learnt_is_refused_with_its_place(
    text: str, place: int, model: Path, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "text.jsonl", [{"text": text}, {"txt": "b"}])
    settings = running.config("ppo", model, ppo={"ptx_coef": 1.0, "ptx_data": str(file)})
    with pytest.raises(ValueError, match=rf"{file}:{place}: "):
        loaded(settings)


PROMPTS, RESPONSES = [[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 14]]


def load(config: Config) -> Collector:
    return load_collector(prepare(resolve(config)), options=Options(device="cpu"))


def values(collector: Collector) -> Tensor:
    policy = collector.policy
    batch = policy.batch_of(examples(PROMPTS, RESPONSES))
    with torch.no_grad(), policy.acting(policy.value_role):
        states = None if policy.value_role == "critic" else policy.states("policy", batch)
        return policy.values(batch, states=states)


def learnt(config: Config, folder: Path, name: str) -> tuple[RunDir, Tensor]:
    """A run of two steps, and what its critic thinks at the end."""
    run = trained(config, folder, name=name)
    collector = load(run.read_config())
    start = values(collector)
    restore_policy(collector.policy, run.checkpoints / "step-000002")
    end = values(collector)
    collector.close()
    assert float((end - start).abs().max()) > 1e-3
    return run, end


def ppo(base: Path, **sections: Any) -> Config:
    rates = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2}
    return running.config("ppo", base, **{"optim": rates, "run": {"num_steps": 2}, **sections})


CRITICS: dict[str, tuple[dict[str, Any], str]] = {
    "adapter of another rank": ({"lora": {"r": 3}}, "adapter"),
    "full": ({"lora": {"enabled": False}, "critic": {"kind": "separate"}}, "separate"),
    "head alone": ({"critic": {"kind": "shared-detached", "warmup_steps": 2}}, "shared-detached"),
    "shared, with its policy": ({"critic": {"kind": "shared", "warmup_steps": 0}}, "shared"),
}


@pytest.mark.parametrize("name", CRITICS)
@pytest.mark.wide
def test_a_run_goes_on_with_the_critic_of_another(name: str, tiny: TinyModels, tmp_path: Path) -> None:
    first, kind = CRITICS[name]
    run, end = learnt(ppo(tiny("llama"), **first), tmp_path, "first")
    model = {"adapter": str(run.path)} if kind == "shared" else {}
    begun = load(ppo(tiny("llama"), model=model, critic={"path": str(run.path), "kind": kind}))
    assert begun.policy.critic_kind == kind
    torch.testing.assert_close(values(begun), end, rtol=1e-5, atol=1e-6)
    begun.close()


def with_vocabulary(source: Path, folder: Path, order: Callable[[list[str]], list[str]]) -> Path:
    """Copy a model; its tokenizer has the same tokens in another order."""
    shutil.copytree(source, folder)
    facts = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = facts["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = len(facts["added_tokens"])
    facts["model"]["vocab"] = {t: i for i, t in enumerate([*tokens[:added], *order(tokens[added:])])}
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("of_run", [False, True], ids=["model", "run"])
@pytest.mark.wide
def test_a_critic_of_other_tokens_is_refused(of_run: bool, tiny: TinyModels, tmp_path: Path) -> None:
    """Of as many tokens, shifted by one or in another order; a model of another kind with the same tokens is taken."""
    models = {
        "same": tiny("qwen2"),
        "shifted": with_vocabulary(tiny("qwen2"), tmp_path / "shifted", lambda tokens: [*tokens[1:], tokens[0]]),
        "reversed": with_vocabulary(tiny("qwen2"), tmp_path / "reversed", lambda tokens: tokens[::-1]),
    }
    for name, path in models.items():
        if of_run:
            run = trained(ppo(path, critic={"kind": "separate"}, run={"num_steps": 1}), tmp_path, name=f"run-{name}")
            path = run.path
        settings = resolve(ppo(tiny("llama"), critic={"path": str(path), "kind": "separate"}))
        if name == "same":
            loaded(settings).close()
        else:
            with pytest.raises(ValueError, match=r"critic\.path=.* another tokenizer"):
                loaded(settings)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.wide
def test_a_critic_starts_with_the_scores_of_a_reward_model(lora: bool, tiny: TinyModels, tmp_path: Path) -> None:
    """Its value after the last token is the reward of the whole text, centre included."""
    lines = ({"prompt": f"{a}{b}:", "chosen": "yes" + a, "rejected": "no" + a} for a in "abcdefgh" for b in "abcd")
    task = {"name": "rows", "data": str(write_rows(tmp_path / "rows.jsonl", lines))}
    rate = {"learning_rate": 1e-2 if lora else 1e-3}
    made = running.config("reward", tiny("llama"), lora={"enabled": lora}, task=task, optim=rate, run={"num_steps": 5})
    run = trained(made, tmp_path, name="rm")
    reward = {"functions": [], "model": str(run.path)}
    critic = {"path": str(run.path), "kind": "adapter" if lora else "separate"}
    collector = load(ppo(tiny("llama"), critic=critic, reward=reward))
    policy = collector.policy
    batch = policy.batch_of(examples(PROMPTS, RESPONSES), last_tokens=True)
    with torch.no_grad(), policy.acting("critic"):
        assert policy.value_head is not None
        got = policy.value_head(last_states(policy.backbone("critic"), batch))
    if lora:
        with torch.no_grad(), policy.acting("reward"):
            wanted = policy.reward_scores(batch).tolist()
    else:
        folder = str(run.checkpoints / "step-000005")
        model = load_reward_model(folder, dtype=torch.float32, label=None, device=torch.device("cpu"))
        texts = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
        wanted = model.reward_scores(texts, micro_batches=MicroBatches(torch.device("cpu"), 512))
    assert got.tolist() == pytest.approx(wanted, abs=1e-5)
    assert abs(wanted[0] - wanted[1]) > 1e-3
    assert policy.critic_kind == ("adapter" if lora else "separate")
    collector.close()


@pytest.mark.parametrize(
    ("kind", "warming_up", "of_backbone", "of_head"),
    [
        ("shared", False, 3.0 + 0.5 * 3.0, 0.5 * 6.0),
        ("shared-detached", False, 3.0, 6.0),
        ("shared", True, 0.0, 6.0),
    ],
)
def test_value_coef_weighs_the_value_only_where_its_gradient_reaches_the_backbone(
    kind: str, warming_up: bool, of_backbone: float, of_head: float
) -> None:
    """States are 3 w, with w = 2; the policy's loss is their sum, and the value's that of 1 h times them."""
    w = torch.tensor(2.0, requires_grad=True)
    h = torch.tensor(1.0, requires_grad=True)
    policy = SimpleNamespace(states=lambda role, batch: 3.0 * w, critic_kind=kind)
    trainer: Any = SimpleNamespace(policy=policy, config=SimpleNamespace(ppo=SimpleNamespace(value_coef=0.5)))
    batch: Any = None
    terms: Any = {
        "policy_terms": lambda batch, states: (states.sum(), {}),
        "critic_loss": lambda batch, states: ((h * states).sum(), {}),
    }
    loss, _ = Ppo.joint_loss(trainer, batch, **terms, warming_up=warming_up)
    loss.backward()
    assert h.grad == of_head
    assert (0.0 if w.grad is None else w.grad) == of_backbone
