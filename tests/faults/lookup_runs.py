"""Small runs of the embedded lookup model with people's environments, for tests of several files."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.starter.lookup import NAMES

PROMPTS, GROUP = 6, 2
READ = 8  # tokens of an answer, at most
CODE = "def length(completions, **columns):\n    return [float(len(c[0]['content'])) for c in completions]\n"
LOOKUP: dict[str, Any] = {
    "model": {"path": "lookup"},
    "task": {"name": "lookup", "max_samples": PROMPTS},
    "generation": {"max_new_tokens": 24, "max_prompt_tokens": 32, "stop": [";", "."]},
    "environment": {"max_turns": 3, "max_observation_tokens": READ},
    "optim": {"learning_rate": 2e-3},
    "grpo": {"num_prompts": PROMPTS, "group_size": GROUP},
    "ppo": {"num_prompts": PROMPTS, "num_epochs": 2, "minibatch_size": 3},
    "run": {"num_steps": 2, "eval_every": 0, "eval_prompts": 4, "save_every": 1, "threads": 1},
}


def lookup(method: str = "grpo", **sections: Any) -> Config:
    """A small run of the lookup model; `sections` are laid over it."""
    values: dict[str, Any] = {**LOOKUP, "method": method}
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return config_of(values)


def answered_by(folder: Path, code: str, method: str = "grpo", **sections: Any) -> Config:
    """The same, with a function `respond` in a file of its own."""
    (folder / "world.py").write_text(textwrap.dedent(code))
    environment = {"name": f"{folder / 'world.py'}:respond", **sections.pop("environment", {})}
    return lookup(method, environment=environment, **sections)


def samples(run: RunDir) -> list[dict[str, Any]]:
    """The lines of samples.jsonl."""
    return [json.loads(line) for line in run.samples.read_text().splitlines()]


def said_by_environment(run: RunDir) -> set[str]:
    """All that an environment said in the samples of a run."""
    turns = [turn for line in samples(run) for turn in line["episode"]]
    return {turn["content"] for turn in turns if turn["role"] == "tool"}


def lookup_query(turn: str, tag: str) -> str | None:
    """What the lookup model writes as `search Ada Stone job ;` and `answer baker .`, in the place of tags."""
    words = turn.split()
    return " ".join(words[words.index(tag) + 1 :]) if tag in words else None


def searching(folder: Path, corpus: str | None = None, *, num_steps: int = 3) -> Config:
    """The lookup model, with a corpus that has a passage for each name where none is named."""
    if corpus is None:
        corpus = str(folder / "corpus.jsonl")
        passages = [{"contents": f"{name}\nfound {name} ;"} for name in NAMES]
        (folder / "corpus.jsonl").write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    (folder / "rewards.py").write_text(CODE)
    return lookup(
        reward={"functions": [{"use": f"{folder / 'rewards.py'}:length"}]},
        environment={"name": "search", "corpus": corpus, "max_observation_tokens": 24, "top_k": 1},
        run={"num_steps": num_steps},
    )
