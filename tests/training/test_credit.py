"""Credit by turn in runs: what is recorded of turns, a resume, and environments that reward none."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import running
from tests.training.rows import loaded
from tinyrl.config.schema import Config
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.run_dir import RunDir
from tinyrl.tools.check.largest_step import trial_config, worst_step
from tinyrl.training.load import load_method

# Two or three turns of a character each; the first and the last turn have rewards.
GAME = """
    from tinyrl.environments import Reply

    class Quiet:
        def reset(self, **row):
            return " play:"

    def respond(prompts, transcripts, **columns):
        replies = []
        for turns in transcripts:
            played = [turn["content"] for turn in turns if turn["role"] == "assistant"]
            code = sum(map(ord, played[-1]))
            done = len(played) == 3 or (len(played) == 2 and code % 2 == 0)
            reward = None if len(played) == 2 and not done else (code % 7) / 7
            replies.append(Reply("x", done=done, reward=reward))
        return replies
"""


def game(model: Path, folder: Path, use: str, **grpo: Any) -> Config:
    (folder / "game.py").write_text(textwrap.dedent(GAME))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {letter}"}) + "\n" for letter in "abcdefgh"))
    return running.config(
        "grpo",
        model,
        task={"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "rows.jsonl")},
        reward={"functions": []},
        environment={"name": f"{folder / 'game.py'}:{use}", "max_turns": 3, "max_observation_tokens": 4},
        generation={"stop": [chr(code) for code in range(33, 127)], "max_new_tokens": 24},
        grpo={"credit": "turn", **grpo},
    )


@pytest.fixture(scope="module")
def played(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, int]:
    """A run, and how often it looked at whether to stop."""
    folder = tmp_path_factory.mktemp("game")
    code, run, looks = running.train(game(model, folder, "respond", num_epochs=2), folder)
    assert code == 0
    return run, looks


@pytest.fixture(scope="module")
def run(played: tuple[RunDir, int]) -> RunDir:
    return played[0]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_of_a_sample_has_reward_and_advantage_of_its_turns(run: RunDir) -> None:
    samples = [line for line in lines(run.samples) if line["kind"] == "train"]
    assert {len(line["turns"]) for line in samples} == {2, 3}
    for line in samples:
        turns = line["turns"]
        assert len(turns) == sum(message["role"] == "assistant" for message in line["episode"])
        assert sum(turn["reward"] or 0.0 for turn in turns) == pytest.approx(line["reward"])
        assert len(turns) == 2 or turns[1]["reward"] is None
    assert any(len({turn["advantage"] for turn in line["turns"]}) > 1 for line in samples)


def test_a_line_of_a_held_out_sample_has_the_reward_of_its_turns_and_no_advantage(run: RunDir) -> None:
    samples = [line for line in lines(run.samples) if line["kind"] != "train"]
    assert {line["kind"] for line in samples} == {"eval", "eval-greedy"}
    for line in samples:
        assert len(line["turns"]) == sum(message["role"] == "assistant" for message in line["episode"])
        assert sum(turn["reward"] or 0.0 for turn in line["turns"]) == pytest.approx(line["reward"])
        assert {turn["advantage"] for turn in line["turns"]} == {None}


def test_all_tokens_of_a_turn_have_its_advantage(run: RunDir) -> None:
    samples = {
        (line["step"], line["prompt_index"], line["sample"]): line["turns"]
        for line in lines(run.samples)
        if line["kind"] == "train"
    }
    shown = lines(run.tokens)
    assert shown
    for line in shown:
        chosen = [token["advantage"] for token in line["tokens"] if token["chosen"]]
        turns = samples[line["step"], line["prompt_index"], line["sample"]]
        assert {*chosen} == {round(turn["advantage"], 3) for turn in turns}


def test_rewards_by_turn_are_metrics(run: RunDir) -> None:
    start, *steps = running.metrics(run)
    assert "turn/reward_1" not in start
    assert len(steps) == 3
    for line in steps:
        assert 0 <= line["turn/reward_1"] <= 6 / 7
        assert {"turn/reward_2", "turn/reward_3"} <= {*line}
        assert 0 <= line["turn/zero_spread"] < 1


def test_a_resume_goes_on_with_the_same_numbers(played: tuple[RunDir, int], model: Path, tmp_path: Path) -> None:
    run, looks = played
    code, stopped, _ = running.train(game(model, tmp_path, "respond", num_epochs=2), tmp_path, stop_at=3 * looks // 4)
    assert code == 75
    assert running.go_on(stopped) == 0
    expected = running.weights(run, 3)
    assert all(value.equal(expected[name]) for name, value in running.weights(stopped, 3).items())


def test_a_class_that_rewards_nothing_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="get_reward"):
        loaded(game(model, tmp_path, "Quiet"))


def test_a_trial_of_the_largest_step_credits_responses(model: Path, tmp_path: Path) -> None:
    """They are no episodes."""
    method: Any = SimpleNamespace(config=game(model, tmp_path, "respond"))
    grpo = trial_config(method).grpo
    assert grpo is not None
    assert (method.config.grpo.credit, grpo.credit) == ("turn", "episode")


@pytest.mark.slow  # Fast: its settings (above), and that of other runs in tools/check/test_check.py.
def test_the_largest_step_of_a_check_is_trained(model: Path, tmp_path: Path) -> None:
    """Its responses are as long as they may be, and no episodes."""
    method = load_method(prepare(game(model, tmp_path, "respond")), options=Options(device="cpu"))
    try:
        assert worst_step(method, text=[]).facts["seconds"]["update"] > 0
    finally:
        method.close()
