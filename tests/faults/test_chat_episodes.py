"""A chat with an environment class as TRL's trainers take it, in a real worker."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.faults.lookup_runs import lookup, samples
from tests.tiny_models import EOS
from tests.training import rows
from tests.training.rows import trained
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
    return rows.chat_model(folder, TEMPLATE, vocabulary=WORDS)


def playing(model: Path, folder: Path) -> Config:
    (folder / "game.py").write_text(textwrap.dedent(GAME))
    asked = ({"prompt": [rows.user(f"guess {'a ' * i}")], "secret": ("red", "blue")[i % 2]} for i in range(8))
    data = rows.write_rows(folder / "rows.jsonl", asked)
    return lookup(
        model={"path": str(model)},
        task={"name": "rows", "data": str(data)},
        environment={"name": f"{folder / 'game.py'}:Game", "max_turns": 3},
        generation={"max_new_tokens": 30, "max_prompt_tokens": 40, "stop": []},
        grpo={"num_prompts": 4, "group_size": 4},
    )


@pytest.mark.slow
def test_an_environment_class_plays_a_chat_from_its_opening_to_its_reward(tmp_path: Path) -> None:
    run = trained(playing(chat_model(tmp_path / "model"), tmp_path), tmp_path)
    answers = set[str]()
    for line in [line for line in samples(run) if line["kind"] == "train"]:
        secret = line["prompt"].partition("hint ")[2].split()[0]
        assert line["prompt"].startswith("tools guess [user] guess")
        assert line["prompt"].endswith(f"hint {secret} {EOS} [assistant] ")
        said = [turn["content"] for turn in line["episode"] if turn["role"] == "assistant"]
        guesses = [word for text in said for word in text.split() if word in CALLS]
        won = any(secret in word for word in guesses)
        assert line["rewards"]["environment"] == pytest.approx(float(won) - 0.1 * len(guesses), abs=1e-6)
        answers |= {turn["content"] for turn in line["episode"] if turn["role"] == "tool"}
    assert {"yes", "no"} <= answers
