"""Reward functions that break in the middle of a run.

The run survives; the rows at fault are dropped, counted and kept for reading, and their prompt is named. Only a
reward that keeps failing stops it.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import running
from tests.faults.children import workers_left
from tests.tiny_models import tiny_reward_model
from tests.trainers.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.runs.diagnosis import findings
from tinyrl.runs.records import read_run
from tinyrl.runs.run_dir import RunDir

PROMPTS, GROUP = 8, 2
BAD = "say bad things:"
REWARD = """
    import ctypes, os, re, signal, sys, time
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
IN_SECOND_BATCH = f"calls == 2 and row == 0 and len(prompts) == {PROMPTS * GROUP}"


@dataclass
class Fault:
    """What a reward does, when, and the result: rows dropped in each step, the message (None: none)."""

    code: str
    reason: str | None
    when: str = IN_BAD_ROWS
    dropped: list[int] = field(default_factory=lambda: [GROUP, GROUP])
    timeout_s: float = 30.0
    failed: bool = True  # dropped rows failed; otherwise the reward does not apply to them


FAULTS = {
    "raises": Fault("raise KeyError('judge')", "`score` raised KeyError: 'judge' (rewards.py, line 13)"),
    "NaN": Fault("scores[row] = float('nan')", "`score` returned NaN"),
    "inf": Fault("scores[row] = float('-inf')", "`score` returned -inf"),
    "more than a float32 holds": Fault("scores[row] = 1e39", "`score` returned 1e+39, a number beyond 1e+12"),
    "a string": Fault("scores[row] = '1'", "`score` returned a str ('1'), not a number"),
    "None": Fault("scores[row] = None", None, failed=False),
    "too few": Fault("return scores[1:]", "`score` returned a list of 15 for a batch of 16", IN_SECOND_BATCH, [0, 16]),
    "nothing": Fault("return None", "`score` returned NoneType, not a list", IN_SECOND_BATCH, [0, 16]),
    "hangs": Fault("time.sleep(1000)", "`score` gave no answer within 1 s (rewards.py, line 13)", timeout_s=1.0),
    "segfaults": Fault("os.kill(os.getpid(), signal.SIGSEGV)", "`score` died of SIGSEGV"),
    "exits": Fault("sys.exit(5)", "`score` ended its process with exit code 5"),
    "raises once": Fault(
        "if not Path(__file__).with_name('raised').exists(): "
        "Path(__file__).with_name('raised').touch(); raise OSError('the network blinked')",
        None,
        IN_SECOND_BATCH,
        [0, 0],
    ),
    "prints a lot": Fault("print('flood ' * 100_000, flush=True)", None, dropped=[0, 0]),
}
SLOW = ("hangs", "exits", "nothing", "more than a float32 holds")


def settings_for(model: Path, folder: Path, code: str, **sections: Any) -> Config:
    """Two steps over eight prompts, all in each step, one of them bad."""
    good = [f"say {a}:" for a in "abcdefg"]
    for name, prompts in (("rows", [*good, BAD]), ("eval", good)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    (folder / "rewards.py").write_text(code)
    task = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "eval.jsonl")}
    reward = {"functions": [{"use": f"{folder / 'rewards.py'}:score"}], **sections.pop("reward", {})}
    few = {"num_steps": 2, "eval_every": 0, "eval_prompts": 4, "save_every": 1, **sections.pop("run", {})}
    grpo = {"num_prompts": PROMPTS, "group_size": GROUP}
    return running.config("grpo", model, task=task, reward=reward, grpo=grpo, run=few, **sections)


def code_of(fault: str, when: str) -> str:
    return textwrap.dedent(REWARD).format(rows=PROMPTS * GROUP, when=when, fault=fault)


def failed_rows(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.failed_rewards.read_text().splitlines()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in FAULTS])
@pytest.mark.wide
def test_a_reward_that_breaks_costs_its_rows_and_not_the_run(
    name: str, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    reward = {"timeout_s": fault.timeout_s}
    code, run, _ = running.train(
        settings_for(model, tmp_path, code_of(fault.code, fault.when), reward=reward), tmp_path
    )
    said = capfd.readouterr().err
    assert code == 0, said
    assert [line["reward/dropped"] for line in running.metrics(run)[1:]] == fault.dropped
    assert all(
        0 <= line["optim/grad_norm"] < 100 and line["optim/skipped_steps"] == 0 for line in running.metrics(run)[1:]
    )
    warned = [line for line in said.splitlines() if "rewards failed and their rows are dropped" in line]
    if fault.reason is None:
        assert warned == []
        assert not run.failed_rewards.exists()
    else:
        steps = [step for step, dropped in enumerate(fault.dropped, 1) if dropped]
        assert len(warned) == len(steps), said
        assert all(fault.reason in line and "Prompt 'say " in line for line in warned), said
        assert fault.when != IN_BAD_ROWS or all(BAD in line for line in warned)
        rows = failed_rows(run)
        assert [row["step"] for row in rows] == [step for step in steps for _ in range(fault.dropped[step - 1])]
        assert all(fault.reason in row["reason"] and isinstance(row["completion"], str) for row in rows)
        assert fault.when != IN_BAD_ROWS or {row["prompt"] for row in rows} == {BAD}
    assert "flood" not in said
    assert said.count("was tried row by row") == (name in ("raises", "hangs", "segfaults", "exits", "raises once"))
    assert workers_left({os.getpid()}) == []


# More than a fifth of the rows fail, in as many batches as the name says


def breaking_in(batches: str, *, stop_at: int = -1) -> str:
    """Code of a reward that gives no score to half of the rows of some batches, and sends the run a SIGTERM in one.

    Batches are counted in a file, so that a resume goes on counting.
    """
    return textwrap.dedent(f"""
        import os, signal
        from pathlib import Path

        def score(prompts, completions, **columns):
            scores = [float(len(set(completion))) for completion in completions]
            if len(prompts) == {PROMPTS * GROUP}:
                counter = Path(__file__).with_name("batches")
                batch = len(counter.read_text()) if counter.exists() else 0
                counter.write_text("x" * (batch + 1))
                if batch in {batches}:
                    scores[::2] = [float("nan")] * {PROMPTS * GROUP // 2}
                if batch == {stop_at}:
                    os.kill({os.getpid()}, signal.SIGTERM)
            return scores
    """)


def test_a_reward_that_never_applies_stops_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code_of_none = "def score(prompts, completions, **columns):\n    return [None] * len(prompts)"
    code, run, _ = running.train(settings_for(model, tmp_path, code_of_none, run={"num_steps": 8}), tmp_path)
    assert code == 3
    assert len(running.metrics(run)[1:]) == 2
    assert "rewards dropped" in [one.name for one in findings(read_run(run.path))]
    assert "No completion got a reward, 3 batches in a row (last: 16 rows)" in capsys.readouterr().err


def test_a_reward_model_without_numbers_stops_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only tokens past the few that loading tries have no numbers."""
    folder = tiny_reward_model(tmp_path / "reward")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][9:] = math.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reward = {"functions": [], "model": str(folder)}
    code, run, _ = running.train(settings_for(model, tmp_path, "", reward=reward, run={"num_steps": 8}), tmp_path)
    assert code == 3
    assert "(last: 16 of 16). Prompt 'say" in (said := capsys.readouterr().err)
    assert "the reward model gave no number to learn from" in said
    assert len(failed_rows(run)) == 3 * 16


@pytest.mark.slow
def test_what_a_reward_prints_is_in_the_runs_log(model: Path, tmp_path: Path) -> None:
    talking = "def score(prompts, completions):\n    print('judging', len(prompts))\n    return [1.0] * len(prompts)"
    settings = settings_for(model, tmp_path, talking, run={"num_steps": 3})
    _, run, looks = running.train(settings, tmp_path, name="whole")
    steps = ["score: judging 3", *["score: judging 4"] * 2, *["score: judging 16"] * 3, *["score: judging 4"] * 2]
    log = run.path / "reward_output.log"
    assert log.read_text().splitlines() == steps
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks * 2 // 3)
    assert code == 75
    assert running.go_on(stopped) == 0
    said = (stopped.path / "reward_output.log").read_text().splitlines()
    assert said[:4] == steps[:4]
    assert said[said.index("--- resumed ---") + 1] == "score: judging 3"
    assert said[-2:] == steps[-2:]


@pytest.mark.slow
def test_three_bad_batches_in_a_row_stop_the_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two do not, if a good one follows."""
    settings = settings_for(model, tmp_path, breaking_in("(0, 1, 3, 4, 5)"), run={"num_steps": 8})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 3
    assert [line["reward/dropped"] for line in running.metrics(run)[1:]] == [8, 8, 0, 8, 8]
    assert "more than 20% of the rows, 3 batches in a row (last: 8 of 16). Prompt 'say" in capsys.readouterr().err
    assert {row["step"] for row in failed_rows(run)} == {1, 2, 4, 5, 6}


def test_bad_batches_before_a_stop_count_after_it(model: Path, tmp_path: Path) -> None:
    """The first of four bad batches counts, the run is stopped at the second (which may have to be sampled again), and
    two after that are enough. If the first were forgotten, the run would go on to its end.
    """
    settings = settings_for(model, tmp_path, breaking_in("(0, 1, 2, 3)", stop_at=1), run={"num_steps": 8})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 75
    assert running.go_on(run) == 3


@pytest.mark.slow
def test_failed_rows_stand_once_in_their_file_after_a_resume(model: Path, tmp_path: Path) -> None:
    """Stopped inside the second step, whose failures are recorded again by the resume and replace the first record."""
    settings = settings_for(model, tmp_path, code_of("scores[row] = float('nan')", IN_BAD_ROWS), run={"num_steps": 3})
    _, whole, looks = running.train(settings, tmp_path, name="whole")
    for share in (0.5, 0.7):
        name = f"stopped-{share}"
        code, run, _ = running.train(settings, tmp_path, name=name, stop_at=int(looks * share))
        assert code == 75
        assert running.go_on(run) == 0
        assert_same(whole, run, 3)
        assert run.failed_rewards.read_bytes() == whole.failed_rewards.read_bytes()
    assert len(failed_rows(whole)) == 3 * GROUP
