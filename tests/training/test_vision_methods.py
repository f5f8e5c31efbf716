"""Methods beside GRPO and SFT on rows with images: runs that are resumed to the bit."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.images import image_file
from tests.tiny_vision import FAMILIES, tiny_vision
from tests.training.rows import write_rows
from tinyrl.config.schema import Config
from tinyrl.workers.loading import use_of

FULL = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-3}}
PPO: dict[str, Any] = {"num_prompts": 4, "minibatch_size": 4, "num_epochs": 1}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo-separate": ("ppo", {"critic": {"kind": "separate"}}),
    "ppo-separate-full": ("ppo", {"critic": {"kind": "separate"}, **FULL}),
    "ppo-adapter": ("ppo", {}),
    "ppo-shared": ("ppo", {"critic": {"kind": "shared"}}),
    "ppo-shared-detached": ("ppo", {"critic": {"kind": "shared-detached"}}),
    "dpo": ("dpo", {"dpo": {"batch_size": 2}}),
    "dpo-full": ("dpo", {"dpo": {"batch_size": 2}, **FULL}),
    "dpo-kto": ("dpo", {"dpo": {"batch_size": 2, "loss": "kto"}}),
    "dpo-orpo": ("dpo", {"dpo": {"batch_size": 2, "loss": "orpo"}}),
    "reward": ("reward", {}),
    "reward-labels": ("reward", {"task": {"columns": {"unused": "rejected", "completion": "chosen"}}}),
}
FAST = "smolvlm"
ORDER = sorted(FAMILIES, key=lambda family: family != FAST)  # of which the first is fast


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("vision")
    return cache(lambda family: tiny_vision(family, root / family))


def letters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Reward different characters."""
    return [float(len({*str(completion)})) for completion in completions]


def settings(name: str, base: Path, rows: Path, *, num_steps: int) -> Config:
    """The settings of a run of RUNS on six pictures of one colour each, which are written into a folder."""
    method, own = RUNS[name]
    lines = list[dict[str, Any]]()
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how green?"}]}]
    for number in range(6):
        image_file(rows / f"{number}.png", color=(30 * number, 200, 90), size=(32, 32))
        pair = {"chosen": str(number), "rejected": "none of it", "label": number % 2}
        lines.append({"prompt": prompt, "image": f"{number}.png", "answer": str(number), **pair})
    data = str(write_rows(rows / "rows.jsonl", lines))
    sections: dict[str, Any] = {
        "task": {"name": "rows", "data": data, "eval_data": data, **own.get("task", {})},
        "run": {"num_steps": num_steps, "eval_every": 1},
    }
    if method == "ppo":
        talk = [*prompt, {"role": "assistant", "content": "quite"}]
        text = write_rows(rows / "text.jsonl", [{"messages": talk, "image": "0.png"}, {"text": "green"}])
        sections["ppo"] = {**PPO, "ptx_data": str(text), "ptx_coef": 0.1}
        sections["generation"] = {"max_prompt_tokens": 256}
        sections["reward"] = {"functions": [{"use": use_of(partial(letters))}]}
    return running.config(method, base, **{**own, **sections})


@pytest.mark.wide
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("family", ORDER)
def test_a_run_that_is_stopped_and_resumed_is_bit_equal(folders: Any, family: str, name: str, tmp_path: Path) -> None:
    config = settings(name, folders(family), tmp_path, num_steps=2)
    code, whole, looks = running.train(config, tmp_path, name="whole")
    assert code == 0
    code, stopped, _ = running.train(config, tmp_path, name="stopped", stop_at=int(looks * 0.8))
    assert code == 75
    assert running.go_on(stopped) == 0
    assert running.lasting(stopped) == running.lasting(whole)
    mine, its = running.weights(whole, 2), running.weights(stopped, 2)
    assert mine.keys() == its.keys()
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []
