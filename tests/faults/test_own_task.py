"""A person's own task: its code runs in a worker, is hashed, and what it does wrong costs rows and never the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import tinyrl
from tests import running
from tests.faults.children import Child, go_on, workers_left
from tests.faults.lookup_runs import said_by_environment
from tests.faults.test_kill import train_until
from tests.running import rows_for
from tinyrl.api import evaluate
from tinyrl.config.schema import Config
from tinyrl.rewards.functions import verifier_of
from tinyrl.runs import checkpoint
from tinyrl.runs.checkpoint import list_checkpoints
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks import load_task
from tinyrl.tasks.own import OwnTask
from tinyrl.tools.export import export
from tinyrl.workers import calls

PROMPTS, GROUP = 4, 4
TASK = """
import os, time
from words import WORDS
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row

print("loaded")

def rows(split):
    return [{"word": word, "answer": word[0]} for word in WORDS[split]]

def prompt(row):
    if not isinstance(row["word"], str):
        raise ValueError(f"'word' must be text, not {row['word']!r}")
    return f"say {row['word']}:"

def score(text, row):
    PLACE
    return float(len(set(text)))

def answer(text):
    return (text[:1], len(text)) if text else None

TASK = Task(name="letters", rows=rows, prompt=prompt, columns=("word", "answer"), verify=by_row(score),
            gold=lambda row: row["answer"] * 3 + "abcdefgh", answer=answer)
"""
WORDS = "WORDS = {'train': ['ab', 'cd', 'ef', 'gh'], 'eval': ['xy', 'yz']}\n"
HANGS = "if row['word'] == 'cd': time.sleep(1000)"
REPLIES = """
def respond(prompts, transcripts, *, word, **columns):
    if "cd" in word:
        os._exit(7)
    return [None if len(turns) > 1 else f" {os.getpid()} " for turns in transcripts]
"""


def write_task(folder: Path, *, score: str = "pass", more: str = "", **fields: str) -> None:
    """Write a task, its score with a statement in it, with further code and fields of the Task."""
    folder.mkdir(exist_ok=True)
    given = "".join(f", {name}={value}" for name, value in fields.items())
    code = TASK.replace("PLACE", score).replace("TASK = Task(", f"{more}\nTASK = Task(")
    (folder / "letters.py").write_text(code.rstrip().removesuffix(")") + given + ")\n")
    (folder / "words.py").write_text(WORDS)


def settings(model: Path, name: str, *, timeout_s: float = 8.0, group: int = GROUP, **sections: Any) -> Config:
    given = {"name": name, "max_samples": None} | sections.pop("task", {})
    reward = {"functions": [], "timeout_s": timeout_s}
    run = {"num_steps": 2, "eval_every": 0, "eval_prompts": 2, "save_every": 1} | sections.pop("run", {})
    grpo = {"num_prompts": PROMPTS, "group_size": group}
    return running.config("grpo", model, task=given, reward=reward, grpo=grpo, run=run, **sections)


def failed_rows(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.failed_rewards.read_text().splitlines()]


# Fast: test_resuming.py for its code as an input, changed and moved, and below what is wrong with its rows.
@pytest.mark.slow
def test_a_run_goes_on_from_another_folder_exports_is_evaluated_and_refuses_another_verifier(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    own = settings(model, "letters.py:TASK")
    run = RunDir(tmp_path / "run")
    second_save = checkpoint.__name__, "write_checkpoint", 2
    child = Child(train_until, own, tmp_path, *second_save, output=tmp_path / "said.txt")
    assert child.end() == -signal.SIGKILL, child.said
    assert workers_left({child.pid}) == []

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (tmp_path / "mine" / "words.py").write_text(WORDS.replace("'yz'", "'zz'"))
    with pytest.raises(ValueError, match=r"words\.py"):
        running.go_on(run)
    (tmp_path / "mine" / "words.py").write_text(WORDS)
    write_task(tmp_path / "mine", score="text = 7 * text")
    with pytest.raises(ValueError, match=r"letters\.py"):
        running.go_on(run)
    write_task(tmp_path / "mine")
    assert Child(go_on, run.path, output=tmp_path / "more.txt").end() == 0, (tmp_path / "more.txt").read_text()
    assert running.metrics(run)[-1]["step"] == 2
    assert run.path.joinpath("reward_output.log").read_text().startswith("letters: loaded")

    assert (export(str(run.path), output=str(tmp_path / "exported")).folder / "adapter_config.json").exists()
    found = evaluate(run.path)
    assert found["num_prompts"] == 2
    assert 0 < found["reward_mean"] < 7


@pytest.mark.slow  # Fast: its seconds in tasks/test_loading.py; a row that hangs in rewards/test_functions.py.
def test_a_row_whose_verifier_hangs_is_lost_and_the_run_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch, and a row alone, has a second; the rows of a batch have as long as they take together. The run goes on
    with its update, the evaluation and the save.
    """
    monkeypatch.setattr(calls, "ROWS_TIMEOUTS", 1000)
    write_task(tmp_path, score=HANGS)
    one_step = {"num_steps": 1, "eval_every": 1}
    own = settings(model, f"{tmp_path / 'letters.py'}:TASK", timeout_s=1.0, group=2, run=one_step)
    code, run, _ = running.train(own, tmp_path)
    assert code == 0
    [_, line] = running.metrics(run)
    assert line["reward/dropped"] == 2
    assert line["optim/grad_norm"] > 0
    assert line["eval/reward_mean"] > 0
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-000000", "step-000001"]
    assert {row["prompt"] for row in failed_rows(run)} == {"say cd:"}
    assert "letters.py, line" in failed_rows(run)[0]["reason"]
    assert workers_left({os.getpid()}) == []


@pytest.mark.slow  # Fast: its seconds in tasks/test_loading.py; test_functions.py has an environment that dies.
def test_episodes_of_an_own_task_are_answered_by_a_worker_which_may_die(model: Path, tmp_path: Path) -> None:
    write_task(tmp_path, more=REPLIES, respond="respond", stop="tuple('abcdefghijklmnopqrstuvwxyz ')")
    own = settings(model, f"{tmp_path / 'letters.py'}:TASK", environment={"max_turns": 2, "timeout_s": 20.0})
    code, run, _ = running.train(own, tmp_path)
    assert code == 0
    failed = failed_rows(run)  # of the turns that ended before the last token
    assert len(failed) > 0
    assert {row["prompt"] for row in failed} == {"say cd:"}
    assert all("exit code 7" in row["reason"] for row in failed)
    told = said_by_environment(run)
    assert len(told) > 0
    assert str(os.getpid()) not in {text.strip() for text in told}


def test_what_is_wrong_with_rows_of_an_own_task_is_a_sentence_with_their_place(tmp_path: Path) -> None:
    write_task(tmp_path)
    name = f"{tmp_path / 'letters.py'}:TASK"
    for rows, place in (
        ([{"word": "ab", "answer": "a"}, {"word": 7, "answer": "b"}], r"rows\.jsonl:2: 'word' must be text, not 7"),
        (
            [{"word": "ab", "answer": "a"}, {"word": "cd", "answer": 1}],
            r"rows\.jsonl:2: TypeError: .*letters\.py, line",
        ),
        ([{"word": "ab"}], r"rows\.jsonl:1: no column 'answer'"),
    ):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"name": name, "data": str(tmp_path / "rows.jsonl"), "eval_data": str(tmp_path / "rows.jsonl")}
        with pytest.raises(ValueError, match=place):
            rows_for(config_of({"method": "grpo", "task": data}))
    (tmp_path / "words.py").write_text(WORDS.replace("'cd'", "3j"))
    with pytest.raises(ValueError, match=r"TypeError"):
        rows_for(config_of({"method": "grpo", "task": {"name": name}}))


def test_a_refused_run_in_a_notebook_leaves_no_worker(tmp_path: Path) -> None:
    write_task(tmp_path)
    given = {"task.name": f"{tmp_path / 'letters.py'}:TASK"}
    with pytest.raises(ValueError, match=r"'word' must be text"):
        tinyrl.train("grpo", settings=given, rows=[{"word": 7, "answer": "b"}], output_dir=tmp_path / "runs")
    assert workers_left({os.getpid()}) == []


def test_equal_answers_of_an_own_task_are_one_vote(tmp_path: Path) -> None:
    """Answers are pairs here, which are no JSON keys."""
    write_task(tmp_path)
    task = load_task(f"{tmp_path / 'letters.py'}:TASK")
    assert task.answers(["ab", "ac", "", "b", "ad"], [{"word": "ab"}] * 5) == [0, 0, None, 1, 0]
    with verifier_of(task, timeout_s=5) as verifier:
        assert verifier(["p"], ["aab"], {"word": ["ab"], "answer": ["a"]}).values == [2.0]
    assert isinstance(task, OwnTask)
    task.code.worker.close()
