"""Lines of samples.jsonl with an agent's conversations."""

from __future__ import annotations

import json
from typing import Any

from tinyrl.data.images import IMAGE_MARK
from tinyrl.data.messages import Prompt
from tinyrl.environments.environment import Dialogue, Episode
from tinyrl.generation.sample import Sample
from tinyrl.rollout.records import EPISODE_CHARACTERS, LEAST_SHARE, conversation_lines, sample_lines
from tinyrl.runs.records import turns_of
from tinyrl.tasks.prompts import PreparedPrompt


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


SYSTEM = said("system", "Be brief.")
ASKED = said("user", "Who wrote Emma?")
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": {"title": "Emma"}}}
CALLED = said("assistant", "", tool_calls=[CALL])
FOUND = said("tool", "Jane Austen", tool_call_id="call_1")
ANSWER = said("assistant", "Austen.")
PROPERTIES = {"title": {"type": "string"}, "year": {"type": "integer"}}
FIND = {
    "type": "function",
    "function": {"name": "find", "description": "Find\na book.", "parameters": {"properties": PROPERTIES}},
}


def line_of(episode: Episode) -> dict[str, Any]:
    sample = Sample([1], [2], [True], [-0.5], row=3, played=episode, scores=[1.0], score=1.0, reward=1.0)
    return line_with(sample, prompt="asked")


def line_with(sample: Sample, *, prompt: Prompt) -> dict[str, Any]:
    prepared = PreparedPrompt(index=3, row={}, prompt=prompt, text="PROMPT", tokens=[1], opened="")
    [line] = sample_lines([sample], ["returned"], kind="train", prompts={3: prepared}, group_size=2, names=["exact"])
    return json.loads(json.dumps(line))


def test_a_line_names_file_and_hash_of_images() -> None:
    sample = Sample([1], [2], [True], [-0.5], row=3, scores=[1.0], score=1.0, reward=1.0)
    image = {"path": "/pictures/a.png", "sha256": "0" * 64, "size": [4, 2]}
    line = line_with(sample, prompt=[{**said("user", f"{IMAGE_MARK}what?"), "images": [image]}])
    assert (line["prompt"], line["images"]) == ("PROMPT", [image])
    assert "images" not in line_with(sample, prompt="asked")


def test_a_line_has_an_agents_messages_and_tools_beside_what_it_returned() -> None:
    messages = [SYSTEM, ASKED, CALLED, FOUND, ANSWER]
    line = line_of(Episode([said("assistant", "returned")], dialogues=[Dialogue(messages, [FIND])]))
    assert line["conversations"] == [{"tools": [FIND], "messages": messages}]
    assert line["completion"] == "returned"
    assert line["episode"] == [said("assistant", "returned")]
    assert [turn[:3] for turn in turns_of(line)] == [
        ("tools", "find(title, year): Find a book.", 0),
        ("system", "Be brief.", 0),
        ("user", "Who wrote Emma?", 0),
        ("policy", 'find({"title": "Emma"})', 0),
        ("tool", "Jane Austen", 0),
        ("policy", "Austen.", 0),
        ("agent returned", "returned", 0),
    ]


def test_an_episode_without_an_agent_has_no_conversations() -> None:
    line = line_of(Episode([said("assistant", "ask"), said("tool", "<reply>")]))
    assert "conversations" not in line
    assert [turn[:3] for turn in turns_of(line)] == [("policy", "ask", 0), ("environment", "<reply>", 0)]


def test_an_agent_that_asked_nothing_has_only_what_it_returned() -> None:
    line = line_of(Episode([said("assistant", "")], dialogues=[]))
    assert line["conversations"] == []
    assert [turn[:3] for turn in turns_of(line)] == [("agent returned", "returned", 0)]


def test_what_an_earlier_conversation_begins_with_is_written_once() -> None:
    """The second edits the history of the first; the third is a sub-agent's, without tools; the fourth goes on with the
    second's.
    """
    edited = said("user", "Summary: Emma was asked for.")
    again = said("assistant", "Jane Austen.")
    dialogues = [
        Dialogue([SYSTEM, ASKED, CALLED], [FIND]),
        Dialogue([SYSTEM, edited, again], [FIND]),
        Dialogue([said("user", "Check: Austen"), ANSWER]),
        Dialogue([SYSTEM, edited, said("assistant", "Somebody.")]),
    ]
    lines = conversation_lines(dialogues)
    assert lines == [
        {"tools": [FIND], "messages": [SYSTEM, ASKED, CALLED]},
        {"same_as": {"conversation": 1, "messages": 1}, "messages": [edited, again]},
        {"tools": [], "messages": [said("user", "Check: Austen"), ANSWER]},
        {"same_as": {"conversation": 2, "messages": 2}, "messages": [said("assistant", "Somebody.")]},
    ]
    shown = turns_of({"conversations": lines, "completion": "x"})
    assert [turn.conversation for turn in shown] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 0]
    assert [turn.text for turn in shown if turn.speaker == "as before"] == [
        "the first message of conversation 1",
        "the first 2 messages of conversation 2",
    ]


def test_long_texts_are_cut_in_the_middle_and_others_kept() -> None:
    share = EPISODE_CHARACTERS // 3
    long = "a" * share + "b" * share + "c" * share
    call = {"type": "function", "function": {"name": "save", "arguments": {"text": [long]}}}
    whole = said("user", "d" * share)
    [line] = conversation_lines([Dialogue([whole, said("assistant", long, tool_calls=[call]), said("tool", "no")])])
    kept, cut, short = line["messages"]
    assert (kept, short) == (whole, said("tool", "no"))
    in_call = cut["tool_calls"][0]["function"]["arguments"]["text"][0]
    for text in (cut["content"], in_call):
        head, note, tail = text.split("\n")
        assert (len(head), len(tail)) == (share * 2 // 3, share // 3)
        assert {*head, *tail} == {"a", "c"}
        assert f"{3 * share - len(head) - len(tail):,}" in note


def test_many_messages_leave_each_a_little() -> None:
    messages = [said("user", "x" * 2 * LEAST_SHARE)] * (EPISODE_CHARACTERS // LEAST_SHARE + 1)
    [line] = conversation_lines([Dialogue(messages)])
    sizes = {message["content"].count("x") for message in line["messages"]}
    assert sizes == {LEAST_SHARE * 2 // 3 + LEAST_SHARE // 3}


def test_what_is_nested_without_end_is_cut_too() -> None:
    deep: Any = "bottom"
    for _ in range(5000):
        deep = [deep]
    call = {"type": "function", "function": {"name": "save", "arguments": {"text": deep}}}
    line = line_of(Episode([said("assistant", "")], dialogues=[Dialogue([said("assistant", "", tool_calls=[call])])]))
    assert len(json.dumps(line)) < 2000
