"""Forks go on from a checkpoint as new runs; a verification finds what steps did not write, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import running
from tests.tiny_models import tiny_model
from tests.training.test_resume import contents, stopped_in_update
from tinyrl.rollout.components import Options
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.records import read_run
from tinyrl.runs.run_dir import RunDir, open_run
from tinyrl.tools.report.outcome import subtitle
from tinyrl.training.resume import fork
from tinyrl.training.state import STATE
from tinyrl.training.verify import Found, verify

STEPS = 3
CPU = Options(device="cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


def trained(method: str, model: Path, folder: Path) -> RunDir:
    kept = {"num_steps": STEPS, "save_every": 1, "keep_checkpoints": 9, "eval_every": 2}
    sections: dict[str, dict[str, Any]] = {"run": kept}
    if method == "sft":
        rows = [{"prompt": f"say {word}:", "completion": f" {word}"} for word in "abcdefghijklmnop"]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sections["task"] = {"name": "rows", "data": str(folder / "rows.jsonl"), "max_samples": None}
    code, run, _ = running.train(running.config(method, model, **sections), folder, name="first")
    assert code == 0
    return run


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained("grpo", model, tmp_path_factory.mktemp("first"))


def forked(origin: str, *overrides: str, name: str = "second", output_dir: Path | None = None) -> RunDir:
    where = None if output_dir is None else str(output_dir)
    launch = fork(origin, [*overrides], options=CPU, output_dir=where, name=name, command=["test"])
    assert launch.go(report=running.report) == 0
    return launch.run


def found_in(run: RunDir, *, num: int | None = None) -> list[Found]:
    return list(verify(run, options=CPU, num=num))


# ---- fork ----


@pytest.mark.parametrize("method", [pytest.param("grpo"), pytest.param("ppo")])
@pytest.mark.wide
def test_an_unchanged_fork_is_the_run_again(method: str, model: Path, tmp_path: Path) -> None:
    run = trained(method, model, tmp_path)
    before = contents(run)
    again = forked(f"{run.path}@1")
    assert contents(run) == before
    assert running.lasting(again) == running.lasting(run)
    assert again.samples.read_bytes() == run.samples.read_bytes()
    now, then = running.weights(again, STEPS), running.weights(run, STEPS)
    assert now.keys() == then.keys()
    assert all(torch.equal(now[name], then[name]) for name in then)
    assert again.read_config().run.origin == f"{run.path.resolve()}@1"
    assert f"forked from {run.path.resolve()}@1"[:40] in subtitle(read_run(again.path))
    assert json.loads((again.path / "env.json").read_text())["command"] == "test"


def test_a_changed_fork_shares_the_beginning_only(first: RunDir, tmp_path: Path) -> None:
    again = forked(f"{first.path}@2", "optim.learning_rate=0.1", "run.num_steps=4", output_dir=tmp_path)
    there, here = running.lasting(first), running.lasting(again)
    assert [line["step"] for line in here] == [0, 1, 2, 3, 4]
    assert here[:3] == there[:3]
    assert here[3]["optim/learning_rate"] == pytest.approx(0.1)
    assert here[3]["reward/mean"] == there[3]["reward/mean"]  # sampled by the same weights
    assert again.read_config().optim.learning_rate == 0.1


def test_a_fork_of_a_step_in_hand_goes_on_in_it(model: Path, tmp_path: Path) -> None:
    settings = running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1, "keep_checkpoints": 9})
    stopped = stopped_in_update(settings, tmp_path)
    again = forked(str(stopped.path))
    assert running.go_on(stopped) == 0
    assert running.lasting(again) == running.lasting(stopped)


def test_what_cannot_be_forked_leaves_no_folder(first: RunDir, tmp_path: Path) -> None:
    for origin, override, sentence in (
        (
            f"{first.path}@7",
            "run.num_steps=9",
            r"no checkpoint of step 7; those there are: 0, 1, 2, 3 \(run.save_every",
        ),
        (str(first.path), "optim.learning_rate=1", "step 3 is the last of .*run.num_steps=N"),
        (f"{first.path}@1", "optim.rate=1", "optim.rate"),
        (f"{first.path}@1", f"model.path={tmp_path / 'gone'}", "gone"),
        (f"{first.path}@1", "lora.r=3", "lora"),
    ):
        with pytest.raises(ValueError, match=sentence):
            forked(origin, override, output_dir=tmp_path)
        assert not [*tmp_path.iterdir()]


# ---- verify ----


@pytest.mark.parametrize("method", [pytest.param("grpo"), pytest.param("ppo"), pytest.param("sft")])
@pytest.mark.wide
def test_an_honest_run_is_the_same_to_the_bit(method: str, model: Path, tmp_path: Path) -> None:
    run = trained(method, model, tmp_path)
    before = contents(run)
    found = found_in(run)
    assert [one.stretch for one in found] == [
        "start to step 0",
        "step 0 to step 1",
        "step 1 to step 2",
        "step 2 to step 3",
    ]
    assert all(str(one).endswith(": the same to the bit") for one in found)
    assert contents(run) == before
    assert not [path for path in run.path.parent.iterdir() if path.name.startswith(".")]  # the repetition is deleted


def test_a_fork_and_a_run_that_was_stopped_in_a_step_are_honest(first: RunDir, model: Path, tmp_path: Path) -> None:
    again = forked(f"{first.path}@1", "optim.learning_rate=0.05", output_dir=tmp_path)
    begun, *rest = found_in(again)
    assert begun.skipped == f"its beginning is that of {first.path.resolve()}@1"
    assert len(rest) == 3
    assert not any(one.different or one.skipped for one in rest)
    settings = running.config("grpo", model, run={"num_steps": STEPS, "save_every": 1, "keep_checkpoints": 9})
    stopped = stopped_in_update(settings, tmp_path)
    assert running.go_on(stopped) == 0
    found = found_in(stopped)
    assert found
    assert not any(one.different or one.skipped for one in found)


def test_settings_that_changed_in_between_are_not_repeated(first: RunDir, tmp_path: Path) -> None:
    again = RunDir(tmp_path / "changed")
    shutil.copytree(first.path, again.path)
    shutil.rmtree(again.checkpoints / "step-000003")
    settings = again.read_config(["optim.learning_rate=0.05"])
    assert running.go_on(again, config=settings, allow_config_change=True) == 0
    assert [one.skipped is None for one in found_in(again)] == [True, True, True, False]


def edited_line(file: str, key: str) -> Callable[[RunDir], None]:
    """Another value of `key` in the last line of a record that has one."""

    def edit(run: RunDir) -> None:
        path = run.path / file
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        row = next(row for row in reversed(lines) if row.get(key) is not None)
        row[key] = row[key] + (1e-9 if isinstance(row[key], float) else " ")
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))

    return edit


def edited_tensor(file: str, *, step: int) -> Callable[[RunDir], None]:
    """One number of a checkpoint made another by the least there is, and the manifest written anew."""

    def edit(run: RunDir) -> None:
        folder = run.checkpoints / f"step-{step:06d}"
        tensors = load_file(folder / file)
        name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
        flat = tensors[name].view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))
        save_file(tensors, folder / file, metadata={"format": "pt"})
        sealed(folder, step)

    return edit


def sealed(folder: Path, step: int) -> None:
    (folder / checkpoints.MANIFEST).unlink()
    checkpoints._seal(folder, step)  # pyright: ignore[reportPrivateUsage]


def other_state(run: RunDir) -> None:
    folder = run.checkpoints / "step-000002"
    state = json.loads((folder / STATE).read_text())
    state["run"]["tokens"] += 1
    (folder / STATE).write_text(json.dumps(state))
    sealed(folder, 2)


def without_a_line(run: RunDir) -> None:
    lines = run.samples.read_text().splitlines(keepends=True)
    run.samples.write_text("".join(lines[:-1]))


def damaged(run: RunDir) -> None:
    file = run.checkpoints / "step-000002" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


ALTERED: dict[str, tuple[Callable[[RunDir], None], str]] = {
    "a metric": (edited_line("metrics.jsonl", "reward/mean"), r"metrics.jsonl, step 3.*: reward/mean .*, repeated "),
    "a completion": (edited_line("samples.jsonl", "completion"), r"samples.jsonl, step 3.*: completion "),
    "a reward": (edited_line("samples.jsonl", "reward"), r"samples.jsonl, step 3.*: reward "),
    "a line less": (without_a_line, r"samples.jsonl, step 3.*nothing, repeated "),
    "a weight at the end": (edited_tensor("adapter_model.safetensors", step=3), "step-000003: adapter_model"),
    "a weight in the middle": (edited_tensor("adapter_model.safetensors", step=2), "step-000002: adapter_model"),
    "a moment of Adam": (edited_tensor("optimizer.safetensors", step=1), "step-000001: optimizer.safetensors"),
    "a state": (other_state, "step-000002: state.json: where the run stands"),
    "a damaged file": (damaged, "adapter_model.safetensors is not what was written"),
}


@pytest.mark.parametrize("what", ALTERED)
@pytest.mark.wide
def test_what_was_altered_is_found(what: str, first: RunDir, tmp_path: Path) -> None:
    alter, line = ALTERED[what]
    run = RunDir(tmp_path / "first")
    shutil.copytree(first.path, run.path)
    alter(run)
    assert any(re.search(line, one) for found in found_in(run) for one in found.different)


def test_stretches_are_drawn_at_random(first: RunDir) -> None:
    (one,) = found_in(first, num=1)
    assert not one.different


def test_another_device_is_refused(first: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "first")
    shutil.copytree(first.path, run.path)
    (run.path / "env.json").write_text(json.dumps({"device": "2 processes, each cpu"}))
    with pytest.raises(ValueError, match=r"trained on 2 processes, each cpu, and this is cpu"):
        found_in(run)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(ValueError, match="has no checkpoint at the end of a step"):
        found_in(open_run(run.path))
