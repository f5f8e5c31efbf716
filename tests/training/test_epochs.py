"""run.epochs: the steps it comes to, for rows and for prompts; the schedule; a resume, a longer one, a fork."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.tiny_models import TinyModels
from tests.training.rows import write_rows
from tinyrl.config.derive import derive_over
from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import changed_config, config_of
from tinyrl.training.launch import fork
from tinyrl.training.load import load_method

ROWS = 10  # and 3 of a step
ROWS_OF_STEP = {"num_prompts": 3, "group_size": 2}


def of_rows(method: str, tiny: TinyModels, folder: Path, **run: Any) -> Config:
    """A run of an epoch or so on ten rows, three of them a step."""
    rows: list[dict[str, Any]] = [{"prompt": f"say {word}:", "completion": word} for word in "abcdefghij"]
    if method == "dpo":
        rows = [{"prompt": f"say {w}:", "chosen": w, "rejected": "no"} for w in "abcdefghij"]
    if method == "grpo":
        rows = [{"prompt": f"say {word}:"} for word in "abcdefghij"]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "eval.jsonl", [{**rows[0], "prompt": "say z:"}])
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    size = ROWS_OF_STEP if method == "grpo" else {"batch_size": 3}
    limits = {"eval_every": 0, "eval_prompts": 0, "save_every": 1, **run}
    values = {"method": method, "model": {"path": str(tiny("llama"))}, "task": task, method: size, "run": limits}
    if method == "grpo":
        values |= {"reward": running.SMALL["reward"], "generation": {"max_new_tokens": 3}}
    return config_of(values)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("method", "epochs", "steps"),
    [
        ("sft", 1, 4),  # 10 / 3, rounded up
        ("sft", 0.3, 1),  # three rows are one step; as binary numbers 0.3 * 10 is 3.0 or more
        ("dpo", 2, 7),  # 20 / 3
        ("grpo", 0.6, 2),
        ("grpo", 0.7, 3),
    ],
)
def test_epochs_are_whole_steps(method: str, epochs: float, steps: int, tiny: TinyModels, tmp_path: Path):
    code, run, _ = running.train(of_rows(method, tiny, tmp_path, epochs=epochs), tmp_path)
    assert code == 0
    assert [line["step"] for line in running.metrics(run)][-1] == steps
    assert run.read_config().run.num_steps == steps
    assert run.read_config().run.epochs == epochs


def test_a_step_of_more_rows_than_there_are_takes_each_once(tiny: TinyModels, tmp_path: Path):
    config = derive_over(of_rows("sft", tiny, tmp_path, epochs=2), ["sft.batch_size=64"])
    with closing(load_method(prepare(config), options=Options(device="cpu"))) as method:
        assert method.rows_of_epoch == (ROWS, ROWS)
        assert method.config.run.num_steps == 2


def test_the_schedule_ends_with_the_epochs(tiny: TinyModels, tmp_path: Path):
    config = of_rows("sft", tiny, tmp_path, epochs=1)
    config = derive_over(config, ["optim.schedule=linear", "optim.learning_rate=4e-3"])
    _, run, _ = running.train(config, tmp_path)
    rates = [line["optim/learning_rate"] for line in running.metrics(run) if line["step"] > 0]
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])


def test_a_resume_has_the_same_steps_and_a_longer_one_more(tiny: TinyModels, tmp_path: Path):
    config = of_rows("sft", tiny, tmp_path, epochs=1)
    _, whole, looks = running.train(config, tmp_path, name="whole")
    code, run, _ = running.train(config, tmp_path, name="cut", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(run) == 0
    assert running.lasting(run) == running.lasting(whole)
    longer = changed_config(run, ["run.epochs=2"])
    assert running.go_on(run, config=longer) == 0
    assert running.metrics(run)[-1]["step"] == 7
    assert run.read_config().run.num_steps == 7


def test_fewer_epochs_are_another_setting(tiny: TinyModels, tmp_path: Path):
    _, run, _ = running.train(of_rows("sft", tiny, tmp_path, epochs=2), tmp_path)
    with pytest.raises(ValueError, match=r"run\.epochs"):
        running.go_on(run, config=changed_config(run, ["run.epochs=1"]))


def test_a_fork_of_a_finished_run_takes_more_epochs_and_no_fewer(tiny: TinyModels, tmp_path: Path):
    _, run, _ = running.train(of_rows("sft", tiny, tmp_path, epochs=1), tmp_path)
    how: dict[str, Any] = {"options": Options(device="cpu"), "output_dir": str(tmp_path), "command": ["test"]}
    more = fork(str(run.path), ["run.epochs=2"], name="more", **how)
    assert more.until == 7
    more.close()
    more.method.close()
    more.folder.lock.release()
    with pytest.raises(ValueError, match="step 4 is the last"):
        fork(str(run.path), ["run.epochs=0.5"], name="fewer", **how)
    assert not (tmp_path / "fewer").exists()


def test_epochs_and_steps_are_not_both_given():
    with pytest.raises(ValueError, match=r"run\.num_steps"):
        load_config("sft", None, overrides=["model.path=starter", "run.epochs=1", "run.num_steps=5"])
    assert load_config("sft", None, overrides=["model.path=starter", "run.epochs=1"]).run.epochs == 1


@pytest.mark.parametrize(
    ("section", "updates"),
    [
        ({}, "1 optimizer step"),
        ({"minibatch_size": 64}, "1 optimizer step"),
        ({"num_epochs": 2, "minibatch_size": 2}, "6 optimizer steps"),
    ],
)
def test_a_step_of_three_prompts_has_six_completions_in_minibatches(
    section: dict[str, int], updates: str, tiny: TinyModels, tmp_path: Path
) -> None:
    """Six completions are three minibatches of two, in each of two epochs."""
    config = of_rows("grpo", tiny, tmp_path)
    config = config_of({**config.model_dump(exclude_unset=True), "grpo": {**ROWS_OF_STEP, **section}})
    with closing(load_method(prepare(config), options=Options(device="cpu"))) as method:
        assert method.epoch_note().endswith(f"3 prompts x 2 = 6 completions, {updates}")
