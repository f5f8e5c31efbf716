"""Two architectures unlike the others (a hybrid inside a vision model, shared keys) through training and a resume."""

from pathlib import Path

import pytest

from tests import running
from tests.tiny_models import TinyModels
from tests.training.test_resume import assert_same


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [("qwen3.5-vl", "grpo"), ("gemma4", "ppo")])
def test_an_architecture_trains_and_resumes(kind: str, method: str, tiny: TinyModels, tmp_path: Path) -> None:
    """Rows short enough for both windows of a tiny model; the reference, the critic and the checkpoints included."""
    sections = {"grpo": {"preset": "grpo"}} if method == "grpo" else {}
    settings = running.config(method, tiny(kind), generation={"max_prompt_tokens": 128}, **sections)
    code, whole, looks = running.train(settings, tmp_path, name="whole")
    assert code == 0
    last = running.metrics(whole)[-1]
    assert last["policy/ratio"] == pytest.approx(1.0, abs=1e-3 if method == "grpo" else 0.5)
    code, stopped, _ = running.train(settings, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    assert_same(whole, stopped, settings.run.num_steps)
