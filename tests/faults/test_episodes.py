"""Environments that break, talk nonsense or never end, in real runs of the embedded lookup model.

The run survives; episodes without an answer are dropped, counted and kept for reading. What an environment says is cut,
read and never scored.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.children import workers_left
from tests.faults.lookup_runs import GROUP, PROMPTS, READ, answered_by, said_by_environment, samples
from tinyrl.tasks.lookup import lookup_rows
from tinyrl.tools.report import write_report

BAD = lookup_rows("train", num_rows=PROMPTS)[0]["prompt"]
ANSWERING = """
    import os, signal, sys, time

    class Reply:
        def __init__(self, text="", done=False, reward=0.0):
            self.text, self.done, self.reward = text, done, reward

    def respond(prompts, transcripts, answer, **columns):
        letters = [len(set(turns[-1]["content"])) / 10 for turns in transcripts]
        replies = [
            Reply("found Amy Berg ;", reward=reward) if len(turns) == 1 else None
            for turns, reward in zip(transcripts, letters)
        ]
        for row, prompt in enumerate(prompts):
            if prompt == {bad!r} or {always}:
                {does}
        return replies
"""


def doing(does: str, *, always: bool = False) -> str:
    return textwrap.dedent(ANSWERING).format(bad=BAD, always=always, does=does)


# What an environment does to the bad prompt's episodes, and the reason that is given for dropping them
FAULTS = {
    "hangs": ("time.sleep(1000)", "`respond` gave no answer within 1 s (world.py, line 16)"),
    "dies": ("os._exit(7)", "`respond` ended its process with exit code 7"),
    "reward NaN": ("replies[row] = Reply(reward=float('nan'))", "gave the reward nan"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.wide
def test_an_environment_that_breaks_costs_its_episodes_and_not_the_run(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    does, reason = FAULTS[name]
    timeout_s = 4.0 if name == "hangs" else 30.0
    settings = answered_by(tmp_path, doing(does), environment={"timeout_s": timeout_s})
    code, run, _ = running.train(settings, tmp_path)
    said = capfd.readouterr().err
    assert code == 0, said
    assert "Traceback" not in said
    steps = running.metrics(run)[1:]
    assert [line["reward/dropped"] for line in steps] == [GROUP, GROUP]
    assert all(math.isfinite(line["reward/mean"]) and 0 < line["optim/grad_norm"] < 100 for line in steps)
    failed = [json.loads(line) for line in run.failed_rewards.read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in failed] == [(step, BAD) for step in (1, 2) for _ in range(GROUP)]
    assert all(reason in row["reason"] and row["episode"] for row in failed), failed[0]["reason"]
    warned = [line for line in said.splitlines() if "their rows are dropped" in line]
    assert len(warned) == 2
    assert all(reason in line and BAD in line for line in warned)
    trained = [line for line in samples(run) if line["kind"] == "train"]
    assert all((line["reward"] is None) == (line["prompt"] == BAD) for line in trained)
    assert said.count("was tried row by row") == (name != "reward NaN")  # where the batch was lost
    assert workers_left({os.getpid()}) == []


def test_three_batches_without_answers_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The episodes of one prompt of three: more than a fifth."""
    few: dict[str, Any] = {"task": {"max_samples": 3}, "grpo": {"num_prompts": 3}, "run": {"num_steps": 5}}
    code, run, _ = running.train(answered_by(tmp_path, doing("raise OSError('gone')"), **few), tmp_path)
    assert code == 3
    assert [line["reward/dropped"] for line in running.metrics(run)[1:]] == [GROUP, GROUP]
    said = capsys.readouterr().err
    assert f"3 batches in a row (last: {GROUP} of {3 * GROUP})" in said
    assert "raised OSError: gone (world.py, line 16)" in said


@pytest.mark.wide
def test_odd_text_is_read_cut_and_shown_harmlessly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = "\x1b[2J\u202efound\x00 <eos> <pad> \ud83d <script>alert(1)</script> ;" + "x" * 1_000_000
    settings = answered_by(tmp_path, doing(f"replies[row] = {odd!a}", always=True))
    code, run, _ = running.train(settings, tmp_path)
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "Traceback" not in said.err
    assert "\x1b[2J" not in said.err + said.out
    steps = running.metrics(run)[1:]
    assert [line["reward/dropped"] for line in steps] == [0, 0]
    assert all(line["environment/turns"] > 2 for line in steps)
    assert all(line["environment/observation_tokens"] <= 2 * READ for line in steps)
    shown = said_by_environment(run)
    assert shown
    assert max(map(len, shown)) <= 64 * READ
    assert run.samples.stat().st_size < 300_000
    write_report(run.path)
    assert "<script>alert" not in (run.path / "report.html").read_text()


def test_the_right_answer_is_not_scored_when_the_environment_says_it(tmp_path: Path) -> None:
    """Every answer is `answer <right> .`, and no other reward can come of it than from what the policy wrote."""
    says = "replies[row] = f' answer {answer[row]} .'"
    code, run, _ = running.train(answered_by(tmp_path, doing(says, always=True)), tmp_path)
    assert code == 0
    on_output = 0
    for line in samples(run):
        right = next(turn["content"] for turn in line["episode"] if turn["role"] == "tool").split()[1]
        own = "\n".join(turn["content"] for turn in line["episode"] if turn["role"] == "assistant").split()
        answers = own[own.index("answer") + 1 :] if "answer" in own else []
        assert line["rewards"]["lookup"] == float(answers in ([right], [right, "."]))
        on_output += line["rewards"]["lookup"] == 0.0
    assert on_output > 10


def test_an_environment_that_never_says_done_is_ended_by_the_turns(tmp_path: Path) -> None:
    settings = answered_by(tmp_path, doing("replies[row] = ''", always=True), generation={"max_new_tokens": 60})
    _, run, _ = running.train(settings, tmp_path)
    cut_off = [line for line in samples(run) if line["finish_reason"] == "turns"]
    assert len(cut_off) > 10
    assert {line["finish_reason"] for line in samples(run)} <= {"turns", "length"}
    roles = [turn["role"] for turn in cut_off[0]["episode"]]
    assert roles.count("assistant") == 3
    for line in running.metrics(run)[1:]:
        assert line["environment/out_of_turns"] + line["completion/truncated"] == pytest.approx(1.0)
