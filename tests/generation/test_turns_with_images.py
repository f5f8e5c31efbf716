"""Episodes whose prompt shows a picture, answered in text: what is sampled behind it is what is trained."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.images import image_file
from tests.tiny_vision import tiny_vision
from tests.training.rows import write_rows
from tinyrl.workers.loading import use_of

ENVIRONMENT = '''
def respond(prompts, transcripts, images, **columns):
    """Answer one turn of each episode with the name of its picture."""
    return [images[i][0][-5:] if len(t) < 3 else None for i, t in enumerate(transcripts)]
'''


def letters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Reward different characters."""
    return [float(len({*str(completion)})) for completion in completions]


@pytest.mark.wide
@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl", "gemma3"])
def test_turns_behind_a_picture_are_trained_as_they_were_sampled(family: str, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT, encoding="utf-8")
    rows = list[dict[str, Any]]()
    for number in range(4):
        image_file(tmp_path / f"{number}.png", color=(60 * number, 9, 9), size=(32, 32))
        rows.append({"prompt": "what?", "image": f"{number}.png"})
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    config = running.config(
        "grpo",
        tiny_vision(family, tmp_path / "base"),
        task={"name": "rows", "data": data, "eval_data": data},
        environment={"name": f"{tmp_path / 'env.py'}:respond", "max_turns": 3},
        reward={"functions": [{"use": use_of(partial(letters))}]},
        generation={"max_prompt_tokens": 128, "max_new_tokens": 64, "stop": [*"abcdefghijklmnop"]},
        run={"num_steps": 1, "eval_every": 0, "eval_prompts": 0},
    )
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    line = running.metrics(run)[-1]
    assert line["environment/turns"] > 1.5
    assert line["policy/sampling_gap"] < 1e-5
    assert "0.png" in run.samples.read_text()
