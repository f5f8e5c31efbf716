"""The scripts of examples/: each command runs, with few steps of training, and the last compares what was trained."""

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.embedded_models import reviews
from tinyrl.cli.commands import app

EXAMPLES = Path(__file__).parents[1] / "examples"
SHORT = ["run.num_steps=2", "run.eval_prompts=8", "run.threads=1"]


def commands(script: str) -> list[list[str]]:
    """Return the script's commands, as words."""
    lines = (EXAMPLES / script).read_text(encoding="utf-8").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("tinyrl ", "python "))]


@pytest.mark.slow
def test_the_chain_runs_from_text_to_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reviews, "FILES", (("", "train", 64), (".eval", "eval", 16)))
    first, *others = commands("sentiment.sh")
    assert first == ["python", "-m", "examples.embedded_models.reviews", "data"]
    reviews.write(Path("data"))
    *training, compare = [words[1:] for words in others]
    assert [words[:2] for words in training] == [
        ["train", method] for method in ("sft", "reward", "dpo", "ppo", "ppo", "grpo", "grpo")
    ]
    for words in training:
        assert app([*words, *SHORT, "--device", "cpu"], standalone_mode=False) in (0, None), words
    capsys.readouterr()
    app([*compare, "--num-prompts", "6", "--json", "--device", "cpu"], standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)
    names = [row["target"].split("/")[0] for row in rows]
    assert names == [f"sentiment-{name}" for name in ("sft", "dpo", "ppo", "a2c", "grpo", "rloo")]
    assert all(0 <= row["win_rate"]["mean"] <= 1 for row in rows[1:])
    assert all(row["num_prompts"] == 6 for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the example needs scikit-learn")
def test_the_digits_run_from_pictures_to_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *others = commands("digits_images.sh")
    assert first == ["python", "examples/digits_images.py", "digits"]
    script = str(EXAMPLES / "digits_images.py")
    subprocess.run([sys.executable, script, "digits", "--num-steps", "2"], check=True, capture_output=True)
    *training, compare = [words[1:] for words in others]
    assert [words[:2] for words in training] == [["train", name] for name in ("sft", "grpo", "ppo", "grpo")]
    few = {
        "sft": ["sft.batch_size=4"],
        "grpo": ["grpo.num_prompts=2", "grpo.group_size=2"],
        "ppo": ["ppo.num_prompts=2", "ppo.group_size=2", "ppo.minibatch_size=4"],
    }
    for words in training:
        given = [*words, *SHORT, *few[words[1]], "--device", "cpu"]
        assert app(given, standalone_mode=False) in (0, None), words
    capsys.readouterr()
    app([*compare, "--num-prompts", "6", "--json", "--device", "cpu"], standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)
    assert [row["target"].split("/")[0] for row in rows[1:]] == ["digits-sft", "digits-grpo", "digits-ppo"]
    assert all(row["num_prompts"] == 6 for row in rows)


@pytest.mark.slow
def test_the_five_lists_run_from_text_to_a_report_of_both_credits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, *others = commands("five_lists.sh")
    assert first == ["python", "examples/five_lists.py", "lists"]
    Path("examples").mkdir()
    shutil.copy(EXAMPLES / "five_lists.py", "examples")
    subprocess.run([sys.executable, *first[1:]], check=True)
    *training, report = [words[1:] for words in others]
    for words in training:
        assert app([*words, *SHORT, "--device", "cpu"], standalone_mode=False) in (0, None), words
    assert app(report, standalone_mode=False) in (0, None)
    steps = [json.loads(line) for line in Path("runs/lists-gtpo/metrics.jsonl").read_text().splitlines()]
    assert all("turn/zero_spread" in step for step in steps[1:])
