"""Methods beside GRPO and SFT on rows with images: runs that are resumed to the bit."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import running
from tests.images import image_file
from tests.tiny_vision import FAMILIES, MORE, tiny_vision
from tests.training.rows import loaded, write_rows
from tinyrl.config.schema import Config
from tinyrl.data.images import is_image_id
from tinyrl.process.launched import Options
from tinyrl.rollout.collect import Collector
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare
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
    "distill-model": ("distill", {}),
    "distill-model-4bit": ("distill", {"teacher": {"quantization": "4bit"}}),
    "distill-self": ("distill", {"teacher": {"path": "self", "hint": "It is {answer}."}}),
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
    if method == "distill":
        sections["distill"] = {"num_prompts": 4, "on_policy_fraction": 0.5}
        sections["generation"] = {"max_prompt_tokens": 256}
        sections["reward"] = {"functions": []}
    if name.startswith("distill-model"):
        sections["teacher"] = {"path": str(tiny_vision(base.name, rows / "teacher", seed=1)), **own.get("teacher", {})}
    return running.config(method, base, **{**own, **sections})


@pytest.mark.slow  # Fast: test_vision_runs.py resumes GRPO; the pieces of each method are tested below.
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("family", ORDER)
def test_a_run_that_is_stopped_and_resumed_is_bit_equal(folders: Any, family: str, name: str, tmp_path: Path) -> None:
    check_resumed(settings(name, folders(family), tmp_path, num_steps=2), tmp_path)


@pytest.mark.slow  # Fast: models/test_vision_families.py computes what a further family does with a picture.
@pytest.mark.parametrize("family", MORE)
def test_a_run_of_a_further_family_is_resumed_bit_equal(folders: Any, family: str, tmp_path: Path) -> None:
    check_resumed(settings("ppo-adapter", folders(family), tmp_path, num_steps=2), tmp_path)


def check_resumed(config: Config, tmp_path: Path) -> None:
    """Compare a run that is stopped and resumed with a whole one."""
    code, whole, looks = running.train(config, tmp_path, name="whole")
    assert code == 0
    code, stopped, _ = running.train(config, tmp_path, name="stopped", stop_at=int(looks * 0.8))
    assert code == 75
    assert running.go_on(stopped) == 0
    assert running.lasting(stopped) == running.lasting(whole)
    mine, its = running.weights(whole, 2), running.weights(stopped, 2)
    assert mine.keys() == its.keys()
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []


def test_a_teacher_s_hint_is_behind_the_picture(folders: Any, tmp_path: Path) -> None:
    method = loaded(settings("distill-self", folders(FAST), tmp_path, num_steps=1))
    samples = [method.given(prompt) for prompt in method.collector.train_prompts]
    hinted = method.teacher.prompts(samples)
    for prompt, sample in zip(hinted, samples, strict=True):
        images = [token for token in sample.prompt if is_image_id(token)]
        assert [token for token in prompt if is_image_id(token)] == images
        assert len(prompt) > len(sample.prompt)
        assert images


@pytest.fixture(scope="module")
def scored(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Collector:
    """What a PPO run samples and scores with, by a reward adapter that was trained on pictures."""
    folder = tmp_path_factory.mktemp("scored")
    reward = settings("reward", folders(FAST), folder, num_steps=2)
    code, run, _ = running.train(reward, folder, name="reward")
    assert code == 0
    ppo = settings("ppo-adapter", folders(FAST), folder, num_steps=1)
    given = ppo.model_copy(update={"reward": ppo.reward.model_copy(update={"functions": [], "model": str(run.path)})})
    return load_collector(prepare(given), options=Options(device="cpu"))


def test_a_reward_adapter_scores_one_answer_to_one_question_by_its_picture(scored: Collector) -> None:
    first, second, *_ = scored.train_prompts
    assert first.text == second.text
    both = scored.scorer([first, second], [[5, 6], [5, 6]]).scores[:, 0]
    alone = torch.cat([scored.scorer([prompt], [[5, 6]]).scores[:, 0] for prompt in (first, second)])
    assert both[0] != both[1]
    torch.testing.assert_close(both, alone)
