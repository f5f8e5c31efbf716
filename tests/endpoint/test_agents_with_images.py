"""Agents whose calls have images: what they sampled is what is trained, and images tell conversations apart."""

from __future__ import annotations

import json
from base64 import b64encode
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.images import image_cache, image_file, png  # noqa: F401  a fixture
from tests.tiny_vision import tiny_vision
from tests.training.rows import write_rows
from tinyrl.endpoint.agent_episode import is_same
from tinyrl.workers.loading import use_of

AGENT = '''
import openai


def play(row, base_url, api_key, model):
    """Ask about the row's picture, go on in text, then show the picture once more."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    def say(messages):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=5)
        return messages + [{"role": "assistant", "content": answer.choices[0].message.content}]

    chat = say(row["prompt"])
    chat = say(chat + [{"role": "user", "content": "sure?"}])
    again = [part for part in row["prompt"][0]["content"] if part["type"] == "image_url"]
    return say(chat + [{"role": "user", "content": again}])[-1]["content"]
'''


ON_TEXT = '''
import openai


def play(row, base_url, api_key, model):
    """Show a picture that no row has, beside a tool that only a provider runs."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    shown = {"type": "image_url", "image_url": {"url": row["shown"]}}
    messages = [{"role": "user", "content": [{"type": "text", "text": row["prompt"]}, shown]}]
    tools = [{"type": "custom", "custom": {"name": "apply_patch"}}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=5, tools=tools)
    return answer.choices[0].message.content
'''


def letters(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """Reward different characters."""
    return [float(len({*str(completion)})) for completion in completions]


@pytest.mark.slow  # Fast: test_agents.py for a picture behind an answer, and test_agents_by_family.py.
@pytest.mark.usefixtures("image_cache")
@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_calls_with_images_are_trained_as_they_were_sampled(family: str, tmp_path: Path) -> None:
    """An image behind an answer begins another row, so that a row's images are all in its prompt."""
    (tmp_path / "agents.py").write_text(AGENT, encoding="utf-8")
    rows = list[dict[str, Any]]()
    for number in range(4):
        image_file(tmp_path / f"{number}.png", color=(60 * number, 9, 9), size=(32, 32))
        rows.append({"prompt": "what?", "image": f"{number}.png"})
    data = str(write_rows(tmp_path / "rows.jsonl", rows))
    config = running.config(
        "grpo",
        tiny_vision(family, tmp_path / "base"),
        task={"name": "rows", "data": data, "eval_data": data},
        environment={"agent": f"{tmp_path / 'agents.py'}:play", "max_concurrency": 2},
        reward={"functions": [{"use": use_of(partial(letters))}]},
        generation={"max_prompt_tokens": 128, "max_new_tokens": 32},
        run={"num_steps": 1, "eval_every": 0, "eval_prompts": 0},
    )
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    line = running.metrics(run)[-1]
    assert line["environment/turns"] == 3
    assert line["policy/sampling_gap"] < 1e-5
    [first, *_] = [json.loads(line) for line in run.samples.read_text().splitlines()]
    messages = [conversation["messages"] for conversation in first["conversations"]]
    assert [len(one) for one in messages] == [4, 2]
    assert [bool(one[0].get("images")) for one in messages] == [True, True]


@pytest.mark.usefixtures("image_cache")
def test_images_are_read_where_rows_are_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With model.with_images=true: the tower is tried before the first step. A tool that is left out is noted once."""
    (tmp_path / "agents.py").write_text(ON_TEXT, encoding="utf-8")
    url = f"data:image/png;base64,{b64encode(png(size=(32, 32))).decode()}"
    data = str(write_rows(tmp_path / "rows.jsonl", [{"prompt": "what?", "shown": url} for _ in range(4)]))
    config = running.config(
        "grpo",
        tiny_vision("smolvlm", tmp_path / "base"),
        task={"name": "rows", "data": data, "eval_data": data},
        model={"with_images": True},
        environment={"agent": f"{tmp_path / 'agents.py'}:play", "max_concurrency": 2},
        reward={"functions": [{"use": use_of(partial(letters))}]},
        generation={"max_prompt_tokens": 128, "max_new_tokens": 32},
        grpo={"num_prompts": 2, "group_size": 2},
        run={"num_steps": 1, "eval_every": 0, "eval_prompts": 0},
    )
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    line = running.metrics(run)[-1]
    assert line["reward/dropped"] == 0
    assert line["policy/sampling_gap"] < 1e-5
    [first, *_] = [json.loads(line) for line in run.samples.read_text().splitlines()]
    assert first["conversations"][0]["messages"][0]["images"]
    assert capfd.readouterr().err.count("apply_patch") == 1


def test_another_image_is_another_message() -> None:
    """As when an agent asks the same of each picture."""

    def message(digit: str) -> dict[str, Any]:
        entry = {"path": "/a.png", "sha256": digit * 64, "size": [4, 2]}
        return {"role": "user", "content": "\ufffcwhat?", "images": [entry]}

    assert is_same(message("a"), message("a"), stops=[])
    assert not is_same(message("a"), message("b"), stops=[])
