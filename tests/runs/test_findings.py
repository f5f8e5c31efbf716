"""`tinyrl doctor RUN`: each planted fault is found, alone; runs that went well have none."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.tools.report.runs import write_run
from tinyrl.cli.commands import app
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.settings import fields_of
from tinyrl.runs.findings import Watch, find
from tinyrl.runs.records import RunRecords, read_run, read_steps

HEALTHY = sorted((Path(__file__).parent / "healthy").glob("*.jsonl"))
Curve = float | tuple[float, float] | Callable[[float], float]  # a constant, from one value to another, or of t in 0..1
Curves = dict[str, Curve]
Lines = list[dict[str, Any]]
SOUND: Curves = {
    "reward/mean": (0.4, 0.8),
    "reward/std": (0.49, 0.4),
    "reward/zero_spread_groups": (0.1, 0.4),
    "completion/truncated": 0.02,
    "completion/mean_length": (100, 120),
    "policy/entropy": (0.8, 0.3),
    "policy/sampling_gap": 0.004,
    "objective/kl": (0, 4),
    "eval/reward_mean": (0.4, 0.75),
}


def at(curve: Curve, t: float) -> float:
    if isinstance(curve, tuple):
        return curve[0] + (curve[1] - curve[0]) * t
    return curve(t) if callable(curve) else curve


def rows(curves: Curves | None = None, *, steps: int = 80) -> Lines:
    """A run that goes well, but for the curves given; held-out ones at every tenth step."""
    of, made = SOUND | (curves or {}), list[dict[str, Any]]()
    held_out = of.pop("eval/reward_mean")
    for step in range(steps + 1):
        t, shake = step / steps, 1 + 0.02 * math.sin(7 * step)
        line: dict[str, Any] = {"step": step} | ({name: at(of[name], t) * shake for name in of} if step else {})
        if step % 10 == 0:
            score = at(held_out, t)
            line |= {"eval/reward_mean": score, "eval/reward_ci": [score - 0.04, score + 0.04]}
        made.append(line)
    return made


def run_of(lines: Lines, config: dict[str, Any] | None = None) -> RunRecords:
    return RunRecords(Path(), {line["step"]: line for line in lines}, config or {"method": "grpo"})


def named(lines: Lines, config: dict[str, Any] | None = None) -> list[str]:
    return [one.name for one in find(run_of(lines, config))]


def falling(t: float) -> float:
    return 0.8 * math.exp(-6 * t)


def rise_and_fall(t: float) -> float:
    return 0.4 + 0.8 * t * (1 - t)


CUT: Curves = {"completion/truncated": 0.45}
SAME: Curves = {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_spread_groups": 1.0, "eval/reward_mean": 0.0}
ALL_RIGHT: Curves = SAME | {"reward/mean": lambda t: 1 / (1 + 0.02 * math.sin(560 * t)), "eval/reward_mean": 1.0}
NEAR: list[tuple[str, Curves, Curves]] = [  # a finding, curves of a run that has it, and of one that only comes near
    ("constant reward", SAME, {"reward/mean": 0.3, "reward/std": 0.1}),
    ("constant reward", ALL_RIGHT | {"eval/verifier_mean": 0.4}, {}),
    ("reward at its ceiling", ALL_RIGHT | {"eval/verifier_mean": 1.0}, {}),
    ("zero-spread groups", {"reward/zero_spread_groups": 0.9, "reward/mean": 0.05},
     {"reward/zero_spread_groups": 0.7, "reward/mean": 0.05}),
    ("reward at its ceiling", {"reward/mean": 0.97, "reward/zero_spread_groups": 0.95},
     {"reward/mean": 0.97, "reward/zero_spread_groups": 0.85}),
    ("truncation", CUT, {"completion/truncated": 0.18}),
    ("entropy collapse", {"policy/entropy": falling, "reward/mean": 0.45},
     {"policy/entropy": falling, "reward/mean": 0.95}),
    ("KL blow-up", {"objective/kl": (0, 120)}, {"objective/kl": (0, 30)}),
    ("length creep", {"completion/mean_length": (100, 400), "reward/mean": 0.45},
     {"completion/mean_length": (100, 400)}),  # and the reward grows with it
    ("length creep", {"completion/mean_length": (100, 400), "reward/mean": 0.45},  # none since halfway
     {"completion/mean_length": lambda t: 100 + 300 * min(1.0, 2 * t), "reward/mean": 0.45}),
    ("critic explains nothing", {"value/explained_variance": 0.005}, {"value/explained_variance": (0.05, 0.35)}),
    ("train up, held-out down", {"eval/reward_mean": rise_and_fall}, {"eval/reward_mean": (0.6, 0.57)}),
    ("one reward up, another down", {"reward/format": (0.2, 0.9), "reward/right": (0.5, 0.2)},
     {"reward/format": (0.2, 0.9), "reward/right": 0.5}),
    ("one reward up, another down", {"eval/verifier_mean": (0.5, 0.2), "eval/num_prompts": 64},
     {"eval/verifier_mean": (0.5, 0.45), "eval/num_prompts": 64}),
    ("diverged", {"reward/mean": (0.4, 0.05), "eval/reward_mean": (0.4, 0.05), "objective/kl": (0, 120)},
     {"reward/mean": (0.4, 0.05), "eval/reward_mean": (0.4, 0.05)}),
    ("mismatch", {"policy/sampling_gap": 0.15}, {"policy/sampling_gap": 0.03}),
    ("far from the teacher", {"teacher/logprob": -4.0}, {"teacher/logprob": -2.5}),
    ("critic explains nothing", {"value/explained_variance": -0.5}, {"value/explained_variance": 0.05}),
]  # fmt: skip


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_measured_run_that_went_well_has_no_finding(path: Path) -> None:
    steps = read_steps(path, [])
    assert len(steps) > 30
    assert find(RunRecords(path, steps, {"method": path.stem.partition("-")[0]})) == []


@pytest.mark.parametrize(("fault", "planted", "near"), NEAR, ids=[fault for fault, *_ in NEAR])
def test_a_planted_fault_is_found_alone_and_what_comes_near_it_is_none(
    fault: str, planted: Curves, near: Curves
) -> None:
    assert named(rows(planted)) == [fault]
    assert named(rows(near)) == []
    assert named(rows(planted, steps=8)) == []  # too short to compare windows


def repeated(line: Callable[[int], dict[str, Any]], steps: int = 3) -> Lines:
    return [{"step": step, **line(step)} for step in range(1, steps + 1)]


SIXTEEN = {"completion/mean_length": 7.0, "completion/tokens": 112.0, "reward/mean": 0.0, "reward/std": 0.0}
EMPTY = {"completion/mean_length": 0.0, "completion/tokens": 0.0}
AT_ONCE: dict[str, tuple[Lines, str | None]] = {
    "a third of the rewards dropped": ([{"step": 1, **SIXTEEN, "reward/dropped": 6.0}], "rewards dropped"),
    "an eighth of the rewards dropped": ([{"step": 1, **SIXTEEN, "reward/dropped": 2.0}], None),
    "no token sampled": ([{"step": 1, **EMPTY, "reward/dropped": 16.0}], "rewards dropped"),
    "no token sampled and none dropped": ([{"step": 1, **EMPTY, "reward/dropped": 0.0}], None),
    "three steps skipped": (repeated(lambda step: {"optim/skipped_steps": step}), "non-finite steps"),
    "two steps skipped": (repeated(lambda step: {"optim/skipped_steps": min(step, 2), "loss": None}, 8), None),
    "five steps skipped long ago": (repeated(lambda step: {"optim/skipped_steps": min(step, 5)}, 98), None),
    "one turn of five": ([{"step": 1, "environment/turns": 1.05}], "environment hardly asked"),
    "held out at step 0": ([{"step": 0, "eval/environment/turns": 1.05}], "environment hardly asked"),
    "a tool that fails in a third of the turns": (
        [{"step": 1, "environment/turns": 3.0, "environment/tool_errors": 1.0}],
        "tools fail",
    ),
    "a tool that fails held out at step 0": (
        [{"step": 0, "eval/environment/turns": 3.0, "eval/environment/tool_errors": 1.0}],
        "tools fail",
    ),
    "a tool that fails in a sixth of the turns, and bad calls": (
        [{"step": 1, "environment/turns": 3.0, "environment/tool_errors": 0.5, "environment/invalid_calls": 3.0}],
        None,
    ),
    "some episodes with a second turn": ([{"step": 1, "environment/turns": 1.4}], None),
}


@pytest.mark.parametrize(("lines", "name"), AT_ONCE.values(), ids=AT_ONCE)
def test_what_the_first_steps_show_is_found_and_nothing_else(lines: Lines, name: str | None) -> None:
    assert named(lines, {"method": "grpo", "environment": {"max_turns": 5}}) == ([name] if name else [])


def test_batches_that_a_stop_has_kept_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"step": 0}, {"step": 1, "optim/skipped_steps": 0.0}])
    (run / "nonfinite").mkdir()
    for number, names in ((1, []), (2, []), (3, ["non-finite steps"])):
        (run / "nonfinite" / f"step-000001-{number}.json").write_text("{}")
        assert [one.name for one in find(read_run(run))] == names


def test_the_fall_of_what_a_negative_weight_punishes_is_no_fault() -> None:
    lines = rows({"reward/right": (0.2, 0.9), "reward/length": (0.5, 0.2)})
    functions = [{"use": "rewards.py:right", "weight": 1.0}, {"use": "rewards.py:length", "weight": -0.1}]
    assert named(lines) == ["one reward up, another down"]
    assert named(lines, {"reward": {"functions": functions}}) == []


@pytest.mark.parametrize("method", ["grpo", "ppo", "distill"])
def test_the_settings_that_are_advised_are_of_the_method(method: str) -> None:
    for _, planted, _ in NEAR:
        if "value/explained_variance" in planted and method != "ppo":
            continue  # there is no critic
        for one in find(run_of(rows(planted), {"method": method})):
            for section, name in re.findall(r"\b([a-z_]+)\.([a-z_]+)=", one.change):
                assert section not in {*OPTIONAL_SECTIONS} - {*METHODS[method].sections}, one.change
                assert name in fields_of(section), one.change


@pytest.mark.parametrize("fault", ["KL blow-up", "entropy collapse", "zero-spread groups", "constant reward"])
def test_a_distillation_may_leave_its_start_and_needs_no_reward(fault: str) -> None:
    planted = next(planted for name, planted, _ in NEAR if name == fault)
    assert named(rows(planted), {"method": "grpo"}) == [fault]
    assert named(rows(planted), {"method": "distill"}) == []


def test_a_ppo_run_without_groups_can_reach_the_ceiling() -> None:
    lines = [line | {"reward/mean": 0.99} for line in rows({"reward/std": 0.1, "reward/zero_spread_groups": math.nan})]
    assert named(lines) == ["reward at its ceiling"]


def test_an_overfitted_text_run_is_found() -> None:
    lines = [{"step": 0, "eval/loss": 2.0}, *repeated(lambda step: {"loss": 2.0 - 0.04 * step}, 40)]
    for step, loss in {10: 1.6, 20: 1.5, 30: 1.7, 40: 2.1}.items():
        lines[step]["eval/loss"] = loss
    [found] = find(run_of(lines, {"method": "sft"}))
    assert (found.name, found.figures["best_step"]) == ("train up, held-out down", 20)


def test_a_cut_off_agent_is_told_of_the_limit_of_a_call() -> None:
    for agent, is_named in (("a.py:f", True), (None, False)):
        [found] = find(run_of(rows(CUT), {"method": "grpo", "environment": {"agent": agent}}))
        assert found.name == "truncation"
        assert ("environment.max_call_tokens" in found.change) is is_named


def test_a_longer_limit_is_advised_where_the_model_has_positions_for_it() -> None:
    """The embedded model has 256."""
    for limit, fits in ((64, True), (127, True), (128, False)):
        config = {"method": "grpo", "generation": {"max_new_tokens": limit}, "model": {"path": "starter"}}
        [found] = find(run_of(rows(CUT), config))
        assert (f"generation.max_new_tokens={2 * limit}" in found.change) is fits


def test_numbers_that_are_none_show_nothing() -> None:
    lines = rows()
    for line in lines[1:]:
        line |= dict.fromkeys(("completion/truncated", "objective/kl", "policy/entropy", "reward/std"))
    assert named(lines) == []


def test_a_run_warns_once_and_not_again_when_it_is_resumed(tmp_path: Path) -> None:
    record, config, warned, lines = tmp_path / "metrics.jsonl", {"method": "grpo"}, list[str](), rows(CUT, steps=60)
    watch = Watch(record, config)
    for line in lines:
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        warned += watch.look(line["step"])
    assert [warning.partition(":")[0] for warning in warned] == ["truncation"]
    resumed = Watch(record, config)
    resumed.look(50)
    assert [resumed.look(step) for step in range(51, 70)] == [[]] * 19


def test_doctor_prints_each_finding_for_people_and_programs(tmp_path: Path) -> None:
    config = {"method": "grpo", "generation": {"max_new_tokens": 64}}
    run = write_run(tmp_path / "run", rows(CUT), config=config)
    text, printed = (CliRunner().invoke(app, ["doctor", str(run), *more]).output for more in ((), ("--json",)))
    assert "truncation" in text
    assert max(map(len, text.splitlines())) <= 110
    [found] = json.loads(printed)
    assert (found["finding"], found["figures"]["truncated"]) == ("truncation", pytest.approx(0.45, abs=0.01))
    assert "generation.max_new_tokens=128" in found["change"]


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["show"]])
def test_lines_of_metrics_that_cannot_be_read_are_counted_beside_what_is_printed(
    words: list[str], tmp_path: Path
) -> None:
    damaged = write_run(tmp_path / "damaged", rows(CUT), tail="garbage\n[1]\n")
    whole = write_run(tmp_path / "whole", rows(CUT))
    command, *more = words
    assert "metrics.jsonl: 2 lines" in CliRunner().invoke(app, [command, str(damaged), *more]).stderr
    assert CliRunner().invoke(app, [command, str(whole), *more]).stderr == ""
