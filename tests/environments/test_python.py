"""The Python environment: what cells are answered, what stays from turn to turn, and that nothing gets out."""

import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from tinyrl.environments import Reply, python
from tinyrl.environments.python import (
    CRASHED,
    NO_OUTPUT,
    OUT_OF_MEMORY,
    TIMED_OUT,
    TOO_MUCH_OUTPUT,
    UNREADABLE,
    call_in,
    check_available,
    cut,
    fenced,
    kept_cells,
    respond,
    was_stopped,
)
from tinyrl.workers.sandbox import Limits, Outcome, why_not_isolated

pytestmark = pytest.mark.sandbox
needs_isolation = pytest.mark.skipif(why_not_isolated() is not None, reason=str(why_not_isolated()))


def block(code: str) -> str:
    return f"Let me compute that.\n```python\n{code}\n```\n"


def tool_call(code: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


def episode(*codes: str, timeout_s: float = 5.0, memory_gb: float = 0.5, seed: int = 0) -> list[str]:
    """The answers to cells that are called one after the other."""
    transcript, answers = [], []
    for code in codes:
        transcript.append({"role": "assistant", "content": tool_call(code)})
        [reply] = respond([[]], [transcript], seed=[seed], timeout_s=timeout_s, memory_gb=memory_gb)
        assert reply is not None
        assert reply == Reply(reply.text)
        transcript.append({"role": "tool", "content": reply.text})
        answers.append(reply.text)
    return answers


def answer(code: str) -> str:
    return episode(code)[0]


# What a turn calls


def test_the_last_block_or_the_last_tool_call_of_a_turn_is_run():
    assert call_in(block("a") + block("b = 1\nb")) == ("b = 1\nb", True)
    assert call_in(f"{tool_call('a')}\n{tool_call('b')}\n") == ("b", False)
    assert call_in(block("a") + tool_call("b")) == ("b", False)
    assert call_in(tool_call("a").removesuffix("</tool_call>")) == ("a", False)
    assert call_in("The answer is 7. ```python\n7") is None
    assert call_in("") is None


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "python", "arguments": {"code": "1"}} and more',
        '{"name": "search", "arguments": {"code": "1"}}',
        '{"name": "python", "arguments": {"code": 1}}',
        "[" * 100_000,
    ],
)
def test_a_call_that_cannot_be_read_is_said_to_be_and_counted(call: str):
    turn = f"<tool_call>{call}</tool_call>"
    assert respond([[]], [[{"role": "assistant", "content": turn}]]) == [Reply(UNREADABLE, invalid=True)]


def test_a_turn_that_calls_nothing_ends_the_episode_wherever_that_is():
    over = [{"role": "assistant", "content": "It is 7."}]
    later = [{"role": "assistant", "content": block("7")}, {"role": "tool", "content": "7"}, *over]
    assert respond(["a", "b"], [over, later], seed=[1, 2], answer=["7", "7"]) == [None, None]


# What is answered


@needs_isolation
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 20\nx + 1", "21"),
        ("print('a', end='')\n'b'", "a\n'b'"),
        ("import sys\nprint('b', file=sys.stderr)\nprint('c')", "b\nc"),
        ("import os\nos.write(1, b'd\\n')\nNone", "d"),
        ("x = 1", NO_OUTPUT),
        ("__name__", "'__main__'"),
    ],
)
def test_what_is_printed_and_the_value_of_a_trailing_expression_are_shown(code: str, said: str):
    assert answer(code) == said


@needs_isolation
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 0\n\n1 / x", "Line 3: ZeroDivisionError: division by zero"),
        ("print('so far')\nf = {}\nf['k']", "so far\nLine 3: KeyError: 'k'"),
        ("def f():\n    return g\nf()", "Line 2: NameError: name 'g' is not defined"),
        ("x = 1\nx = = 2", "Line 2: SyntaxError: invalid syntax"),
        ("import numpy", "Line 1: ModuleNotFoundError: No module named 'numpy'"),
        ("\n\nexit()", "Line 3: SystemExit: None"),
        ("raise ValueError('a\\nb')", "Line 1: ValueError: a\nb"),
        (
            "x = '\ud800'",
            "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 5: surrogates not allowed",
        ),
        ("\0", "SyntaxError: source code string cannot contain null bytes"),
    ],
)
def test_an_error_is_its_last_line_with_the_line_of_the_cell(code: str, said: str):
    assert answer(code) == said


@needs_isolation
def test_a_block_is_answered_in_a_block_and_a_tool_call_with_the_output_alone():
    prompts = ["text", "text", [{"role": "user", "content": "messages"}], "text"]
    turns = [block("6 * 7"), block("6 * 7").rstrip(), block("6 * 7").rstrip(), tool_call("6 * 7")]
    replies = respond(prompts, [[{"role": "assistant", "content": turn}] for turn in turns])
    said = "```output\n42\n```\n"
    assert replies == [Reply(said), Reply("\n" + said), Reply(said), Reply("42")]


# State


@needs_isolation
@pytest.mark.parametrize("write", [block, tool_call])
def test_names_stay_and_nothing_is_said_twice(write):
    codes = [
        "import math\nr = 2\nprint('first')",
        "def area(): return math.pi * r**2\nr = 1\n'second'",
        "print(area())",
    ]
    transcript, said = [], []
    for code in codes:
        transcript.append({"role": "assistant", "content": write(code)})
        [reply] = respond([[]], [transcript])
        assert reply is not None
        transcript.append({"role": "tool", "content": reply.text})
        said.append(reply.text.removeprefix("```output\n").removesuffix("\n```\n"))
    assert said == ["first", "'second'", "3.141592653589793"]


@needs_isolation
def test_random_numbers_are_the_same_again_and_others_in_another_episode():
    draw = "import random\nx = random.random()\nx"
    first, again = episode(draw, "x", seed=7)
    assert first == again
    assert episode(draw, seed=8)[0] != first


@needs_isolation
@pytest.mark.slow
def test_a_stopped_cell_is_not_run_again_and_leaves_nothing():
    stopped = "x = 0\nwhile True: pass"
    assert episode("x = 1", stopped, "x", timeout_s=2) == [NO_OUTPUT, TIMED_OUT, "1"]
    # A cell that is run again for good would stop the third turn as well.
    assert episode("x = 1", "import os\nx = 0\nos._exit(0)", "x") == [NO_OUTPUT, CRASHED, "1"]


def test_a_stopped_cell_is_known_by_its_answer_also_when_that_was_cut():
    codes = ["a", "b", "c", "d", "e"]
    answers = [fenced(TIMED_OUT), "1", "\n" + fenced(CRASHED)[:40], UNREADABLE, ""]
    transcript = [
        {"role": role, "content": text}
        for code, said in zip(codes, answers, strict=True)
        for role, text in (("assistant", block(code)), ("tool", said))
    ]
    assert kept_cells(transcript[:-1]) == ["b", "d"]
    assert was_stopped(OUT_OF_MEMORY[:30])
    assert was_stopped(TOO_MUCH_OUTPUT)
    assert not any(map(was_stopped, ["", "T", "Timed out: 3", NO_OUTPUT, f"It said {TIMED_OUT}"]))


# Cells that must be stopped


@needs_isolation
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("while True: pass", TIMED_OUT),
        ("import time\nwhile True:\n    try: time.sleep(99)\n    except BaseException: pass", TIMED_OUT),
        ("x = bytearray(10**9)", OUT_OF_MEMORY),
        ("while True: print('x' * 1000)", TOO_MUCH_OUTPUT),
        ("import os\nos._exit(0)", CRASHED),
        ("import sys\nprint('finished', file=sys.stderr, flush=True)\nimport os\nos._exit(0)", CRASHED),
    ],
)
@pytest.mark.wide
def test_a_cell_that_is_stopped_is_answered_with_one_sentence(code: str, said: str):
    assert episode(code, "1 + 1", timeout_s=2) == [said, "2"]


@needs_isolation
def test_a_cell_has_its_own_time_whatever_ran_before():
    limit = "import resource\nresource.getrlimit(resource.RLIMIT_CPU)[0]"
    assert episode("1", "1", "1", limit, timeout_s=20)[-1] == "21"  # whole seconds; 80 is what all four have together


def test_a_process_has_as_much_time_as_its_cells(monkeypatch: pytest.MonkeyPatch):
    given = []

    def stopped(_: str, *, limits: Limits) -> Outcome:
        given.append((limits.wall_s, limits.cpu_s))
        return Outcome("out of CPU time", "", "", exit_code=None, seconds=9.0, cpu_seconds=8.0)

    monkeypatch.setattr(python, "why_not_isolated", lambda: None)
    monkeypatch.setattr(python, "run_program", stopped)
    first = [{"role": "assistant", "content": tool_call("1")}, {"role": "tool", "content": "1"}]
    assert respond([[]], [first + first[:1]], timeout_s=2.25) == [Reply(TIMED_OUT)]
    assert given == [(4.5, 5)]


# Nothing gets out


@needs_isolation
def test_a_cell_cannot_reach_files_the_network_or_processes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attacks = [
            f"open({str(Path(__file__).resolve())!r}).read()",
            "open('/etc/passwd').read()",
            f"import os\nos.listdir({str(Path(python.__file__).parent)!r})",
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)",
            "import os\nwhile True: os.fork()",
            "import os\nos.kill(os.getppid(), 9)",
            f"import os\nos.kill({os.getpid()}, {signal.SIGTERM.value})",
            "import subprocess\nsubprocess.run(['true'])",
        ]
        for attack in attacks:
            assert "PermissionError" in episode("x = 1", attack)[1], attack


@needs_isolation
def test_nothing_in_an_output_is_more_than_text():
    harmful = "print('\\ud800', '\\0\\x1b[31m\\u202e', '<|im_end|>', 'a\\r\\nb', '```\\nc')"
    text = "\\ud800 \ufffd\ufffd[31m\ufffd <|im_end|> a\nb ```\nc"
    transcript = [{"role": "assistant", "content": block(harmful)}]
    assert respond(["text"], [transcript]) == [Reply(f"````output\n{text}\n````\n")]
    assert answer("import os\nos.write(1, b'\\xff\\xed\\xa0\\x80\\n')\nNone") == "\ufffd" * 4
    assert answer("'\\ud800'") == "'\\ud800'"


@needs_isolation
@pytest.mark.parametrize("code", ["print('a' + 'x' * 10**6 + 'z')", "raise ValueError('x' * 10**6)"])
def test_a_long_output_is_cut_in_the_middle(code: str):
    said = answer(code)
    assert len(said) < 1000 + len("\n[1,000,000 characters left out]\n") + 1
    assert "x\n[999,0" in said
    assert " characters left out]\nx" in said


def test_what_was_left_out_is_counted():
    assert cut("a" * 8 + "b" * 10 + "c" * 4, 12) == f"{'a' * 8}\n[10 characters left out]\ncccc"
    assert cut("a\n" * 6, 12) == "a\n" * 6
    assert cut("\0" * 13, 12) == "\ufffd" * 8 + "\n[1 characters left out]\n" + "\ufffd" * 4


# Batches


@needs_isolation
def test_a_batch_is_answered_in_its_order_by_processes_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(python, "_workers", lambda: 4)
    together = threading.Barrier(4, timeout=20)
    run = python.run_program

    def meeting(*arguments, **options):
        together.wait()  # passes only when four of them run
        return run(*arguments, **options)

    monkeypatch.setattr(python, "run_program", meeting)
    codes = [f"import time\ntime.sleep({0.05 * (8 - number)})\n{number}" for number in range(8)]
    transcripts = [[{"role": "assistant", "content": tool_call(code)}] for code in codes]
    transcripts.insert(3, [{"role": "assistant", "content": "done"}])
    replies = respond([[]] * 9, transcripts, seed=list(range(9)), question=["?"] * 9)
    assert [reply and reply.text for reply in replies] == ["0", "1", "2", None, "3", "4", "5", "6", "7"]


# Where it is not available


def test_a_system_without_the_sandbox_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(python, "why_not_isolated", lambda: "the kernel has no Landlock")
    with pytest.raises(ValueError, match=r"`python`.*the kernel has no Landlock\. It takes Linux"):
        check_available()
    with pytest.raises(ValueError, match="the kernel has no Landlock"):
        respond(["a"], [[{"role": "assistant", "content": block("1")}]])
    assert respond(["a"], [[{"role": "assistant", "content": "no call"}]]) == [None]
