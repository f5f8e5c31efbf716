"""A critic that starts from what a run has learnt: a PPO run's critic, a reward model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import running
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reward_model import load_reward_model
from tinyrl.models.states import last_states
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.runs.launched import Options
from tinyrl.runs.resolve import resolve
from tinyrl.runs.run_dir import RunDir

PROMPTS, RESPONSES = [[5, 6, 7], [8, 9]], [[10, 11, 12], [13, 14]]
FULL = {"lora": {"enabled": False}}
SEPARATE = {"critic": {"kind": "separate"}}


def load(config: Config) -> Collector:
    return load_collector(resolve(config), options=Options(device="cpu"))


def values(parts: Collector) -> Tensor:
    roles = parts.policy
    batch = roles.batch(PROMPTS, RESPONSES)
    with torch.no_grad(), roles.acting(roles.value_role):
        states = None if roles.value_role == "critic" else roles.policy_states(batch)
        return roles.values(batch, states=states)


def learnt(config: Config, folder: Path, name: str) -> tuple[RunDir, Tensor]:
    """A run of two steps, and what its critic thinks at the end."""
    code, run, _ = running.train(config, folder, name=name)
    assert code == 0
    parts = load(run.read_config())
    start = values(parts)
    parts.policy.load(run.checkpoints / "step-000002")
    end = values(parts)
    parts.close()
    assert float((end - start).abs().max()) > 1e-3
    return run, end


def ppo(base: Path, **sections: Any) -> Config:
    rates = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2}
    return running.config("ppo", base, **{"optim": rates, "run": {"num_steps": 2}, **sections})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"lora": {"r": 3}}, {}),  # another rank than this run's adapters have
        ({**FULL, **SEPARATE}, SEPARATE),  # a full model under new adapters, which are zero
        # whose policy, which it reads, has not moved
        ({"critic": {"kind": "shared-detached", "warmup_steps": 2}}, {"critic": {"kind": "shared"}}),
    ],
    ids=["adapter of another rank", "full under adapters", "head alone"],
)
@pytest.mark.wide
def test_a_run_goes_on_with_the_critic_of_another(
    first: dict[str, Any], second: dict[str, Any], tiny: TinyModels, tmp_path: Path
) -> None:
    run, end = learnt(ppo(tiny("llama"), **first), tmp_path, "first")
    critic = {"path": str(run.path), **second.get("critic", {})}
    begun = load(ppo(tiny("llama"), critic=critic))
    torch.testing.assert_close(values(begun), end, rtol=1e-5, atol=1e-6)
    begun.close()


@pytest.mark.slow
def test_a_shared_critic_goes_with_its_policy(tiny: TinyModels, tmp_path: Path) -> None:
    run, end = learnt(ppo(tiny("llama"), critic={"kind": "shared", "warmup_steps": 0}), tmp_path, "first")
    critic = {"kind": "shared", "path": str(run.path)}
    begun = load(ppo(tiny("llama"), model={"adapter": str(run.path)}, critic=critic))
    torch.testing.assert_close(values(begun), end, rtol=1e-5, atol=1e-6)
    begun.close()


@pytest.mark.slow
def test_a_critic_that_began_with_a_critic_that_began_with_a_model(tiny: TinyModels, tmp_path: Path) -> None:
    """Adapters on a base of their own, which the configuration of the run that made them names."""
    other = str(tiny("llama", seed=3))
    own = SEPARATE["critic"]
    first, of_first = learnt(ppo(tiny("llama"), critic={**own, "path": other}), tmp_path, "first")
    second, end = learnt(ppo(tiny("llama"), critic={**own, "path": str(first.path)}), tmp_path, "second")
    state = json.loads((second.checkpoints / "step-000002/state.json").read_text())
    assert "critic.path: critic/adapter_model.safetensors" in state["sources"]["files"]
    fresh = load(second.read_config())
    torch.testing.assert_close(values(fresh), of_first, rtol=1e-5, atol=1e-6)
    fresh.close()
    begun = load(ppo(tiny("llama"), critic={**own, "path": str(second.path)}))
    torch.testing.assert_close(values(begun), end, rtol=1e-5, atol=1e-6)
    begun.close()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [{"prompt": f"{a}{b}:", "chosen": "yes" + a, "rejected": "no" + a} for a in "abcdefgh" for b in "abcd"]
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.wide
def test_a_critic_starts_with_the_scores_of_a_reward_model(
    lora: bool, tiny: TinyModels, rows: Path, tmp_path: Path
) -> None:
    """Its value after the last token is the reward of the whole text, centre included."""
    made = {
        "method": "reward", "model": {"path": str(tiny("llama"))}, "lora": {"enabled": lora},
        "task": {"data": str(rows)}, "optim": {"learning_rate": 1e-2 if lora else 1e-3},
        "run": {"num_steps": 5, "eval_every": 0, "threads": 1},
    }  # fmt: skip
    code, run, _ = running.train(Config.model_validate(made), tmp_path, name="rm")
    assert code == 0
    reward = {"functions": [], "model": str(run.path)}
    critic = {"path": str(run.path), "kind": "adapter" if lora else "separate"}
    parts = load(ppo(tiny("llama"), critic=critic, reward=reward))
    roles = parts.policy
    batch = roles.batch(PROMPTS, RESPONSES, last_tokens=True)
    with torch.no_grad(), roles.acting("critic"):
        assert roles.value_head is not None
        got = roles.value_head(last_states(roles.backbone("critic"), batch))
    if lora:
        with torch.no_grad(), roles.acting("reward"):
            wanted = roles.scores(batch).tolist()
    else:
        folder = str(run.checkpoints / "step-000005")
        model = load_reward_model(folder, dtype=torch.float32, label=None, device=torch.device("cpu"))
        texts = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
        wanted = model.scores(texts, micro_batches=MicroBatches(torch.device("cpu"), 512))
    assert got.tolist() == pytest.approx(wanted, abs=1e-5)
    assert abs(wanted[0] - wanted[1]) > 1e-3
    parts.close()
