"""Countdown: generated puzzles that can be solved, and a verifier that takes nothing but solutions."""

import pytest

from tinyrl.tasks.countdown import TASK, check_expression


def score(completion, numbers=(3, 7, 25), target=46):
    assert TASK.verify is not None
    return TASK.verify(["?"], [completion], numbers=[list(numbers)], target=[target], solution=[None])[0]


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>3 * 7 + 25</answer>",
        "First 25 + 7.\n<think>no</think><answer>\n(7*3)+25\n</answer> done",
        "<answer>25 + 7 * 3 = 46</answer>",
        "<answer>２５ ＋ ７ ＊ ３ ＝ 46</answer>",
        "Let me see: 25 + 3 = 28\n25 + 3 × 7",
        "`25 + 21/7*7*0`\n3*7 - -25",
        [{"role": "assistant", "content": "<answer>25+3*7</answer>"}],
    ],
)
def test_a_solution_has_full_marks(completion):
    assert score(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>25 + 21</answer>",  # 21 is no given number
        "<answer>3 * 7 + 25 + 7 - 7</answer>",  # 7 used three times
        "<answer>46</answer>",
        "<answer>3 + 7 + 25</answer>",
        "<answer>3 * 7 + 25</answer><answer>7</answer>",
        "<answer></answer>",
        "<answer>3 * 7 + 25",
        "<answer>3 * 7 + 25.0</answer>",
        "<answer>int('46')</answer>",
        "<answer>٣ * 7 + 25</answer>",
        "<answer>9**9**9</answer>",
        "<answer>3/(7-7)</answer>",
        "3 * 7 + 25\nso there",
        "",
        "(" * 1_000_000,
        "<answer>" + "(" * 400 + "</answer>",
        "<answer>" + "9*" * 200 + "9</answer>",
        "9" * 1_000_000,
        [],
    ],
    ids=lambda completion: str(completion)[:24],
)
def test_anything_else_has_none(completion):
    assert score(completion) == 0.0


def test_division_is_exact_and_each_number_counts():
    assert score("<answer>(1/3)*3*7</answer>", numbers=[1, 3, 3, 7], target=7) == 1.0
    assert score("<answer>(1/3)*3*7</answer>", numbers=[1, 3, 7], target=7) == 0.0
    assert score("<answer>7/2</answer>", numbers=[7, 2], target=3) == 0.0


def test_puzzles_are_the_same_every_time_and_splits_are_disjoint():
    train, held = TASK.rows("train"), TASK.rows("eval")
    assert (len(train), len(held)) == (8192, 512)
    assert train[0] == {"numbers": [2, 3, 36, 18], "target": 28, "solution": "18 + ((36 / 3) - 2)"}
    assert held[0] == {"numbers": [21, 5, 1], "target": 26, "solution": "(1 * 21) + 5"}
    keys = [(tuple(sorted(row["numbers"])), row["target"]) for row in train + held]
    assert len(set(keys)) == len(keys)
    train[0]["numbers"].append(1)
    assert TASK.rows("train")[0]["numbers"] == [2, 3, 36, 18]


def test_every_generated_puzzle_is_solved_by_its_gold_answer():
    for split in ("train", "eval"):
        rows = TASK.rows(split)
        columns = {name: [row[name] for row in rows] for name in ("numbers", "target", "solution")}
        gold = [TASK.gold(row) for row in rows]
        assert TASK.verify is not None
        assert TASK.verify([], gold, **columns) == [1.0] * len(rows)
        assert {len(row["numbers"]) for row in rows} == {3, 4}
        assert min(columns["target"]) >= 10
        assert max(columns["target"]) <= 100
        # the number itself says nothing, and neither does the solution of another puzzle
        none = [0.0] * len(rows)
        assert TASK.verify([], [f"<answer>{t}</answer>" for t in columns["target"]], **columns) == none
        assert TASK.verify([], gold[1:] + gold[:1], **columns) == none


def test_the_prompt_shows_numbers_and_target():
    text = TASK.prompt({"numbers": [3, 7, 25], "target": 46})
    assert "3, 7, 25" in text
    assert "46" in text
    assert "<answer>" in text


@pytest.mark.parametrize(
    ("numbers", "target"),
    [("[3, 7]", 4), ([], 4), ([3, "7"], 4), ([3, 7.0], 4), ([True], 4), ([3, 7], "10"), ([3, 7], None)],
)
def test_rows_that_are_no_puzzle_are_refused(numbers, target):
    with pytest.raises(ValueError, match=r"'numbers' must|'target' must"):
        TASK.prompt({"numbers": numbers, "target": target})


def test_data_without_solutions_has_no_gold_answer():
    assert TASK.gold({"numbers": [3, 7], "target": 10}) is None


def test_what_a_completion_says():
    assert TASK.answer is not None
    assert TASK.answer("<answer>3 * 7 + 25 = 46</answer>") == "3*7+25"
    assert TASK.answer("<answer>none</answer>") is None


def test_the_tool_computes_and_counts():
    episode = {"numbers": [3, 4, 5], "target": 35}
    assert check_expression("(3 + 4) * 5", episode) == "35, which is the target"
    assert check_expression("3 * 4 + 5", episode) == "17, which is not the target"
    assert check_expression("7 * 5", episode) == "35, but each of 3, 4, 5 has to be used exactly once"
    with pytest.raises(ValueError, match="not an expression"):
        check_expression("3 +", episode)
