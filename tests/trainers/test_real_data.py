"""Real rows through a real chat tokenizer on a small random Qwen3-style model.

GSM8K and knights-and-knaves, GRPO and PPO.
"""

import shutil
from pathlib import Path

import pytest

from tests import running
from tests.conftest import shared_data
from tests.tiny_models import tiny_model

DATA = shared_data()
pytestmark = pytest.mark.skipif(DATA is None, reason="needs ../shared/data")
ROWS = {"gsm8k": "gsm8k", "knights_and_knaves": "knights-and-knaves"}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-style model with the shared chat tokenizer (6,400 tokens)."""
    assert DATA is not None
    folder = tiny_model(tmp_path_factory.mktemp("chat"), "qwen3", vocabulary=[f"w{i}" for i in range(6397)])
    for stale in ("special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        (folder / stale).unlink(missing_ok=True)
    for file in (DATA / "chat-tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.parametrize(("task", "method"), [("gsm8k", "grpo"), ("knights_and_knaves", "ppo")])
def test_three_steps_on_real_rows_run_and_say_what_design_says(
    task: str, method: str, chat_model: Path, tmp_path: Path
) -> None:
    assert DATA is not None
    folder = DATA / ROWS[task]
    settings = running.config(
        method,
        chat_model,
        task={
            "name": task,
            "data": str(folder / "train.jsonl"),
            "eval_data": str(folder / "test.jsonl"),
            "max_samples": 64,
        },
        generation={"max_new_tokens": 12, "max_prompt_tokens": 480},
        run={"eval_prompts": 4},
    )
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    lines = running.metrics(run)
    assert len(lines) == 4
    assert lines[1]["policy/clipfrac" if method == "grpo" else "value/loss"] is not None
    assert lines[-1]["optim/grad_norm"] > 0
    sample = run.samples.read_text().splitlines()[0]
    assert "<|im_start|>user" in sample  # the chat template was used
