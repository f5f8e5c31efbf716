"""A probe finds what was planted, says what to change, and finds nothing where a run would learn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app
from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.data.rows import PASS_RATE, read_rows
from tinyrl.evaluation.statistics import mean
from tinyrl.rollout.components import Options
from tinyrl.tools.probe import Probe, probe, rows_with_rates, write_rows
from tinyrl.tools.probe_findings import findings, histogram, render, to_json

CPU = Options(device="cpu")
STARTER = ["run.threads=1"]
NARROW = ["generation.top_k=1"]


def probed(*settings: str, num_prompts: int = 24, samples: int | None = 8) -> Probe:
    return probe(of(*settings), options=CPU, num_prompts=num_prompts, samples=samples, minutes=5)


def of(*settings: str, method: str = "grpo") -> Config:
    return load_config(method, "starter-grpo", overrides=[*STARTER, *settings])


def names(seen: Probe) -> dict[str, str]:
    """What was found, and what it says to change."""
    return {one.name: one.change for one in findings(seen)}


REWARDS = """
def constant(prompts, completions, **columns):
    return [0.5 for _ in completions]

def failing(prompts, completions, **columns):
    if any(completion.lstrip()[:1] in "abcde" for completion in completions):
        raise RuntimeError("no such table")
    return [1.0 for _ in completions]

def silent(prompts, completions, **columns):
    return [1.0 if completion.lstrip()[:1] == "a" else None for completion in completions]

def by_length(prompts, completions, **columns):
    return [0.01 * len(completion.split()) for completion in completions]

def letters(prompts, completions, **columns):
    return [float(sum(len(word) == 1 for word in completion.split()) >= 3) for completion in completions]

def whole_gold(prompts, completions, answer, **columns):
    return [float(completion.strip() == gold.strip()) for completion, gold in zip(completions, answer)]

def half(prompts, completions, **columns):
    # prompts of one kind are always right, of another never
    return [float(sum(map(ord, prompt)) % 2 and len(completion.split()) >= 3)
            for prompt, completion in zip(prompts, completions)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("probe")
    (made / "rewards.py").write_text(REWARDS)
    return made


def reward(folder: Path, name: str) -> str:
    return f"reward.functions=[{{use: {folder / 'rewards.py'}:{name}}}]"


def rows(folder: Path, make: Any) -> str:
    """A file of sorting prompts whose answers are what `make` makes of the right ones."""
    from tinyrl.tasks import load_task

    task = load_task("sort")
    own = [{"prompt": task.prompt(row), "answer": make(str(task.gold(row)))} for row in task.rows("train")[:200]]
    path = folder / f"{make.__name__}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in own))
    return f"task.data={path}"


def test_nothing_is_found_where_the_default_run_learns():
    seen = probed(samples=None)
    assert findings(seen) == []
    assert 0.2 < mean(seen.pass_rates) < 0.8
    assert sum(histogram(seen).values()) == len(seen.groups) == 24
    assert seen.rollout_seconds > 0
    assert seen.peak_gb > 0
    said = render(seen)
    assert "nothing found" in said
    assert "pass rate" in said


@pytest.mark.parametrize(
    ("settings", "name", "change"),
    [
        (["generation.max_new_tokens=8"], "cut off", "generation.max_new_tokens=16"),
        (["generation.max_new_tokens=3"], "nothing ends", "tinyrl doctor MODEL"),
        (["generation.temperature=0.02"], "all completions alike", "generation.temperature=1.0"),
        (NARROW, "all completions alike", "generation.top_k=0"),
        (["generation.temperature=2.5"], "temperature too high", "generation.temperature=1.0"),
        (["run.num_steps=100000000"], "a long run", "run.num_steps"),
    ],
)
def test_planted_settings_are_found(settings: list[str], name: str, change: str):
    found = names(probed(*settings))
    assert name in found
    assert change in found[name]


@pytest.mark.parametrize(
    ("function", "name", "change"),
    [
        ("constant", "one reward for everything", "tinyrl reward test"),
        ("failing", "rewards dropped", "tinyrl reward test"),
        ("silent", "rewards dropped", "tinyrl reward test"),
        ("letters", "too easy", "task.sampler=difficulty"),
        ("half", "prompts that are decided", "task.sampler=difficulty"),
    ],
)
def test_planted_rewards_are_found(function: str, name: str, change: str, folder: Path):
    found = names(probed(reward(folder, function)))
    assert name in found
    assert change in found[name]


def reversed_answer(gold: str) -> str:
    return " ".join(reversed(gold.split())) + " 0"


def marked(gold: str) -> str:
    return f"#### {gold}"


def plain(gold: str) -> str:
    return gold


def test_rows_that_are_too_hard_are_found(folder: Path):
    seen = probed(rows(folder, reversed_answer), "task.name=rows")
    assert "too hard" in names(seen)
    assert "tinyrl train sft" in names(seen)["too hard"]
    assert mean(seen.pass_rates) < 0.05


def test_right_answers_in_another_form_are_found(folder: Path):
    seen = probed(rows(folder, marked), "task.name=rows", reward(folder, "whole_gold"))
    found = names(seen)
    assert "task.system_prompt" in found["right answers in another form"]


def test_a_reward_by_length_is_found(folder: Path):
    """Prompts ask for lists of several lengths, so what counts is the length within a prompt's completions."""
    found = names(probed(reward(folder, "by_length"), "generation.temperature=1.5"))
    assert "tinyrl reward attack" in found["reward follows length"]


def test_a_group_that_is_too_small_is_found():
    """Prompts that are mostly wrong: groups of two hardly ever hold a right answer, of eight they do."""
    seen = planted([[1.0] + [0.0] * 15] * 16, "grpo.group_size=2")
    assert names(seen) == {"group too small": "grpo.group_size=8, with as many prompts fewer for the same time."}
    assert [seen.with_spread(size) for size in (2, 4, 8, 16)] == pytest.approx([0.125, 0.25, 0.5, 1.0])
    assert math.isnan(seen.with_spread(32))


def test_empty_completions_are_found():
    seen = planted([[1.0, 0.0] * 4] * 16, texts=["", "3 4"] * 4)
    assert "empty completions" in names(seen)


# ---- made by hand ----


def planted(rewards: list[list[float]], *settings: str, texts: list[str] | None = None, **changes: Any) -> Probe:
    """A probe whose groups have these rewards."""
    lines = [
        {
            "prompt_index": index,
            "sample": i,
            "prompt": "sort",
            "completion": texts[i] if texts else f"text {index} {i}",
            "reward": value,
            "rewards": {},
            "finish_reason": "eos",
            "tokens": 4,
            "gold": None,
            "row": str(index),
            "failed": None,
        }
        for index, group in enumerate(rewards)
        for i, value in enumerate(group)
    ]
    values: dict[str, Any] = {"rollout_seconds": 0.1, "positions": 512.0, "longest_prompt": 16}
    greedy = [line for line in lines if line["sample"] == 0]
    kept = {"num_there": 100, "gold": None, "entropy": 0.5, "seconds": 1.0, **values, **changes}
    return Probe(of(*settings), lines, greedy, len(rewards[0]), **kept)


def test_spread_is_that_of_groups_drawn_from_what_was_sampled():
    seen = planted([[1.0, 1.0, 0.0, 0.0], [0.25, 0.5, 0.75, 1.0], [0.0] * 4, [math.nan] * 3 + [1.0]])
    pairs = 1 - 2 / 6  # of two zeros and two ones
    assert seen.with_spread(2) == pytest.approx((pairs + 1 + 0 + 0) / 4)
    assert seen.pass_rates[:3] == [0.5, 0.25, 0.0]
    assert seen.pass_rates[3] == 1.0


def test_a_probe_without_rewards_says_what_it_can():
    seen = planted([[math.nan] * 4] * 4)
    assert "rewards dropped" in names(seen)
    assert "groups" not in render(seen)
    assert to_json(seen)["reward_mean"] is None


def test_json_and_words_hold_the_same():
    seen = planted([[1.0, 0.0] * 4] * 16)
    said = to_json(seen)
    assert said["groups_with_spread"] == 1.0
    assert said["pass_rates"] == {"never": 0, "to 25 %": 0, "to 50 %": 16, "to 75 %": 0, "over 75 %": 0, "always": 0}
    assert said["findings"] == []
    json.dumps(said)
    assert "16 of 100, 8 completions each" in render(seen)


# ---- rows with rates ----


def test_rates_are_written_beside_all_rows_and_the_split_stays(folder: Path):
    config = of(rows(folder, plain), "task.name=rows")
    seen = probe(config, options=CPU, num_prompts=16, samples=4, minutes=5)
    written = rows_with_rates(config, seen)
    assert len(written) == 200
    known = [row[PASS_RATE] for row in written if row[PASS_RATE] is not None]
    assert sorted(known) == sorted(seen.pass_rates)
    write_rows(folder / "rated.jsonl", written)
    assert read_rows(str(folder / "rated.jsonl")) == written
    again = of(f"task.data={folder / 'rated.jsonl'}", "task.name=rows", "task.sampler=difficulty")
    second = probe(again, options=CPU, num_prompts=16, samples=4, minutes=5)
    assert [line["prompt"] for line in second.lines] == [line["prompt"] for line in seen.lines]
    assert [line["completion"] for line in second.lines] == [line["completion"] for line in seen.lines]
    longer = rows_with_rates(again, probe(again, options=CPU, num_prompts=24, samples=4, minutes=5))
    assert sum(row[PASS_RATE] is not None for row in longer) == 24  # what was known before is kept


def test_rows_that_are_made_have_no_file_to_put_rates_into():
    config = of("task.name=reasoning_gym", "task.data=leg_counting")
    with pytest.raises(ValueError, match="no file to put rates into"):
        rows_with_rates(config, planted([[1.0] * 4]))


# ---- the command ----


def test_the_command(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    words = ["probe", "grpo", *STARTER, "--prompts", "8", "--device", "cpu", "--write", str(path)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert "8 of" in told.output
    assert "8 of them with a pass_rate" in told.output
    assert path.is_file()


def test_a_method_without_samples_is_refused(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "completion": "a"}) + "\n" for i in range(20)))
    told = CliRunner().invoke(app, ["probe", "sft", f"task.data={path}"])
    assert told.exit_code == 2
    assert "learns from rows" in told.output


def test_ppo_and_episodes_are_probed():
    lookup = load_config("grpo", "lookup", overrides=STARTER)
    seen = probe(lookup, options=CPU, num_prompts=8, samples=4, minutes=5)
    assert len(seen.lines) == 32
    assert all("episode" in line for line in seen.lines)
    config = load_config("ppo", "starter-ppo", overrides=STARTER)
    seen = probe(config, options=CPU, num_prompts=8, samples=None, minutes=5)
    assert seen.samples == 8


def test_a_probe_ends_when_its_time_is_over():
    seen = probe(of(), options=CPU, num_prompts=64, samples=8, minutes=1e-6)
    assert len(seen.groups) == 8  # one batch of them
