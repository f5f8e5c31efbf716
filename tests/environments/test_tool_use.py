"""Tools and TRL's environment classes: what a turn calls, its reply, and that a replay equals the live episode."""

import asyncio
import enum
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL.Image import new as new_image

import tinyrl
from tinyrl.environments import MAX_TEXT_CHARS, DropEpisode, Message, Reply, Transcript, trl_classes, worker_service
from tinyrl.environments.tool_calls import CALL_FAILED, ToolCall, calls_of, carry_out, joined, text_of
from tinyrl.environments.trl_classes import ClassEnvironment
from tinyrl.environments.worker_service import respond_with
from tinyrl.workers.calls import WorkerFunction
from tinyrl.workers.loading import parse_use
from tinyrl.workers.values import RowResults


def add(a: int, b: int = 10) -> int:
    return a + b


def divide(a: float, b: float) -> float:
    if b < 0:
        raise ValueError
    return a / b


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turn(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def told(text: str) -> Message:
    return {"role": "tool", "content": text}


def answer(*tools: Callable[..., Any], to: str, **columns: Any) -> Reply | DropEpisode | None:
    """Return the reply of tools to one turn."""
    (found,) = respond_with(tools)(["?"], [[turn(to)]], **{name: [value] for name, value in columns.items()})
    return found


def several(*results: str, invalid: bool = False, tool_error: bool = False) -> Reply:
    """Return the reply to several calls: the result of each, and all of them as one text."""
    return Reply("\n".join(results), invalid=invalid, results=results, tool_error=tool_error)


# ---- calls ----


def test_calls_are_parsed_in_order_and_thoughts_call_nothing() -> None:
    text = (
        '<think>maybe <tool_call>{"name": "no"}</tool_call> or <tool_call></think>'
        'First <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> then\n'
        '<tool_call>\n  {"arguments": {}, "name": "show"}\t</tool_call></tool_call> and <b>done</b>.'
        r'<tool_call>{"name": "show", "arguments": "{\"text\": \"hi\"}"}</tool_call>'
    )
    assert calls_of(turn(text)) == [ToolCall("add", {"a": 1}), ToolCall("show", {}), ToolCall("show", {"text": "hi"})]
    for nothing in ("", ', "arguments": null', ', "arguments": ""'):
        assert calls_of(turn(f'<tool_call>{{"name": "now"{nothing}}}</tool_call>')) == [ToolCall("now", {})]
    given = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}, {"name": "x"}, "no JSON"]
    parsed = turn(call("show", text="not this one"), tool_calls=given)  # by the form of the model's template
    assert calls_of(parsed) == [ToolCall("add", {"a": 1}), ToolCall("x"), ToolCall(problem="no JSON")]
    assert calls_of(turn(call("show"), tool_calls=[])) == []


def test_a_thought_that_is_not_closed_calls_nothing() -> None:
    thought = f"<think>I could {call('show')}"
    assert calls_of(turn(thought)) == []
    assert calls_of(turn(f"{thought}</think>")) == []
    assert calls_of(turn(f"I could write <think>: {call('show')}")) == [ToolCall("show", {})]


def test_a_call_that_cannot_be_parsed_has_its_problem() -> None:
    for text, problem in [
        ('<tool_call>["add"]</tool_call>', "a call is an object with 'name'"),
        ('<tool_call>{"arguments": {}}</tool_call>', "the call has no 'name'"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add: 'arguments' must be an object"),
        ('<tool_call>{"name": "add", "arguments": "1 2"}</tool_call>', "add: 'arguments' are not JSON"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON: too many brackets"),
        ("<tool_call>" * 90_000, "<tool_call> without </tool_call>"),
    ]:
        (found,) = calls_of(turn(text))
        assert found.problem.startswith(problem)


# ---- tools ----


def test_a_tool_that_returns_an_image_fails_instead_of_showing_its_name() -> None:
    with pytest.raises(ValueError, match="image"):
        text_of(new_image("RGB", (2, 2)))


def test_a_result_becomes_text_and_a_failed_call_is_answered_with_its_reason() -> None:
    assert text_of({"a": [1, None, True], "ß": (2.5,)}) == '{"a": [1, null, true], "ß": [2.5]}'
    assert text_of({"at": range(2)}) == '{"at": "range(0, 2)"}'
    assert text_of("\ud83d\ude00 \ud83d.").encode() == "😀 �.".encode()
    assert answer(add, to="It is 3.") is None
    for made, reason in [
        ("<tool_call></tool_call>", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        (call("multiply", a=1), "there is no tool 'multiply'; there are: add, divide"),
        (call("add"), "add: missing a required argument: 'a'"),
        (call("divide", a=1, b=-1), "ValueError"),
    ]:
        reply = answer(add, divide, to=made + call("add", a=1))
        assert reply == several(f"{CALL_FAILED} {reason}", "11", invalid=True)
    reply = answer(add, divide, to=call("divide", a=1, b=0) + call("add", a=1))
    assert reply == several(f"{CALL_FAILED} ZeroDivisionError: float division by zero", "11", tool_error=True)


@pytest.mark.parametrize(
    ("error", "of_the_policy"),
    [
        (ValueError("no such city"), True),
        (ConnectionRefusedError(111, "down"), False),
        (TimeoutError(), False),
        (KeyError("answer"), False),
        (json.JSONDecodeError("Expecting value", "<html>", 0), False),  # what a broken server answers
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), False),
    ],
)
def test_a_bad_call_and_an_outage_of_its_tool_are_told_apart(error: Exception, *, of_the_policy: bool) -> None:
    def ask(city: str) -> str:
        raise error

    reply = answer(ask, to=call("ask", city="Riga"))
    assert isinstance(reply, Reply)
    assert (reply.invalid, reply.tool_error) == (of_the_policy, not of_the_policy)


def test_a_tool_may_drop_the_episode_that_called_it() -> None:
    """Its other calls are left; other episodes are answered."""
    called: list[str] = []

    async def ask(city: str) -> str:
        called.append(city)
        if city == "Riga":
            raise DropEpisode("the server is down")
        return city.upper()

    transcripts = [[turn(call("ask", city="Oslo"))], [turn(call("ask", city="Riga") + call("ask", city="Bern"))]]
    service = worker_service.serve_replies(respond_with([ask]))
    results = service.calls["respond"]({"prompts": ["p"] * 2, "transcripts": transcripts}, 2)
    assert results.values == [["OSLO", False, None, False, [], False], None]
    [failure] = results.failures
    assert failure.row == 1
    assert "the server is down" in failure.reason
    assert called == ["Oslo", "Riga"]


def test_coroutines_of_several_episodes_wait_together_and_those_of_one_in_order() -> None:
    log: list[str] = []

    async def fetch(what: str) -> str:
        log.append(f"ask {what}")
        await asyncio.sleep(0)
        log.append(f"got {what}")
        if what == "bad":
            raise ConnectionError("refused\nand more")
        return what.upper()

    transcripts = [[turn(call("fetch", what="a") + call("fetch", what="b"))], [turn(call("fetch", what="bad"))]]
    replies = respond_with([fetch])(["p", "p"], transcripts)
    assert replies == [several("A", "B"), Reply(f"{CALL_FAILED} ConnectionError: refused", tool_error=True)]
    assert log == ["ask a", "ask bad", "got a", "got bad", "ask b", "got b"]


def test_a_tool_that_exits_is_a_failed_call_and_others_are_answered() -> None:
    def leave(code: int) -> str:
        sys.exit(code)

    async def leave_later(code: int) -> str:
        await asyncio.sleep(0)
        sys.exit(code)

    made = call("leave", code=3) + call("leave_later", code=4) + call("add", a=1)
    reply = answer(leave, leave_later, add, to=made)
    assert isinstance(reply, Reply)
    first, second, third = reply.text.splitlines()
    assert (first.startswith(CALL_FAILED), "3" in first) == (True, True)
    assert (second.startswith(CALL_FAILED), "4" in second) == (True, True)
    assert (third, reply.tool_error) == ("11", True)


def test_a_result_that_is_nested_too_deep_is_a_failed_call_and_a_deep_one_is_not() -> None:
    def deep(levels: int) -> list[Any]:
        value: list[Any] = []
        for _ in range(levels - 1):
            value = [value]
        return value

    reply = answer(deep, add, to=call("deep", levels=100_000) + call("deep", levels=100) + call("add", a=1))
    assert isinstance(reply, Reply)
    first, second, third = reply.results
    assert first.startswith(CALL_FAILED)
    assert (second, third, reply.tool_error) == ("[" * 100 + "]" * 100, "11", True)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_that_has_no_text_is_a_failed_call_by_its_class() -> None:
    def fetch() -> str:
        raise Unspeakable

    assert answer(fetch, to=call("fetch")) == Reply(f"{CALL_FAILED} Unspeakable", tool_error=True)


def test_a_result_that_cannot_be_turned_into_text_is_a_failed_call() -> None:
    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert answer(Silent, to=call("Silent")) == Reply(f"{CALL_FAILED} RuntimeError: no words", tool_error=True)


STOPPING = """
from tinyrl.environments.worker_service import respond_with

def stop():
    raise KeyboardInterrupt("no")

async def stop_later():
    raise KeyboardInterrupt

def add(a):
    return a + 10

def respond(prompts, transcripts):
    return respond_with([stop, stop_later, add])(prompts, transcripts)
"""


def test_an_interrupt_that_a_tool_raises_is_a_failed_call(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STOPPING)
    use = parse_use(f"{tmp_path}/mine.py:respond", setting="environment.name")
    host = f"{worker_service.__name__}:environment"
    asked = call("stop") + call("stop_later") + call("add", a=1)
    given = {"prompts": ["?"], "transcripts": [[turn(asked)]]}
    with WorkerFunction([use], setting="environment.name", host=host, timeout_s=20) as worker:
        results = worker.rows(given, 1, call="respond", is_valid=lambda value: True)
    first, second, third = results.values[0][4]
    assert (first.startswith(CALL_FAILED), second.startswith(CALL_FAILED), third) == (True, True, "11")
    assert results.failures == []


def test_an_interrupt_of_the_run_itself_passes_a_tool_of_a_notebook() -> None:
    def stop() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(stop, to=call("stop"))


class Thing:
    pass


def test_a_result_has_no_address_which_another_process_reads_otherwise() -> None:
    def look() -> Any:
        return Thing()

    def count() -> Any:
        return {"first": [Thing()], "second": len}

    def fail() -> Any:
        raise ValueError(Thing())

    thing = f"<{__name__}.Thing>"
    assert answer(look, to=call("look")) == Reply(thing)
    assert answer(count, to=call("count")) == Reply(json.dumps({"first": [thing], "second": "<built-in function len>"}))
    assert answer(fail, to=call("fail")) == Reply(f"{CALL_FAILED} ValueError: {thing}", invalid=True)


def test_a_text_that_a_tool_returns_keeps_an_address_in_it() -> None:
    def read() -> str:
        return "<Thing object at 0x7f00aa10>"

    assert answer(read, to=call("read")) == Reply("<Thing object at 0x7f00aa10>")


def test_an_environment_that_is_a_coroutine_is_awaited() -> None:
    async def respond(prompts: list[Any], transcripts: list[Transcript]) -> list[str]:
        await asyncio.sleep(0)
        return [f"{prompt}!" for prompt in prompts]

    service = worker_service.environment([respond])
    found = service.calls["respond"]({"prompts": ["a", "b"], "transcripts": [[], []]}, 2)
    assert found.values == [["a!", False, None, False, [], False], ["b!", False, None, False, [], False]]


def test_a_tool_may_get_the_episode_that_called_it() -> None:
    def whoami(loud: bool, episode: dict) -> str:
        """Tell.

        Args:
            loud: Whether to shout.
        """
        return f"{episode} {loud}"

    found = answer(whoami, to=call("whoami", loud=True), seed=7, gold="x")
    assert found == Reply("{'seed': 7, 'gold': 'x', 'prompt': '?'} True")
    forged = answer(whoami, to=call("whoami", loud=True, episode={}), seed=7)
    assert forged == Reply(f"{CALL_FAILED} whoami: got an unexpected keyword argument 'episode'", invalid=True)
    (schema,) = worker_service.tools([whoami]).facts.of_host["schemas"]
    assert list(schema["function"]["parameters"]["properties"]) == ["loud"]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


def paint(count: int, color: Color = Color.RED, note: int | str = "") -> str:
    """Paint.

    Args:
        count: How many.
        color: In which color.
        note: Anything.
    """
    return f"{count!r} {color!r} {note!r}"


def test_arguments_have_the_types_of_the_hints() -> None:
    for given, shown in (
        ({"count": 2, "color": "blue"}, "2 <Color.BLUE: 'blue'> ''"),
        ({"count": "2"}, "2 <Color.RED: 'red'> ''"),
        ({"count": 2.0, "note": "3"}, "2 <Color.RED: 'red'> '3'"),
        ({"count": 2, "note": 3}, "2 <Color.RED: 'red'> 3"),
    ):
        assert answer(paint, to=call("paint", **given)) == Reply(shown)


@pytest.mark.parametrize("given", [{"count": "two"}, {"count": 2.5}, {"count": 2, "color": "green"}, {"count": None}])
def test_an_argument_of_another_type_is_a_failed_call(given: dict[str, Any]) -> None:
    reply = answer(paint, to=call("paint", **given))
    assert isinstance(reply, Reply)
    assert reply.invalid
    assert reply.text.startswith(f"{CALL_FAILED} paint: {[*given][-1]}: ")


def test_the_schema_of_a_tool_has_its_defaults() -> None:
    (schema,) = worker_service.schemas([paint])
    properties = schema["function"]["parameters"]["properties"]
    assert {name: found.get("default", "none") for name, found in properties.items()} == {
        "count": "none",
        "color": "red",
        "note": "",
    }


def test_parameters_that_a_call_cannot_name_are_refused() -> None:
    def rest(*places: str) -> None:
        """Look.

        Args:
            places: Where.
        """

    def first(place: str, /) -> None:
        """Look.

        Args:
            place: Where.
        """

    for tool, name in ((rest, "rest"), (first, "first")):
        with pytest.raises(ValueError, match=f"'{name}'"):
            worker_service.schemas([tool])


class Shop:
    def look(self, place: str) -> str:
        """Look.

        Args:
            place: Where.
        """
        return place.upper()

    @classmethod
    def visit(cls, place: str) -> str:
        """Visit.

        Args:
            place: Where.
        """
        return place.upper()


def test_a_method_of_a_class_is_refused_as_a_tool_and_that_of_an_object_is_not() -> None:
    with pytest.raises(ValueError, match=r"'look'.*self"):
        worker_service.schemas([Shop.look])
    for bound in (Shop().look, Shop.visit):
        (schema,) = worker_service.schemas([bound])
        assert list(schema["function"]["parameters"]["properties"]) == ["place"]


# ---- TRL's classes ----


class Wordle:
    """A game in the style of TRL's documentation."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def reset(self, **row: Any) -> str | None:
        self.word, self.guesses, self.done = row["word"], list[str](), False
        return f"\nIt has {len(self.word)} letters."

    def guess(self, word: str) -> str:
        """Guess the word.

        Args:
            word: A word of as many letters.
        """
        if self.done:
            raise ValueError("Game over.")
        if len(word) != len(self.word):
            raise ValueError(f"{word} has not {len(self.word)} letters.")
        self.guesses.append(word)
        self.done = word == self.word
        return f"{len(self.guesses)}: " + "".join("G" if a == b else "-" for a, b in zip(word, self.word, strict=True))

    def history(self) -> list[str]:
        """What was guessed so far."""
        return self.guesses

    async def get_reward(self) -> float:
        return 1.0 if self.done else -0.25 * len(self.guesses)

    look_back = history

    def _hidden(self) -> str:
        """Not a tool."""
        return self.word

    @property
    def expensive(self) -> str:
        raise AssertionError("looked at")


# A whole episode: the policy's turns, and the reply to each.
TURNS = [
    call("guess", word="cart"),
    call("guess", word="c") + call("guess", word="cast"),
    call("_hidden") + call("get_reward") + call("history"),
    call("guess", word="cats"),
    call("guess", word="coal"),
]
TOOLS = "guess, history"
REPLIES = [
    Reply("1: GG--"),
    several(f"{CALL_FAILED} ValueError: c has not 4 letters.", "2: GG--", invalid=True),
    several(
        f"{CALL_FAILED} there is no tool '_hidden'; there are: {TOOLS}",
        f"{CALL_FAILED} there is no tool 'get_reward'; there are: {TOOLS}",
        '["cart", "cast"]',
        invalid=True,
    ),
    Reply("3: GGGG"),
    Reply(f"{CALL_FAILED} ValueError: Game over.", invalid=True),
]


def until(count: int) -> Transcript:
    """Return the episode until the policy's turn with this number, which was not answered yet."""
    pairs = [[turn(text), told(reply.text)] for text, reply in zip(TURNS, REPLIES, strict=True)][:count]
    return [*(message for pair in pairs for message in pair), turn(TURNS[count])]


@pytest.fixture
def wordle() -> ClassEnvironment:
    environment = ClassEnvironment(Wordle)
    Wordle.made = 0
    return environment


WORD = {"word": ["cats"], "seed": [0]}


@pytest.mark.parametrize(("most_live", "made"), [(4096, 1), (0, 7)])
def test_an_episode_played_live_or_again_from_its_beginning(
    wordle: ClassEnvironment, monkeypatch: pytest.MonkeyPatch, most_live: int, made: int
) -> None:
    monkeypatch.setattr(trl_classes, "MOST_LIVE", most_live)
    assert wordle.opening(["Guess."], **WORD) == ["\nIt has 4 letters."]
    for count, reply in enumerate(REPLIES):
        assert wordle.respond(["Guess."], [until(count)], **WORD) == [reply]
    over = [*until(4), told(REPLIES[4].text), turn("I won.")]
    assert wordle.respond(["Guess."], [over], **WORD) == [Reply(done=True, reward=1.0)]
    assert Wordle.made == made


def test_of_live_instances_the_one_that_was_kept_longest_ago_is_dropped(
    wordle: ClassEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes the place of an identical one is new."""
    monkeypatch.setattr(trl_classes, "MOST_LIVE", 2)
    for key, instance in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        wordle._keep(key, instance)
    assert wordle._live == {"a": 3, "c": 4}


def test_episodes_that_part_do_not_meet_again(wordle: ClassEnvironment) -> None:
    columns = {"word": ["cats", "cats"], "seed": [0, 0]}
    wordle.respond(["p", "p"], [until(0)] * 2, **columns)
    other = [*until(0), told(REPLIES[0].text), turn(call("history"))]
    assert wordle.respond(["p", "p"], [until(1), other], **columns) == [REPLIES[1], Reply('["cart"]')]
    one_more = [told('["cart"]'), turn(call("guess", word="cats"))]
    assert wordle.respond(["p"], [[*other, *one_more]], **WORD) == [Reply("2: GGGG")]
    # nor do those whose calls were parsed before, and are not in the text
    asked = [{"function": {"name": "guess", "arguments": {"word": word}}} for word in ("cats", "dogs")]
    first = [[turn("", tool_calls=[each])] for each in asked]
    assert wordle.respond(["p"] * 2, first, **columns) == [Reply("1: GGGG"), Reply("1: ---G")]
    second = [[*each, told("..."), turn("", tool_calls=asked[:1])] for each in first]
    assert wordle.respond(["p"] * 2, second, **columns) == [REPLIES[4], Reply("2: GGGG")]


def test_the_reward_of_an_episode_that_was_cut_off_counts_its_last_calls(wordle: ClassEnvironment) -> None:
    transcripts = [until(0), until(2), until(3), [*until(3), told("3: GGGG")], []]
    columns = {"word": ["cats"] * 5, "seed": [*range(5)]}
    cold = wordle.final_rewards(["p"] * 5, transcripts, **columns)
    assert cold == [-0.25, -0.5, 1.0, 1.0, 0.0]
    wordle.respond(["p"] * 3, transcripts[:3], word=["cats"] * 3, seed=[0, 1, 2])
    Wordle.made = 0
    assert wordle.final_rewards(["p"] * 5, transcripts, **columns) == cold
    assert Wordle.made == 2


@pytest.mark.parametrize(
    ("given", "failed"),
    [(Reply("b", reward=0.0), True), (Reply("b", done=True), True), (Reply("b"), False), ("b", False)],
)
def test_a_tool_that_rewards_or_ends_fails_since_neither_would_count(given: Any, *, failed: bool) -> None:
    [replies] = carry_out([({"a": lambda: given}, [ToolCall("a")])])
    reply = joined(replies)
    assert isinstance(reply, Reply)
    assert reply.tool_error == failed
    assert (reply.text == "b") != failed
    assert not reply.invalid


def test_a_row_is_not_changed_by_the_class_that_was_given_it() -> None:
    class Stack:
        def reset(self, items: list[int]) -> None:
            self.items = items

        def pop(self) -> int:
            """Take one."""
            return self.items.pop()

    service, items = worker_service.environment([Stack]), [[1, 2]] * 2
    assert (service.facts.of_host["opening"], service.facts.of_host["rewards"]) == (True, "none")
    given = {"prompts": ["p"] * 2, "transcripts": [[turn(call("pop"))], [turn("2")]], "items": items}
    assert service.calls["respond"](given, 2) == RowResults([["2", False, None, False, [], False], None])
    assert items == [[1, 2]] * 2


class Flaky:
    """A class whose server is down at the second question of Riga."""

    def reset(self, **row: Any) -> None:
        self.asked = 0

    def ask(self, city: str) -> str:
        """Ask.

        Args:
            city: Where.
        """
        self.asked += 1
        if city == "Riga" and self.asked == 2:
            raise tinyrl.DropEpisode("the server is down")
        return city

    def get_reward(self) -> float:
        return float(self.asked)


@pytest.mark.parametrize("most_live", [4096, 0])
def test_a_method_may_drop_its_episode_live_replayed_and_at_its_end(
    monkeypatch: pytest.MonkeyPatch, most_live: int
) -> None:
    monkeypatch.setattr(trl_classes, "MOST_LIVE", most_live)
    calls = worker_service.environment([Flaky]).calls
    transcripts = [[turn(call("ask", city=city))] for city in ("Oslo", "Riga")]
    given = {"prompts": ["p", "p"], "transcripts": transcripts}
    assert [value[0] for value in calls["respond"](given, 2).values] == ["Oslo", "Riga"]
    given["transcripts"] = [[*each, told("..."), *each] for each in transcripts]
    for ask, first in (("final_rewards", 2.0), ("respond", ["Oslo", False, None, False, [], False])):
        results = calls[ask](given, 2)
        assert results.values == [first, None]
        [failure] = results.failures
        assert (failure.row, "the server is down" in failure.reason) == (1, True)


# ---- services ----


def test_replies_of_a_respond_function_are_checked_and_cut() -> None:
    class Odd:
        text, done, reward = "x", False, float("nan")

    def respond(prompts: list, transcripts: list, city: list) -> list:
        return [Reply("x" * 1_000_000, reward=2), "y", None, Odd(), 3, ValueError("no server")]

    found = worker_service.environment([respond])
    assert (found.facts.of_host["rewards"], found.facts.required) == ("some", ["prompts", "transcripts", "city"])
    given = {"prompts": ["p"] * 6, "transcripts": [[]] * 6, "city": ["Riga"] * 6}
    results = found.calls["respond"](given, 6)
    cut, short = (["x" * MAX_TEXT_CHARS, False, 2.0, False, [], False], ["y", False, None, False, [], False])
    assert results.values == [cut, short, *[None] * 4]
    assert [failure.row for failure in results.failures] == [3, 4, 5]
    assert "no server" in results.failures[2].reason


@pytest.mark.parametrize("make", [Wordle, lambda: Wordle()])
def test_a_class_or_a_function_that_makes_an_instance_is_a_service(make: Any) -> None:
    found = worker_service.environment([make])
    assert [each["function"]["name"] for each in found.facts.of_host["schemas"]] == ["guess", "history"]
    assert (found.facts.of_host["opening"], found.facts.of_host["rewards"]) == (True, "all")
    given = {"prompts": ["p"], "transcripts": [until(1)], **WORD}
    reply = REPLIES[1]
    assert found.calls["respond"](given, 1) == RowResults([[reply.text, False, None, True, [*reply.results], False]])
    assert found.calls["final_rewards"]({**given, "transcripts": [until(3)]}, 1) == RowResults([1.0])
    assert found.calls["opening"]({"prompts": ["p"], **WORD}, 1) == RowResults(["\nIt has 4 letters."])


@pytest.mark.parametrize("serve", [worker_service.environment, worker_service.tools])
def test_other_code_is_refused_with_its_name(serve: Any) -> None:
    """No respond function, and no docstring that describes it as a tool."""
    with pytest.raises(ValueError, match="'add'"):
        serve([add])


SERVED = """
import sys
from tinyrl.environments import worker_service

def show(text: str = "") -> str:
    \"\"\"Show.

    Args:
        text: What.
    \"\"\"
    return text

service = worker_service.tools([show])
assert service.facts.of_host["schemas"][0]["function"]["name"] == "show"
turn = {"role": "assistant", "content": sys.argv[1]}
assert service.calls["respond"]({"prompts": ["p"], "transcripts": [[turn]]}, 1).values[0][0] == "shown"
loaded = {name.split(".")[0] for name in sys.modules}
assert not {"torch", "transformers", "numpy", "jinja2", "asyncio"} & loaded
"""


def test_describing_and_answering_load_neither_torch_nor_other_slow_libraries() -> None:
    subprocess.run([sys.executable, "-c", SERVED, call("show", text="shown")], check=True)
