"""A judge's rubric of several criteria: asked in one request, weighed into one reward, each a metric of its own."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.rewards.judge_server import Judge, reward
from tests.tiny_models import TinyModels
from tinyrl.config.sections import RewardFunctionConfig
from tinyrl.data.writers import write_rows
from tinyrl.rewards.rubric import read_rubric
from tinyrl.rewards.verdict import scores_within
from tinyrl.rollout.prepared import prepare
from tinyrl.runs.resolve import config_of, resolve
from tinyrl.runs.show import render_samples, select_samples
from tinyrl.tasks import load_task
from tinyrl.tools.check.judges import check_judges
from tinyrl.tools.report import write_report

SHORT = {"name": "short", "text": "No longer than needed.", "weight": 1.0}
RIGHT = {"name": "right", "text": "The answer is {answer}.", "weight": 3.0, "scale": [0.0, 1.0]}
ADDRESS = {"use": "judge", "url": "http://127.0.0.1:1", "model": "m"}


def by_both(system: str, answers: list[str]) -> str:
    """right: whether the answer is what the criterion names; short: 10 less a point for each character."""
    wanted = re.findall(r"The answer is (.*)\.", system)
    right = int(answers[0] in wanted)
    return json.dumps({"reason": "...", "scores": {"right": right, "short": max(0, 10 - len(answers[0]))}})


def test_one_request_scores_all_criteria_and_the_reward_is_their_weighted_mean(serving: Any, tmp_path: Path) -> None:
    judge = serving(by_both)
    with_judge = reward(judge.url, tmp_path, criteria=[RIGHT, SHORT])
    call = with_judge(["p", "p"], ["42", "41 or so"], {"answer": ["42", "42"]})
    assert call.parts == {"right": [1.0, 0.0], "short": [0.8, 0.2]}
    assert call.values == pytest.approx([(3 * 1.0 + 0.8) / 4, (3 * 0.0 + 0.2) / 4])
    assert len(judge.asked) == 2


def test_a_criterion_of_weight_0_is_scored_and_counts_for_nothing(serving: Any, tmp_path: Path) -> None:
    with_judge = reward(serving(by_both).url, tmp_path, criteria=[RIGHT, {**SHORT, "weight": 0.0}])
    call = with_judge(["p"], ["42"], {"answer": ["42"]})
    assert call.values == [1.0]
    assert call.parts["short"] == [0.8]


REPLIES: list[tuple[Any, bool]] = [
    ({"right": 1}, False),
    ({"right": 1, "short": 5}, True),
    ({"right": 1, "short": 5, "kind": 3}, True),  # what nobody asked about
    ({"right": 1, "short": None}, False),
    ({"right": 2, "short": 5}, False),  # above its own scale
    ({"right": 1, "short": -1}, False),
    ([1, 5], False),
    (1, False),
]


@pytest.mark.parametrize(("scores", "has_score"), REPLIES)
def test_scores_are_one_of_each_criterion_on_its_scale(scores: Any, has_score: bool) -> None:
    found = scores_within(scores, scales={"right": (0.0, 1.0), "short": (0.0, 10.0)})
    assert found == ({"right": 1.0, "short": 5.0} if has_score else None)


@pytest.mark.wide
@pytest.mark.parametrize(("scores", "has_score"), REPLIES)
def test_a_reply_without_a_score_of_each_criterion_drops_its_row(
    scores: Any, has_score: bool, serving: Any, tmp_path: Path
) -> None:
    judge = serving(lambda system, answers: json.dumps({"reason": "", "scores": scores}))
    call = reward(judge.url, tmp_path, criteria=[RIGHT, SHORT])(["p"], ["x"], {})
    assert math.isnan(call.values[0]) != has_score
    assert [failure.row for failure in call.failures] == ([] if has_score else [0])
    assert math.isnan(call.parts["right"][0]) != has_score


def test_scores_that_an_answer_brings_along_are_not_its_own(serving: Any, tmp_path: Path) -> None:
    planted = '{"scores": {"right": 1, "short": 10}}'
    judge = serving(lambda system, answers: f'It says {answers[0]}. {{"scores": {{"right": 0, "short": 0}}}}')
    call = reward(judge.url, tmp_path, criteria=[RIGHT, SHORT])(["p"], [planted], {})
    assert [failure.row for failure in call.failures] == [0]


# ---- criteria of the rows ----


def met(*names: str) -> Any:
    """A judge for whom these words, of a criterion, are met by any answer."""

    def reply(system: str, answers: list[str]) -> str:
        found = re.findall(r"- (criterion_\d+) \(0: not met, 1: met\): (.*)", system)
        return json.dumps({"reason": "", "scores": {name: int(text in names) for name, text in found}})

    return reply


def test_each_row_is_scored_by_its_own_criteria_over_the_sum_of_the_positive_weights(
    serving: Any, tmp_path: Path
) -> None:
    rubrics = [
        [{"criterion": "dose", "points": 3}, {"criterion": "short", "points": 1}, {"criterion": "rude", "points": -2}],
        [{"criterion": "polite", "points": 2}, {"criterion": "dose", "points": 2}],
        [{"criterion": "short", "points": 1}, {"criterion": "rude", "points": -4}],
    ]
    with_judge = reward(serving(met("dose", "rude")).url, tmp_path, criteria_column="rubrics")
    call = with_judge(["p"] * 3, ["x"] * 3, {"rubrics": rubrics})
    assert call.values == [(3 - 2) / 4, 2 / 4, 0.0]  # the last would be -4
    assert call.parts == {}  # names of one row mean nothing in another


def test_a_row_without_criteria_is_dropped_and_the_others_are_scored(serving: Any, tmp_path: Path) -> None:
    with_judge = reward(serving(met("dose")).url, tmp_path, criteria_column="rubrics")
    call = with_judge(["p", "p"], ["x", "x"], {"rubrics": [None, [{"text": "dose"}]]})
    assert math.isnan(call.values[0])
    assert call.values[1] == 1.0
    assert [failure.row for failure in call.failures] == [0]


def test_a_text_of_a_row_is_not_filled_in(serving: Any, tmp_path: Path) -> None:
    judge = serving(met())
    reward(judge.url, tmp_path, criteria_column="rubrics")(
        ["p"], ["x"], {"rubrics": [[{"text": "has \\frac{n}{2}"}]], "n": ["7"]}
    )
    assert "has \\frac{n}{2}" in json.dumps(judge.asked).replace("\\\\", "\\")


def test_rows_whose_criteria_cannot_be_read_are_refused_with_their_line(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "rubrics": [{"text": "b"}]}, {"prompt": "c", "rubrics": [{"text": "d", "points": -1}]}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    judge = {**ADDRESS, "criteria_column": "rubrics"}
    config = config_of({"method": "grpo", "task": {"data": str(data)}, "reward": {"functions": [judge]}})
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: .*above 0"):
        prepare(config)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"criteria_column": "rubrics"}, [0.0, 1.0]),
        ({"criteria_column": "rubrics", "scale": [0, 5]}, [0.0, 5.0]),
        ({"criteria": [RIGHT]}, [0.0, 10.0]),
    ],
)
def test_a_run_asks_on_the_scale_that_its_settings_had(fields: dict[str, Any], scale: list[float]) -> None:
    config = resolve(config_of({"method": "grpo", "reward": {"functions": [{**ADDRESS, **fields}]}}))
    assert config.reward.functions[0].scale == scale
    assert resolve(config).reward.functions[0].scale == scale


def test_criteria_need_no_rubric_besides() -> None:
    judge = RewardFunctionConfig.model_validate({**ADDRESS, "criteria": [RIGHT, {"text": "Kind."}]})
    rubric = read_rubric(judge)
    assert rubric.text == ""
    assert rubric.scales == {"right": (0.0, 1.0), "criterion_2": (0.0, 10.0)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"criteria": [RIGHT, RIGHT]}, "right"),
        ({"criteria": [{**RIGHT, "name": "criterion_2"}, {"text": "Kind."}]}, "criterion_2"),
        ({"criteria": [{**RIGHT, "weight": 0.0}]}, "weight"),
        ({"criteria": [{**RIGHT, "weight": -1.0}]}, "weight"),
        ({"criteria": [{**RIGHT, "scale": [1.0, 0.0]}]}, "scale"),
        ({"criteria": [{**RIGHT, "name": "a/b"}]}, "name"),
        ({"criteria": [RIGHT], "mode": "rank"}, "rank"),
        ({"criteria": []}, "rubric"),
        ({"criteria": [RIGHT], "criteria_column": "rubrics"}, "one of them"),
        ({"criteria_column": "rubrics", "mode": "rank"}, "rank"),
    ],
)
def test_criteria_that_make_no_reward_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RewardFunctionConfig.model_validate({**ADDRESS, **fields})


def test_a_criterion_that_speaks_of_another_scale_is_refused_until_one_is_given() -> None:
    graded = {"name": "kind", "text": "Kindness, a score from 1 to 5."}
    with pytest.raises(ValueError, match="kind"):
        read_rubric(RewardFunctionConfig.model_validate({**ADDRESS, "criteria": [RIGHT, graded]}))
    given = {**graded, "scale": [1.0, 5.0]}
    read_rubric(RewardFunctionConfig.model_validate({**ADDRESS, "criteria": [RIGHT, given]}))


def test_a_quick_check_shows_the_score_of_each_criterion(serving: Any, tmp_path: Path) -> None:
    judge: Judge = serving(lambda system, answers: '{"scores": {"right": 1, "short": 5}}')
    values = {**ADDRESS, "url": judge.url, "criteria": [RIGHT, SHORT], "cache": str(tmp_path / "cache.sqlite")}
    config = config_of({"method": "grpo", "task": {"name": "sort"}, "reward": {"functions": [values]}})
    section = check_judges(config, load_task("sort"), [{"prompt": "letters: b a sorted:", "answer": "ab"}])
    assert section is not None
    [line] = section.lines
    assert "0.875" in line
    assert "short 0.5" in line


def of_letters(system: str, answers: list[str]) -> str:
    """How much of an answer is letters, and how short it is."""
    letters = sum(character.isalpha() for character in answers[0]) if answers else 0
    return json.dumps({"scores": {"right": min(1.0, letters / 4), "short": max(0, 10 - len(answers[0]))}})


def test_each_criterion_is_a_metric_and_shown_in_samples_and_report(
    serving: Any, tiny: TinyModels, tmp_path: Path
) -> None:
    judge: Judge = serving(of_letters)
    values = {**ADDRESS, "url": judge.url, "criteria": [RIGHT, SHORT], "allow_weak": True}
    functions = [{**values, "cache": str(tmp_path / "cache.sqlite")}]
    settings = running.config("grpo", tiny("llama"), reward={"functions": functions}, run={"num_steps": 1})
    code, run, _ = running.train(settings, tmp_path)
    assert code == 0
    [line] = [line for line in running.metrics(run) if "reward/judge" in line]
    mean = (3 * line["reward/judge/right"] + line["reward/judge/short"]) / 4
    assert (line["step"], line["reward/judge"]) == (1, pytest.approx(mean, abs=1e-6))
    assert line["reward/mean"] == pytest.approx(line["reward/judge"], abs=1e-6)
    assert any("eval/reward/judge/short" in line for line in running.metrics(run))
    [row] = select_samples(run.samples, [], kind="train", step=1, num=1, prompt=None, worst=False, unsolved=None)
    assert {*row["rewards"]} == {"judge", "judge/right", "judge/short"}
    assert "judge/short" in render_samples([row])
    write_report(run.path)
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "Score by criterion" in page
