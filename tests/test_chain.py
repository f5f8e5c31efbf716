"""examples/sentiment.sh: each command runs, with two steps of training, and the last prints one table."""

import json
import shlex
from pathlib import Path

import pytest

from examples.embedded_models import reviews
from tinyrl.cli.commands import app

SCRIPT = Path(__file__).parents[1] / "examples" / "sentiment.sh"
SHORT = ["run.num_steps=2", "run.eval_prompts=8", "run.threads=1"]


def commands() -> list[list[str]]:
    """Return the script's commands, as words."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("tinyrl ", "python -m examples."))]


@pytest.mark.slow
def test_the_chain_runs_from_text_to_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reviews, "FILES", (("", "train", 64), (".eval", "eval", 16)))
    first, *others = commands()
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
