"""A chat with an environment class as TRL's trainers take it, in a real worker."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests import running
from tests.faults.lookup_runs import lookup, samples
from tests.tiny_models import EOS, tiny_model
from tinyrl.config.schema import Config

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
            return f" hint {secret}"

        def guess(self, word: str) -> str:
            \"\"\"Guess the word.

            Args:
                word: The word.
            \"\"\"
            self.guesses += 1
            self.won = self.won or word == self.secret
            return "yes" if word == self.secret else "no"

        def get_reward(self):
            return float(self.won) - 0.1 * self.guesses
"""


def chat_model(folder: Path) -> Path:
    """It says one of a dozen words at random: calls of the tool, calls of none, the end of a turn."""
    tiny_model(folder, "llama", vocabulary=WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def playing(model: Path, folder: Path) -> Config:
    (folder / "game.py").write_text(textwrap.dedent(GAME))
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


@pytest.mark.slow
def test_an_environment_class_plays_a_chat_from_its_opening_to_its_reward(tmp_path: Path) -> None:
    code, run, _ = running.train(playing(chat_model(tmp_path / "model"), tmp_path), tmp_path)
    assert code == 0
    trained = [line for line in samples(run) if line["kind"] == "train"]
    answers = set[str]()
    for line in trained:
        secret = line["prompt"].partition("hint ")[2].split()[0]
        assert line["prompt"].startswith("tools guess [user] guess")
        assert line["prompt"].endswith(f"hint {secret} {EOS} [assistant] ")
        said, told = (
            [turn["content"] for turn in line["episode"] if turn["role"] == role] for role in ("assistant", "tool")
        )
        guesses = [word for text in said for word in text.split() if word in CALLS]
        won = any(secret in word for word in guesses)
        assert line["rewards"]["environment"] == pytest.approx(float(won) - 0.1 * len(guesses), abs=1e-6)
        answers.update(told)
    assert {"yes", "no"} <= answers
    metrics = running.metrics(run)[1:]
    assert all(line["environment/turns"] > 1 and line["environment/invalid_calls"] > 0 for line in metrics)
    assert {line["finish_reason"] for line in trained} >= {"eos", "turns"}
