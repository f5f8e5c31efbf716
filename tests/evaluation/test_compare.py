"""`tinyrl eval`: one table of policies that are judged alike, and refusal where they would not be."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tinyrl.config.recipe import dump_config
from tinyrl.config.schema import Config
from tinyrl.evaluation import versus
from tinyrl.evaluation.evaluate import Evaluation
from tinyrl.evaluation.table import render_comparison
from tinyrl.evaluation.targets import Asked, Target
from tinyrl.evaluation.versus import alike, compare_policies
from tinyrl.rollout.components import Options

SEARCHING = {"environment": {"use": "search", "corpus": "rows.jsonl", "timeout_s": 9}}


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs of grpo, of which one samples differently and one trains differently, one of sft, a reward model."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    for name, values in {
        "short": {"method": "grpo", "task": {"name": "sort"}, "generation": {"max_new_tokens": 5}},
        "long": {
            "method": "grpo",
            "task": {"name": "sort"},
            "generation": {"max_new_tokens": 9, "engine": "hf"},
            **SEARCHING,
        },
        "skips": {
            "method": "grpo",
            "task": {"name": "sort", "sampler": "difficulty"},
            "generation": {"max_new_tokens": 5},
            "reward": {"truncated": "mask", "timeout_s": 3.0},
        },
        "judge": {"method": "reward", "task": {"data": "rows.jsonl"}},
        "text": {"method": "sft", "task": {"data": "rows.jsonl"}, "run": {"seed": 3}},
    }.items():
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "config.yaml").write_text(dump_config(Config.model_validate(values)))


def test_policies_that_would_be_judged_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which engine samples is a policy's own."""
    monkeypatch.setattr(versus, "locate", lambda target: target)
    with pytest.raises(ValueError, match=r"differ in generation.max_new_tokens \(5 and 9\).*=\.\.\.$"):
        alike(["runs/short", "runs/long"], Asked())
    assert len(alike(["runs/short", "runs/long"], Asked(settings=("generation.max_new_tokens=7",)))) == 2
    with pytest.raises(ValueError, match=r"^runs/text: nothing says what its samples are judged by"):
        alike(["runs/short", "runs/text"], Asked())
    with pytest.raises(ValueError, match=r"^runs/judge is a reward model"):
        alike(["runs/short", "runs/judge"], Asked())


def test_settings_of_training_alone_keep_no_policy_from_being_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versus, "locate", lambda target: target)
    assert len(alike(["runs/short", "runs/skips"], Asked())) == 2


def judged(reward: float, wins: list[float], **more: Any) -> Evaluation:
    """An evaluation whose prompts have these rewards, one sample each."""
    metrics = {
        "reward_mean": reward,
        "reward_ci": [reward - 0.5, reward + 0.5],
        "reward_median": reward + 0.25,
        "mean_length": 7.0,
        "num_prompts": 40,
        "num_samples": 2,
        **more,
    }
    return Evaluation(metrics, wins, [], {"reward": [[value] for value in wins]})


def test_the_table_has_a_row_for_the_baseline_its_best_and_each_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """short wins three of four prompts and ties in none; long ties everywhere."""
    given = {
        ("runs/text", 1): judged(1.0, [1.0, 1.0, 1.0, 1.0], kl=0.0),
        ("runs/text", 4): judged(2.0, [2.0, 2.0, 2.0, 2.0], kl_bound=math.log(4) - 0.75),
        ("runs/short", 1): judged(3.0, [5.0, 5.0, 5.0, 0.0], kl=2.5),
        ("runs/long", 1): judged(1.0, [1.0, 1.0, 1.0, 1.0], kl=0.125),
    }
    monkeypatch.setattr(versus, "locate", lambda target: target)
    monkeypatch.setattr(versus, "trained_on", lambda path: frozenset([path]))

    places = {"runs/long": [7, 8]}

    def evaluated(
        target: Target, asked: Asked, *, seen: frozenset[str], seed: int, options: Options
    ) -> tuple[list[int], Evaluation]:
        assert seen == {"runs/text", "runs/short", "runs/long"}
        assert seed == 3  # the baseline's
        assert (asked.num_prompts, asked.samples) == (40, 2)
        return places.get(target.path, [7, 9]), given[target.path, asked.best_of]

    monkeypatch.setattr(versus, "_evaluated", evaluated)
    settings = ("generation.max_new_tokens=7", "task.max_samples=null")
    asked = Asked(task="sort", settings=settings, num_prompts=40, samples=2, best_of=4)
    options = Options(device="cpu")
    with pytest.raises(ValueError, match=r"runs/text and runs/long have room for different prompts"):
        compare_policies(["runs/short", "runs/long"], asked, vs="runs/text", options=options)
    places.clear()
    rows = compare_policies(["runs/short", "runs/long"], asked, vs="runs/text", options=options)
    header, *lines, note, environment = render_comparison(rows, as_json=False).splitlines()
    assert environment.startswith("runs/long plays in another environment than runs/text (environment.use, ")
    assert "timeout_s" not in environment
    assert header.split() == ["policy", "reward", "median", "KL", "length", "wins", "by", "reward"]
    names = [line.split("  ")[0] for line in lines]
    assert names == ["runs/text", "runs/text, best of 4", "runs/short", "runs/long"]
    assert lines[0].split() == ["runs/text", "1.000", "(0.500", "to", "1.500)", "1.250", "0.000", "7.0", "-"]
    assert "<= 0.636" in lines[1]
    assert [row["win_rate"]["reward"]["mean"] for row in rows[1:]] == [1.0, 0.75, 0.5]
    assert lines[2].split()[1:8] == ["3.000", "(2.500", "to", "3.500)", "3.250", "2.500", "7.0"]
    assert len({len(line) for line in (header, *lines)}) == 1
    assert "40 prompts x 2" in note
    assert json.loads(render_comparison(rows, as_json=True))[0]["policy"] == "runs/text"
