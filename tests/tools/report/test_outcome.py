"""The outcome's sentence and key numbers, against literal metrics."""

import math
from pathlib import Path
from typing import Any

from tests.tools.report.runs import write_run
from tinyrl.runs.records import read_run
from tinyrl.tools.report.panels import outcome, phase_seconds, show


def said(folder: Path, metrics: list[dict[str, Any]], config: dict[str, Any] | None = None) -> str:
    return outcome(read_run(write_run(folder, metrics, config=config)))


def test_outcome_says_before_after_interval_and_kl(tmp_path: Path) -> None:
    first = {"step": 0, "eval/reward_mean": 0.456, "eval/reward_ci": [0.43, 0.48], "eval/kl": 0.0}
    last = {"step": 60, "eval/reward_mean": 0.9384, "eval/reward_ci": [0.921, 0.953], "eval/kl": 1.324}
    middle = {"step": 30, "eval/reward_mean": 0.99, "eval/reward_ci": [0.98, 1.0], "eval/kl": 9.0}
    assert said(tmp_path / "a", [first, middle, last]) == (
        "Held-out reward rose from 0.456 to 0.938 in 60 steps (95 % interval 0.921 to 0.953; higher is better), "
        "at a KL of 1.32 nats per response."
    )
    fallen = {"step": 1, "eval/reward_mean": -2.5, "eval/reward_ci": [-3, -2.0]}
    assert said(tmp_path / "b", [first, fallen]) == (
        "Held-out reward fell from 0.456 to \u22122.50 in 1 step (95 % interval \u22123 to \u22122; higher is better)."
    )


def test_outcome_does_not_call_what_the_intervals_do_not_carry(tmp_path: Path) -> None:
    first = {"step": 0, "eval/reward_mean": 0.5, "eval/reward_ci": [0.45, 0.55]}
    last = {"step": 9, "eval/reward_mean": 0.6, "eval/reward_ci": [0.55, 0.65], "objective/kl": 0.25}
    assert said(tmp_path / "a", [first, last]) == (
        "Held-out reward went from 0.500 to 0.600 in 9 steps (95 % interval 0.550 to 0.650; higher is better), "
        "too little to call because the intervals overlap, at a KL of 0.250 nats per response in training."
    )
    last["eval/reward_mean"] = 0.5
    assert "stayed at 0.500 in 9 steps" in said(tmp_path / "b", [first, last])


def test_outcome_of_runs_with_less_to_say(tmp_path: Path) -> None:
    once = [{"step": 0, "eval/reward_mean": 0.25}, {"step": 1, "reward/mean": 0.3}]
    assert said(tmp_path / "a", once) == (
        "Held-out reward is 0.250 at step 0 (higher is better); it was measured once so far."
    )
    training = [{"step": step, "reward/mean": float(step)} for step in range(1, 21)]
    assert said(tmp_path / "b", training) == (  # means of 1..5 and of 16..20
        "Training reward rose from 3 to 18 by step 20 (means of the first and last 5 steps; higher is better); "
        "no held-out comparison."
    )
    losses = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]
    assert said(tmp_path / "c", losses) == (
        "Training loss fell from 2 to 1.50 by step 2 (lower is better); no held-out comparison."
    )
    accuracy = [{"step": step, "rewards/accuracy": 0.5, "eval/accuracy": 0.5 + step / 100} for step in (10, 20)]
    assert said(tmp_path / "d", accuracy) == (
        "Held-out preference accuracy rose from 0.600 at step 10 to 0.700 in 10 steps (higher is better)."
    )
    assert said(tmp_path / "e", [{"step": 3, "note": "x"}]).startswith("3 steps recorded; no reward")


def test_where_the_time_went_adds_up(tmp_path: Path) -> None:
    line = {"time/total": 10.0, "time/rollout": 4.0, "time/update": 5.0, "time/rollout/reward": 3.0}
    run = read_run(write_run(tmp_path / "a", [{"step": step, **line} for step in (1, 2)]))
    assert [*phase_seconds(run).items()] == [
        ("update", {1: 5.0, 2: 5.0}), ("rollout", {1: 4.0, 2: 4.0}), ("other", {1: 1.0, 2: 1.0}),
    ]  # fmt: skip
    many = {f"time/p{i}": float(i) for i in range(1, 10)} | {"time/total": 45.0, "time/evaluation": 99.0}
    phases = phase_seconds(read_run(write_run(tmp_path / "b", [{"step": 1, **many}])))
    assert [*phases] == ["evaluation", "p9", "p8", "p7", "p6", "p5", "p4", "other"]  # as many as there are colours
    assert phases["other"] == {1: 6.0}


def test_numbers_are_rounded_as_people_read_them() -> None:
    shown = {
        0.0: "0", 1.0: "1", 0.0314: "0.031", 0.9996: "1.00", 9.996: "10.0", -1.284: "\u22121.28", 99.96: "100",
        4215.4: "4,215", 0.00071: "0.00071", 0.0001: "0.00010", -0.004147: "\u22120.004", 5e-5: "5e\u22125",
        3.33e-7: "3.3e\u22127", -4.4e-17: "0", 2.5e12: "2.5e12", math.nan: "–", math.inf: "–",
    }  # fmt: skip
    assert {value: show(value) for value in shown} == shown
