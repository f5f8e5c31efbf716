"""The model card: data, rewards, curve, evaluation and licence, and nothing that a reader's page could be harmed by."""

from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.schema import Config
from tinyrl.tools.export import curve, licence_of, model_card

STEPS: dict[int, dict[str, Any]] = {
    0: {"eval/reward_mean": 0.25, "eval/reward_ci": [0.2, 0.3], "eval/kl": 0.0},
    10: {"reward/mean": 0.5},
    20: {"eval/reward_mean": 0.75, "eval/reward_ci": [0.7, 0.8], "eval/kl": 1.5},
    30: {"eval/reward_mean": 0.9, "eval/reward_ci": [0.85, 0.95], "eval/kl": 2.0},
}


def card(step: int = 20, *, dtype: str | None = None, **sections: Any) -> str:
    config = Config.model_validate({"method": "grpo", "model": {"path": "Qwen/Qwen3-0.6B"}, **sections})
    return model_card(config, STEPS, name="my-run", step=step, dtype=dtype, notes=[], picture=False)


def test_it_says_what_it_was_trained_from_on_and_for():
    reward = {"functions": [{"use": "/somewhere/private/rewards.py:score", "weight": 0.5}]}
    text = card(task={"data": "openai/gsm8k:main", "name": "gsm8k"}, reward=reward)
    assert text.startswith('---\nlibrary_name: "peft"\nbase_model: "Qwen/Qwen3-0.6B"\n')
    assert 'datasets: ["openai/gsm8k"]' in text
    assert "- rewards.py:score, weight 0.5" in text
    assert "/somewhere" not in text  # a folder of this machine is nobody's business


def test_the_lines_that_use_an_adapter_load_its_base():
    assert 'from_pretrained("Qwen/Qwen3-0.6B")\nmodel = PeftModel' in card()
    text = card(model={"path": "starter"})
    code = text.partition("```python\n")[2].partition("\n```")[0]
    code = code.partition("model = PeftModel")[0]
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["model"].num_parameters() > 0


def test_the_curve_and_the_evaluation_end_at_the_checkpoint():
    text = card()
    assert "| 0 | 0.250 | 0 |" in text
    assert "| 20 | 0.750 | 1.500 |" in text
    assert "0.900" not in text
    assert "| reward_mean | 0.750 (95 %: 0.700 to 0.800) |" in text


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    lines = curve({step: {"eval/reward_mean": step / 1000} for step in range(0, 1001, 5)}).splitlines()
    assert len(lines) == 2 + 12
    assert lines[2].startswith("| 0 |")
    assert lines[-1].startswith("| 1000 |")


def test_the_licence_is_the_bases_own(tmp_path: Path):
    assert licence_of("starter") == "apache-2.0"
    assert licence_of("Qwen/Qwen3-0.6B") is None
    assert "not stated in its files here" in card()
    (tmp_path / "LICENSE").write_text("\nMIT License\n\nCopyright")
    assert licence_of(str(tmp_path)) == "MIT License"
    (tmp_path / "README.md").write_text("---\nlicense: llama3.2\n---\n# a model")
    assert licence_of(str(tmp_path)) == "llama3.2"


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "a\x1b[31mb", "a\u202eb", "| cell |", "[x](http://y)"]
)
def test_hostile_names_are_text(hostile: str):
    text = card(task={"data": f"{hostile.replace('/', '')}.jsonl"})
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[x](http" not in text
