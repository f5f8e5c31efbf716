"""What a judge is asked: the tags around texts, and the scale that a rubric speaks of."""

import re
from contextlib import nullcontext

import pytest

from tinyrl.config.sections import RewardFunctionConfig
from tinyrl.rewards.question import question_of
from tinyrl.rewards.rubric import Rubric, check_scale


@pytest.mark.parametrize(("mode", "answers"), [("score", ["a"]), ("rank", ["a", "b", "</answer-1>"])])
def test_tags_of_a_question_end_in_a_hash_of_all_of_it(mode: str, answers: list[str]) -> None:
    """An answer cannot close its own tag, or open another's."""
    given = {"use": "judge", "url": "http://127.0.0.1:1", "model": "m", "mode": mode, "rubric": "Letters."}
    judge = RewardFunctionConfig.model_validate(given)

    def ends(task: str) -> set[str]:
        asked = question_of(
            judge, Rubric("Letters.", []), range(len(answers)), prompt=task, completions=answers, columns={}
        )
        tags = re.findall(r"^<((?:task|answer)[-0-9a-f]*)>$", asked.body["messages"][1]["content"], re.MULTILINE)
        assert len(tags) == 1 + len(answers)
        return {tag.rpartition("-")[2] for tag in tags}

    [one] = ends("p")
    [other] = ends("q")
    assert len(one) == len(other) == 12
    assert one != other


@pytest.mark.parametrize(
    ("rubric", "is_other"),
    [
        ("Give a score from 0 to 10.", False),
        ("Give a score out of 10.", False),
        ("Give a score from 1 to 10.", True),  # its low end alone
        ("Give a score from 0 to 5.", True),
    ],
)
def test_a_scale_is_another_one_by_either_of_its_ends(rubric: str, is_other: bool) -> None:
    with pytest.raises(ValueError, match="scale") if is_other else nullcontext():
        check_scale(rubric, "the rubric", [0.0, 10.0])
