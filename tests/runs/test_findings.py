"""`tinyrl doctor RUN`: each planted fault is found, alone; runs that went well have none."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.tools.report.runs import sample, write_run
from tinyrl.cli.commands import app
from tinyrl.runs.findings import MOST_LINES, Watch, find
from tinyrl.runs.records import RunRecords, read_run, read_steps

HEALTHY = sorted((Path(__file__).parent / "healthy").glob("*.jsonl"))
Curve = Callable[[float], float]


def rows(*, steps: int = 80, held_out: Curve = lambda t: 0.4 + 0.35 * t, **curves: Curve) -> list[dict[str, Any]]:
    """A run that goes well, but for the curves given (names with __ for /), of t from 0 to 1."""
    of: dict[str, Curve] = {
        "reward__mean": lambda t: 0.4 + 0.4 * t,
        "reward__std": lambda t: 0.49 - 0.09 * t,
        "reward__zero_spread_groups": lambda t: 0.1 + 0.3 * t,
        "completion__truncated": lambda t: 0.02,
        "completion__mean_length": lambda t: 100 + 20 * t,
        "policy__entropy": lambda t: 0.8 - 0.5 * t,
        "policy__sampling_gap": lambda t: 0.004,
        "objective__kl": lambda t: 4 * t,
        **curves,
    }
    made = []
    for step in range(steps + 1):
        t = step / steps
        line: dict[str, Any] = {"step": step}
        if step:
            shake = 1 + 0.02 * math.sin(7 * step)
            line |= {name.replace("__", "/"): curve(t) * shake for name, curve in of.items()}
        if step % 10 == 0:
            line |= {"eval/reward_mean": held_out(t), "eval/reward_ci": [held_out(t) - 0.04, held_out(t) + 0.04]}
        made.append(line)
    return made


def run_of(lines: list[dict[str, Any]], config: dict[str, Any] | None = None) -> RunRecords:
    return RunRecords(Path(), {line["step"]: line for line in lines}, config or {"method": "grpo"})


def named(lines: list[dict[str, Any]], config: dict[str, Any] | None = None) -> list[str]:
    return [one.name for one in find(run_of(lines, config))]


FLAT = {"reward__mean": lambda t: 0.45}
PLANTED: dict[str, dict[str, Any]] = {
    "zero-spread groups": {"reward__zero_spread_groups": lambda t: 0.9, "reward__mean": lambda t: 0.05},
    "reward at its ceiling": {
        "reward__mean": lambda t: 0.97,
        "reward__std": lambda t: 0.08,
        "reward__zero_spread_groups": lambda t: 0.95,
    },
    "truncation": {"completion__truncated": lambda t: 0.45},
    "entropy collapse": {"policy__entropy": lambda t: 0.8 * math.exp(-6 * t), **FLAT},
    "KL blow-up": {"objective__kl": lambda t: 120 * t},
    "length creep": {"completion__mean_length": lambda t: 100 + 300 * t, **FLAT},
    "critic explains nothing": {"value__explained_variance": lambda t: 0.005},
    "train up, held-out down": {"held_out": lambda t: 0.4 + 0.8 * t * (1 - t)},
    "one reward up, another down": {
        "reward__format": lambda t: 0.2 + 0.7 * t,
        "reward__right": lambda t: 0.5 - 0.3 * t,
    },
    "mismatch": {"policy__sampling_gap": lambda t: 0.15},
}
JUST_FINE: dict[str, dict[str, Any]] = {
    "zero-spread groups": {"reward__zero_spread_groups": lambda t: 0.7, "reward__mean": lambda t: 0.05},
    "reward at its ceiling": {"reward__mean": lambda t: 0.97, "reward__zero_spread_groups": lambda t: 0.85},
    "truncation": {"completion__truncated": lambda t: 0.18},
    "entropy collapse": {"policy__entropy": lambda t: 0.8 * math.exp(-6 * t), "reward__mean": lambda t: 0.95},
    "KL blow-up": {"objective__kl": lambda t: 30 * t},
    "length creep": {"completion__mean_length": lambda t: 100 + 300 * t},  # and the reward grows with it
    "critic explains nothing": {"value__explained_variance": lambda t: 0.05 + 0.3 * t},
    "train up, held-out down": {"held_out": lambda t: 0.6 - 0.03 * t},
    "one reward up, another down": {"reward__format": lambda t: 0.2 + 0.7 * t, "reward__right": lambda t: 0.5},
    "mismatch": {"policy__sampling_gap": lambda t: 0.03},
}


def test_a_run_that_goes_well_has_no_finding() -> None:
    assert named(rows()) == []


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_measured_run_that_went_well_has_no_finding_at_any_step(path: Path) -> None:
    steps = read_steps(path, [])
    assert len(steps) > 30
    assert find(RunRecords(path, steps, {"method": path.stem.partition("-")[0]})) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(fault: str) -> None:
    assert named(rows(**PLANTED[fault])) == [fault]


@pytest.mark.parametrize("fault", JUST_FINE)
def test_what_comes_near_a_fault_is_none(fault: str) -> None:
    assert named(rows(**JUST_FINE[fault])) == []


Lines = list[dict[str, Any]]
FIVE_TURNS = {"method": "grpo", "environment": {"max_turns": 5}}


def dropping(share: float) -> Lines:
    """Two steps of 16 completions, after which the run was stopped."""
    line = {"completion/mean_length": 7.0, "completion/tokens": 112.0, "reward/mean": 0.0, "reward/std": 0.0}
    return [{"step": 0}, *({"step": step, **line, "reward/dropped": 16 * share} for step in (1, 2))]


def turning(turns: float, *, cut: float = 0.98, held_out: bool = False) -> Lines:
    names = ("eval/environment/turns", "eval/truncated") if held_out else ("environment/turns", "completion/truncated")
    return [{"step": 0}, {"step": 0 if held_out else 1, **dict(zip(names, (turns, cut), strict=True))}]


AT_ONCE: dict[str, tuple[Lines, str | None]] = {
    "all rewards dropped": (dropping(1), "rewards dropped"),
    "a third of the rewards dropped": (dropping(0.375), "rewards dropped"),
    "an eighth of the rewards dropped": (dropping(0.125), None),
    "completions without tokens": (
        [{"step": 1, "reward/dropped": 0.0, "completion/tokens": 0.0, "completion/mean_length": 0.0}],
        None,
    ),
    "all losses null": ([{"step": step, "loss": None} for step in (1, 2, 3)], "loss is no number"),
    "held-out losses null": ([{"step": 0, "eval/loss": None}, {"step": 1, "loss": 2.0}], "loss is no number"),
    "all policy losses null lately": (
        [{"step": step, "policy/loss": None if step > 4 else 0.1} for step in range(1, 15)],
        "loss is no number",
    ),
    "one loss null": ([{"step": step, "loss": None if step == 3 else 2.0} for step in (1, 2, 3)], None),
    "three steps skipped": (
        [{"step": step, "optim/skipped_steps": float(step)} for step in (1, 2, 3)],
        "non-finite steps",
    ),
    "two steps skipped": ([{"step": step, "optim/skipped_steps": min(step, 2)} for step in range(1, 9)], None),
    "five steps skipped long ago": (
        [{"step": step, "optim/skipped_steps": min(step, 5)} for step in range(1, 99)],
        None,
    ),
    "one turn of five": (turning(1.05), "environment hardly asked"),
    "one turn of five, held out at step 0": (turning(1.05, held_out=True), "environment hardly asked"),
    "an answer at once": (turning(1.0, cut=0.0), "environment hardly asked"),
    "some episodes with a second turn": (turning(1.4), None),
}


@pytest.mark.parametrize("what", AT_ONCE)
def test_what_the_first_steps_show_is_found_and_nothing_else(what: str) -> None:
    lines, name = AT_ONCE[what]
    steps = {line["step"]: line for line in lines}
    assert [one.name for one in find(RunRecords(Path(), steps, FIVE_TURNS))] == ([name] if name else [])


def test_batches_that_a_stop_has_kept_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 0}, {"step": 1, "optim/skipped_steps": 0.0}])
    (run / "nonfinite").mkdir()
    for number in (1, 2, 3):
        assert find(read_run(run)) == []
        (run / "nonfinite" / f"step-000001-{number}.json").write_text("{}")
    [found] = find(read_run(run))
    assert (found.name, found.figures["skipped_steps"]) == ("non-finite steps", 3)
    write_run(tmp_path / "later", [{"step": step, "optim/skipped_steps": 3.0} for step in range(40)])
    (run / "nonfinite").rename(tmp_path / "later" / "nonfinite")  # resumed, and well since
    assert find(read_run(tmp_path / "later")) == []


def test_findings_have_figures_and_one_change() -> None:
    [found] = find(run_of(rows(completion__truncated=lambda t: 0.5), {"generation": {"max_new_tokens": 64}}))
    assert found.figures["truncated"] == pytest.approx(0.5, abs=0.01)
    assert "50% of the completions" in found.what
    assert "generation.max_new_tokens=128" in found.change


def test_a_critic_worse_than_none_is_found_sooner() -> None:
    assert named(rows(steps=30, value__explained_variance=lambda t: -0.5)) == ["critic explains nothing"]
    assert named(rows(steps=30, value__explained_variance=lambda t: 0.0)) == []


def test_a_policy_far_from_its_teacher_is_found() -> None:
    assert named(rows(teacher__logprob=lambda t: -4.0)) == ["far from the teacher"]
    assert named(rows(teacher__logprob=lambda t: -2.5)) == []


def test_the_fall_of_what_a_negative_weight_punishes_is_no_fault() -> None:
    lines = rows(reward__right=lambda t: 0.2 + 0.7 * t, reward__length=lambda t: 0.5 - 0.3 * t)
    functions = [{"use": "rewards.py:right", "weight": 1.0}, {"use": "rewards.py:length", "weight": -0.1}]
    assert named(lines) == ["one reward up, another down"]
    assert named(lines, {"reward": {"functions": functions}}) == []


def test_a_ppo_run_without_groups_can_reach_the_ceiling() -> None:
    lines = rows(reward__std=lambda t: 0.1)
    for line in lines[1:]:
        line["reward/mean"] = 0.99
        del line["reward/zero_spread_groups"]
    assert named(lines) == ["reward at its ceiling"]


def test_an_overfitted_text_run_is_found() -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "eval/loss": 2.0}]
    for step in range(1, 41):
        lines.append({"step": step, "loss": 2.0 - 0.04 * step})
        if step % 10 == 0:
            lines[-1]["eval/loss"] = {10: 1.6, 20: 1.5, 30: 1.7, 40: 2.1}[step]
    [found] = find(run_of(lines, {"method": "sft"}))
    assert found.name == "overfitting"
    assert found.figures["best_step"] == 20
    assert "was 1.5 at step 20 and is 2.1 at step 40" in found.what


def test_too_few_steps_and_numbers_that_are_none_show_nothing() -> None:
    assert named(rows(steps=8, **PLANTED["truncation"])) == []
    lines = rows()
    for line in lines[1:]:
        line |= dict.fromkeys(("completion/truncated", "objective/kl", "policy/entropy", "reward/std"))
    assert named(lines) == []


@pytest.mark.parametrize("fault", ["truncation", "length creep", "train up, held-out down"])
def test_a_run_warns_once_and_not_again_when_it_is_resumed(fault: str) -> None:
    watch, warned, lines = Watch({"method": "grpo"}), [], rows(steps=200, **PLANTED[fault])
    for line in lines:
        warned += watch.look(line["step"], line)
    assert [warning.partition(":")[0] for warning in warned].count(fault) == 1
    resumed = Watch({"method": "grpo"})
    resumed.know({line["step"]: line for line in lines[:-30]})
    assert [resumed.look(line["step"], line) for line in lines[-30:]] == [[]] * 30


def test_a_watch_of_a_long_run_keeps_a_bounded_number_of_lines() -> None:
    watch = Watch({"method": "grpo"})
    for step in range(1, 6001):
        watch.look(step, {"reward/mean": 0.5} | ({"eval/reward_mean": 0.5} if step % 25 == 0 else {}))
    steps = [*watch._steps]
    assert len(steps) <= 1.5 * MOST_LINES
    assert steps[:25] == [*range(1, 26)]
    assert steps[-40:] == [*range(5961, 6001)]
    assert [step for step in steps if step % 25 == 0] == [*range(25, 6001, 25)]


def doctor(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_doctor_shows_three_completions_of_the_last_step_that_have_the_fault(tmp_path: Path) -> None:
    samples = [
        sample(step, i, "P", f"text {step} {i}", 0.5, kind="train", finish_reason="length" if i % 2 else "eos")
        for step in (79, 80)
        for i in range(8)
    ]
    run = write_run(tmp_path / "run", rows(**PLANTED["truncation"]), samples=samples)
    shown = doctor(str(run))
    assert [line.split()[-1] for line in shown.splitlines() if "reward 0.500: text 80" in line] == ["1", "3", "5"]
    [found] = json.loads(doctor(str(run), "--json"))
    assert found["finding"] == "truncation"
    assert [row["prompt_index"] for row in found["completions"]] == [1, 3, 5]


def test_a_hostile_completion_harms_no_terminal(tmp_path: Path) -> None:
    texts = ["\x1b[2J<script>alert(1)</script>", "\u202eabc\ud800", "x" * 1_000_000]
    samples = [sample(80, i, "P", text, 0.0, kind="train", finish_reason="length") for i, text in enumerate(texts)]
    run = write_run(tmp_path / "run", rows(**PLANTED["truncation"]), samples=samples)
    shown = doctor(str(run))
    assert not {"\x1b", "\u202e", "\ud800"} & {*shown}
    assert max(map(len, shown.splitlines())) <= 110
