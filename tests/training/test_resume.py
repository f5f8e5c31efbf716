"""Stopping anywhere and resuming: to the bit the run that was not stopped (on a CPU), for every method."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import running
from tests.tiny_models import TinyModels, sharp_model
from tests.training.rows import loaded, trained, write_rows
from tinyrl.config.schema import Config
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.models.parallel import ALONE
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.training import run as training_run
from tinyrl.training.launch import _check_alike
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.run_state import CheckpointState, RunState
from tinyrl.training.step import Updater

TEXT = {"ptx_coef": 0.5, "ptx_data": str(Path(__file__).parents[1] / "text_rows.jsonl")}
FULL = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2}}
ROWS = {"run": {"num_steps": 5, "micro_batch_tokens": 100}}
SMALL = {"num_prompts": 4, "group_size": 2}
# Kind of model, method, sections; data files are those of `folder`, a teacher without a path is another model.
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grpo, epochs and minibatches": (
        "llama",
        "grpo",
        {"grpo": {"num_epochs": 2, "minibatch_size": 8, "kl_coef": 0.1, "dynamic_sampling_rounds": 2}},
    ),
    "grpo, a hybrid inside a vision model": ("qwen3.5-vl", "grpo", {"generation": {"max_prompt_tokens": 128}}),
    "grpo, full, inside a vision model": ("qwen3.5-vl", "grpo", {**FULL, "generation": {"max_prompt_tokens": 128}}),
    "grpo, full, experts": ("qwen3-moe", "grpo", FULL),
    "ppo, adapters on experts": ("qwen3-moe", "ppo", {"lora": {"target_parameters": "experts"}}),
    "grpo, float16": ("sharp", "grpo", {"model": {"dtype": "float16"}}),
    "ppo, adaptive KL, text, micro-batches": (
        "llama",
        "ppo",
        {"ppo": {"target_kl": 6.0, **TEXT}, "critic": {"warmup_steps": 0}, "run": {"micro_batch_tokens": 40}},
    ),
    "ppo, full, shared keys": ("gemma4", "ppo", {**FULL, "generation": {"max_prompt_tokens": 128}}),
    "distill, hint": ("llama", "distill", {"distill": SMALL, "teacher": {"path": "self", "hint": "It is {answer}"}}),
    "distill, half given": ("llama", "distill", {"distill": {**SMALL, "group_size": 1, "on_policy_fraction": 0.5}}),
    "sft, dropout": ("llama", "sft", {**ROWS, "task": {"data": "texts.jsonl"}, "lora": {"dropout": 0.1}}),
    "kto, dropout, behind an adapter": (
        "llama",
        "dpo",
        {**ROWS, "task": {"data": "pairs.jsonl"}, "lora": {"dropout": 0.1}, "dpo": {"loss": "kto", "batch_size": 40},
         "model": {"adapter": "before"}},
    ),
    "reward, pairs": ("llama", "reward", {**ROWS, "task": {"data": "pairs.jsonl"}}),
    "reward, labels, full": ("llama", "reward", {**ROWS, **FULL, "task": {"data": "labels.jsonl"}}),
    "reward, full, experts": ("qwen3-moe", "reward", {**ROWS, **FULL, "task": {"data": "labels.jsonl"}}),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with rows for each method."""
    names = [f"{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcd"]
    write_rows(tmp_path / "texts.jsonl", ({"prompt": f"{n}:", "completion": n[0] * 3} for n in names))
    write_rows(tmp_path / "labels.jsonl", ({"prompt": n, "completion": n, "label": n[1] == "a"} for n in names))
    sides = ({"prompt": f"{n}:", "chosen": "yes yes" + n[0], "rejected": "no no no" + n[1], "margin": 1} for n in names)
    write_rows(tmp_path / "pairs.jsonl", sides)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named_config(name: str, tiny: TinyModels, folder: Path) -> Config:
    kind, method, sections = VARIANTS[name]
    if method == "distill":
        sections = {**sections, "teacher": {"path": str(tiny("qwen2")), **sections.get("teacher", {})}}
    if sections.get("task"):
        sections = {**sections, "task": {"name": "rows", "max_samples": None, **sections["task"]}}
    if sections.get("model") == {"adapter": "before"}:
        started = running.config(method, tiny(kind), **{**sections, "model": {}, "run": {"num_steps": 1}})
        before = trained(started, folder, name="before")
        sections = {**sections, "model": {"adapter": str(before.checkpoints / "step-000001")}}
    path = sharp_model(folder / "sharp") if kind == "sharp" else tiny(kind)
    return running.config(method, path, **sections)


def assert_same(one: RunDir, other: RunDir, step: int) -> None:
    assert running.lasting(one) == running.lasting(other)
    for record in ("samples", "tokens", "prompts"):
        ours, theirs = getattr(one, record), getattr(other, record)
        assert ours.exists() == theirs.exists()
        assert not ours.exists() or ours.read_bytes() == theirs.read_bytes()
    mine, its = running.weights(one, step), running.weights(other, step)
    assert mine.keys() == its.keys()
    different = [name for name in mine if not torch.equal(mine[name], its[name])]
    assert not different


def last_state(run: RunDir, step: int) -> RunState:
    return CheckpointState.read(run.checkpoints / f"step-{step:06d}").run


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.wide
def test_stopped_and_resumed_is_bit_equal(name: str, tiny: TinyModels, folder: Path) -> None:
    """Stopped by SIGTERM at moments spread over the whole run: in sampling, in the update, in evaluations."""
    settings = named_config(name, tiny, folder)
    loading = running.SignalAt(None)
    with loading:  # a stop before this is one before there is a run
        method = loaded(settings)
        method.check()
        method.close()
    begun = loading.looks
    code, whole, looks = running.train(settings, folder, name="whole")
    assert code == 0
    for share in (0.1, 0.62, 0.9):
        stop_at = begun + max(1, int((looks - begun) * share))
        code, stopped, _ = running.train(settings, folder, name=f"stopped-{share}", stop_at=stop_at)
        assert code == 75
        assert running.go_on(stopped) == 0
        assert_same(whole, stopped, settings.run.num_steps)
        assert last_state(stopped, settings.run.num_steps) == last_state(whole, settings.run.num_steps)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.wide
def test_stopped_inside_an_update(large: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop inside an update puts back what the step has changed, the prompt sampler's record too. Where the weights
    are too large to copy, it waits for the end of the update.
    """
    reward = {"functions": [{"use": f"{Path(running.__file__).parent / 'varied_reward.py'}:partly_solved"}]}
    how = {"critic": {"warmup_steps": 0}, "task": {"sampler": "difficulty", "max_samples": 21}, "reward": reward}
    settings = running.config("ppo", model, ppo={"num_epochs": 3, **TEXT}, **how, **(FULL if large else {}))
    if large:
        monkeypatch.setattr(training_run, "MOST_COPIED", 0)
    whole = trained(settings, tmp_path, name="whole")
    plain, steps = Updater.step, [0]

    def step(updater: Updater, *args: Any, **named: Any) -> dict[str, float]:
        steps[0] += 1
        if steps[0] == 8:  # the second optimizer step of the second step
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(updater, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "step", step)
        code, stopped, _ = running.train(settings, tmp_path, name="stopped")
    assert code == 75
    folder = sorted(stopped.checkpoints.iterdir())[-1]
    at = ("step-000002", "evaluation") if large else ("step-000001", "rollout")
    assert (folder.name, CheckpointState.read(folder).run.phase) == at
    assert [line["step"] for line in running.metrics(stopped)] == [0, 1]
    assert running.go_on(stopped, stop_at=2) == 75
    assert running.go_on(stopped) == 0
    assert_same(whole, stopped, settings.run.num_steps)
    assert running.lasting(whole)[-1]["reward/known_prompts"] >= 8


@pytest.mark.whole
def test_a_finished_run_is_left_alone(model: Path, tmp_path: Path) -> None:
    """Without held-out prompts, so without an evaluation, and with a report."""
    settings = running.config("grpo", model, run={"num_steps": 1, "eval_prompts": 0})
    run = trained(settings, tmp_path)
    assert not [key for line in running.metrics(run) for key in line if key.startswith("eval/")]
    assert (run.path / "report.html").is_file()
    before = run.metrics.read_bytes()
    assert running.go_on(run) == 0
    assert run.metrics.read_bytes() == before


class Unread:
    """A collector whose prompts nobody may read."""

    @property
    def train_prompts(self) -> None:
        raise AssertionError("nobody is there to compare the prompts with")


def test_a_single_process_compares_its_prompts_with_nobody() -> None:
    config = config_of({"method": "grpo"})
    method: Any = SimpleNamespace(world=ALONE, collector=Unread(), config=config, row_fingerprints={})
    _check_alike(method, "step-000000")
    method.world = SimpleNamespace(size=2)
    with pytest.raises(AssertionError):
        _check_alike(method, "step-000000")


def test_a_step_whose_evaluation_was_stopped_keeps_its_times(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the evaluation after step 1, the second one; the step's line is written by the resumed process."""
    plain = OnPolicy.evaluate
    calls = [0]

    def evaluate(method: OnPolicy) -> Evaluation:
        calls[0] += 1
        if calls[0] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(method)

    with monkeypatch.context() as patch:
        patch.setattr(OnPolicy, "evaluate", evaluate)
        code, stopped, _ = running.train(running.config("grpo", model, run={"num_steps": 1}), tmp_path)
    assert code == 75
    kept = CheckpointState.read(sorted(stopped.checkpoints.iterdir())[-1]).run
    assert (kept.step, kept.phase) == (1, "evaluation")
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "peak_memory_gb", lambda device: 0.25 * kept.peak_gb)  # of a smaller process
        assert running.go_on(stopped) == 0
    line = running.metrics(stopped)[-1]
    phases = [name for name in kept.seconds if name not in ("total", "evaluation")]  # what is left of that is to come
    assert "update" in phases
    assert {name: line[f"time/{name}"] for name in phases} == {name: kept.seconds[name] for name in phases}
    assert line["time/total"] >= kept.seconds["total"] - kept.seconds.get("evaluation", 0.0) > 0
    assert line["tokens_per_second"] == line["completion/tokens"] / line["time/total"]
    assert line["memory/peak_gb"] == kept.peak_gb
    finished = CheckpointState.read(sorted(stopped.checkpoints.iterdir())[-1]).run
    assert (finished.phase, finished.seconds, finished.peak_gb) == ("rollout", {}, 0.0)


def test_a_state_of_before_the_seconds_were_kept_is_read() -> None:
    assert RunState.model_validate({"step": 2, "phase": "evaluation", "values": {}}).seconds == {}
