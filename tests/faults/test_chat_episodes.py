"""Chats with environment classes as TRL's trainers take them, in a real worker, and cells of Python that never end."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests import running
from tests.faults.lookup_runs import lookup, samples
from tests.tiny_models import EOS, tiny_model
from tinyrl.config.schema import Config
from tinyrl.rollout.load import load_collector
from tinyrl.runs.launched import Options

CALLS = [f'<tool_call>{{"name":"guess","arguments":{{"word":"{word}"}}}}</tool_call>' for word in ("red", "blue")]
BAD_CALL = '<tool_call>{"name":"shout","arguments":{}}</tool_call>'
WORDS = (*CALLS, BAD_CALL, "[user]", "[assistant]", "[tool]", "tools", "guess", "no", "yes", "red", "blue", "a", "hint")
TEMPLATE = (
    "{% if tools %}tools{% for tool in tools %} {{ tool.function.name }}{% endfor %} {% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
).replace("[{{ m.role }}]", "{{ '[' + m.role + ']' }}")
GAME = """
    class Game:
        def reset(self, secret, **row):
            self.secret, self.guesses, self.won = secret, 0, False
            return f" hint {{secret}}"

        def guess(self, word: str) -> str:
            \"\"\"Guess the word.

            Args:
                word: The word.
            \"\"\"
            self.guesses += 1
            self.won = self.won or word == self.secret
            return "yes" if word == self.secret else "no"

        def get_reward(self):
            return {reward}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


def chat_model(folder: Path) -> Path:
    """It says one of a dozen words at random: calls of the tool, calls of none, the end of a turn."""
    tiny_model(folder, "llama", vocabulary=WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def playing(model: Path, folder: Path, *, reward: str = "float(self.won) - 0.1 * self.guesses") -> Config:
    (folder / "game.py").write_text(textwrap.dedent(GAME).format(reward=reward))
    rows = [
        {"prompt": [{"role": "user", "content": f"guess {'a ' * i}"}], "secret": ("red", "blue")[i % 2]}
        for i in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lookup(
        model={"path": str(model)},
        task={"name": "rows", "data": str(folder / "rows.jsonl")},
        environment={"name": f"{folder / 'game.py'}:Game", "max_turns": 3},
        generation={"max_new_tokens": 30, "max_prompt_tokens": 40, "stop": []},
        grpo={"num_prompts": 4, "group_size": 4},
    )


def secret_of(line: dict[str, Any]) -> str:
    return line["prompt"].partition("hint ")[2].split()[0]


@pytest.mark.slow
def test_an_environment_class_plays_a_chat_from_its_opening_to_its_reward(model: Path, tmp_path: Path) -> None:
    settings = playing(model, tmp_path)
    parts = load_collector(settings, options=Options(device="cpu"))
    parts.close()
    assert parts.train_prompts[0].text.startswith("tools guess [user] guess")
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    trained = [line for line in samples(run) if line["kind"] == "train"]
    answered = 0
    for line in trained:
        secret = secret_of(line)
        assert line["prompt"].endswith(f"hint {secret} {EOS} [assistant] ")
        guesses = won = 0
        for said, told in zip(line["episode"][::2], line["episode"][1::2], strict=False):
            assert (said["role"], told["role"]) == ("assistant", "tool")
            words = said["content"].split()
            asked = [w for w in words if w in CALLS]
            if len(asked) == 1 and BAD_CALL not in words:
                assert told["content"] == ("yes" if secret in asked[0] else "no")
            answered += len(asked)
        for said in line["episode"][::2]:
            asked = [w for w in said["content"].split() if w in CALLS]
            guesses, won = guesses + len(asked), won or any(secret in w for w in asked)
        assert line["rewards"]["environment"] == pytest.approx(float(won) - 0.1 * guesses, abs=1e-6)
    assert answered > 10
    metrics = running.metrics(run)[1:]
    assert all(line["environment/turns"] > 1 and line["environment/invalid_calls"] > 0 for line in metrics)
    assert {line["finish_reason"] for line in trained} >= {"eos", "turns"}
