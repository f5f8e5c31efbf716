"""Distillation: every kind of teacher against a plain pass, stopped and resumed, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import running
from tests.faults.lookup_runs import lookup
from tests.generation.stand_in import Faults, StandIn
from tests.tiny_models import TinyModels, tiny_model
from tests.training.test_resume import assert_same
from tinyrl.algorithms.distillation import jensen_shannon
from tinyrl.config.schema import Config
from tinyrl.data import http_client
from tinyrl.generation.engine import Completion
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.logprobs import TeacherStates, TeacherTopK
from tinyrl.rollout.load import load_method
from tinyrl.rollout.sample import Sample, fill, loss_mask, padded
from tinyrl.runs.launched import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.distill import Distill
from tinyrl.training.state import RunState

SMALL = {"distill": {"num_prompts": 4, "group_size": 2}}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyrl.generation.server.WAITS_S", (0.01, 0.01))
    monkeypatch.setattr(http_client, "POLL_S", 0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short GRPO run, on the same base."""
    code, run, _ = running.train(running.config("grpo", model), tmp_path_factory.mktemp("teacher"))
    assert code == 0
    return run.checkpoints / "step-000003"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another width with the same tokens."""
    return tiny_model(tmp_path_factory.mktemp("other"), "qwen2")


def config(model: Path, who: object, **sections: Any) -> Config:
    own = {"path": str(who), **sections.pop("teacher", {})}
    return running.config("distill", model, **{**SMALL, **sections}, teacher=own)


def distill(settings: Config) -> Distill:
    return load_method(settings, options=Options(device="cpu"))


def given(trainer: Distill) -> list[Sample]:
    samples = [trainer.given(prompt) for prompt in trainer.collector.train_prompts[:5]]
    assert trainer.teacher is not None
    trainer.teacher.start()
    trainer.teacher.score(samples)
    return samples


def distance(trainer: Any, minibatch: list[Sample], rows: list[Sample] | None = None) -> Any:
    """(loss, metrics) of a micro-batch of some rows of a minibatch (None: all)."""
    rows = minibatch if rows is None else rows
    batch = trainer.policy.batch_of(rows)
    return trainer.teacher.distance_loss(minibatch)(batch, trainer.policy.policy_states(batch))


def plain_logprobs(path: Path, samples: list[Sample]) -> torch.Tensor:
    """(M, V) of a model's own forward pass, a row at a time."""
    model, found = load_causal_lm(str(path), dtype=torch.float32), []
    for sample in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*sample.prompt, *sample.response]])).logits[0]
        found.append(logits[len(sample.prompt) - 1 : -1].log_softmax(-1))
    return torch.cat(found)


def test_a_model_of_its_own_says_what_its_plain_pass_says(model: Path, other: Path) -> None:
    trainer = distill(config(model, other))
    samples = given(trainer)
    expected, targets = plain_logprobs(other, samples), torch.cat([torch.tensor(s.response) for s in samples])
    found = padded(samples, "teacher")[loss_mask(samples)]
    torch.testing.assert_close(found, expected.gather(1, targets.unsqueeze(1)).squeeze(1), atol=1e-5, rtol=1e-5)

    rows = [3, 0, 4]
    loss, _ = distance(trainer, [samples[row] for row in rows])
    student, counts = plain_logprobs(model, samples), [len(sample.response) for sample in samples]
    each = jensen_shannon(student, expected, beta=1.0).split(counts)
    mean = torch.cat([each[row] for row in rows]).mean()
    torch.testing.assert_close(loss.detach(), mean, atol=1e-5, rtol=1e-5)


def test_a_pass_does_not_depend_on_micro_batches(model: Path, adapter: Path) -> None:
    losses = []
    for tokens in (10_000, 30):
        trainer = distill(config(model, adapter, teacher={"top_k": 3}, run={"micro_batch_tokens": tokens}))
        samples = given(trainer)
        losses.append(sum(float(distance(trainer, samples, [sample])[0].detach()) for sample in samples))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] > 1e-4


def test_a_server_says_what_the_model_here_says(model: Path, other: Path, tmp_path: Path) -> None:
    live = given(distill(config(model, other, teacher={"top_k": 5})))
    with StandIn(other) as serving:
        served = given(distill(config(model, serving.url, teacher={"top_k": 5})))
    for here, there in zip(live, served, strict=True):
        assert isinstance(here.teaching, TeacherTopK)
        assert isinstance(there.teaching, TeacherTopK)
        torch.testing.assert_close(there.teaching.logprobs, here.teaching.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(there.teacher, here.teacher, atol=1e-5, rtol=1e-5)
        assert torch.equal(there.teaching.ids, here.teaching.ids)


@pytest.mark.parametrize("kind", ["self", "sampled", "half given"])
@pytest.mark.wide
def test_stopped_and_resumed_is_bit_equal(kind: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {"distill": {**SMALL["distill"]}}
    if kind == "self":
        own["teacher"] = {"hint": "It is {answer}"}
    elif kind == "sampled":
        own["distill"]["objective"] = "sampled"
    else:
        own["distill"] |= {"on_policy_fraction": 0.5, "group_size": 1}
    settings = config(model, "self" if kind == "self" else adapter, **own)
    code, whole, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    for share in (0.3, 0.7):
        code, stopped, _ = running.train(settings, tmp_path, name=f"at-{share}", stop_at=int(looks * share))
        assert code == 75
        assert running.go_on(stopped) == 0
        assert_same(whole, stopped, settings.run.num_steps)
    lines = running.metrics(whole)
    assert "teacher/logprob" in lines[1]
    assert {"teacher/kl", "reward/mean"} <= lines[1].keys()
    tokens = json.loads(whole.tokens.read_text().splitlines()[0])["tokens"]
    assert tokens[0]["teacher"] is not None


def test_a_teacher_that_has_changed_is_refused_by_a_resume(model: Path, adapter: Path, tmp_path: Path) -> None:
    no_manifest = shutil.ignore_patterns("MANIFEST.json")  # whose hashes would be believed
    teacher = Path(shutil.copytree(adapter, tmp_path / "teacher", ignore=no_manifest))
    settings = config(model, teacher)
    code, run, _ = running.train(settings, tmp_path, stop_at=12)
    assert code == 75
    [file] = teacher.glob("*model.safetensors")
    weights = load_file(file)
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 0.5}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"teacher\.path"):
        running.go_on(run)
    assert running.go_on(run, allow_config_change=True) == 0


def test_a_distance_beside_the_reward(model: Path, adapter: Path, tmp_path: Path) -> None:
    """With a weight that outdoes the reward the policy comes nearer to the teacher."""
    settings = running.config("grpo", model, run={"num_steps": 6}, teacher={"path": str(adapter), "kl_coef": 100.0})
    _, run, _ = running.train(settings, tmp_path)
    lines = running.metrics(run)
    assert lines[-1]["teacher/loss"] < 0.5 * lines[1]["teacher/loss"]


def test_observed_tokens_are_not_learnt(tmp_path: Path) -> None:
    """In episodes the teacher reads what the environment said, and says nothing of it."""
    own = {"path": str(lookup("grpo").model.path)}
    trainer = load_method(lookup("distill", environment={"max_turns": 3}, teacher=own), options=Options(device="cpu"))
    assert trainer.teacher is not None
    samples = trainer.collector.collect(trainer.collector.train_prompts[:4], group_size=2, step=0)
    trainer.teacher.score(samples)
    assert sum(len(sample.response) - sample.num_actions for sample in samples) > 5
    for sample in samples:
        assert isinstance(sample.teaching, TeacherStates)
        assert len(sample.teaching.states) == sample.num_actions
        assert sample.teacher is not None
        assert (sample.teacher[~torch.tensor(sample.mask)] == 0).all()
    loss, _ = distance(trainer, [samples[row] for row in (0, 3, 5)])
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)  # the teacher is the base, and the adapter is fresh
    trainer.close()


def hinted(trainer: Any, right: list[bool], **fields: list[float]) -> list[Sample]:
    """One group that the teacher has read: responses to the first prompt, the task's own answer where right."""
    prompt = trainer.collector.train_prompts[0]
    answer = trainer.policy.tokenizer.encode(str(trainer.collector.task.gold(prompt.row)))
    rewards = fields.get("rewards", [float(one) for one in right])
    scores = fields.get("scores", rewards)
    samples = []
    for one, reward, score in zip(right, rewards, scores, strict=True):
        completion = Completion(answer if one else answer[::-1], [0.0] * len(answer), "eos")
        samples.append(Sample.of(prompt.tokens, completion, row=prompt.index, reward=reward, scores=[score]))
    assert trainer.teacher is not None
    trainer.teacher.score(samples)
    return samples


def in_loss(samples: list[Sample]) -> list[bool]:
    return [sample.in_loss for sample in samples]


ONE_RIGHT: dict[str, Any] = {"path": "self", "hint": "One said {correct}"}


def test_correct_answers_of_the_group_are_a_hint(model: Path) -> None:
    """Rows of groups without another right answer have nothing to learn from, and do not count."""
    trainer = distill(config(model, "self", teacher=ONE_RIGHT))
    samples = hinted(trainer, [True, False, False])
    assert in_loss(samples) == [False, True, True]
    assert in_loss(hinted(trainer, [True, True, False])) == [True, True, True]
    assert in_loss(hinted(trainer, [False, False])) == [False, False]
    assert trainer.teacher is not None
    assert trainer.teacher.hint is not None
    read = trainer.teacher.hint.prompts(samples, trainer)
    right = trainer.policy.tokenizer.decode(samples[0].response, skip_special_tokens=True)
    assert str(trainer.policy.tokenizer.decode(read[1] or [])).endswith(f"One said {right}")


def test_rows_without_a_hint_stay_in_the_policy_loss(model: Path) -> None:
    """With a teacher of next to no weight the gradient is that of GRPO alone; the distance is a mean over the rows that
    the teacher was shown something for.
    """
    gradients = []
    for coef in (1e-9, 0.0):
        own = running.config("grpo", model, teacher={**ONE_RIGHT, "kl_coef": 1e-9})
        trainer: Any = load_method(own, options=Options(device="cpu"))
        trainer.run = SimpleNamespace(update=0)
        samples = hinted(trainer, [True, False, False, False])
        assert in_loss(samples) == [True] * 4
        fill(samples, "advantage", torch.tensor([1.5, -0.5, -0.5, -0.5]))
        trainer.config.teacher.kl_coef = coef
        (one,) = trainer.passes(samples, kl_coef=0.0)
        loss, metrics = one.loss(trainer.policy.batch_of(samples))
        loss.backward()
        gradients.append({n: p.grad for n, p in trainer.policy.parameters["policy"].items() if p.grad is not None})
        if coef:
            few = distance(trainer, samples[1:])[1]["teacher/loss"]
            assert float(few) > 0.01
            assert float(metrics["teacher/loss"]) == pytest.approx(float(few), rel=1e-4)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-4)


def test_right_is_what_the_verifier_says(model: Path) -> None:
    """Not a wrong answer with other rewards, and a right one whatever its penalties."""
    trainer = distill(config(model, "self", teacher=ONE_RIGHT))  # its reward is a function beside the verifier
    assert in_loss(hinted(trainer, [True, False], rewards=[0.2, 1.5])) == [False, True]
    own = {"reward": {"functions": [], "truncated": "penalize"}}
    trainer = distill(config(model, "self", teacher=ONE_RIGHT, **own))
    assert trainer.collector.scorer.uses_verifier
    assert in_loss(hinted(trainer, [True, False], rewards=[0.5, 0.0], scores=[1.0, 0.0])) == [False, True]
    eased = distill(config(model, "self", teacher=ONE_RIGHT, task={"solved_reward": 0.3}, **own))
    assert in_loss(hinted(eased, [False, False], scores=[0.4, 0.1])) == [False, True]


def test_a_function_that_never_says_why_stops_the_run(model: Path, tmp_path: Path) -> None:
    code, run, _ = running.train(config(model, "self", teacher={"hint": "It has {why}"}), tmp_path)
    assert code == 3
    assert len(running.metrics(run)) < 2


@pytest.mark.parametrize(
    ("method", "hint", "sections"),
    [
        ("ppo", "{correct}", {}),
        ("distill", "{correct}", {"distill": {"group_size": 1}}),
        ("grpo", "{why}", {"reward": {"functions": []}}),
    ],
)
def test_a_hint_that_nothing_can_fill_in_is_refused(
    method: str, hint: str, sections: dict[str, Any], model: Path
) -> None:
    teacher = {"path": "self", "hint": hint} | ({} if method == "distill" else {"kl_coef": 0.5})
    settings = running.config(method, model, **sections, teacher=teacher)
    with pytest.raises(ValueError, match=r"teacher\.hint"):
        load_method(settings, options=Options(device="cpu"))


def test_the_policy_as_its_own_teacher_stays_as_it_was(model: Path) -> None:
    """With every weight trained: no gradient goes through the teacher, and no optimizer step moves it."""
    trainer = distill(config(model, "self", teacher={"hint": "It is {answer}"}, lora={"enabled": False}))
    samples = given(trainer)
    head = trainer.policy.head("policy").weight
    read = [sample.teaching.states for sample in samples if isinstance(sample.teaching, TeacherStates)]
    expected = (torch.cat(read) @ head.detach().T).log_softmax(-1)
    with torch.no_grad():
        head.mul_(1.5)
    loss, _ = distance(trainer, samples)
    (gradient,) = torch.autograd.grad(loss, head)
    states = trainer.policy.policy_states(trainer.policy.batch_of(samples))
    plain = jensen_shannon((states @ head.T).log_softmax(-1), expected, beta=1.0).mean()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, head)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["grpo", "distill"])
def test_rows_of_which_nothing_counts(method: str, model: Path, other: Path) -> None:
    """A micro-batch of them, with every weight trained, adds nothing."""
    teacher = {"path": str(other)} | ({} if method == "distill" else {"kl_coef": 0.5})
    settings = running.config(method, model, lora={"enabled": False}, teacher=teacher)
    trainer = load_method(settings, options=Options(device="cpu"))
    samples = hinted(trainer, [True, False])
    samples[1].in_loss = False
    trainer.teacher.score(samples)
    loss, metrics = distance(trainer, samples, samples[1:])
    loss.backward()
    assert float(metrics["teacher/loss"]) == 0.0


@pytest.mark.parametrize("top_k", [None, 3])
def test_rows_of_padding_that_only_the_policy_has_are_left_out(
    top_k: int | None, model: Path, other: Path, tmp_path: Path
) -> None:
    """Both have all tokens of the text; the policy may sample an id behind them all the same."""
    wide = load_causal_lm(str(model), dtype=torch.float32)
    rows = int(wide.get_input_embeddings().weight.shape[0])  # pyright: ignore
    wide.resize_token_embeddings(rows + 5, mean_resizing=False)
    wide.save_pretrained(tmp_path)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    trainer = distill(config(tmp_path, other, teacher={"top_k": top_k}))
    assert trainer.teacher is not None
    assert len(trainer.teacher.start()) == 1
    samples = [trainer.given(prompt) for prompt in trainer.collector.train_prompts[:2]]
    samples[0].response[1] = rows + 4
    trainer.teacher.score(samples)
    loss, _ = distance(trainer, samples)
    assert torch.isfinite(loss)
    if top_k is None:
        mine, theirs = (plain_logprobs(path, samples[1:]) for path in (tmp_path, other))
        expected = jensen_shannon(mine[:, :rows].log_softmax(-1), theirs, beta=1.0).mean()
        torch.testing.assert_close(distance(trainer, samples[1:])[0].detach(), expected, atol=1e-5, rtol=1e-5)


def test_a_teacher_without_a_row_for_a_token_of_text_is_refused(model: Path, tmp_path: Path) -> None:
    narrow = load_causal_lm(str(model), dtype=torch.float32)
    narrow.resize_token_embeddings(200)
    narrow.save_pretrained(tmp_path)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(ValueError, match="200 rows"):
        distill(config(model, tmp_path))


def test_what_a_reward_says_is_a_hint(model: Path, tmp_path: Path) -> None:
    """A score may come with a text; rows of which nothing was said do not count."""
    file = tmp_path / "judge.py"
    file.write_text(
        "def judge(prompts, completions, **columns):\n"
        "    return [(0.5, f'{len(c)} letters') if n % 2 else 0.0 for n, c in enumerate(completions)]\n"
    )
    settings = config(model, "self", teacher={"hint": "It has {why}"}, reward={"functions": [{"use": f"{file}:judge"}]})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    assert running.metrics(run)[1]["reward/mean"] == pytest.approx(0.25)
    trainer = distill(settings)
    trainer.state = RunState()
    samples = trainer.collector.collect(trainer.collector.train_prompts[:2], group_size=2, step=0)
    trainer.close()
    assert trainer.teacher is not None
    assert trainer.teacher.hint is not None
    read = trainer.teacher.hint.prompts(samples, trainer)
    assert [tokens is not None for tokens in read] == [False, True, False, True]
    assert samples[3].comment
    assert str(trainer.policy.tokenizer.decode(read[3] or [])).endswith(f"It has {samples[3].comment}")


def test_no_reward_is_needed(model: Path, adapter: Path, tmp_path: Path) -> None:
    """Rows of a person's own, without a verifier or a reward function: every response is learnt from."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} and"}) + "\n" for n in range(40)))
    own = {"task": {"name": "rows", "data": str(rows)}, "reward": {"functions": []}}
    settings = config(model, adapter, **own, run={"num_steps": 5})  # in five batches a guard of GRPO's would stop it
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    lines = running.metrics(run)
    assert len(lines) == 6
    assert all(line["optim/grad_norm"] > 0 for line in lines[1:])
    assert not any(key.startswith("reward/") for key in lines[-1])


def test_a_server_that_is_gone_stops_a_run_that_can_be_resumed(model: Path, other: Path, tmp_path: Path) -> None:
    with StandIn(other) as serving:
        settings, port = config(model, serving.url), serving.port
        assert running.train(settings, tmp_path, name="whole")[0] == 0
    with StandIn(other, port=port, faults=Faults(dead_after=12)):
        code, stopped, _ = running.train(settings, tmp_path, name="stopped")
        assert code == 75
    with StandIn(other, port=port):
        assert running.go_on(stopped) == 0
    assert_same(RunDir(tmp_path / "whole"), stopped, settings.run.num_steps)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"teacher": {"hint": "{answr}"}}, "answr"),
        ({"lora": {"enabled": False}}, "lora.enabled"),
    ],
)
def test_refused(sections: dict[str, Any], word: str, model: Path, adapter: Path) -> None:
    with pytest.raises(ValueError, match=word):
        distill(config(model, adapter, **sections))


def test_another_tokenizer_is_refused(model: Path, tiny: TinyModels, tmp_path: Path) -> None:
    for file in tiny("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "tokenizer.json").read_text()
    facts = json.loads(text)
    vocabulary = facts["model"]["vocab"]
    first, second = sorted(vocabulary)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"teacher\.path=.* another tokenizer"):
        distill(config(model, tmp_path))


@pytest.mark.parametrize(
    ("faults", "word"),
    [(Faults(dead_after=0), "did not answer"), (Faults(leaves_out=True), "tokens"), (Faults(token=7), "tokenizer"),
     (Faults(shift_after=0, shift=40.0), "logprob")],
)  # fmt: skip
def test_a_faulty_server_is_named(faults: Faults, word: str, model: Path, other: Path, tmp_path: Path) -> None:
    with StandIn(other, faults=faults) as serving, pytest.raises(Exception, match=f"(?s)127.0.0.1.*{word}"):
        given(distill(config(model, serving.url)))
