"""Tools and TRL's environment classes: what a turn calls, what it is answered, and that a replay is what was live."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tinyrl.environments import Message, Reply, Transcript, worker_service
from tinyrl.environments.tool_calls import CALL_FAILED, MAX_REPLY_CHARS, Call, calls_of, text_of
from tinyrl.environments.trl_classes import ClassEnvironment
from tinyrl.environments.worker_service import respond_with


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def add(a: int, b: int = 10) -> int:
    return a + b


def divide(a: float, b: float) -> float:
    return a / b


def show(text: str) -> str:
    return text


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turn(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def told(text: str) -> Message:
    return {"role": "tool", "content": text}


def answer(*tools: Callable[..., Any], to: str, **columns: Any) -> Reply | str | None:
    """Return the reply of tools to one turn."""
    (found,) = respond_with(tools)(["?"], [[turn(to)]], **{name: [value] for name, value in columns.items()})
    return found


class TestCalls:
    def test_calls_are_parsed_in_order_and_thoughts_call_nothing(self) -> None:
        text = (
            '<think>maybe <tool_call>{"name": "no"}</tool_call> or <tool_call></think>'
            'First <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> then\n'
            '<tool_call>\n  {"arguments": {}, "name": "show"}\t</tool_call></tool_call> and <b>done</b>.'
            r'<tool_call>{"name": "show", "arguments": "{\"text\": \"hi\"}"}</tool_call>'
        )
        assert calls_of(turn(text)) == [Call("add", {"a": 1}), Call("show", {}), Call("show", {"text": "hi"})]
        for nothing in ("", ', "arguments": null', ', "arguments": ""', ', "arguments": "null"'):
            assert calls_of(turn(f'<tool_call>{{"name": "now"{nothing}}}</tool_call>')) == [Call("now", {})]

    def test_a_call_that_cannot_be_parsed_has_its_problem(self) -> None:
        for text, problem in [
            ("<tool_call></tool_call>", "not JSON: Expecting value: line 1 column 1 (char 0)"),
            ('<tool_call>["add"]</tool_call>', "a call is an object with 'name' and 'arguments'"),
            ('<tool_call>{"arguments": {}}</tool_call>', "the call has no 'name'"),
            ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add: 'arguments' must be an object"),
            ('<tool_call>{"name": "add", "arguments": "1 2"}</tool_call>', "add: 'arguments' are not JSON: Extra data"),
            ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "not JSON: NaN is not a value of JSON"),
            (f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON: too many brackets inside each other"),
            (f'<tool_call>{{"name": "add", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>', "not JSON: Exceeds"),
            ("<tool_call>" * 90_000, "<tool_call> without </tool_call>"),
        ]:
            (found,) = calls_of(turn(text))
            assert found.problem.startswith(problem)

    def test_calls_that_were_parsed_before(self) -> None:
        given = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}, {"name": "x"}, 7]
        found = calls_of(turn(call("show", text="not this one"), tool_calls=given))
        assert found == [Call("add", {"a": 1}), Call("x"), Call(problem=found[2].problem)]
        assert "an object with 'name'" in found[2].problem
        assert calls_of(turn(call("show", text="nor this one"), tool_calls=[])) == []


class TestTools:
    def test_a_result_becomes_text_that_can_be_written(self) -> None:
        assert text_of({"a": [1, None, True], "ß": (2.5,)}) == '{"a": [1, null, true], "ß": [2.5]}'
        assert text_of({"at": range(2)}) == '{"at": "range(0, 2)"}'
        assert text_of("\ud83d\ude00 \ud83d.").encode() == "😀 �.".encode()

    def test_a_turn_without_a_call_ends_the_episode_and_a_result_is_cut(self) -> None:
        assert answer(show, to="It is 3.") is None
        assert answer(show, to=call("show", text="x" * 1_000_000) * 2) == Reply("x" * MAX_REPLY_CHARS)

    def test_a_call_that_fails_is_answered_with_its_reason_and_counted(self) -> None:
        for made, reason in [
            ("<tool_call></tool_call>", "not JSON: Expecting value: line 1 column 1 (char 0)"),
            (call("multiply", a=1), "there is no tool 'multiply'; there are: add, divide"),
            (call("add"), "add: missing a required argument: 'a'"),
            (call("divide", a=1, b=0), "ZeroDivisionError: division by zero"),
        ]:
            reply = answer(add, divide, to=made + call("add", a=1))
            assert reply == Reply(f"{CALL_FAILED} {reason}\n11", invalid=True)

    def test_an_exception_is_answered_with_its_first_line_and_printed_once(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its author sees no other sign of a bug."""

        def fail(how: str) -> str:
            if how == "exit":
                sys.exit(3)
            if how == "unspeakable":
                raise Unspeakable
            raise ValueError({"lines": "first\nsecond", "long": "x" * 500, "half": "\ud800", "empty": ""}[how])

        messages = {"lines": "ValueError: first", "long": f"ValueError: {'x' * 188}", "half": "ValueError: \ufffd"}
        messages |= {"empty": "ValueError", "exit": "SystemExit: 3", "unspeakable": "Unspeakable"}
        for how, message in messages.items():
            assert answer(fail, to=call("fail", how=how)) == Reply(f"{CALL_FAILED} {message}", invalid=True)
        printed = capsys.readouterr().err
        assert (printed.count("ValueError: first"), printed.count("x" * 500)) == (1, 0)
        assert "test_tool_use.py" in printed

    def test_coroutines_of_several_episodes_wait_together_and_those_of_one_in_order(self) -> None:
        log: list[str] = []

        async def fetch(what: str) -> str:
            log.append(f"ask {what}")
            await asyncio.sleep(0)
            log.append(f"got {what}")
            if what == "bad":
                raise ConnectionError("refused")
            return what.upper()

        transcripts = [[turn(call("fetch", what="a") + call("fetch", what="b"))], [turn(call("fetch", what="bad"))]]
        replies = respond_with([fetch])(["p", "p"], transcripts)
        assert replies == [Reply("A\nB"), Reply(f"{CALL_FAILED} ConnectionError: refused", invalid=True)]
        assert log == ["ask a", "ask bad", "got a", "got bad", "ask b", "got b"]

    def test_a_tool_may_get_the_episode_that_called_it(self) -> None:
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
        (schema,) = worker_service.tools([whoami]).facts["schemas"]
        assert list(schema["function"]["parameters"]["properties"]) == ["loud"]


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


# A whole episode: the policy's turns, and what each is answered.
TURNS = [
    call("guess", word="cart"),
    call("guess", word="c") + call("guess", word="cast"),
    "<tool_call>oops</tool_call>",
    call("_hidden") + call("get_reward") + call("history"),
    call("guess", word="cats"),
    call("guess", word="coal"),
]
TOOLS = "guess, history"
REPLIES = [
    Reply("1: GG--"),
    Reply(f"{CALL_FAILED} ValueError: c has not 4 letters.\n2: GG--", invalid=True),
    Reply(f"{CALL_FAILED} not JSON: Expecting value: line 1 column 1 (char 0)", invalid=True),
    Reply(
        f"{CALL_FAILED} there is no tool '_hidden'; there are: {TOOLS}\n"
        f'{CALL_FAILED} there is no tool \'get_reward\'; there are: {TOOLS}\n["cart", "cast"]',
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


class TestClasses:
    def test_an_episode_played_live(self, wordle: ClassEnvironment) -> None:
        assert wordle.opening(["Guess."], **WORD) == ["\nIt has 4 letters."]
        for count, reply in enumerate(REPLIES):
            assert wordle.respond(["Guess."], [until(count)], **WORD) == [reply]
        over = [*until(5), told(REPLIES[5].text), turn("I won.")]
        assert wordle.respond(["Guess."], [over], **WORD) == [Reply(done=True, reward=1.0)]
        assert Wordle.made == 1

    def test_a_cache_that_dropped_it_changes_nothing(self) -> None:
        environment = ClassEnvironment(Wordle, most_live=1)
        Wordle.made = 0
        for count in range(6):
            replies = environment.respond(["Guess."] * 2, [until(count)] * 2, word=["cats", "cats"], seed=[0, 1])
            assert replies == [REPLIES[count]] * 2
        assert Wordle.made == 7

    def test_episodes_that_part_do_not_meet_again(self, wordle: ClassEnvironment) -> None:
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
        lost = Reply(f"{CALL_FAILED} ValueError: Game over.", invalid=True)
        assert wordle.respond(["p"] * 2, second, **columns) == [lost, Reply("2: GGGG")]

    def test_the_reward_of_an_episode_that_was_cut_off_counts_its_last_calls(self, wordle: ClassEnvironment) -> None:
        transcripts = [until(0), until(3), until(4), [*until(4), told("3: GGGG")], []]
        columns = {"word": ["cats"] * 5, "seed": [*range(5)]}
        cold = wordle.final_rewards(["p"] * 5, transcripts, **columns)
        assert cold == [-0.25, -0.5, 1.0, 1.0, 0.0]
        wordle.respond(["p"] * 3, transcripts[:3], word=["cats"] * 3, seed=[0, 1, 2])
        Wordle.made = 0
        assert wordle.final_rewards(["p"] * 5, transcripts, **columns) == cold
        assert Wordle.made == 2

    def test_a_row_is_not_changed_by_the_class_that_was_given_it(self) -> None:
        class Stack:
            def reset(self, items: list[int], prompt: Any) -> None:
                self.items = items
                prompt.clear()

            def pop(self) -> int:
                """Take one."""
                return self.items.pop()

        items, prompt = [[1, 2]] * 2, [{"role": "user", "content": "Go"}]
        popped = ClassEnvironment(Stack).respond([prompt] * 2, [[turn(call("pop"))]] * 2, items=items, seed=[1, 2])
        assert popped == [Reply("2")] * 2
        assert (items, prompt) == ([[1, 2], [1, 2]], [{"role": "user", "content": "Go"}])
        # without get_reward a turn without a call is answered with nothing
        silent = worker_service.environment([Stack])
        assert not silent.facts["final_rewards"]
        assert replies(silent, prompts=[prompt], transcripts=[[turn("2")]], items=items[:1]) == [None]

    def test_a_class_that_is_wrong_is_refused(self) -> None:
        class Wrong:
            def reset(self, how: str) -> Any:
                self.how = how
                return ["a", "list"] if how == "reset" else None

            def get_reward(self) -> Any:
                return {"text": "much", "nan": float("nan")}.get(self.how)

        environment = ClassEnvironment(Wrong)
        with pytest.raises(ValueError, match=r"Wrong\.reset takes 'how', which the data does not have.* seed, prompt"):
            environment.opening(["p"], seed=[0])
        with pytest.raises(ValueError, match=r"Wrong\.reset returned a list, not text or None"):
            environment.opening(["p"], how=["reset"])
        for how, value in [("text", "much"), ("nan", "nan"), ("none", "None")]:
            with pytest.raises(ValueError, match=rf"Wrong\.get_reward returned {value}, not a number up to 1e\+12"):
                environment.respond(["p"], [[turn("done")]], how=[how])


def replies(service: worker_service.Service, **arguments: Any) -> list[Reply | None]:
    """Return the replies of a service, none of it at fault."""
    values, problems = service.calls["respond"](arguments, len(arguments["prompts"]))
    assert not problems
    return [value and Reply(*value) for value in values]


class TestServices:
    def test_a_respond_function_may_give_rewards(self) -> None:
        def respond(prompts: list, transcripts: list, city: list) -> list:
            return [Reply("x", reward=2), "y"]

        found = worker_service.environment([respond])
        assert (found.facts["rewards"], found.facts["required"]) == (True, ["prompts", "transcripts", "city"])
        given = {"prompts": ["p"] * 2, "transcripts": [[], []], "city": ["Riga"] * 2}
        assert found.calls["respond"](given, 2) == ([["x", False, 2.0, False], ["y", False, 0.0, False]], [])

    def test_a_class_or_what_makes_an_instance(self) -> None:
        for make in (Wordle, lambda: Wordle()):
            found = worker_service.environment([make])
            assert [each["function"]["name"] for each in found.facts["schemas"]] == ["guess", "history"]
            assert [found.facts[name] for name in ("opening", "final_rewards", "rewards")] == [True] * 3
            assert replies(found, prompts=["p"], transcripts=[until(1)], **WORD) == [REPLIES[1]]
            assert found.calls["final_rewards"]({"prompts": ["p"], "transcripts": [until(4)], **WORD}, 1) == ([1.0], [])

    def test_anything_else_is_refused_with_what_is_missing(self) -> None:
        def no_hint(a) -> str:
            """Do it.

            Args:
                a: What.
            """
            return a

        def starred(*a: int) -> int:
            return 1

        class Needy:
            def __init__(self, size: int) -> None: ...

            def reset(self) -> None: ...

        for serve, wrong, reason in [
            (worker_service.environment, 3, "'int' is a int, neither a function nor an environment class"),
            (worker_service.environment, add, r"'add' takes no 'transcripts', as respond\(prompts, transcripts, "),
            (worker_service.environment, Call, "Call: an environment class has a method 'reset', and this one does"),
            (worker_service.environment, Needy, "made without arguments, but missing a required argument: 'size'"),
            (worker_service.tools, no_hint, r"tool 'no_hint': .*\ba is missing a type hint"),
            (worker_service.tools, starred, r"tool 'starred': its parameter '\*a: int' has no name"),
            (worker_service.tools, dict, r"tool 'dict': a tool is a function"),
        ]:
            with pytest.raises(ValueError, match=reason):
                serve([wrong])


def test_answering_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; from tinyrl.environments.worker_service import respond_with\n"
        "respond_with([lambda a: a])(['p'], [[{'role': 'assistant', 'content': sys.argv[1]}]])\n"
        "assert not {'torch', 'transformers', 'numpy', 'jinja2', 'asyncio'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, call("<lambda>", a=1)], check=True)


def test_replies_and_openings_are_cut_in_the_worker():
    class Talks:
        def reset(self, **row: Any) -> str:
            return "b" * (worker_service.MAX_TEXT_CHARS * 3)

    long, cut = Talks().reset(), "b" * worker_service.MAX_TEXT_CHARS
    found = worker_service.checked([long, Reply(long, reward=1.0), "short"], 3)
    assert found == ([[cut, False, 0.0, False], [cut, False, 1.0, False], ["short", False, 0.0, False]], [])
    assert worker_service.environment([Talks]).calls["opening"]({"prompts": ["p"], "seed": [0]}, 1) == ([cut], [])
