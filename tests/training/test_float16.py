"""float16, for GPUs without bfloat16: a scaled loss, overflows that cost a step, exact resumes."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import running
from tests.distributed.ranks import Ranks
from tests.tiny_models import sharp_model
from tinyrl.config.schema import Config
from tinyrl.models.device import make_accelerator, resolve_dtype
from tinyrl.models.parallel import World, join
from tinyrl.runs.run_dir import open_run
from tinyrl.training import step
from tinyrl.training.state import read_state
from tinyrl.training.step import Updater


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_model(tmp_path_factory.mktemp("sharp"))


def settings(method: str, model: Path, dtype: str = "float16", **sections: Any):
    return running.config(
        method,
        model,
        **{"model": {"dtype": dtype}, "run": {"num_steps": 3, "save_every": 1, "keep_checkpoints": 4}, **sections},
    )


def plant(monkeypatch: pytest.MonkeyPatch, value: float, *, steps: int, rank: int = 0) -> None:
    """Have the gradient of one parameter be `value` in the first steps, on one of the processes."""
    plain, calls = step.sum_step, [0]

    def planted(world: World, metrics: dict[str, float], parameters: list[torch.nn.Parameter]) -> dict[str, float]:
        calls[0] += 1
        if calls[0] <= steps and world.rank == rank:
            next(p.grad for p in parameters if p.grad is not None).fill_(value)
        return plain(world, metrics, parameters)

    monkeypatch.setattr(step, "sum_step", planted)


def test_auto_is_float16_on_a_gpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert resolve_dtype("auto", on_cpu=False) == torch.float16
    assert resolve_dtype("auto", on_cpu=True) == torch.float32
    accelerator = make_accelerator("cpu", dtype="float16")
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    make_accelerator("cpu", dtype="float32")


@pytest.mark.parametrize(("method", "lora"), [("grpo", True), ("ppo", False)])
@pytest.mark.wide
def test_the_first_step_is_close_to_that_of_float32(method: str, lora: bool, sharp: Path, tmp_path: Path):
    """But a sample may turn out otherwise, and with it a reward."""
    sections: dict[str, Any] = {"grpo": {"grpo": {"kl_coef": 0.05}}, "ppo": {"critic": {"warmup_steps": 0}}}[method]
    sections |= {"lora": {"enabled": lora}, "optim": {"learning_rate": 1e-6}}
    found = {}
    for dtype in ("float32", "float16"):
        code, run, _ = running.train(settings(method, sharp, dtype, **sections), tmp_path, name=dtype)
        assert code == 0
        found[dtype] = running.metrics(run)[1]
    exact, half = found["float32"], found["float16"]
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
    code, run, _ = running.train(settings("grpo", sharp), tmp_path)
    assert code == 0
    lines = running.metrics(run)[1:]
    assert [line["optim/loss_scale"] for line in lines] == [65536, 32768, 16384]
    assert [line["optim/skipped_steps"] for line in lines] == [0, 0, 0]
    weights = [running.weights(run, step) for step in range(4)]
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(weights)]
    assert same == [True, True, False]


def test_a_gradient_that_no_scale_would_help_is_a_fault(sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its elements are finite and its norm is not, so the scale stays; three such steps stop the run."""
    plant(monkeypatch, 3e30, steps=8)
    code, run, _ = running.train(settings("grpo", sharp, run={"num_steps": 8, "save_every": 1}), tmp_path)
    assert code == 3
    lines = running.metrics(run)[1:]
    assert [line["optim/skipped_steps"] for line in lines] == [1, 2]
    assert {line["optim/loss_scale"] for line in lines} == {65536}


def train_with_an_overflow_on_one(settings: Config, folder: Path) -> None:
    """Train, and write down the scale and the weights that this process came to."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, torch.inf, steps=1, rank=1)
        kept: list[Updater] = []
        plain = Updater.step
        patch.setattr(Updater, "step", lambda self, *args, **kwargs: kept.append(self) or plain(self, *args, **kwargs))
        code, *_ = running.train(settings, folder)
    assert code == 0
    scale = {"scale": torch.tensor(kept[-1].scaler.get_scale())}
    save_file({**scale, **kept[-1].optimizers["policy"].parameters}, folder / f"{join(on_cpu=True).rank}.safetensors")


@pytest.mark.slow
def test_processes_leave_out_a_step_together(sharp: Path, tmp_path: Path):
    ranks = Ranks(train_with_an_overflow_on_one, settings("grpo", sharp), tmp_path, folder=tmp_path)
    assert ranks.end() == [0, 0], ranks.said
    one, other = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert float(one["scale"]) == 32768
    assert all(torch.equal(one[name], other[name]) for name in one)
    lines = running.metrics(open_run(tmp_path / "run"))[1:]
    assert [line["optim/loss_scale"] for line in lines] == [65536, 32768, 32768]


def test_a_launcher_does_not_choose_the_dtype(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = make_accelerator("cpu", dtype="float16")
    assert accelerator.mixed_precision == "fp16"
    make_accelerator("cpu", dtype="float32")


@pytest.mark.slow
def test_a_resume_goes_on_with_the_scale_to_the_bit(sharp: Path, tmp_path: Path):
    whole = settings("grpo", sharp)
    code, straight, _ = running.train(whole, tmp_path, name="straight")
    assert code == 0
    code, stopped, _ = running.train(whole, tmp_path, name="stopped", stop_at=12)
    assert code != 0
    assert running.go_on(stopped) == 0
    assert running.lasting(straight) == running.lasting(stopped)
    states = [read_state(run.checkpoints / "step-000003").run for run in (straight, stopped)]
    assert states[0].loss_scale == states[1].loss_scale
    assert states[0].loss_scale["_growth_tracker"] == 3
