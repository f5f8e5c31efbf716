"""Rewards and environments that break, talk nonsense or never end, in the middle of a run.

The run survives; rows at fault are dropped, counted and kept for reading. Only a reward that keeps failing stops it.
An environment's text is cut, read and never scored.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import running
from tests.faults.children import workers_left
from tests.faults.lookup_runs import GROUP, PROMPTS, READ, answered_by, said_by_environment, samples
from tests.tiny_models import tiny_reward_model
from tinyrl.config.schema import Config
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.run_dir import RunDir
from tinyrl.starter.lookup import lookup_rows
from tinyrl.tools.report import write_report
from tinyrl.training.launch import start

BAD = "say bad things:"
REWARD = """
    import os, signal, time
    from pathlib import Path

    calls = 0  # of training batches, in this process

    def score(prompts, completions, **columns):
        global calls
        calls += len(prompts) == {rows}
        scores = [float(len(set(completion))) for completion in completions]
        for row, prompt in enumerate(prompts):
            if {when}:
                {fault}
        return scores
"""
IN_BAD_ROWS = "'bad' in prompt"
REWARD_FAULTS = {  # what a reward does, when, and the reason for dropping rows (None: nothing is dropped)
    "raises": ("raise KeyError('judge')", IN_BAD_ROWS, "`score` raised KeyError: 'judge' (rewards.py, line 13)"),
    "hangs": ("time.sleep(1000)", IN_BAD_ROWS, "`score` gave no answer within 1 s (rewards.py, line 13)"),
    "segfaults": ("os.kill(os.getpid(), signal.SIGSEGV)", IN_BAD_ROWS, "`score` died of SIGSEGV"),
    "raises once": (
        "if not Path(__file__).with_name('raised').exists(): "
        "Path(__file__).with_name('raised').touch(); raise OSError('the network blinked')",
        f"calls == 2 and row == 0 and len(prompts) == {PROMPTS * GROUP}",
        None,
    ),
}
BAD_EPISODE = lookup_rows("train", num_rows=PROMPTS)[0]["prompt"]
ANSWERING = """
    import os, time

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
ENVIRONMENT_FAULTS = {  # what an environment does to the bad prompt's episodes, and the reason for dropping them
    "dies": ("os._exit(7)", "`respond` ended its process with exit code 7"),
    "reward NaN": ("replies[row] = Reply(reward=float('nan'))", "gave the reward NaN"),
    "hangs": ("time.sleep(1000)", "`respond` gave no answer within 1 s (world.py, line 16)"),
}


def rewarded(model: Path, folder: Path, code: str, **sections: Any) -> Config:
    """Two steps over six prompts, all in each step, one of them bad."""
    good = [f"say {a}:" for a in "abcdefg"[: PROMPTS - 1]]
    for name, prompts in (("rows", [*good, BAD]), ("eval", good)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    (folder / "rewards.py").write_text(code)
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    reward = {"functions": [{"use": f"{folder / 'rewards.py'}:score"}], **sections.pop("reward", {})}
    few = {"num_steps": 2, "eval_every": 0, "eval_prompts": 4, "save_every": 1, **sections.pop("run", {})}
    grpo = {"num_prompts": PROMPTS, "group_size": GROUP}
    return running.config("grpo", model, task=task, reward=reward, grpo=grpo, run=few, **sections)


def doing(does: str, *, always: bool = False) -> str:
    return textwrap.dedent(ANSWERING).format(bad=BAD_EPISODE, always=always, does=does)


def failed_rows(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.failed_rewards.read_text().splitlines()]


def assert_bad_rows_are_dropped(settings: Config, folder: Path, bad: str, reason: str | None) -> RunDir:
    code, run, _ = running.train(settings, folder)
    assert code == 0
    steps = running.metrics(run)[1:]
    assert [line["reward/dropped"] for line in steps] == [GROUP * (reason is not None)] * 2
    assert all(math.isfinite(line["reward/mean"]) and 0 < line["optim/grad_norm"] < 100 for line in steps)
    if reason is None:
        assert not run.failed_rewards.exists()
    else:
        rows = failed_rows(run)
        assert [(row["step"], row["prompt"]) for row in rows] == [(step, bad) for step in (1, 2) for _ in range(GROUP)]
        assert all(reason in row["reason"] for row in rows), rows[0]["reason"]
        trained = [line for line in samples(run) if line["kind"] == "train"]
        assert all((line["reward"] is None) == (line["prompt"] == bad) for line in trained)
    assert workers_left({os.getpid()}) == []
    return run


@pytest.mark.parametrize("name", REWARD_FAULTS)
@pytest.mark.wide
def test_a_reward_that_breaks_costs_its_rows_and_not_the_run(name: str, model: Path, tmp_path: Path) -> None:
    fault, when, reason = REWARD_FAULTS[name]
    code = textwrap.dedent(REWARD).format(rows=PROMPTS * GROUP, when=when, fault=fault)
    settings = rewarded(model, tmp_path, code, reward={"timeout_s": 4.0 if name == "hangs" else 30.0})
    assert_bad_rows_are_dropped(settings, tmp_path, BAD, reason)


@pytest.mark.parametrize("name", ENVIRONMENT_FAULTS)
@pytest.mark.wide
def test_an_environment_that_breaks_costs_its_episodes_and_not_the_run(name: str, tmp_path: Path) -> None:
    does, reason = ENVIRONMENT_FAULTS[name]
    settings = answered_by(tmp_path, doing(does), environment={"timeout_s": 4.0 if name == "hangs" else 30.0})
    run = assert_bad_rows_are_dropped(settings, tmp_path, BAD_EPISODE, reason)
    assert all(row["episode"] for row in failed_rows(run))


NEVER = {"num_steps": 2, "eval_prompts": 0}  # with a reward: too few for the guard that counts three batches
RAISES = "raise RuntimeError(prompt)"


@pytest.mark.parametrize(("does", "code"), [(RAISES, 3), (f"if prompt != {BAD_EPISODE!r}: {RAISES}", 0)])
def test_a_run_whose_every_episode_the_environment_failed_exits_3_with_its_error(
    does: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Episodes of one prompt that it did not fail are enough for 0."""
    found, run, _ = running.train(answered_by(tmp_path, doing(does, always=True), run=NEVER), tmp_path)
    assert (found, len(running.metrics(run))) == (code, 3)
    last = capfd.readouterr().err.splitlines()[-1]
    assert ("environment `respond` failed in 12 of 12 episodes" in last) == (code == 3)
    assert ("raised RuntimeError" in last) == (code == 3)


def test_a_run_in_which_no_reward_applies_exits_3_at_its_end(model: Path, tmp_path: Path) -> None:
    """Also where a resume did its last step."""
    settings = rewarded(model, tmp_path, "def score(prompts, **_):\n    return [None] * len(prompts)\n", run=NEVER)
    options = Options(device="cpu")
    how: dict[str, Any] = {"options": options, "output_dir": str(tmp_path), "name": None, "overwrite": False}
    run = start(prepare(settings), command=["test"], until=1, **how)
    assert run.go(report=running.report) == 0
    assert running.go_on(run.folder) == 3
    assert len(running.metrics(run.folder)) == 3


def test_a_reward_model_without_numbers_stops_the_run(model: Path, tmp_path: Path) -> None:
    """Only tokens past the few that loading tries have no numbers."""
    folder = tiny_reward_model(tmp_path / "reward")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][9:] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = rewarded(model, tmp_path, "", reward={"functions": [], "model": str(folder)}, run={"num_steps": 8})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 3
    assert len(failed_rows(run)) == 3 * PROMPTS * GROUP


@pytest.mark.wide
def test_odd_text_is_read_cut_and_shown_harmlessly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """From an environment that is never done: the turns, or the tokens, end its episodes."""
    odd = "\x1b[2J\u202efound\x00 <eos> <pad> \ud83d <script>alert(1)</script> ;" + "x" * 1_000_000
    settings = answered_by(tmp_path, doing(f"replies[row] = {odd!a}", always=True), generation={"max_new_tokens": 60})
    code, run, _ = running.train(settings, tmp_path)
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "Traceback" not in said.err
    assert "\x1b[2J" not in said.err + said.out
    for line in running.metrics(run)[1:]:
        assert line["reward/dropped"] == 0
        assert 2 < line["environment/turns"] <= 3
        assert line["environment/out_of_turns"] + line["completion/truncated"] == pytest.approx(1.0)
        assert line["environment/observation_tokens"] <= 2 * READ
    assert len([line for line in samples(run) if line["finish_reason"] == "turns"]) > 10
    assert 0 < max(map(len, said_by_environment(run))) <= 64 * READ + len("\n[1,000,000 characters left out]\n")
    assert run.samples.stat().st_size < 300_000
    write_report(run.path)
    assert "<script>alert" not in (run.path / "report.html").read_text()
