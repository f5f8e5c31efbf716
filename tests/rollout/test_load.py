"""Loading what samples: the limit of prompts, and the columns of an environment."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.tiny_models import POSITIONS, TinyModels
from tinyrl.config.derive import derive_over
from tinyrl.config.schema import Config
from tinyrl.process.launched import Options
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare


def small_config(model: Path, rows: Path, **generation: Any) -> Config:
    task = {"name": "rows", "data": str(rows), "eval_data": str(rows)}
    return running.config("grpo", model, task=task, generation=generation)


def longest_of(config: Config) -> int:
    collector = load_collector(prepare(config), options=Options(device="cpu"))
    try:
        return max(len(prompt.tokens) for prompt in collector.train_prompts)
    finally:
        collector.close()


def test_an_advice_for_a_long_prompt_is_one_that_works(tiny: TinyModels, tmp_path: Path) -> None:
    """A prompt of 400 tokens beside responses of 200: positions are what is short, not generation.max_prompt_tokens."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "x" * 400, "answer": "y"}) + "\n")
    config = small_config(tiny("llama"), rows, max_new_tokens=200)
    with pytest.raises(ValueError, match=f"context length (is|of) {POSITIONS}") as refused:
        longest_of(config)
    advised = re.findall(r"generation\.\w+=\d+(?=[ ,])", str(refused.value).splitlines()[1])
    assert longest_of(derive_over(config, advised)) == 400
    rows.write_text(json.dumps({"prompt": "x" * 500, "answer": "y"}) + "\n")
    with pytest.raises(ValueError, match="No limit"):
        longest_of(config)


def test_a_column_that_the_environment_needs_and_rows_lack_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "x", "answer": "y"}) + "\n")
    game = tmp_path / "game.py"
    config = small_config(tiny("llama"), rows)
    for columns in ("answer, seed, size=3, **more", "anser"):
        game.write_text(f"def respond(prompts, transcripts, {columns}):\n    return ['more'] * len(prompts)\n")
        playing = derive_over(config, [f"environment.name={game}:respond"])
        if "**more" in columns:
            assert longest_of(playing) > 0
        else:
            with pytest.raises(ValueError, match=r"'anser'.*`answer`"):
                longest_of(playing)
