"""Distillation: every kind of teacher against a plain pass, stopped and resumed, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import running
from tests.faults.lookup_runs import lookup
from tests.generation.stand_in import Faults, StandIn
from tests.tiny_models import TinyModels, tiny_model
from tests.trainers.test_resume import assert_same
from tinyrl.algorithms.distillation import jensen_shannon
from tinyrl.config.schema import Config
from tinyrl.data import http_client
from tinyrl.generation import server_client
from tinyrl.models.loading import load_causal_lm
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.collector import sample_and_score
from tinyrl.rollout.components import Options
from tinyrl.runs.run_dir import RunDir
from tinyrl.trainers.distill import Distill
from tinyrl.trainers.teaching import LocalTeacher

SMALL = {"distill": {"num_prompts": 4, "group_size": 2}}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "WAITS_S", (0.01, 0.01))
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
    return Distill(settings, options=Options(device="cpu"))


def given(trainer: Distill) -> Rollout:
    rollout = trainer.given(trainer.train_prompts[:5])
    assert trainer.teacher is not None
    trainer.teacher.start()
    trainer.teacher.read(rollout)
    return rollout


def plain_logprobs(path: Path, rollout: Rollout) -> torch.Tensor:
    """(M, V) of a model's own forward pass, a row at a time."""
    model, found = load_causal_lm(str(path), dtype=torch.float32), []
    for row in range(len(rollout)):
        prompt, response = rollout.prompt_tokens[row], rollout.response(row)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
        found.append(logits[len(prompt) - 1 : -1].log_softmax(-1))
    return torch.cat(found)


def test_a_model_of_its_own_says_what_its_plain_pass_says(model: Path, other: Path) -> None:
    trainer = distill(config(model, other))
    rollout = given(trainer)
    expected, targets = plain_logprobs(other, rollout), rollout.response_tokens[rollout.loss_mask]
    assert rollout.teacher_logprobs is not None
    said = rollout.teacher_logprobs[rollout.loss_mask]
    torch.testing.assert_close(said, expected.gather(1, targets.unsqueeze(1)).squeeze(1), atol=1e-5, rtol=1e-5)

    rows = [3, 0, 4]
    loss, _ = trainer.distance_loss(rollout, rows)(rows)
    student, counts = plain_logprobs(model, rollout), rollout.loss_mask.sum(1).tolist()
    each = jensen_shannon(student, expected, beta=1.0).split(counts)
    mean = torch.cat([each[row] for row in rows]).mean()
    torch.testing.assert_close(loss.detach(), mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_pass_does_not_depend_on_micro_batches(top_k: int | None, model: Path, adapter: Path) -> None:
    losses = []
    for tokens in (10_000, 30):
        trainer = distill(config(model, adapter, teacher={"top_k": top_k}, run={"micro_batch_tokens": tokens}))
        rollout = given(trainer)
        loss = trainer.distance_loss(rollout, range(5))  # pyright: ignore[reportArgumentType]
        losses.append(sum(float(loss([row])[0].detach()) for row in range(5)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] > 1e-4


def test_a_server_says_what_the_model_here_says(model: Path, other: Path, tmp_path: Path) -> None:
    live = given(distill(config(model, other, teacher={"top_k": 5})))
    with StandIn(other) as serving:
        served = given(distill(config(model, serving.url, teacher={"top_k": 5})))
    assert live.teacher_top_logprobs is not None
    assert served.teacher_top_logprobs is not None
    torch.testing.assert_close(served.teacher_top_logprobs, live.teacher_top_logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(served.teacher_logprobs, live.teacher_logprobs, atol=1e-5, rtol=1e-5)
    assert torch.equal(served.teacher_top_ids, live.teacher_top_ids)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["adapter", "model", "server", "start", "self", "sampled", "half given"])
def test_stopped_and_resumed_is_bit_equal(kind: str, model: Path, adapter: Path, other: Path, tmp_path: Path) -> None:
    with StandIn(other) as serving:
        teachers = {"adapter": adapter, "model": other, "server": serving.url, "start": "start", "self": "self"}
        own: dict[str, Any] = {"distill": {**SMALL["distill"], "num_epochs": 2, "minibatch_size": 4}}
        if kind in ("start", "self"):
            own["teacher"] = {"hint": "It is {answer}"}
        if kind == "sampled":
            own["distill"]["objective"] = "sampled"
        if kind == "half given":
            own["distill"] |= {"on_policy": 0.5, "group_size": 1, "minibatch_size": None}
        settings = config(model, teachers.get(kind, adapter), **own)
        code, whole, looks = running.train(settings, tmp_path, name="whole")
        assert code == 0
        places = [max(1, int(looks * share)) for share in (0.3, 0.6, 0.85)]
        for number, place in enumerate(
            (9, 25, 50) if kind == "server" else places
        ):  # waiting for one looks by the clock
            code, stopped, _ = running.train(settings, tmp_path, name=f"s{number}", stop_at=place)
            assert code == 75
            assert running.go_on(stopped) == 0
            assert_same(whole, stopped, settings.run.num_steps)
    lines = running.metrics(whole)
    assert "teacher/logprob" in lines[1]
    assert {"teacher/kl", "reward/mean"} <= lines[1].keys()
    tokens = json.loads(whole.tokens.read_text().splitlines()[0])["tokens"]
    assert tokens[0]["teacher"] is not None


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_a_teacher_that_has_changed_is_refused_by_a_resume(
    kind: str, model: Path, adapter: Path, other: Path, tmp_path: Path
) -> None:
    no_manifest = shutil.ignore_patterns("MANIFEST.json")  # whose hashes would be believed
    teacher = Path(shutil.copytree(adapter if kind == "adapter" else other, tmp_path / "teacher", ignore=no_manifest))
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


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_distance_beside_the_reward(method: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    """With a weight that outdoes the reward the policy comes nearer to the teacher."""
    sections: dict[str, Any] = {"run": {"num_steps": 6}, "critic": {"warmup": 0}}
    with_it = {"path": str(adapter), "coef": 100.0}
    _, run, _ = running.train(running.config(method, model, **sections, teacher=with_it), tmp_path, name="with")
    _, without, _ = running.train(running.config(method, model, **sections), tmp_path, name="without")
    lines = running.metrics(run)
    assert lines[-1]["teacher/loss"] < 0.5 * lines[1]["teacher/loss"]
    assert not any(key.startswith("teacher/") for key in running.metrics(without)[-1])


def test_observed_tokens_are_not_learnt(tmp_path: Path) -> None:
    """In episodes the teacher reads what the environment said, and says nothing of it."""
    own = {"path": str(lookup("grpo").model.path)}
    trainer = Distill(lookup("distill", environment={"max_turns": 3}, teacher=own), options=Options(device="cpu"))
    assert trainer.teacher is not None
    rollout = sample_and_score(trainer.train_prompts[:4], trainer, group_size=2, step=0)
    trainer.teacher.read(rollout)
    exists = torch.arange(rollout.response_mask.shape[1]) < rollout.response_lengths[:, None]
    assert (exists & ~rollout.response_mask).sum() > 5
    assert rollout.teacher_states is not None
    assert len(rollout.teacher_states) == int(rollout.loss_mask.sum()) < int(exists.sum())
    assert rollout.teacher_logprobs is not None
    assert (rollout.teacher_logprobs[~rollout.response_mask] == 0).all()
    rows = [0, 3, 5]
    loss, _ = trainer.distance_loss(rollout, rows)(rows)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)  # the teacher is the base, and the adapter is fresh
    trainer.close()


def test_correct_answers_of_the_group_are_a_hint(model: Path, tmp_path: Path) -> None:
    """Rows of groups without another right answer have nothing to learn from, and do not count."""
    settings = config(
        model, "self", teacher={"hint": "One said {correct}"}, distill={"num_prompts": 2, "group_size": 3}
    )
    trainer = distill(settings)
    rollout = trainer.given(trainer.train_prompts[:6])
    rollout.prompt_index, rollout.rewards = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1.0, 0, 0, 0, 1, 1])
    assert trainer.teacher is not None
    trainer.teacher.read(rollout)
    assert rollout.kept.tolist() == [False, True, True, True, True, True]
    assert trainer.teacher.hint is not None
    read = trainer.teacher.hint.prompts(rollout, trainer)
    right = trainer.tokenizer.decode(rollout.response(0), skip_special_tokens=True)
    assert str(trainer.tokenizer.decode(read[1] or [])).endswith(f"One said {right}")


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
    rollout = sample_and_score(trainer.train_prompts[:2], trainer, group_size=2, step=0)
    trainer.close()
    assert rollout.whys is not None
    assert trainer.teacher is not None
    assert trainer.teacher.hint is not None
    read = trainer.teacher.hint.prompts(rollout, trainer)
    assert [tokens is not None for tokens in read] == [False, True, False, True]
    assert str(trainer.tokenizer.decode(read[3] or [])).endswith(f"It has {rollout.whys[3]}")
    again = rollout.with_groups(rollout, [1], places=[0], group_size=2)
    assert again.whys is not None
    assert again.whys[1] == rollout.whys[3]


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
        settings, port = config(model, serving.url, teacher={"timeout_s": 60.0}), serving.port
        assert running.train(settings, tmp_path, name="whole")[0] == 0
    with StandIn(other, port=port, faults=Faults(dead_after=12)):
        code, stopped, _ = running.train(settings, tmp_path, name="stopped")
        assert code == 75
    with StandIn(other, port=port):
        assert running.go_on(stopped) == 0
    assert_same(RunDir(tmp_path / "whole"), stopped, settings.run.num_steps)


def test_numbers_that_are_none_change_no_weight(
    model: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of a teacher that are NaN from the second step on: three steps are skipped, and a sentence is the end."""
    told, real = list[Rollout](), LocalTeacher.say

    def say(teacher: LocalTeacher, rollout: Rollout, *rows: Any) -> torch.Tensor:
        found = real(teacher, rollout, *rows)
        told.append(rollout)
        if len(told) > 1 and rollout.teacher_states is not None:
            rollout.teacher_states[:] = torch.nan
        return found

    monkeypatch.setattr(LocalTeacher, "say", say)
    code, run, _ = running.train(config(model, other, run={"num_steps": 8, "save_every": 1}), tmp_path)
    assert code == 3
    before, after = running.weights(run, 1), running.weights(run, 2)
    names = [name for name in before if name.startswith("adapter_model")]
    assert names
    assert all(torch.equal(before[name], after[name]) for name in names)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"teacher": {"hint": "{answr}"}}, "answr"),
        ({"lora": {"enabled": False}}, "lora.enabled"),
        ({"teacher": {"top_k": 10_000}}, "teacher.top_k"),
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
        given(distill(config(model, serving.url, teacher={"timeout_s": 2.0})))
