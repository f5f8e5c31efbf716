"""Several sources in one run, each row answered by its own source's environment, or by none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.lookup_runs import lookup, samples
from tinyrl.cli.preflight import check_before_loading
from tinyrl.config.schema import Config
from tinyrl.config.sections import EnvironmentConfig
from tinyrl.environments import Reply, last_turn
from tinyrl.environments.environment import Environment, SourceEnvironments
from tinyrl.runs.resolve import absolute_paths
from tinyrl.tasks import environments, load_split, load_task

OWN = """
from tinyrl.environments import Reply

def respond(prompts, transcripts, answer, seed, **columns):
    if "world" in columns:
        raise ValueError("a column of another source's")
    return [Reply(f" found {word} .", reward=0.25, done=len(turns) > 2) for turns, word in zip(transcripts, answer)]
"""


def respond(prompts: list[str], transcripts: list[Any], *, number: list[int], **columns: Any) -> list[Any]:
    assert "word" not in columns
    said = [Reply(f"{prompt}{last_turn(turns)}{n}", reward=n) for prompt, turns, n in
            zip(prompts, transcripts, number, strict=True)]  # fmt: skip
    return [ValueError("odd") if n % 2 else reply for n, reply in zip(number, said, strict=True)]


def shout(prompts: list[str], transcripts: list[Any], *, word: list[str], **columns: Any) -> list[Any]:
    return [each.upper() for each in word]


def made(respond: Any, name: str, **section: Any) -> Environment:
    return Environment(EnvironmentConfig(**section), task=name, respond=respond, use=None, stop=(name,), length=len)


def test_each_row_is_answered_by_its_own_and_failures_keep_their_places() -> None:
    both = SourceEnvironments({"a": made(respond, "x", max_turns=2), "b": made(shout, "y"), "none": None})
    both.start()
    assert (both.max_turns, both.stop, both.rewards) == (4, ("x", "y"), False)
    source = ["b", "a", "none", "a", "b"]
    columns = {"source": source, "number": [None, 1, None, 2, None], "word": ["p", None, None, None, "q"]}
    turns = [[{"role": "assistant", "content": f"t{i}"}] for i in range(5)]
    found = both.respond([f"p{i}" for i in range(5)], turns, columns)
    texts = [None if reply is None else (reply.text, reply.reward) for reply in found.values]
    assert texts == [("P", 0.0), None, None, ("p3t32", 2.0), ("Q", 0.0)]
    [failure] = found.failures
    assert (failure.row, "odd" in failure.reason) == (1, True)
    assert both.final_rewards(["p"] * 5, turns, columns).values == [0.0] * 5
    assert both.of({"source": "none"}) is None


@pytest.fixture
def mixed(tmp_path: Path) -> Config:
    """A third of the rows each: lookup's own environment, a person's with rewards, and none."""
    rows = load_task("lookup").rows("train")[:40]
    own = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    (tmp_path / "env.py").write_text(OWN)
    (tmp_path / "rewards.py").write_text("def score(completions, **_): return [float(len(c)) for c in completions]")
    data = str(tmp_path / "rows.jsonl")
    sources = [
        {"task": "lookup", "max_samples": 40},
        {"name": "mine", "data": data, "environment": str(tmp_path / "env.py") + ":respond"},
        {"name": "plain", "data": data},
    ]
    values = lookup(run={"num_steps": 2}, environment={"max_turns": 3}).model_dump()
    values["task"] = {"sources": sources}
    values["reward"]["functions"] = [{"use": str(tmp_path / "rewards.py") + ":score"}]
    return Config.model_validate(values)


def test_a_source_says_what_answers_its_rows(mixed: Config) -> None:
    found = {label: (section.use, task.name) for label, (section, task) in environments(mixed).items()}
    own = mixed.task.sources[1].environment
    assert found == {"lookup": (None, "lookup"), "mine": (own, "rows"), "plain": (None, "rows")}
    rows = load_split(mixed, "train")
    asks = load_task("mixture").asking_turn
    assert asks is not None
    assert [asks(row) is None for row in rows[:3]] == [False, True, True]


@pytest.mark.wide
def test_a_run_plays_each_source_with_its_own_and_is_resumed(mixed: Config, tmp_path: Path) -> None:
    code, run, looks = running.train(mixed, tmp_path, name="whole")
    assert code == 0
    held_out, said = load_split(mixed, "eval"), dict[str, list[str]]()
    for line in samples(run):
        if line["kind"].startswith("eval"):
            heard = [turn["content"] for turn in line["episode"] if turn["role"] == "tool"]
            said.setdefault(held_out[line["prompt_index"]]["source"], []).extend(heard)
            assert line["rewards"]["environment"] == 0.25 * len(heard) * (
                held_out[line["prompt_index"]]["source"] == "mine"
            )
    assert said["plain"] == []
    assert {*said["mine"]} == {f" found {row['answer']} ." for row in held_out[:4] if row["source"] == "mine"}
    code, stopped, _ = running.train(mixed, tmp_path, name="stopped", stop_at=looks // 2)
    assert code == 75
    assert running.go_on(stopped) == 0
    assert running.lasting(stopped) == running.lasting(run)


def test_its_file_is_found_from_elsewhere(mixed: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = mixed.model_dump()
    values["task"]["sources"][1]["environment"] = "env.py:respond"
    kept = absolute_paths(values)["task"]["sources"]
    assert [source["environment"] for source in kept] == [None, f"{tmp_path}/env.py:respond", None]
    values["task"]["sources"][1]["environment"] = "missing.py:respond"
    with pytest.raises(ValueError, match=r"missing\.py"):
        check_before_loading(Config.model_validate(values))
    values["task"]["sources"][1].update(task="search_qa", environment=None)
    with pytest.raises(ValueError, match=r"environment\.corpus"):
        check_before_loading(Config.model_validate(values))
