"""Every architecture that people train, through training, a stop and a resume, and an evaluation."""

from pathlib import Path

import pytest

from tests import running
from tests.architectures import MORE_KINDS
from tests.tiny_models import TinyModels
from tests.trainers.test_resume import assert_same
from tinyrl.evaluation.targets import Asked
from tinyrl.evaluation.versus import evaluate_target
from tinyrl.rollout.components import Options

TRAINED = ("llama", "qwen2", "qwen3", "gemma2", "gpt2", *MORE_KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.parametrize("kind", TRAINED)
def test_an_architecture_trains_resumes_and_is_evaluated(
    kind: str, method: str, tiny: TinyModels, tmp_path: Path
) -> None:
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
    asked = Asked(num_prompts=4, samples=2)
    result = evaluate_target(str(whole.path), asked, vs="base", options=Options(device="cpu"))
    assert abs(result["kl"]) > 1e-3  # of eight samples, so it may be below 0
    assert result["other"]["kl"] == pytest.approx(0.0, abs=1e-4)
