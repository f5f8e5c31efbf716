"""The script that teaches a model to play through a harness, and the examples' task, without any harness."""

import random
import re
from pathlib import Path

import pytest

from tests.agents import teach
from tests.test_examples import EXAMPLES, load

TASK = f"{EXAMPLES / 'boxes.py'}:TASK"
LOOK = {"type": "function", "function": {"name": "look"}}
FINAL = {"type": "function", "function": {"name": "final_answer"}}
BASH = {"type": "function", "function": {"name": "bash"}}
ASKED = {"role": "user", "content": "Ada asks: what is on top in the red box?"}
FOUND = {"role": "tool", "content": "key, below it coin"}

AGENT = """
from openai import OpenAI

TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {
    "colour": {"type": "string"}}}}


def run(row, base_url, api_key, model):
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    passage = "A passage that is repeated."
    messages = [{"role": "system", "content": passage}, {"role": "user", "content": row["prompt"]}]
    while True:
        tools = [{"type": "function", "function": TOOL}]
        said = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return said.content
        [call] = said.tool_calls
        colour = eval(call.function.arguments)["colour"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": row["boxes"][colour]})
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[teach.Row]:
    """Two episodes of an agent that is an OpenAI client."""
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(AGENT)
    return teach.record(f"{file}:run", TASK, most=2, concurrency=1)


@pytest.mark.parametrize(
    ("tools", "looks", "answers"),
    [
        (
            [LOOK],
            '<tool_call>\n{"name": "look", "arguments": {"colour": "red"}}\n</tool_call>',
            ["key", "coin"],
        ),
        (
            [FINAL, LOOK],
            '<tool_call>\n{"name": "look", "arguments": {"colour": "red"}}\n</tool_call>',
            [
                '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "key"}}\n</tool_call>',
                '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "coin"}}\n</tool_call>',
            ],
        ),
        (
            [BASH],
            '<tool_call>\n{"name": "bash", "arguments": {"command": "cat red"}}\n</tool_call>',
            [
                '<tool_call>\n{"name": "bash", "arguments": {"command": '
                '"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo key"}}\n</tool_call>',
                '<tool_call>\n{"name": "bash", "arguments": {"command": '
                '"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo coin"}}\n</tool_call>',
            ],
        ),
        (
            [],
            '<code>\nprint(look(colour="red"))\n</code>',
            ['<code>\nfinal_answer("key")\n</code>', '<code>\nfinal_answer("coin")\n</code>'],
        ),
    ],
)
def test_the_script_looks_and_then_names_either_thing(tools: list[object], looks: str, answers: list[str]) -> None:
    assert teach.scripted_answers([ASKED], tools) == [looks]
    assert teach.scripted_answers([ASKED, FOUND], tools) == answers


def test_a_prompt_without_a_question_is_refused() -> None:
    with pytest.raises(ValueError, match="no question"):
        teach.scripted_answers([{"role": "user", "content": "Hello"}], [LOOK])


def test_each_call_of_a_played_episode_is_a_row_and_its_answer_two(recorded: list[teach.Row]) -> None:
    """The first row of the task, and that in the middle: a red box of Ada and one of Leo."""
    rows = load("boxes").rows("train")
    inside = [rows[place]["boxes"]["red"] for place in (0, 36)]
    calls = [[message["role"] for message in row["prompt"]] for row in recorded]
    assert calls == [["system", "user"], *[["system", "user", "assistant", "tool"]] * 2] * 2
    ends = [row for row in recorded if len(row["prompt"]) == 4]
    assert [row["completion"] for row in ends] == [thing for both in inside for thing in both.split(", below it ")]
    assert [row["prompt"][3]["content"] for row in ends] == [both for both in inside for _ in range(2)]


def test_a_repeated_recording_has_other_words_in_the_places_of_its_own() -> None:
    row = {"prompt": [{"role": "user", "content": "a red key, a blue coin, reddish"}], "completion": "key"}
    first, *others = teach.varied([row], [("red", "blue"), ("key", "coin")], times=40)
    assert first == row
    seen = {(each["prompt"][0]["content"], each["completion"]) for each in others}
    assert seen == {
        ("a red key, a blue coin, reddish", "key"),
        ("a blue key, a red coin, reddish", "key"),
        ("a red coin, a blue key, reddish", "coin"),
        ("a blue coin, a red key, reddish", "coin"),
    }


def test_a_tokenizer_of_the_recording_gives_its_texts_back(recorded: list[teach.Row], tmp_path: Path) -> None:
    """In few tokens: a repeated passage and an answer's frame are one each, and a text it never saw is whole too."""
    words = ["red", "blue", "stone", "nail"]
    tokenizer = teach.tokenizer_of(recorded, words)
    teach.write_model(tokenizer, tmp_path)
    again = teach.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("A passage that is repeated.", '<tool_call>\n{"name": "look", "arguments": {"colour": "'):
        assert len(again(text)["input_ids"]) == 1, text
    for text in (*(row["completion"] for row in recorded), "a reddish stone, über 3 nails.\n"):
        assert again.decode(again(text)["input_ids"]) == text
    assert again("red")["input_ids"] != again("reddish")["input_ids"][:1]


def test_boxes_are_scored_by_the_thing_on_top() -> None:
    boxes = load("boxes")
    row = {"person": "Ada", "colour": "red", "boxes": {"red": "key, below it coin", "blue": "coin, below it key"}}
    said = {"key": 1.0, "It is a key.": 1.0, "coin": 0.0, "key or coin": 0.0, "": 0.0, "keys": 0.0}
    assert {text: boxes.score(text, row) for text in said} == said
    assert boxes.gold({**row, "colour": "blue"}) == "coin"


def test_boxes_have_two_different_things_each_and_no_prompt_in_both_splits() -> None:
    boxes = load("boxes")
    train, held = ({boxes.prompt(row) for row in boxes.rows(split)} for split in ("train", "eval"))
    assert (len(train), len(held), len(train & held)) == (72, 18, 0)
    for row in random.Random(0).sample(boxes.rows("train"), 20):
        upper, lower = re.fullmatch(r"(\w+), below it (\w+)", row["boxes"][row["colour"]]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        assert upper != lower


def test_a_verifiers_episode_has_the_reward_that_its_taskset_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none that ran out of tokens; a row names a task, and no task is in both splits."""
    monkeypatch.setenv("VF_TASKSET", "wordle")
    task = load("verifiers_agent").TASK
    assert task.verify([""] * 4, ["0.25", "1.0", "", "x"]) == [0.25, 1.0, 0.0, 0.0]
    assert task.rows("train")[3] == {"prompt": "wordle 3", "taskset": "wordle", "idx": 3}
    assert not {row["idx"] for row in task.rows("train")} & {row["idx"] for row in task.rows("eval")}
