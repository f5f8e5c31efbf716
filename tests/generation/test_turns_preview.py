"""The scripted episode of a dry run, and the notes before step 1: what is shown is what was played."""

import json
import re
from typing import Any

from tests.tiny_models import tiny_tokenizer
from tinyrl.config.sections import EnvironmentConfig
from tinyrl.environments import Reply
from tinyrl.environments.environment import Environment
from tinyrl.environments.trial import NONSENSE, asking_turn, tool_call
from tinyrl.generation.turns import EpisodeRunner, episode_notes, show_episode
from tinyrl.models.loading import load_tokenizer
from tinyrl.tasks import load_task
from tinyrl.tasks.observations import ObservationTokens
from tinyrl.tasks.prompts import PreparedPrompt

WORDS = load_tokenizer("lookup")
ROW = {"prompt": "question: job of Uma Costa ?", "answer": "baker", "world": "eval 0 0"}
PROMPT = PreparedPrompt(0, ROW, ROW["prompt"], ROW["prompt"], [3], "")
# Without a role for tools, and without what earlier turns thought.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{{ '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def runner_of(
    respond: Any, tokenizer: Any, *, chat: bool = False, max_new_tokens: int = 24, **settings: Any
) -> EpisodeRunner:
    config = EnvironmentConfig(max_observation_tokens=8, **settings)
    environment = Environment(config, task="lookup", respond=respond, use=None, stop=(";", "."), length=len)
    eos = {tokenizer.eos_token_id}
    observed = ObservationTokens(tokenizer, chat=chat, variables={}, eos=eos, max_tokens=8)
    return EpisodeRunner(environment, observed, tokenizer, max_new_tokens, {})


def without_time(line: str) -> str:
    asked, _, rest = line.partition(" ms a call")
    return asked.rpartition(", ")[0] + rest


def test_the_lookup_episode_is_shown_with_its_mask() -> None:
    task = load_task("lookup")
    runner = runner_of(task.respond, WORDS)
    lines = show_episode(runner, PROMPT, task, stop=[";", "."])
    words = ("search", "Uma", "Costa", "job", ";", "found", "baker")
    shown = {word: f"' {word}':{WORDS(f' {word}', add_special_tokens=False)['input_ids'][0]}" for word in words}
    assert lines[1] == "  policy       " + " ".join(shown[word] for word in ("search", "Uma", "Costa", "job", ";"))
    assert lines[2] == f"  environment  [{shown['found']} {shown['baker']} {shown[';']}]"
    assert lines[3].startswith("  policy       ' answer':")
    said = "  8 of 11 tokens count; the environment was asked 2 times; the episode ended: stop"
    assert without_time(lines[4]) == said
    assert len(lines) == 5


def test_rewards_refusals_and_limits_are_said() -> None:
    def respond(prompts: Any, transcripts: Any, **columns: Any) -> list[Any]:
        return [Reply(" found ;", reward=0.25, invalid=True)]

    task = load_task("lookup")
    lines = show_episode(runner_of(respond, WORDS, max_turns=3), PROMPT, task, stop=[";", "."])
    assert sum(line.startswith("  policy") for line in lines) == 3
    assert "asked 3 times" in lines[-3]
    assert lines[-3].endswith("the episode ended: turns")
    assert lines[-2] == "  the environment gave a reward of 0.75"
    assert lines[-1] == "warning: the environment calls a scripted turn invalid"
    short = show_episode(runner_of(respond, WORDS, max_new_tokens=3), PROMPT, task, stop=[";", "."])
    assert short[-1] == "  3 of 3 tokens count; the environment was asked 0 times; the episode ended: length"


def test_an_environment_without_an_answer_is_a_warning() -> None:
    def respond(prompts: Any, transcripts: Any, **columns: Any) -> list[Any]:
        return [5]

    lines = show_episode(runner_of(respond, WORDS), PROMPT, load_task("lookup"), stop=[";"])
    assert lines[-1].startswith("warning: the environment gave no answer: `lookup` answered with int")


def test_a_chat_turn_ends_with_eos_and_is_answered_by_the_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE

    def respond(prompts: Any, transcripts: Any, **columns: Any) -> list[Any]:
        return ["no" if transcripts[0][-1]["content"] in NONSENSE else None]

    runner = runner_of(respond, tokenizer, chat=True, max_new_tokens=99)
    task = load_task("rows")
    row = {"prompt": "q", "answer": "yes"}
    lines = show_episode(runner, PreparedPrompt(0, row, "q", "q", [5], ""), task, stop=[])
    assert lines[1].endswith("'<eos>':1")
    assert "".join(re.findall(r"'(.*?)':\d+", lines[2])) == "<user>no<eos><assistant>"
    assert lines[3].startswith("  policy       'y':")
    assert episode_notes(runner) == [
        "environment lookup; at most 4 turns, 8 tokens of an answer",
        "the chat template has no role tool: what the environment answers is a message of role user",
        "the chat template leaves out what earlier turns thought; here it stays, as it was sampled",
    ]


def test_calls_are_built_from_the_schema() -> None:
    kinds = {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "c": {"type": "array", "items": {"type": "number"}},
        "d": {"type": ["boolean", "string"]},
        "e": {"type": "string", "enum": ["x", "y"]},
        "f": {"type": "object"},
        "g": {},
        "h": {"type": "string"},
    }
    schema = {"function": {"name": "f", "parameters": {"properties": kinds, "required": list("abcdefg")}}}
    text = tool_call(schema, "first line\nwhere is the town of Ada Stone in winter and in summer?\n")
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    words = "where is the town of Ada Stone in"
    arguments = {"a": 1, "b": words, "c": [1.5], "d": True, "e": "x", "f": {}, "g": words}
    assert call == {"name": "f", "arguments": arguments}
    assert asking_turn("search", None, "who?") == "<search>who?</search>"
    assert asking_turn("python", None, "who?") == "```python\nprint(1 + 1)\n```\n"
    assert asking_turn(None, [schema], "who?") == tool_call(schema, "who?")
    assert asking_turn(None, None, "who?") is None
