"""`tinyrl show RUN` and the end of a run: checkpoints, samples, training prompts, and what to type next."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.running import rows_for
from tests.tools.report.runs import sample, write_run
from tinyrl.cli.commands import app
from tinyrl.config.recipe import load_config
from tinyrl.data.rows import row_key
from tinyrl.runs.checkpoint import write_checkpoint
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.runs.show import (
    checkpoint_lines,
    image_lines,
    read_prompt_stats,
    render_checkpoints,
    render_prompt_stats,
    render_samples,
    select_samples,
    summary,
)


def shown(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", *arguments])


# ---- checkpoints ----


@pytest.mark.parametrize("environment", [{}, {"images": None}, {"images": {"count": "8"}}])
def test_a_run_without_images_has_no_line_about_them(environment: dict[str, Any]) -> None:
    assert image_lines(environment) == []


def test_a_sample_shows_the_files_of_its_images() -> None:
    image = {"path": "/pictures/7.png", "sha256": "0", "size": [32, 16]}
    row = {"step": 1, "prompt": "<image>which?", "completion": "seven", "images": [image, "damaged"]}
    assert "/pictures/7.png (32 x 16)\n  damaged" in render_samples([row])


def test_a_checkpoint_is_listed_with_its_size_metric_and_problem(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.write_config(load_config("grpo", None, overrides=[]))
    for step, score in ((2, 0.25), (4, 0.75), (6, None)):
        run.append_metrics(step, {} if score is None else {"eval/reward_mean": score})

        def write(folder: Path, step: int = step) -> None:
            (folder / "x").write_bytes(b"x" * 1000 * step)

        write_checkpoint(run.checkpoints, step, write=write)
    (run.checkpoints / "step-000006" / "x").write_bytes(b"y" * 6000)
    listed = json.loads(shown(str(run.path), "--json").output)
    assert [(one["name"], one["step"], one["metric"], one["problem"] is None) for one in listed] == [
        ("step-000002", 2, 0.25, True),
        ("step-000004", 4, 0.75, True),
        ("step-000006", 6, None, False),
    ]
    assert 4000 < listed[1]["size"] < 5000
    text = render_checkpoints(run, [])
    assert text.splitlines()[2].endswith("0.7500  yes, best")
    assert f"{run.path}@best is that of step 4" in text
    run.append_metrics(6, {"eval/reward_mean": 0.75})  # as good, and later: the run keeps the first
    assert [one["best"] for one in checkpoint_lines(run, [])] == [False, True, False]
    assert shown(str(tmp_path / "two")).exit_code == 2


# ---- the end of a run ----


@pytest.mark.parametrize(
    ("values", "last"),
    [
        ({"method": "grpo"}, "next     tinyrl eval {run} --vs base"),
        ({"method": "sft", "task": {"data": "rows.jsonl"}}, "next     tinyrl chat {run}"),
        ({"method": "reward", "task": {"data": "pairs.jsonl"}, "model": {"path": "/models/base"}},
         "next     tinyrl train ppo model.path=/models/base task.data=PROMPTS reward.model={run}"),
    ],
)  # fmt: skip
def test_the_summary_has_held_out_metrics_the_checkpoint_and_what_to_type_next(
    values: dict[str, Any], last: str, tmp_path: Path
):
    run = RunDir(tmp_path)
    run.write_config(config_of(values))
    (run.checkpoints / "step-000002").mkdir(parents=True)
    for step in (0, 2):
        run.append_metrics(step, {"eval/loss": 0.000456, "eval/accuracy": 0.75})
    lines = summary(run).splitlines()
    assert "  loss, held-out             0.000456 -> 0.000456" in lines
    assert lines[-1] == last.format(run=tmp_path)


def test_the_summary_of_a_run_without_rewards_names_a_command_that_can_work(tmp_path: Path):
    run = RunDir(tmp_path)
    run.write_config(config_of({"method": "distill", "teacher": {"path": "starter"}}))
    for step in (0, 2):
        run.append_metrics(step, {"eval/reward_mean": math.nan, "eval/kl": 0.5})
    lines = summary(run).splitlines()
    assert not [line for line in lines if "reward" in line]
    assert lines[-1] == f"next     tinyrl show {tmp_path} --samples"


def test_the_summary_of_a_run_whose_reward_changed_has_the_step(tmp_path: Path):
    run = RunDir(tmp_path)
    run.write_config(config_of({"method": "grpo"}))
    for step in (0, 6):
        run.append_metrics(step, {"eval/reward_mean": 0.25})
    unchanged = summary(run).splitlines()
    run.write_environment({"reward_changed": [4]})
    (added,) = set(summary(run).splitlines()) - set(unchanged)
    assert "after step 4" in added


def fork_of(folder: Path, *, step: int, evaluated: list[int], deleted: bool = False) -> RunDir:
    """A run that was forked at a step, evaluated at some, in part by the other run; its reward rises by 0.1 a step."""
    run = RunDir(folder)
    run.write_config(config_of({"method": "grpo"}))
    run.write_environment({"forked_from": f"/runs/other@{step}"})
    for at in evaluated:
        run.append_metrics(at, {"eval/reward_mean": at / 10})
    if not deleted:
        (run.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("evaluated", "line"),
    [([0, 2, 4, 6], "step 4 -> 6"), ([0, 3, 6], "step 3 -> 6"), ([5, 6], "step 5 -> 6")],
)
def test_the_summary_of_a_fork_begins_where_it_was_forked(evaluated: list[int], line: str, tmp_path: Path) -> None:
    lines = summary(fork_of(tmp_path, step=4, evaluated=evaluated)).splitlines()
    assert lines[0] == f"{line}, forked from /runs/other@4"
    assert lines[-1] == f"next     tinyrl eval {tmp_path} --vs {tmp_path}@4"


def test_a_fork_that_was_not_evaluated_has_no_change_to_show(tmp_path: Path) -> None:
    assert "->" not in summary(fork_of(tmp_path, step=4, evaluated=[0, 4]))


def test_a_fork_whose_first_checkpoint_is_deleted_is_compared_with_the_base(tmp_path: Path) -> None:
    assert summary(fork_of(tmp_path, step=4, evaluated=[4, 6], deleted=True)).endswith("--vs base")


# ---- samples ----


def a_run(folder: Path, samples: list[dict[str, Any]], **more: Any) -> Path:
    return write_run(folder / "run", [{"step": 0}], samples=samples, **more)


def picked(run: Path, *names: str, **asked: Any) -> list[tuple[Any, ...]]:
    rows = select_samples(run / "samples.jsonl", [], **asked)
    return [tuple(row[name] for name in names) for row in rows]


def test_the_last_step_is_shown_unless_one_is_named(tmp_path: Path) -> None:
    kinds = [(step, kind, i) for step in (0, 4, 2) for kind in ("train", "eval") for i in (7, 3)]
    config = {"method": "grpo", "task": {"name": "sort", "solved_reward": 5}}
    run = a_run(tmp_path, [sample(step, i, "P", "c", i, kind=kind) for step, kind, i in kinds], config=config)
    names = ("step", "kind", "prompt_index")
    assert picked(run, *names) == [(4, "train", 7), (4, "train", 3), (4, "eval", 7), (4, "eval", 3)]
    assert picked(run, *names, num=3, step=2) == [(2, "train", 7), (2, "train", 3), (2, "eval", 7)]
    with pytest.raises(ValueError, match=r"step 0, 2, 4"):
        picked(run, kind="eval", step=9)
    for words, found in {
        "--kind eval --worst --num 1": [("4", "eval", "3")],
        "--prompt 7 --step 0": [("0", "train", "7"), ("0", "eval", "7")],
        "--step 9": [],
    }.items():
        text = shown(str(run), *words.split()).stdout
        assert re.findall(r"^step (\d) \| (\w+) \| prompt (\d), ", text, re.MULTILINE) == found


def test_an_episode_is_printed_by_role_and_what_was_read_is_grey() -> None:
    said = (("assistant", "search Ada ;"), ("tool", "found\nBern ;"), ("assistant", "answer Bern ."))
    episode = [{"role": role, "content": text} for role, text in said]
    line = sample(5, 12, "city of Ada ?", "not shown", 0.25, episode=episode, advantage=-0.5, finish_reason="turns")
    line["rewards"] = {"exact": 0.0, "short": 0.5}
    assert render_samples([line]).split("\n") == [
        "step 5 | eval | prompt 12, sample 0 | reward 0.25 (exact 0, short 0.5) | advantage -0.5 | ended: turns",
        *("prompt", "  city of Ada ?", "policy", "  search Ada ;", "\x1b[2menvironment", "  found", "  Bern ;\x1b[0m"),
        *("policy", "  answer Bern ."),
    ]


def test_a_turn_with_credit_of_its_own_is_printed_with_it() -> None:
    said = (("assistant", "search"), ("tool", "found"), ("assistant", "answer"))
    line = sample(5, 12, "ask", "", 0.25, episode=[{"role": role, "content": text} for role, text in said])
    line["turns"] = [{"reward": 0.5, "advantage": -1.25}, {"reward": None, "advantage": 2.0}]
    heads = [head for head in render_samples([line]).split("\n") if head.startswith("policy")]
    assert heads == ["policy | reward 0.5 | advantage -1.25", "policy | advantage 2"]


def test_the_conversations_of_an_agent_are_printed_by_number_and_role() -> None:
    first = {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "Ada"}]}
    second = {"messages": [{"role": "tool", "content": "Bern"}, {"role": "assistant", "content": ""}]}
    line = sample(5, 12, "city of Ada ?", "it is Bern", 0.25, conversations=[first, second])
    assert render_samples([line]).split("\n")[1:] == [
        *("prompt", "  city of Ada ?", "conversation 1", "\x1b[2muser", "  who?\x1b[0m", "policy", "  Ada"),
        *("conversation 2", "\x1b[2mtool", "  Bern\x1b[0m", "policy", "  (nothing)"),
        *("\x1b[2magent returned", "  it is Bern\x1b[0m"),
    ]


def test_a_sample_harms_no_terminal(tmp_path: Path) -> None:
    hostile = [{"role": "tool", "content": "a\x1b[2Jb\u202ec\x00\ud800"}]
    agents = [{"messages": [{"role": "to\x1bol", "content": "x\x1b"}], "tools": [{"name": "\x1b"}]}]
    rows = [sample(1, 0, "p\x07", "", 1.0, episode=hostile, finish_reason="\x1b")]
    rows.append(sample(1, 1, "p", "", 1.0, conversations=agents))
    text = shown(str(a_run(tmp_path, rows)), "--samples").stdout
    assert "a[ESC][2Jb[U+202E]c[U+0000][U+D800]" in text
    assert not {"\x1b", "\x07"} & {*text}


def test_the_worst_come_first_and_a_prompt_is_unsolved_when_none_of_its_samples_is_right(tmp_path: Path) -> None:
    lines = [sample(3, i, "P", "c", reward) for i, reward in ((0, 0.0), (1, 1.0), (0, 0.5), (1, -1.0), (2, None))]
    run = a_run(tmp_path, [*lines, sample(3, 1, "P", "c", 0.1, kind="train"), sample(1, 9, "P", "c", -9.0)])
    expected = [(1, -1.0), (0, 0.0), (1, 0.1), (0, 0.5), (1, 1.0), (2, None)]  # what has no reward is last
    assert picked(run, "prompt_index", "reward", worst=True) == expected
    assert picked(run, "prompt_index", "reward", unsolved=1.0) == [(0, 0.0), (0, 0.5), (2, None), (1, 0.1)]
    assert picked(run, "prompt_index", "reward", unsolved=0.5, kind="eval") == [(2, None)]


def test_a_right_answer_that_is_too_long_solves_its_prompt(tmp_path: Path) -> None:
    lines = [
        sample(3, 0, "P", "c", 0.4, score=1.0),
        sample(3, 1, "P", "c", 0.4, score=0.9),
        sample(3, 2, "P", "c", 0.4),
    ]
    run = a_run(tmp_path, lines)
    assert picked(run, "prompt_index", "reward", unsolved=1.0) == [(1, 0.4), (2, 0.4)]


def test_one_prompt_is_followed_over_the_steps(tmp_path: Path) -> None:
    lines = [sample(step, i, "P", "c", 0.0, sample=n) for step in (0, 2, 4, 6, 8) for i in (1, 2) for n in (0, 1)]
    lines += [sample(3, 2, "P", "c", 0.0, kind="train"), sample(5, 6, "P", "c", 0.0, kind="train")]
    run, names = a_run(tmp_path, lines), ("step", "kind", "sample")
    assert picked(run, *names, prompt=2, num=3) == [(step, "eval", 0) for step in (0, 4, 8)]
    assert picked(run, *names, prompt=2, num=1) == [(8, "eval", 0)]
    assert picked(run, *names, prompt=2, num=4, kind="train") == [(3, "train", 0)]
    assert picked(run, *names, prompt=6, num=4) == [(5, "train", 0)]


# ---- training prompts ----

#                 index, key, tried, solved
STEPS: dict[int, list[Any]] = {
    1: [[0, "a", 4, 0], [1, "b", 4, 4], [2, "c", 4, 2], [3, "d", 4, 1], [9, "i", 0, 0]],
    2: [[0, "a", 3, 0], [1, "b", 4, 4], [2, "c", 4, 0]],
    5: [[2, "c", 2, 0], [3, "d", 4, 3], [7, "e", 4, 0]],
}


def with_prompts(folder: Path, steps: dict[int, list[Any]] = STEPS, **more: Any) -> Path:
    made = write_run(folder / "run", [{"step": 0}], **more)
    lines = [json.dumps({"step": step, "prompts": prompts}) + "\n" for step, prompts in steps.items()]
    (made / "prompts.jsonl").write_text("".join(lines))
    return made


def test_prompts_are_counted_by_outcome_and_the_hard_ones_tried_most_are_listed(tmp_path: Path) -> None:
    prompt_stats = read_prompt_stats(with_prompts(tmp_path) / "prompts.jsonl", [])
    outcomes = {0: "never", 1: "always", 2: "forgotten", 3: "sometimes", 7: "never"}
    assert {record.index: record.outcome for record in prompt_stats} == outcomes
    assert [record.tried for record in prompt_stats] == [7, 8, 10, 8, 4]
    assert prompt_stats[2].tries == [(1, 4, 2), (2, 4, 0), (5, 2, 0)]
    lines = render_prompt_stats(prompt_stats, {0: "first prompt\x1b[2J", 2: "third"}, num=1).split("\n")
    assert [line.split()[0] for line in lines[2:6]] == ["2", "1", "1", "1"]
    assert [line for line in lines if line.startswith("  prompt ")] == [
        "  prompt 0      0/4 0/3  first prompt[ESC][2J", "  prompt 2      2/4 0/4 0/2  third",
    ]  # fmt: skip


def test_hard_rows_are_listed_with_their_texts_and_written_to_train_on(tmp_path: Path) -> None:
    """Of the training rows of a file the first was never solved, the second was, the third is new."""
    data, hard = tmp_path / "rows.jsonl", tmp_path / "hard.jsonl"
    data.write_text("".join(json.dumps({"q": f"say {c}", "answer": c}) + "\n" for c in "abcdefgh"))
    config = {"method": "grpo", "task": {"name": "rows", "data": str(data), "columns": {"prompt": "q"}}}
    rows = rows_for(config_of(config)).train
    entries = [[0, row_key(rows[0]), 4, 0], [1, row_key(rows[1]), 4, 1], [5, "of a row that is gone", 4, 0]]
    made = str(with_prompts(tmp_path, {1: entries}, config=config))
    done = shown(made, "--export-hard", str(hard))
    assert done.exit_code == 0, done.stderr
    assert f"prompt 0      0/4  {rows[0]['prompt']}" in done.stdout
    task = {"name": "rows", "data": str(hard), "eval_data": str(hard)}
    assert rows_for(config_of({"method": "grpo", "task": task})).train == rows[:1]
    assert shown(made, "--export-hard", str(hard)).exit_code == 2  # nothing is overwritten
    data.unlink()
    gone = shown(made, "--prompts")
    assert gone.exit_code == 0
    assert "prompt 0      0/4\n" in gone.stdout
    assert "rows.jsonl: no such file" in gone.stderr
