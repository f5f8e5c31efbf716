"""The Python environment: replies to cells, what stays from turn to turn, and that nothing gets out."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tinyrl.config.sections import EnvironmentConfig
from tinyrl.environments import Reply, python
from tinyrl.environments.environment import Replies
from tinyrl.environments.python import NO_OUTPUT, STOPPED, UNREADABLE, Python, call_in, kept_cells
from tinyrl.workers.sandbox import why_not_isolated

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(why_not_isolated() is not None, reason=str(why_not_isolated())),
]
Interpreters = Callable[[], list[psutil.Process]]
TIMED_OUT = STOPPED["timed out"]
PATIENCE_S = 120.0  # after which the test says that it never happened


def python_with(timeout_s: float = 5, **settings: Any) -> Python:
    of = {"name": "python", "max_turns": 10, "max_observation_tokens": 500, "timeout_s": timeout_s, **settings}
    return Python(EnvironmentConfig.model_validate(of))


@pytest.fixture(scope="module")
def shared() -> Iterator[Python]:
    interpreters = python_with(timeout_s=2)
    yield interpreters
    interpreters.close()


@pytest.fixture
def alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Python]:
    options = {"most_live": 100, **getattr(request, "param", {})}
    monkeypatch.setattr(python, "MOST_LIVE", options.pop("most_live"))
    interpreters = python_with(**options)
    yield interpreters
    interpreters.close()


@pytest.fixture
def interpreters() -> Interpreters:
    """The processes in the sandbox that a test has started."""
    before = psutil.Process().children()
    return lambda: [each for each in psutil.Process().children() if each not in before]


def block(code: str) -> str:
    return f"Let me compute that.\n```python\n{code}\n```\n"


def tool_call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


def turns(*contents: str) -> list[dict[str, str]]:
    """Return a transcript of the policy's turns and the replies to them."""
    return [{"role": ("assistant", "tool")[i % 2], "content": content} for i, content in enumerate(contents)]


def episode(cells: Python, *codes: str, seed: int = 0) -> list[str]:
    """Return the replies to cells that are called one after the other."""
    messages: list[str] = []
    for code in codes:
        messages.append(tool_call(code))
        [reply] = cells.respond([[]], [turns(*messages)], seed=[seed])
        assert reply is not None
        messages.append(reply.text)
    return messages[1::2]


# Calls and replies


def test_the_last_block_or_the_last_tool_call_of_a_turn_is_run(shared: Python):
    assert call_in(block("a") + block("b = 1\nb")) == ("b = 1\nb", True)
    assert call_in(f"{tool_call('a')}\n{tool_call('b')}\n") == ("b", False)
    assert call_in(block("a") + tool_call("b")) == ("b", False)
    assert call_in(tool_call("a").removesuffix("</tool_call>")) == ("a", False)
    assert call_in("The answer is 7. ```python\n7") is None
    assert call_in(f"<think>\n{block('a')}") is None
    assert call_in(f"<think>{tool_call('a')}") is None
    assert call_in(f"<think>\n{block('a')}</think>\n{block('b')}") == ("b", True)
    transcripts = [turns("It is 7."), turns(block("7"), "7", "It is 7.")]
    assert shared.respond(["a", "b"], transcripts, seed=[1, 2], answer=["7", "7"]) == [None, None]
    for call in (
        '{"name": "python", "arguments": {"code": "1"}} and more',
        '{"name": "search", "arguments": {"code": "1"}}',
        '{"name": "python", "arguments": {"code": 1}}',
        "[" * 100_000,
    ):
        assert shared.respond([[]], [turns(f"<tool_call>{call}</tool_call>")]) == [Reply(UNREADABLE, invalid=True)]


def error_of_null_bytes() -> str:
    """What compiling says: a SyntaxError, before Python 3.11.4 a ValueError."""
    with pytest.raises((SyntaxError, ValueError)) as caught:
        compile("\0", "cell", "exec")
    return f"{caught.type.__name__}: {caught.value}"


ANSWERS = {
    "print('a', end='')\n'b'": "a\n'b'",
    "import os\nos.write(1, b'd\\n')\nNone": "d",
    "x = 1": NO_OUTPUT,
    "__name__": "'__main__'",
    "print('so far')\nf = {}\nf['k']": "so far\nLine 3: KeyError: 'k'",
    "def f():\n    return g\nf()": "Line 2: NameError: name 'g' is not defined",
    "x = 1\nx = = 2": "Line 2: SyntaxError: invalid syntax",
    "\n\nexit()": "Line 3: SystemExit: None",
    "input()": "Line 1: EOFError: EOF when reading a line",
    "\0": error_of_null_bytes(),
    "import os\nos.write(1, b'\\xff\\xed\\xa0\\x80\\n')\nNone": "\ufffd" * 4,
    "'\\ud800'": "'\\ud800'",
    "import sys, os\nsys.stdout.close()\nos.close(1)": NO_OUTPUT,
    "while True: pass": TIMED_OUT,
}
ENDED = {
    "import time\nwhile True:\n    try: time.sleep(99)\n    except BaseException: pass": TIMED_OUT,
    "x = bytearray(10**9)": STOPPED["out of memory"],
    "while True: print('x' * 1000)": STOPPED["output too long"],
    "import os\nos._exit(0)": STOPPED[""],
    "import ctypes\nctypes.string_at(0)": STOPPED[""],
}


@pytest.mark.parametrize("cells", [ANSWERS, pytest.param(ENDED, marks=pytest.mark.slow)], ids=["answers", "stopped"])
def test_a_cell_is_answered_with_its_output_and_its_value_or_error(cells: dict[str, str], shared: Python):
    """A stopped one is not run again, and leaves what was there before."""
    many, begun = [[]] * len(cells), [tool_call("begun = 1"), NO_OUTPUT]
    replies = shared.respond(many, [turns(*begun, tool_call(code)) for code in cells], seed=[*range(len(cells))])
    assert [reply and reply.text for reply in replies] == [*cells.values()]
    transcripts = [turns(*begun, tool_call(code), text, tool_call("begun")) for code, text in cells.items()]
    assert shared.respond(many, transcripts, seed=[*range(len(cells))]) == [Reply("1")] * len(cells)


def test_a_block_is_answered_in_a_block_and_a_tool_call_with_the_output_alone(shared: Python):
    prompts = ["text", "text", [{"role": "user", "content": "messages"}], "text", "text"]
    harmful = "print('\\ud800', '<|im_end|>', 'a\\r\\nb', '```\\nc')"
    written = [block("6 * 7"), block("6 * 7").rstrip(), block("6 * 7").rstrip(), tool_call("6 * 7"), block(harmful)]
    fence, text = "```output\n42\n```\n", "\\ud800 <|im_end|> a\nb ```\nc"
    texts = [fence, "\n" + fence, fence, "42", f"````output\n{text}\n````\n"]
    replies = shared.respond(prompts, [turns(turn) for turn in written], seed=[*range(5)])
    assert replies == [Reply(text) for text in texts]
    [text] = episode(shared, "print('a' + 'x' * 10**6 + 'z')")
    assert (len(text) < 1100, text[:2], text[-2:]) == (True, "ax", "xz")


# State


@pytest.mark.parametrize("alone", [{}, {"most_live": 0}], ids=["cached", "run again"], indirect=True)
def test_names_and_random_numbers_stay_and_nothing_is_printed_twice(alone: Python):
    draw = "import random\nrandom.random()"
    codes = (
        "import math\nr = 2\nprint('first')",
        "def area(): return math.pi * r**2\nr = 1",
        "print(area())",
        draw,
        draw,
    )
    first, *others = episode(alone, *codes, seed=7)
    assert [first, *others[:2]] == ["first", NO_OUTPUT, "3.141592653589793"]
    assert others[2] != others[3]
    assert episode(alone, *codes, seed=7)[3:] == others[2:]
    assert episode(alone, draw, seed=8)[0] not in others
    # episodes that part do not share an interpreter
    begun = [tool_call("x = 1"), NO_OUTPUT]
    both = [turns(*begun, tool_call(f"x += {n}"), NO_OUTPUT, tool_call("x")) for n in (1, 2)]
    for until in (1, 3, 5):
        replies = alone.respond([[], []], [transcript[:until] for transcript in both], seed=[0, 0])
    assert replies == [Reply("2"), Reply("3")]


def test_a_cell_runs_once_and_its_interpreter_waits_frozen_until_the_episode_is_over(
    alone: Python, interpreters: Interpreters
):
    pid = "import os\nn = globals().get('n', 0) + 1\nos.getpid(), n"
    [first] = episode(alone, pid)
    [process] = interpreters()
    deadline = time.monotonic() + PATIENCE_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    messages = [tool_call(pid), first, tool_call("n += 1"), NO_OUTPUT, tool_call("os.getpid(), n")]
    assert alone.respond([[]], [turns(*messages[:3])]) == [Reply(NO_OUTPUT)]
    assert alone.respond([[]], [turns(*messages)]) == [Reply(f"({process.pid}, 2)")]
    assert alone.respond([[]], [turns(*messages, "x", "It is over.")]) == [None]
    assert interpreters() == []


@pytest.mark.parametrize(
    ("alone", "most_bytes", "left"),
    [({"most_live": 2}, None, 2), ({"max_turns": 1}, None, 0), ({}, 100 << 20, 1)],
    ids=["many", "last turn", "large"],
    indirect=["alone"],
)
def test_interpreters_that_are_too_many_or_not_needed_again_end(
    alone: Python, most_bytes: int | None, left: int, interpreters: Interpreters, monkeypatch: pytest.MonkeyPatch
):
    if most_bytes:
        monkeypatch.setattr(alone, "_most_bytes", most_bytes)
    codes = [f"x = bytearray({(60 if most_bytes else 1) << 20})\n{n}" for n in range(4)]
    replies = alone.respond([[]] * 4, [turns(tool_call(code)) for code in codes], seed=[*range(4)])
    assert replies == [Reply(str(n)) for n in range(4)]
    assert len(interpreters()) == left


def test_a_stopped_cell_is_known_by_its_answer_also_when_that_was_cut():
    answers = [f"```output\n{TIMED_OUT}\n```\n", "1", "\n```output\n" + STOPPED[""][:30], "", f"It said {TIMED_OUT}"]
    messages = [text for code, answer in zip("abcde", answers, strict=True) for text in (block(code), answer)]
    assert kept_cells(turns(*messages, block("f"))) == ["b", "d", "e"]


# Time


def test_a_cell_has_its_own_time_whatever_ran_before(alone: Python):
    busy = "import time, resource\nuntil = time.process_time() + 0.6\nwhile time.process_time() < until: pass"
    limit = "used = time.process_time()\n5 <= resource.getrlimit(resource.RLIMIT_CPU)[0] - used <= 6"
    assert episode(alone, busy, busy, limit)[-1] == "True"


# Nothing gets out


@pytest.mark.parametrize(
    "attack",
    [
        f"open({str(Path(__file__).resolve())!r}).read()",
        "import os\nos.kill(os.getppid(), 9)",
        # by the socket of its requests
        "import array, os, socket, stat\n"
        "own = [socket.socket(fileno=fd) for fd in range(3, 7) if stat.S_ISSOCK(os.fstat(fd)[0])]\n"
        "own[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))])",
    ],
    ids=["file", "parent", "socket"],
)
def test_a_cell_is_behind_the_walls_of_the_sandbox(attack: str, shared: Python):
    assert "PermissionError" in episode(shared, attack)[0]


def test_closing_ends_the_interpreters_and_a_system_without_the_sandbox_is_refused(
    interpreters: Interpreters, monkeypatch: pytest.MonkeyPatch
):
    config = EnvironmentConfig.model_validate({"name": "python"})
    environment = Replies(config, task="x", respond=None, use=None, stop=(), length=len)
    assert environment.respond([[]], [turns(tool_call("1"))], {"seed": [0]}).values == [Reply("1")]
    assert len(interpreters()) == 1
    environment.close()
    assert interpreters() == []
    monkeypatch.setattr(python, "why_not_isolated", lambda: "the kernel has no Landlock")
    with pytest.raises(ValueError, match=r"`python`.*the kernel has no Landlock"):
        Python(config, length=len)


@pytest.mark.parametrize(("given", "of_a_cell"), [({}, 5.0), ({"name": "python"}, 5.0), ({"timeout_s": 2.5}, 2.5)])
def test_a_cell_has_its_own_limit_also_in_a_task_s_environment(given: dict[str, Any], of_a_cell: float) -> None:
    """environment.name is null where the task names the environment; other environments wait for 30 s."""
    interpreters = Python(EnvironmentConfig.model_validate(given))
    interpreters.close()
    assert interpreters.timeout_s == of_a_cell
    assert EnvironmentConfig().seconds == 30.0
