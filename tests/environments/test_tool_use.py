"""Tools and TRL's environment classes: what a turn calls, what it is answered, and that a replay is what was live."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tinyrl.environments import Message, Reply, Transcript, worker_service
from tinyrl.environments.tool_calls import CALL_FAILED, MAX_REPLY_CHARS, Call, calls_of, text_of
from tinyrl.environments.trl_classes import ClassEnvironment
from tinyrl.environments.worker_service import respond_with, schemas


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
    """What tools answer to one turn."""
    (found,) = respond_with(tools)(["?"], [[turn(to)]], **{name: [value] for name, value in columns.items()})
    return found


class TestCalls:
    @pytest.mark.parametrize(
        ("text", "calls"),
        [
            (
                'First <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> then\n'
                '<tool_call>\n  {"arguments": {}, "name": "show"}\t</tool_call></tool_call> and <b>done</b>.',
                [Call("add", {"a": 1}), Call("show", {})],
            ),
            (
                r'<tool_call>{"name": "show", "arguments": "{\"text\": \"hi\"}"}</tool_call>',
                [Call("show", {"text": "hi"})],
            ),
            *[
                (f'<tool_call>{{"name": "now"{nothing}}}</tool_call>', [Call("now", {})])
                for nothing in ("", ', "arguments": null', ', "arguments": ""', ', "arguments": "null"')
            ],
        ],
    )
    def test_calls_are_parsed_in_order(self, text: str, calls: list[Call]) -> None:
        assert calls_of(turn(text)) == calls

    def test_what_is_thought_calls_nothing(self) -> None:
        thought = f"<think>maybe {call('add', a=1)} or <tool_call></think>"
        assert calls_of(turn(thought + call("add", a=2))) == [Call("add", {"a": 2})]

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("<tool_call></tool_call>", "not JSON: Expecting value: line 1 column 1 (char 0)"),
            ("<tool_call>{'name': 'add'}</tool_call>", "not JSON: Expecting property name enclosed in double quotes"),
            ('<tool_call>{"name": "add"', "<tool_call> without </tool_call>"),
            ('<tool_call>["add"]</tool_call>', "a call is an object with 'name' and 'arguments'"),
            ('<tool_call>{"arguments": {}}</tool_call>', "the call has no 'name'"),
            ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add: 'arguments' must be an object"),
            ('<tool_call>{"name": "add", "arguments": "1 2"}</tool_call>', "add: 'arguments' are not JSON: Extra data"),
            ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "not JSON: NaN is not a value of JSON"),
            (f"<tool_call>{'[' * 100_000}</tool_call>", "not JSON: too many brackets inside each other"),
            (f'<tool_call>{{"name": "add", "arguments": {{"a": {"1" * 5000}}}}}</tool_call>', "not JSON: Exceeds"),
        ],
    )
    def test_what_is_not_a_call_says_why(self, text: str, problem: str) -> None:
        (found,) = calls_of(turn(text))
        assert found.problem.startswith(problem)

    def test_calls_that_were_read_already(self) -> None:
        function = {"name": "add", "arguments": {"a": 1}}
        given = [{"type": "function", "function": function}, {"name": "x", "arguments": 1}, 7]
        found = calls_of(turn(call("show", text="not this one"), tool_calls=given))
        assert found[0] == Call("add", {"a": 1})
        assert [each.problem for each in found[1:]] == [
            "x: 'arguments' must be an object",
            "a call is an object with 'name' and 'arguments'",
        ]
        assert calls_of(turn(call("show", text="nor this one"), tool_calls=[])) == []

    def test_a_megabyte_of_nonsense_is_read_once(self) -> None:
        looked_at = 0

        class Counted(str):
            def find(self, *sought: Any) -> int:
                nonlocal looked_at
                found = super().find(*sought)
                looked_at += (found if found >= 0 else len(self)) - (sought[1] if len(sought) > 1 else 0)
                return found

        text = Counted("<tool_call>" * 90_000)
        assert all(each.problem for each in calls_of(turn(text)))
        assert looked_at <= 3 * len(text)  # for the end of the thinking, opening tags and closing tags


class TestTools:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("as it is", "as it is"),
            ({"a": [1, None, True], "ß": (2.5,)}, '{"a": [1, null, true], "ß": [2.5]}'),
            ({"at": range(2)}, '{"at": "range(0, 2)"}'),
            ("\ud83d\ude00 \ud83d.", "😀 �."),
        ],
    )
    def test_a_result_becomes_text_that_can_be_written(self, value: Any, text: str) -> None:
        assert text_of(value) == text
        text_of(value).encode()

    def test_a_turn_without_a_call_ends_the_episode_and_a_result_is_cut(self) -> None:
        assert answer(show, to="It is 3.") is None
        assert answer(show, to=call("show", text="x" * 1_000_000) * 2) == Reply("x" * MAX_REPLY_CHARS)

    @pytest.mark.parametrize(
        ("made", "reason"),
        [
            ("<tool_call></tool_call>", "not JSON: Expecting value: line 1 column 1 (char 0)"),
            (call("multiply", a=1), "there is no tool 'multiply'; there are: add, divide"),
            (call("add"), "add: missing a required argument: 'a'"),
            (call("divide", a=1, b=0), "ZeroDivisionError: division by zero"),
        ],
    )
    def test_a_call_that_fails_is_answered_in_a_sentence_and_counted(self, made: str, reason: str) -> None:
        assert answer(add, divide, to=made) == Reply(f"{CALL_FAILED} {reason}", invalid=True)
        assert answer(add, divide, to=made + call("add", a=1)) == Reply(f"{CALL_FAILED} {reason}\n11", invalid=True)

    def test_only_the_first_line_of_an_exception_is_told(self) -> None:
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

    def test_the_author_of_a_tool_sees_each_kind_of_error_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        def buggy(a: int) -> int:
            return a + missing  # pyright: ignore  # noqa: F821

        for _ in range(3):
            answer(buggy, to=call("buggy", a=1))
        printed = capsys.readouterr().err
        assert printed.count("NameError: name 'missing' is not defined") == 1
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

    def test_a_tool_may_be_told_which_episode_called_it(self) -> None:
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


class TestSchemas:
    def test_what_is_missing_is_named(self) -> None:
        def no_hint(a) -> str:
            """Do it.

            Args:
                a: What.
            """
            return a

        def no_line(a: int) -> int:
            """Do it."""
            return a

        def starred(*a: int) -> int:
            return 1

        for tool, what in [
            (no_hint, r"tool 'no_hint': .*\ba is missing a type hint"),
            (no_line, r"tool 'no_line': .*no description for the argument 'a'"),
            (starred, r"tool 'starred': its parameter '\*a: int' has no name"),
            (dict, r"tool 'dict': a tool is a function"),
        ]:
            with pytest.raises(ValueError, match=what):
                schemas([tool])


class Wordle:
    """A game in the style of TRL's documentation."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.guesses: list[str] = []
        self.done = False

    def reset(self, **row: Any) -> str | None:
        self.word = row["word"]
        self.guesses = []
        self.done = False
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

    def get_reward(self) -> float:
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
    """The episode until the policy's turn with this number, which was not answered yet."""
    told_before = [[turn(text), told(reply.text)] for text, reply in zip(TURNS, REPLIES, strict=True)][:count]
    return [*(message for pair in told_before for message in pair), turn(TURNS[count])]


@pytest.fixture
def wordle() -> ClassEnvironment:
    environment = ClassEnvironment(Wordle)
    Wordle.made = 0
    return environment


WORD = {"word": ["cats"], "seed": [0]}


class TestClasses:
    def test_an_episode_played_live(self, wordle: ClassEnvironment) -> None:
        assert wordle.opening(["Guess."], **WORD) == ["\nIt has 4 letters."]
        assert [wordle.respond(["Guess."], [until(count)], **WORD) for count in range(6)] == [
            [each] for each in REPLIES
        ]
        over = [*until(5), told(REPLIES[5].text), turn("I won.")]
        assert wordle.respond(["Guess."], [over], **WORD) == [Reply(done=True, reward=1.0)]
        assert Wordle.made == 1

    @pytest.mark.parametrize("most_live", [0, 1])
    def test_a_cache_that_dropped_it_changes_nothing(self, most_live: int) -> None:
        environment = ClassEnvironment(Wordle, most_live=most_live)
        Wordle.made = 0
        columns = {"word": ["cats", "cats"], "seed": [0, 1]}
        for count in range(6):
            assert environment.respond(["Guess."] * 2, [until(count)] * 2, **columns) == [REPLIES[count]] * 2
        assert Wordle.made == (12 if most_live == 0 else 7)

    def test_episodes_that_part_do_not_meet_again(self, wordle: ClassEnvironment) -> None:
        columns = {"word": ["cats", "cats"], "seed": [0, 0]}
        wordle.respond(["p", "p"], [until(0)] * 2, **columns)
        other = [*until(0), told(REPLIES[0].text), turn(call("history"))]
        assert wordle.respond(["p", "p"], [until(1), other], **columns) == [REPLIES[1], Reply('["cart"]')]
        one_more = [told('["cart"]'), turn(call("guess", word="cats"))]
        assert wordle.respond(["p"], [[*other, *one_more]], **WORD) == [Reply("2: GGGG")]

    def test_the_reward_of_an_episode_that_was_cut_off_counts_its_last_calls(self, wordle: ClassEnvironment) -> None:
        transcripts = [until(0), until(3), until(4), [*until(4), told("3: GGGG")], []]
        columns = {"word": ["cats"] * 5, "seed": [*range(5)]}
        cold = wordle.final_rewards(["p"] * 5, transcripts, **columns)
        assert cold == [-0.25, -0.5, 1.0, 1.0, 0.0]
        wordle.respond(["p"] * 3, transcripts[:3], word=["cats"] * 3, seed=[0, 1, 2])
        Wordle.made = 0
        assert wordle.final_rewards(["p"] * 5, transcripts, **columns) == cold
        assert Wordle.made == 2

    def test_methods_that_are_coroutines(self) -> None:
        class Judge:
            def reset(self) -> None:
                self.votes = 0

            async def vote(self, yes: bool) -> str:
                await asyncio.sleep(0)
                self.votes += yes
                return f"{self.votes}"

            async def get_reward(self) -> float:
                return self.votes / 2

        environment = ClassEnvironment(Judge)
        voted = [turn(call("vote", yes=True) * 2)]
        over = [*voted, told("1\n2"), turn(".")]
        assert environment.respond(["p"], [voted], seed=[3]) == [Reply("1\n2")]
        assert environment.respond(["p"], [over], seed=[3]) == [Reply(done=True, reward=1.0)]

    def test_randomness_from_the_seed_is_replayed(self) -> None:
        class Dice:
            def reset(self, seed: int) -> None:
                self.random = random.Random(seed)

            def roll(self) -> int:
                return self.random.randrange(1_000_000)

        first = [turn(call("roll"))]
        second = [[*first, told("..."), turn(call("roll"))]] * 2
        live, columns = ClassEnvironment(Dice), {"seed": [1, 2], "other": ["x", "y"]}  # reset does not take `other`
        one, two = live.respond(["p", "p"], [first, first], **columns)
        assert one != two
        again = ClassEnvironment(Dice).respond(["p", "p"], second, **columns)
        assert live.respond(["p", "p"], second, **columns) == again

    def test_a_row_is_not_changed_by_the_class_that_was_given_it(self) -> None:
        class Stack:
            def reset(self, items: list[int], prompt: Any) -> None:
                self.items = items
                prompt.clear()

            def pop(self) -> int:
                """Take one."""
                return self.items.pop()

        items, prompt = [[1, 2]] * 2, [{"role": "user", "content": "Go"}]
        assert ClassEnvironment(Stack).respond([prompt] * 2, [[turn(call("pop"))]] * 2, items=items) == [Reply("2")] * 2
        assert (items, prompt) == ([[1, 2], [1, 2]], [{"role": "user", "content": "Go"}])
        # without get_reward a turn without a call is answered with nothing
        silent = worker_service.environment([Stack])
        assert not silent.facts["final_rewards"]
        assert replies(silent, prompts=[prompt], transcripts=[[turn("2")]], items=items[:1]) == [None]

    def test_calls_that_were_read_already_are_part_of_what_led_here(self, wordle: ClassEnvironment) -> None:
        def guessing(word: str) -> Message:
            return turn("", tool_calls=[{"function": {"name": "guess", "arguments": {"word": word}}}])

        columns = {"word": ["cats"] * 2, "seed": [0] * 2}
        first = [[guessing("cats")], [guessing("dogs")]]
        assert wordle.respond(["p"] * 2, first, **columns) == [Reply("1: GGGG"), Reply("1: ---G")]
        second = [[*each, told("..."), guessing("cats")] for each in first]
        lost = Reply(f"{CALL_FAILED} ValueError: Game over.", invalid=True)
        assert wordle.respond(["p"] * 2, second, **columns) == [lost, Reply("2: GGGG")]

    def test_what_a_class_gets_wrong_is_said(self) -> None:
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
    """What a service answers, none of it at fault."""
    values, problems = service.calls["respond"](arguments, len(arguments["prompts"]))
    assert not problems
    return [value and Reply(*value) for value in values]


class TestServices:
    def test_a_respond_function_may_give_rewards(self) -> None:
        def respond(prompts: list, transcripts: list, city: list) -> list:
            return ["x"]

        found = worker_service.environment([respond])
        assert replies(found, prompts=["p"], transcripts=[[]], city=["Riga"]) == [Reply("x")]
        assert list(found.calls) == ["respond"]
        facts = {"schemas": None, "opening": False, "final_rewards": False, "rewards": True}
        names = ["prompts", "transcripts", "city"]
        assert found.facts == {**facts, "parameters": names, "required": names}

    def test_a_class_or_what_makes_an_instance(self) -> None:
        for make in (Wordle, lambda: Wordle()):
            found = worker_service.environment([make])
            assert [each["function"]["name"] for each in found.facts["schemas"]] == ["guess", "history"]
            assert [found.facts[name] for name in ("opening", "final_rewards", "rewards")] == [True] * 3
            assert replies(found, prompts=["p"], transcripts=[until(1)], **WORD) == [REPLIES[1]]
            assert found.calls["final_rewards"]({"prompts": ["p"], "transcripts": [until(4)], **WORD}, 1) == ([1.0], [])

    def test_anything_else_is_refused(self) -> None:
        class Needy:
            def __init__(self, size: int) -> None:
                self.size = size

            def reset(self) -> None: ...

        for wrong, what in [
            (3, "'int' is a int, neither a function nor an environment class"),
            (add, r"'add' takes no 'transcripts', as respond\(prompts, transcripts, \*\*columns\) does"),
            (Call, "Call: an environment class has a method 'reset', and this one does not"),
            (Needy, "Needy: an instance is made without arguments, but missing a required argument: 'size'"),
        ]:
            with pytest.raises(ValueError, match=what):
                worker_service.environment([wrong])


def test_answering_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; from tinyrl.environments.worker_service import respond_with\n"
        "respond_with([lambda a: a])(['p'], [[{'role': 'assistant', 'content': sys.argv[1]}]])\n"
        "print(*{name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, call("<lambda>", a=1)], capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & {"torch", "transformers", "numpy", "jinja2", "asyncio"}


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_replies_and_openings_are_cut_in_the_worker():
    long = "b" * (worker_service.MAX_TEXT_CHARS * 3)
    replies, problems = worker_service.checked([long, Reply(long, reward=1.0), "short"], 3)
    assert ([len(reply[0]) for reply in replies], problems) == ([worker_service.MAX_TEXT_CHARS] * 2 + [5], [])

    class Talks:
        def reset(self, **row: Any) -> str:
            return long

    texts, problems = worker_service.environment([Talks]).calls["opening"]({"prompts": ["p"], "seed": [0]}, 1)
    assert ([len(text) for text in texts], problems) == ([worker_service.MAX_TEXT_CHARS], [])
