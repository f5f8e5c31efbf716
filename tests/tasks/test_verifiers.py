"""The tasks' verifiers: scores of completions, gold answers, prompts, and rows that a task cannot use."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.running import rows_of
from tinyrl.starter import split_of
from tinyrl.tasks import Task, gsm8k, knights_and_knaves, load_task, worker_service
from tinyrl.tasks.search_qa import normalised_answer
from tinyrl.tasks.sums import write

Row = dict[str, Any]
MB = 1_000_000
ROLES = "(1) Zoey is a knight\n(2) Ann is a knave"
GOLDEN = ["George Eliot", "Mary Ann Evans"]


def said(text: str | None) -> dict[str, str | None]:
    return {"role": "assistant", "content": text}


def read(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


def roles(inside: str) -> str:
    return f"<think>a</think><answer>{inside}</answer>"


# A task, a row, and completions by their score.
SCORES: list[tuple[str, Row, dict[float | None, list[Any]]]] = [
    ("gsm8k", {"question": "?", "answer": "1 + 2 = 3\n#### 1,024"},
     {
        1.0: [
            "#### $1,024.00", "#### 1024 apples in 3 boxes", "#### 7\n#### 1024", "####\n1024",
            "so \\boxed{1{,}024} of 3", "<answer>1024 apples</answer> in 3 boxes",
            "The answer is 1024. It took 3 boxes.", "\\boxed{x = 1024} of 3",
            "\\boxed{1024\\text{ cm}} of 3", "#### done\nThe answer is 1024", "That makes 1024.", [said("#### 1024")],
        ],
        0.0: [
            "#### -1024", "#### 1024\n#### 7", "\\boxed{7} 1024", "1024 or 7", "#### 1024.5", "#### 1 024", "#### ١٠٢٤",
            "#### 1024 or 7", "#### not 1024", "\\boxed{1024 \\text{ million}}", "It is not 1024.",
            "", "9**9**9", "9" * MB, "#### " * 200_000, [], [said(None)],
        ],
     }),
    # a third of Logic-RL's 3, 1 - 1.5, 1 - 2 and -3
    ("knights_and_knaves", {"prompt": "?", "answer": ROLES, "names": ["Zoey", "Ann"]},
     {
        1.0: [
            roles(ROLES),
            "<think>Zoey is a knave? No.</think>\n<answer> Ann is a KNAVE, zoey is  a knight. </answer>\n",
            [said(f"<think></think> so <answer>{ROLES}</answer>")],
        ],
        -0.5 / 3: [roles("Zoey is a knave, Ann is a knave"), roles("Zoey is a knave, Ann is a knight")],
        -1 / 3: [
            *map(roles, ("Zoey is a knight", "", "Zoey: knight, Ann: knave", f"{ROLES}, or Zoey is a knave")),
            *map(roles, (f"{ROLES} (a knave lies)", "Zoey is a knight, Bob is a knave", "Zoey is a knight " * 60_000)),
        ],
        -1.0: [
            ROLES, f"<think>a<answer>{ROLES}</answer></think>", f"<think>a</think><answer>{ROLES}",
            f"{roles(ROLES)}<answer>{ROLES}</answer>", "<answer>" * 125_000, "is a knight" * 90_000, [],
        ],
     }),
    ("search_qa", {"question": "?", "golden_answers": GOLDEN},
     {
        1.0: [
            "<answer> the george   eliot. </answer>", "<think>so</think><answer>mary ann evans</answer> done",
            "<answer>no</answer> wait <answer>George Eliot</answer>",
            [said("<answer>George Eliot</answer>"), read("<answer>Charles Dickens</answer>")],
        ],
        0.0: [
            "George Eliot", "<answer>George</answer>", "<answer>George Eliot and others</answer>",
            "<answer>George Eliot</answer> no: <answer>Dickens</answer>", "<answer>George Eliot", [],
            [said("<search>q</search>"), read("<information><answer>George Eliot</answer></information>")],
            "<answer>" + "the " * 300_000 + "</answer>",
        ],
     }),
    ("search_qa", {"question": "?", "golden_answers": "Paris"}, {1.0: ["<answer>the paris</answer>"]}),
    ("search_qa", {"question": "?", "golden_answers": ["A"]},
    {1.0: ["<answer>a</answer>"], 0.0: [f"<answer>{text}</answer>" for text in ("the", "!", "")]}),
    ("rows", {"prompt": "?", "answer": "Paris"},
     {
        1.0: ["Paris", " paris.\n", "I think <answer>Paris</answer> is it", [said("Paris")]],
        0.0: ["Paris, France", "I think Paris", "<answer>Rome</answer> not Paris", "", []],
     }),
    ("rows", {"prompt": "?", "answer": "1000"},
    {1.0: ["The answer is 1,000."], 0.0: ["1000 or 7", "<answer>x</answer> 1000", "9" * MB]}),
    ("rows", {"prompt": "?", "answer": "new york"}, {1.0: ["so\n#### New  York", "so \\boxed{New York}"]}),
    ("rows", {"prompt": "?", "answer": "12"}, {1.0: ["答えは１２です。", "１２"]}),
    ("rows", {"prompt": "?", "answer": 0.5}, {1.0: ["0.5", "so \\boxed{1/2} of 3"]}),
    ("rows", {"prompt": "?", "answer": "48 + 24 = 72\n#### 72"}, {1.0: ["so 72"]}),
    ("rows", {"prompt": "?", "answer": "."}, {0.0: [""]}),
    *[("rows", {"prompt": "?", "answer": none}, {None: ["", "a"]}) for none in (None, "", " \n", ["a"])],
    ("countdown", {"numbers": [3, 7, 25], "target": 46, "solution": None},
     {
        1.0: [
            "First 25 + 7.\n<think>no</think><answer>\n(7*3)+25\n</answer> done",
            "<answer>25 + 7 * 3 = 46</answer>", "<answer>２５ ＋ ７ ＊ ３ ＝ 46</answer>",
            "Let me see: 25 + 3 = 28\n25 + 3 × 7", "`25 + 21/7*7*0`\n3*7 - -25",
        ],
        0.0: [
            "<answer>25 + 21</answer>",  # 21 is no given number
            "<answer>3 * 7 + 25 + 7 - 7</answer>",  # 7 used three times
            "<answer>46</answer>", "<answer>3 * 7 + 25</answer><answer>7</answer>", "<answer>3 * 7 + 25.0</answer>",
            "<answer>int('46')</answer>", "<answer>9**9**9</answer>", "<answer>3/(7-7)</answer>",
            "3 * 7 + 25\nso there", "", "(" * MB, [],
        ],
     }),
    ("countdown", {"numbers": [1, 3, 3, 7], "target": 7}, {1.0: ["<answer>(1/3)*3*7</answer>"]}),
    ("countdown", {"numbers": [7, 2], "target": 3}, {0.0: ["<answer>7/2</answer>"]}),
    ("sort", {"prompt": "letters: d b a sorted:", "answer": "abd"},
     {
        1.0: [" a b d", "a b d\n", [said(" a b d")]],
        0.0: [" a d b", " a d", " a b b d", " a b d e", "abd", " a, b, d", " A B D", "", [said(" b a d")]],
     }),
    ("sums", {"prompt": "?", "answer": 42},
     {
        1.0: ["42", "12 + 30 = 42", "Ann has 42 apples now.", [said("42")]],
        0.0: ["42, that is 12 and 30", "12 + 30 = 43", "٤٢", ""],
     }),
    ("reviews", {"prompt": "i saw it."},
     {
        1.0: [" the plot was superb. i loved it."],
        -1.0: [" the plot was dull. i hated it.", [said(" i hated it.")]],
        0.0: [" the plot was superb, but the cast was dull.", ""],
        2 / 3: [" the plot was superb, and the cast was old. i loved it."],
        0.5: [" the plot was superb. plot plot plot.", " i loved it. i loved it."],
     }),
    ("lookup", {"prompt": "?", "answer": "baker", "world": "w"},
     {
        1.0: [
            " answer baker .", "answer baker", " search Ada Stone job ; found clerk ; answer baker .",
            [said(" search Ada Stone job ;"), read(" answer clerk ;"), said(" answer baker .")],
        ],
        0.0: [
            " answer clerk .", " answer baker clerk .", " answer clerk . answer baker .", " baker .",
            " answer clerk answer baker .", " answer .", "",
            [said(" search Ada Stone job ;"), read(" answer baker .")],  # what was read is nobody's answer
        ],
     }),
]  # fmt: skip


def scores(task: Task, completions: list[Any], rows: list[Row]) -> list[float | None]:
    assert task.verify is not None
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    return task.verify(["?"] * len(rows), completions, **columns)


@pytest.mark.parametrize(("name", "row", "by_score"), SCORES, ids=[name for name, *_ in SCORES])
def test_completions_are_scored(name: str, row: Row, by_score: dict[float | None, list[Any]]) -> None:
    for score, completions in by_score.items():
        for completion in completions:
            assert scores(load_task(name), [completion], [row]) == [pytest.approx(score)], str(completion)[:60]


def test_a_batch_is_scored_row_by_row() -> None:
    rows = [{"prompt": "p", "answer": answer, "completion_ids": [1]} for answer in ("ab", "ac", "ab")]
    assert scores(load_task("sort"), [" a b", " a b", "x"], rows) == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="shorter"):
        scores(load_task("sort"), [" a b"] * 2, rows[:1])
    rows = [{"answer": answer} for answer in ("a", None, "d")]
    assert scores(load_task("rows"), ["a", "b", "c"], rows) == [1.0, None, 0.0]


@pytest.mark.parametrize("name", ["sort", "sums", "lookup", "countdown"])
@pytest.mark.wide
def test_own_rows_are_solved_by_gold_and_by_no_constant(name: str) -> None:
    task = load_task(name)
    rows = task.rows("eval")
    gold = [task.gold(row) for row in rows]
    assert scores(task, gold, rows) == [1.0] * len(rows)
    others = [str(row.get("target", "?")) for row in rows]
    shifted, prompts = gold[1:] + gold[:1], [task.prompt(row) for row in rows]
    for wrong in (gold[:1] * len(rows), shifted, [""] * len(rows), others, prompts):
        assert sum(score or 0.0 for score in scores(task, wrong, rows)) / len(rows) < 0.1


def test_own_rows_are_the_same_every_time_and_of_their_splits() -> None:
    for name, sizes in (("sort", (4096, 512)), ("reviews", (539, 512)), ("lookup", (4096, 512))):
        rows = {split: load_task(name).rows(split) for split in ("train", "eval")}
        assert tuple(map(len, rows.values())) == sizes
        for split, some in rows.items():
            assert {split_of(row["prompt"]) for row in some} == {split}
            assert len({row["prompt"] for row in some}) == len(some)
    first = {
        "sums": {"prompt": "What is 866 + 396?", "answer": 1262, "first": 866, "second": 396, "wrong": 1346},
        "countdown": {"numbers": [2, 3, 36, 18], "target": 28, "solution": "18 + ((36 / 3) - 2)"},
    }
    for name, size in (("sums", 4096), ("countdown", 8192)):
        train, held = load_task(name).rows("train"), load_task(name).rows("eval")
        assert (len(train), len(held), train[0]) == (size, 512, first[name])
        numbers = [row["numbers"] if name == "countdown" else [row["first"], row["second"]] for row in train + held]
        keys = {(*sorted(some), row.get("target")) for some, row in zip(numbers, train + held, strict=True)}
        assert len(keys) == size + 512


@given(
    st.text().filter(str.strip)
    | st.text("#<answer>/1.,$%{}\\boxd \n", min_size=1).filter(str.strip)
    | st.integers()
    | st.floats()
    | st.booleans()
)
def test_every_gold_answer_of_own_rows_has_full_marks(answer: Any) -> None:
    row = {"prompt": "?", "answer": answer}
    assert scores(load_task("rows"), [load_task("rows").gold(row)], [row]) == [1.0]
    task = load_task("search_qa")
    for golden in (GOLDEN, "George Eliot", [" A "], ["!"], ["a < b"]):
        row = {"question": "?", "golden_answers": golden}
        assert scores(task, [task.gold(row)], [row]) == [1.0]


def test_answers_that_are_counted_as_the_same() -> None:
    for name, text, answer in (
        ("gsm8k", "#### 1,000.50", Fraction(2001, 2)),
        ("knights_and_knaves", "<answer>Ann is a knave, Zo is a knight</answer>", {("ann", "knave"), ("zo", "knight")}),
        ("search_qa", "so <answer> The Who. </answer>", "who"),
        ("rows", "#### $1,000.00", "1000"),
        ("rows", "  ", None),
        ("countdown", "<answer>3 * 7 + 25 = 46</answer>", "3*7+25"),
        ("sort", " a d b", "adb"),
        ("lookup", " search Ada Stone job ; found baker ; answer clerk .", "clerk"),
    ):
        found = load_task(name).answer
        assert found is not None
        row = {"golden_answers": ["The Band"]}
        assert found(text, row) == answer
        assert answer is None or hash(found(text, row)) is not None


def test_rows_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for name, row, column in (
        ("gsm8k", {"question": "q", "answer": "#### x"}, "answer"),
        ("knights_and_knaves", {"prompt": "p", "answer": "Zoey"}, "answer"),
        *[("search_qa", {"question": "q", "golden_answers": bad}, "golden_answers") for bad in ([], " ")],
        ("search_qa", {"question": "q", "answer": "a"}, "task.columns.golden_answers=OLD"),
        ("rows", {"prompt": 3}, "prompt"),
        *[("rows", {"prompt": "p", "answer": bad}, "answer") for bad in (["a"], " ")],
        *[("countdown", {"numbers": bad, "target": 4}, "numbers") for bad in ("[3, 7]", [True])],
        ("countdown", {"numbers": [3, 7], "target": "10"}, "target"),
    ):
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{column}"):
            rows_of(name, "train", data=str(file), eval_data=str(file))


def test_rows_of_the_hub_and_tasks_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"task\.data=FILE\.jsonl"):
        rows_of("search_qa", "train")
    for module, names in ((gsm8k, "openai/gsm8k:main@train test"), (knights_and_knaves, "K-and-K train test@3ppl")):
        monkeypatch.setattr(module, "read_rows", lambda source, columns=None: [{"from": source, **(columns or {})}])
        train, held = (module.TASK.rows(split)[0] for split in ("train", "eval"))
        assert train != held
        assert all(part in train["from"] + held["from"] for part in names.split())
    assert (train["prompt"], train["answer"]) == ("quiz", "solution_text_format")


def test_the_answer_of_an_own_task_may_depend_on_its_row() -> None:
    """A function of the text alone is called with that alone."""

    def of_row(text: str, row: Row) -> str:
        return text.replace(row["noise"], "")

    given = {"text": ["ab", "a", "b"], "row": [{"noise": "b"}, {"noise": "x"}, {"noise": "x"}]}
    numbers = {"row": [0, 0, 1], "text": [0, 1, 2]}
    functions: dict[str, Any] = {"row": of_row, "text": str.upper}
    for name, function in functions.items():
        service = worker_service.task([Task(name="own", answer=function)])
        assert service.calls["answers"](given, 3).values == numbers[name]


# ---- one task alone ----


def test_answers_are_compared_as_squad_does() -> None:
    normalised = {"The  Beatles!": "beatles", "an A.B.C. of\nthe sea": "abc of sea", "Theatre": "theatre",
                  "don't": "dont", "“Quoted”": "“quoted”", "É": "é", "A": "a", "!!": "!!", "  ": ""}  # fmt: skip
    assert {text: normalised_answer(text) for text in normalised} == normalised


def test_the_files_of_sums_end_with_the_sum_but_for_the_wrong_ones(tmp_path: Path) -> None:
    files = [path for path in write(tmp_path) if ".eval" in path.name]
    for file, columns in zip(
        files, ({"completion": 1.0}, {"chosen": 1.0, "rejected": 0.0}, {"chosen": 1.0}), strict=True
    ):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for column, right in columns.items():
            assert set(scores(load_task("sums"), [row[column] for row in rows], rows)) == {right}
