"""What a run says at its end: small numbers with their digits, what its checkpoint is, the command that uses it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tinyrl.cli.evaluate import render
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.show import next_command, summary

PAIRS = {"method": "reward", "task": {"data": "/data/pairs.jsonl"}, "model": {"path": "/models/base"}}


def said(folder: Path, values: dict[str, Any], **metrics: Any) -> list[str]:
    """The summary of a run of two steps with these held-out numbers at both."""
    run = RunDir(folder)
    run.write_config(Config.model_validate(values))
    (run.checkpoints / "step-000002").mkdir(parents=True)
    for step in (0, 2):
        run.append_metrics(step, {f"eval/{name}": value for name, value in metrics.items()})
    return summary(run).splitlines()


@pytest.mark.parametrize(("enabled", "kind"), [(True, "adapter"), (False, "model")])
def test_small_numbers_and_what_the_checkpoint_is(enabled: bool, kind: str, tmp_path: Path):
    lines = said(tmp_path, {**PAIRS, "lora": {"enabled": enabled}}, loss=0.000456, accuracy=0.75)
    assert "  loss, held-out             0.000456 -> 0.000456" in lines
    assert "  accuracy, held-out         0.750 -> 0.750" in lines
    assert f"{kind:8} {tmp_path}/checkpoints/step-000002/" in lines


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ({"method": "grpo"}, "tinyrl eval runs/x --vs base"),
        ({"method": "sft", "task": {"data": "rows.jsonl"}}, None),
        (PAIRS, "tinyrl train ppo model.path=/models/base task.data=/data/pairs.jsonl reward.model=runs/x"),
        (
            {
                **PAIRS,
                "task": {"data": "p.jsonl", "columns": {"prompt": "q"}, "system_prompt": "Be: kind", "chat": False},
            },
            "tinyrl train ppo model.path=/models/base task.data=p.jsonl 'task.columns={\"prompt\": \"q\"}' "
            "'task.system_prompt=\"Be: kind\"' task.chat=false reward.model=runs/x",
        ),
        (
            {**PAIRS, "model": {"path": "blank", "random_init": True}},
            "tinyrl train ppo model.path=MODEL task.data=/data/pairs.jsonl reward.model=runs/x",
        ),
    ],
)  # fmt: skip
def test_the_command_that_uses_what_a_run_has_made(values: dict[str, Any], command: str | None):
    assert next_command(Path("runs/x"), Config.model_validate(values)) == command


def test_prompts_that_the_rows_do_not_hold_are_left_to_the_reader():
    values = {**PAIRS, "task": {"data": "p.jsonl", "eval_data": "e.jsonl", "columns": {"text": "t"}, "chat": False}}
    assert next_command(Path("runs/x"), Config.model_validate(values), prompts=False) == (
        "tinyrl train ppo model.path=/models/base task.data=PROMPTS task.chat=false reward.model=runs/x"
    )


def test_an_evaluation_shows_small_scores():
    side: dict[str, Any] = {"target": "x", "reward_mean": 0.000321, "num_prompts": 2, "num_samples": 1}
    side |= {"reward_ci": [-0.0001, 0.0007], "greedy": {"reward_mean": 0.04}}
    difference = {"reward_mean": -0.00012, "reward_ci": [-0.5, 0.00034], "distinguishable": False, "left_out": 0}
    text = render({**side, "other": side, "difference": difference, "win_rate": {}}, as_json=False)
    assert "0.000321 (0.04)" in text
    assert "-0.0001 to 0.0007" in text
    assert "difference -0.00012 (95 % interval -0.500 to +0.00034" in text
    assert json.loads(render({"target": "x", "reward_mean": 0.000321}, as_json=True))["reward_mean"] == 0.000321
