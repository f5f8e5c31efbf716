"""Distillation: every kind of teacher against a plain pass, hints, faults. Sampling through a server."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import running
from tests.faults.lookup_runs import lookup
from tests.generation.stand_in import Faults, StandIn
from tests.tiny_models import TinyModels
from tests.training.experiences import experience_of
from tests.training.rows import loaded, trained, write_rows
from tests.training.test_resume import assert_same
from tinyrl.algorithms.distillation import jensen_shannon
from tinyrl.config.schema import Config
from tinyrl.generation.request import Request
from tinyrl.generation.sample import Sample, SampleBuilder
from tinyrl.models import build
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.logprobs import TeacherStates, TeacherTopK
from tinyrl.training.distill import without_untaught
from tinyrl.training.grpo import loss_options
from tinyrl.training.inputs import named_inputs, read_sources
from tinyrl.training.policy_loss import Counts, Experience, TeacherOutputs

SMALL = {"distill": {"num_prompts": 4, "group_size": 2}}


@pytest.fixture(scope="module")
def other(tiny: TinyModels) -> Path:
    """A model of another architecture with the same tokens."""
    return tiny("qwen2")


def config(model: Path, who: object, **sections: Any) -> Config:
    own = {"path": str(who), **sections.pop("teacher", {})}
    return running.config("distill", model, **{**SMALL, **sections}, teacher=own)


def taught(trainer: Any, samples: list[Sample]) -> Experience:
    """Samples that the teacher has scored; in distillation it leaves those out that the hint has nothing for."""
    prompts = trainer.teacher.prompts(samples)
    if trainer.config.method == "distill":
        samples = without_untaught(samples, prompts)
    return experience_of(samples, teacher=trainer.teacher.score(samples, prompts))


def outputs_of(experience: Experience) -> TeacherOutputs:
    assert experience.teacher is not None
    return experience.teacher


def token_logprobs(experience: Experience) -> torch.Tensor:
    """The teacher's log-probabilities (M,) of the tokens in the loss."""
    return outputs_of(experience).logprobs[experience.inputs.mask]


def given(trainer: Any) -> Experience:
    return taught(trainer, [trainer.given(prompt) for prompt in trainer.collector.train_prompts[:5]])


def distance(trainer: Any, minibatch: Experience) -> Any:
    """(loss, metrics) of a minibatch."""
    batch = trainer.policy.batch_of(minibatch.samples)
    states = trainer.policy.states("policy", batch)
    return trainer.teacher.distance(batch, states, outputs_of(minibatch), Counts.of(minibatch))


def plain_logprobs(path: Path, samples: list[Sample]) -> torch.Tensor:
    """(M, V) of a model's own forward pass, a row at a time."""
    model, found = load_causal_lm(str(path), dtype=torch.float32), []
    for sample in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*sample.prompt, *sample.response]])).logits[0]
        found.append(logits[len(sample.prompt) - 1 : -1].log_softmax(-1))
    return torch.cat(found)


def test_a_teacher_model_gives_the_numbers_of_its_plain_pass(model: Path, other: Path) -> None:
    trainer = loaded(config(model, other))
    read = read_sources(named_inputs(trainer.config), rows={}, known={})
    assert "teacher.path: model.safetensors" in read.files  # a resume with another teacher is refused
    experience = given(trainer)
    samples = experience.samples
    expected, targets = plain_logprobs(other, samples), torch.cat([torch.tensor(s.response) for s in samples])
    found = token_logprobs(experience)
    torch.testing.assert_close(found, expected.gather(1, targets.unsqueeze(1)).squeeze(1), atol=1e-5, rtol=1e-5)

    rows = [3, 0, 4]
    loss, _ = distance(trainer, experience.rows(rows))
    student, counts = plain_logprobs(model, samples), [len(sample.response) for sample in samples]
    each = jensen_shannon(student, expected, beta=1.0).split(counts)
    mean = torch.cat([each[row] for row in rows]).mean()
    torch.testing.assert_close(loss.detach(), mean, atol=1e-5, rtol=1e-5)


def test_a_server_gives_the_numbers_of_a_local_model(model: Path, other: Path) -> None:
    live = outputs_of(given(loaded(config(model, other, teacher={"top_k": 5}))))
    with StandIn(other) as serving:
        served = outputs_of(given(loaded(config(model, serving.url, teacher={"top_k": 5}))))
    torch.testing.assert_close(served.logprobs, live.logprobs, atol=1e-5, rtol=1e-5)
    for here, there in zip(live.distributions, served.distributions, strict=True):
        assert isinstance(here, TeacherTopK)
        assert isinstance(there, TeacherTopK)
        torch.testing.assert_close(there.logprobs, here.logprobs, atol=1e-5, rtol=1e-5)
        assert torch.equal(there.ids, here.ids)


def test_observed_tokens_are_not_learnt(tmp_path: Path) -> None:
    """In episodes the teacher reads what the environment said, and says nothing of it."""
    own = {"path": str(lookup("grpo").model.path)}
    trainer = loaded(lookup("distill", environment={"max_turns": 3}, teacher=own))
    samples = trainer.collector.collect(trainer.collector.train_prompts[:4], group_size=2, step=0)
    experience = taught(trainer, samples)
    outputs = outputs_of(experience)
    assert sum(len(sample.response) - sample.num_actions for sample in samples) > 5
    for sample, distributions in zip(samples, outputs.distributions, strict=True):
        assert isinstance(distributions, TeacherStates)
        assert len(distributions.states) == sample.num_actions
    assert not outputs.logprobs[~experience.inputs.mask].any()
    loss, _ = distance(trainer, experience.rows([0, 3, 5]))
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)  # the teacher is the base, and the adapter is fresh
    trainer.close()


def hinted(trainer: Any, right: list[bool], **fields: list[float]) -> Experience:
    """One group that the teacher has scored: responses to the first prompt, the task's own answer where right."""
    prompt = trainer.collector.train_prompts[0]
    answer = trainer.policy.tokenizer.encode(str(trainer.collector.task.gold(prompt.row)))
    rewards = fields.get("rewards", [float(one) for one in right])
    scores = fields.get("scores", rewards)
    samples = []
    for one, reward, score in zip(right, rewards, scores, strict=True):
        builder = SampleBuilder(Request(prompt.tokens, np.uint64(0), limit=len(answer), row=prompt.index))
        builder.chose(answer if one else answer[::-1], [0.0] * len(answer))
        samples.append(replace(builder.sample(finish="eos"), reward=reward, scores=[score]))
    return taught(trainer, samples)


def in_loss(trainer: Any, right: list[bool], **fields: list[float]) -> list[bool]:
    return [sample.in_loss for sample in hinted(trainer, right, **fields).samples]


ONE_RIGHT: dict[str, Any] = {"path": "self", "hint": "One said {correct}"}


def test_correct_answers_of_the_group_are_a_hint(model: Path) -> None:
    """Rows of groups without another right answer have nothing to learn from, and do not count."""
    trainer = loaded(config(model, "self", teacher=ONE_RIGHT))
    samples = hinted(trainer, [True, False, False]).samples
    assert [sample.in_loss for sample in samples] == [False, True, True]
    assert in_loss(trainer, [True, True, False]) == [True, True, True]
    assert in_loss(trainer, [False, False]) == [False, False]
    read = trainer.teacher.prompts(samples)
    right = trainer.policy.tokenizer.decode(samples[0].response, skip_special_tokens=True)
    assert str(trainer.policy.tokenizer.decode(read[1] or [])).endswith(f"One said {right}")


def test_rows_without_a_hint_stay_in_the_policy_loss(model: Path) -> None:
    """With a teacher of next to no weight the gradient is that of GRPO alone; the distance is a mean over the rows that
    the teacher was shown something for.
    """
    trainer: Any = loaded(running.config("grpo", model, teacher={**ONE_RIGHT, "kl_coef": 1e-9}))
    experience = hinted(trainer, [True, False, False, False])
    samples = experience.samples
    assert [sample.in_loss for sample in samples] == [True] * 4
    outputs = outputs_of(experience)
    second = outputs.distributions[1]  # in place of those of a row that the teacher was shown nothing for
    outputs = replace(outputs, distributions=[second, second, *outputs.distributions[2:]])
    minibatch = experience_of(samples, advantage=torch.tensor([1.5, -0.5, -0.5, -0.5]), teacher=outputs)
    how: dict[str, Any] = {"minibatch": minibatch, "counts": Counts.of(minibatch), "measure_gap": True}
    how["options"] = loss_options(trainer.config.grpo, max_new_tokens=6, inexact=False)
    gradients, metrics = [], dict[str, Any]()
    for coef in (0.0, 1e-9):
        trainer.config = trainer.config.with_setting("teacher.kl_coef", coef)
        batch = trainer.policy.batch_of(samples)
        loss, metrics = trainer.policy_terms(batch, **how)
        gradients.append(torch.autograd.grad(loss, list(trainer.policy.parameters["policy"].values())))
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
    few = distance(trainer, experience.rows([1, 2, 3]))[1]["teacher/loss"]
    assert float(few) > 0.01
    assert float(metrics["teacher/loss"]) == pytest.approx(float(few), rel=1e-4)


def test_right_is_what_the_verifier_says(model: Path) -> None:
    """Not a wrong answer with other rewards, and a right one whatever its penalties."""
    trainer = loaded(config(model, "self", teacher=ONE_RIGHT))  # its reward is a function beside the verifier
    assert in_loss(trainer, [True, False], rewards=[0.2, 1.5]) == [False, True]
    own = {"reward": {"functions": [], "truncated": "penalize"}, "task": {"solved_reward": 0.3}}
    eased = loaded(config(model, "self", teacher=ONE_RIGHT, **own))
    assert in_loss(eased, [True, False], rewards=[0.5, 0.0], scores=[0.4, 0.1]) == [False, True]


@pytest.mark.parametrize(
    ("method", "hint", "sections"),
    [
        ("ppo", "{correct}", {}),
        ("distill", "{correct}", {"distill": {"group_size": 1}}),
        ("grpo", "{why}", {"reward": {"functions": []}}),
        ("distill", "{answr}", {}),
    ],
)
def test_a_hint_that_nothing_can_fill_in_is_refused(
    method: str, hint: str, sections: dict[str, Any], model: Path
) -> None:
    teacher = {"path": "self", "hint": hint} | ({} if method == "distill" else {"kl_coef": 0.5})
    settings = running.config(method, model, **sections, teacher=teacher)
    with pytest.raises(ValueError, match=r"teacher\.hint"):
        loaded(settings)


def test_the_policy_as_its_own_teacher_stays_as_it_was(model: Path) -> None:
    """With every weight trained: no gradient goes through the teacher, and no optimizer step moves it."""
    trainer = loaded(config(model, "self", teacher={"hint": "It is {answer}"}, lora={"enabled": False}))
    experience = given(trainer)
    samples = experience.samples
    head = trainer.policy.head("policy").weight
    read = [each.states for each in outputs_of(experience).distributions if isinstance(each, TeacherStates)]
    expected = (torch.cat(read) @ head.detach().T).log_softmax(-1)
    with torch.no_grad():
        head.mul_(1.5)
    loss, _ = distance(trainer, experience)
    (gradient,) = torch.autograd.grad(loss, head)
    states = trainer.policy.states("policy", trainer.policy.batch_of(samples))
    plain = jensen_shannon((states @ head.T).log_softmax(-1), expected, beta=1.0).mean()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, head)[0], atol=1e-5, rtol=1e-4)


def test_rows_of_padding_that_only_the_policy_has_are_left_out(model: Path, other: Path, tmp_path: Path) -> None:
    """Both have all tokens of the text; the policy may sample an id behind them all the same. A teacher without a row
    for a token of text is refused.
    """
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    resized = load_causal_lm(str(model), dtype=torch.float32)
    rows = int(resized.get_input_embeddings().weight.shape[0])  # pyright: ignore
    resized.resize_token_embeddings(rows + 5, mean_resizing=False)
    resized.save_pretrained(tmp_path)
    trainer = loaded(config(tmp_path, other))
    samples = [trainer.given(prompt) for prompt in trainer.collector.train_prompts[:2]]
    samples[0].response[1] = rows + 4
    experience = taught(trainer, samples)
    assert torch.isfinite(distance(trainer, experience)[0])
    mine, theirs = (plain_logprobs(path, samples[1:]) for path in (tmp_path, other))
    expected = jensen_shannon(mine[:, :rows].log_softmax(-1), theirs, beta=1.0).mean()
    torch.testing.assert_close(distance(trainer, experience.rows([1]))[0].detach(), expected, atol=1e-5, rtol=1e-5)
    resized.resize_token_embeddings(200)
    resized.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="200 rows"):
        loaded(config(model, tmp_path))


def test_a_text_of_a_reward_is_a_hint(model: Path, tmp_path: Path) -> None:
    """Samples without a text do not count."""
    file = tmp_path / "judge.py"
    file.write_text(
        "def judge(prompts, completions, **columns):\n"
        "    return [(0.5, f'{len(c)} letters') if n % 2 else 0.0 for n, c in enumerate(completions)]\n"
    )
    reward = {"functions": [{"use": f"{file}:judge"}]}
    trainer = loaded(config(model, "self", teacher={"hint": "It has {why}"}, reward=reward))
    samples = trainer.collector.collect(trainer.collector.train_prompts[:2], group_size=2, step=0)
    trainer.close()
    read = trainer.teacher.prompts(samples)
    assert [tokens is not None for tokens in read] == [False, True, False, True]
    assert samples[3].comment
    assert str(trainer.policy.tokenizer.decode(read[3] or [])).endswith(f"It has {samples[3].comment}")


def test_every_response_is_learnt_from_without_a_reward(model: Path, other: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"{n} and"} for n in range(40)))
    own = {"task": {"name": "rows", "data": str(rows)}, "reward": {"functions": []}}
    settings = config(model, other, **own, run={"num_steps": 5})  # in five batches a guard of GRPO's would stop it
    run = trained(settings, tmp_path)
    assert all(line["optim/grad_norm"] > 0 for line in running.metrics(run)[1:])


def test_kl_is_of_every_sampled_token_with_or_without_a_reward(model: Path, other: Path) -> None:
    """And of no token of a given answer, which has no log-probability; nor has it an advantage in the records."""
    trainer = loaded(config(model, other))
    prompts = trainer.collector.train_prompts[:3]
    unrewarded, rewarded = trainer.collector.collect(prompts[:2], group_size=1, step=0)
    unrewarded = replace(unrewarded, reward=float("nan"))
    samples = [unrewarded, rewarded, trainer.given(prompts[2])]
    experience = taught(trainer, samples)
    found = trainer.teacher.metrics(samples, outputs_of(experience))
    gaps = list[float]()
    for sample, theirs in zip(samples[:2], outputs_of(experience).logprobs.tolist(), strict=False):
        gaps += [one - other for one, other in zip(sample.logprobs, theirs, strict=False)]
    assert found["teacher/kl"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)
    of_answer = experience.rows([2])
    assert trainer.teacher.metrics(of_answer.samples, outputs_of(of_answer)).keys() == {"teacher/logprob"}


def test_a_given_answer_has_no_advantage_in_the_records(model: Path, other: Path, tmp_path: Path) -> None:
    own = {"num_prompts": 4, "group_size": 2, "on_policy_fraction": 0.5}
    settings = config(model, other, distill=own, run={"num_steps": 1})
    lines = map(json.loads, trained(settings, tmp_path).samples.read_text().splitlines())
    advantages = [line["advantage"] for line in lines if line["kind"] == "train"]
    assert [value != 0.0 for value in advantages] == [True] * 4 + [False] * 2


def with_positions(source: Path, folder: Path, positions: int) -> Path:
    """Copy a model of rotary positions; its config.json names this many."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text())
    values["max_position_embeddings"] = positions
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def longest_sampled(model: Path, **sections: Any) -> int:
    trainer = loaded(config(model, model, **sections))
    return max(len(p.tokens) for p in trainer.collector.train_prompts) + trainer.collector.longest_response


@pytest.mark.parametrize("method", ["distill", "grpo"])
def test_a_teacher_with_too_few_positions_for_a_sampled_text_is_refused(
    method: str, model: Path, other: Path, tmp_path: Path
) -> None:
    longest = longest_sampled(model)
    own = {} if method == "distill" else {"kl_coef": 0.5}
    for positions in (longest, longest - 1):
        teacher = with_positions(other, tmp_path / str(positions), positions)
        settings = running.config(method, model, teacher={"path": str(teacher), **own})
        if positions == longest:
            assert loaded(settings).teacher.positions == longest
        else:
            with pytest.raises(ValueError, match=rf"teacher\.path=.* context length of {positions}.* {longest} tokens"):
                loaded(settings)


def test_a_server_with_too_few_positions_is_refused(model: Path, other: Path) -> None:
    """It answers a prompt with one token behind it."""
    longest = longest_sampled(model)
    with StandIn(other, max_model_len=longest + 1) as serving:
        assert loaded(config(model, serving.url)).teacher.positions == longest
    with (
        StandIn(other, max_model_len=longest) as serving,
        pytest.raises(ValueError, match=f"context length of {longest - 1}"),
    ):
        loaded(config(model, serving.url))


def test_a_teacher_whose_head_is_not_known_is_refused(model: Path, tiny: TinyModels) -> None:
    """HyperCLOVAX multiplies its logits by the number that Granite divides them by."""
    trainer = loaded(config(model, granite := tiny("granite")))
    experience = given(trainer)
    samples = experience.samples
    targets = torch.cat([torch.tensor(sample.response) for sample in samples])
    expected = plain_logprobs(granite, samples).gather(1, targets.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(token_logprobs(experience), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="HyperCLOVAXForCausalLM changes its logits"):
        loaded(config(model, tiny("hyperclovax")))


def test_a_given_answer_beyond_the_teachers_positions_is_refused(model: Path, other: Path, tmp_path: Path) -> None:
    answers = ["x" * 40, "y" * 41]  # of prompts of ten tokens, through EOS
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": "z" * 10, "completion": text} for text in answers))
    task = {"name": "rows", "data": str(rows), "eval_data": str(rows)}
    sections: dict[str, Any] = {"task": task, "reward": {"functions": []}, "run": {"eval_prompts": 0}}
    enough = with_positions(other, tmp_path / "enough", 52)
    loaded(config(model, enough, **sections, distill={"on_policy_fraction": 0.5}))
    short = with_positions(other, tmp_path / "short", 51)
    loaded(config(model, short, **sections))
    with pytest.raises(ValueError, match=r"row 2 has 52 tokens.* context length of 51"):
        loaded(config(model, short, **sections, distill={"on_policy_fraction": 0.5}))


def test_more_of_a_teachers_tokens_than_there_are_is_refused_before_weights(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded(config(model, other, teacher={"top_k": 258})).teacher
    monkeypatch.setattr(build, "load_causal_lm", lambda *_, **__: pytest.fail("weights were loaded"))
    for who in (other, "http://127.0.0.1:9"):
        with pytest.raises(ValueError, match=r"teacher\.top_k=259.* 258 tokens"):
            loaded(config(model, who, teacher={"top_k": 259}))


def test_a_server_that_is_gone_stops_a_run_that_can_be_resumed(model: Path, other: Path, tmp_path: Path) -> None:
    with StandIn(other) as serving:
        settings, port = config(model, serving.url), serving.port
        whole = trained(settings, tmp_path, name="whole")
    with StandIn(other, port=port, faults=Faults(dead_after=12)):
        code, stopped, _ = running.train(settings, tmp_path, name="stopped")
        assert code == 75
    with StandIn(other, port=port):
        assert running.go_on(stopped) == 0
    assert_same(whole, stopped, settings.run.num_steps)


def test_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    facts = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = facts["model"]["vocab"]
    first, second = sorted(vocabulary)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"teacher\.path=.* another tokenizer"):
        loaded(config(model, tmp_path))


@pytest.mark.parametrize(
    ("faults", "word"),
    [(Faults(dead_after=0), "did not answer"), (Faults(leaves_out=True), "token"), (Faults(token=7), "tokenizer"),
     (Faults(shift_after=0, shift=40.0), "logprob")],
)  # fmt: skip
def test_a_faulty_server_is_named(faults: Faults, word: str, model: Path, other: Path) -> None:
    with StandIn(other, faults=faults) as serving, pytest.raises(Exception, match=f"(?s)127.0.0.1.*{word}"):
        given(loaded(config(model, serving.url)))
