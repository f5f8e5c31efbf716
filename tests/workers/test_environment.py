"""What people's code sees of the environment: nothing of a launcher."""

from pathlib import Path

import pytest

from tinyrl.rewards.functions import FunctionReward

CODE = """
import os

def launched(prompts, completions, **columns):
    return [float(any(name in os.environ for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR")))]
"""


def test_a_reward_is_none_of_the_launched_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in it would wait for the other processes."""
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rewards.py").write_text(CODE)
    with FunctionReward(f"{tmp_path / 'rewards.py'}:launched") as reward:
        assert reward(["?"], ["a"], {}).scores == [0.0]
