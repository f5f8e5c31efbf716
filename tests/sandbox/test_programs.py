"""Programs in a sandbox: what they may do, how outcomes are reported, and that only right answers pass."""

import ctypes
import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.workers.test_orphans import wait_until_gone
from tinyrl.rewards.functions import FunctionReward
from tinyrl.workers import sandbox
from tinyrl.workers.cage import filter_for
from tinyrl.workers.sandbox import (
    CAGE,
    CannotIsolate,
    passes_tests,
    python_block,
    run_program,
    same_output,
    why_not_isolated,
)

needs_isolation = pytest.mark.skipif(why_not_isolated() is not None, reason=str(why_not_isolated()))


# What a program may do


@needs_isolation
def test_a_script_reads_and_prints_and_its_environment_is_not_ours(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = """
from __future__ import annotations
import os, sys
def main():
    print(sum(int(line) for line in sys.stdin), "é\\u2028", sys.argv, __file__)
    print(hash("text"), *os.environ, file=sys.stderr)
if __name__ == "__main__":
    main()
    exit()
"""
    outcome = run_program(program, stdin="1\n2\n39")
    assert (outcome.reason, outcome.ok, outcome.exit_code) == ("ok", True, 0)
    assert outcome.stdout == "42 é\u2028 ['program.py'] program.py\n"
    assert set(outcome.stderr.split()[1:]) - {"LC_CTYPE"} == {*sandbox.ENVIRONMENT}
    assert outcome.stderr == run_program(program, stdin="1").stderr


@needs_isolation
@pytest.mark.parametrize(
    "program",
    [
        "import asyncio\nasync def f(): await asyncio.get_running_loop().run_in_executor(None, print, 'done')\n"
        "asyncio.run(f())",
        "import threading, sys\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n"
        "def deep(n): return n and deep(n - 1)\n"
        "t = threading.Thread(target=lambda: print('done' if deep(50000) == 0 else '')); t.start(); t.join()",
        "import hashlib, ssl, sqlite3, decimal, lzma, bz2, zlib, ctypes, uuid, secrets, os, zoneinfo, datetime\n"
        "sqlite3.connect(':memory:').execute('select 1'); hashlib.sha256(b''); secrets.token_hex(); uuid.uuid4()\n"
        "zoneinfo.ZoneInfo('UTC'); datetime.datetime.now(); open(os.devnull, 'w').write('x'); os.urandom(8)\n"
        "print('done')",
    ],
)
def test_the_standard_library_works(program: str):
    outcome = run_program(program)
    assert (outcome.stdout, outcome.reason) == ("done\n", "ok"), outcome.stderr


# How programs end


@needs_isolation
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("1/0", "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("x = '\ud800'", "exit code 1: SyntaxError: "),
        ("import os; os.write(1, b'\\xff\\xed')", "ok"),
        ("raise MemoryError", "out of memory"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
        ("input()", "exit code 1: EOFError: EOF when reading a line"),
        ("raise ValueError('x' * 100_000 + '\\n\\x1b[31m')", "exit code 1: [ESC][31m"),
    ],
)
def test_a_program_ends_with_a_short_reason(program: str, reason: str):
    outcome = run_program(program)
    assert outcome.reason.startswith(reason), outcome.reason
    assert outcome.ok == (reason == "ok")


# Verdicts


@needs_isolation
def test_programs_are_judged_case_by_case():
    program = "n = int(input())\nassert n != 3\nprint(n * n if n != 2 else 5, flush=True)\n1 / (n - 5)"
    cases = [("1", "1"), ("2", "4"), ("3\n", "9\n"), ("4", " 16 \n\n"), ("5", "25")]
    verdicts = passes_tests(program, cases, workers=2)
    assert [verdict.passed for verdict in verdicts] == [True, False, False, True, False]
    assert [verdict.reason for verdict in verdicts[:3]] == ["passed", "wrong answer", "exit code 1: AssertionError"]
    assert verdicts[4].reason.startswith("exit code 1: ZeroDivisionError")  # after the right answer
    assert passes_tests(program, []) == []


def test_outputs_are_compared_by_words_in_lines_and_the_last_complete_block_is_the_program():
    for printed, expected, same in [
        ("  1   2 \r\n3\n\n", "1 2\n3", True),
        ("", "\n", True),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
    ]:
        assert same_output(printed, expected) == same
    for text, block in {
        "a\n```python\nx = 1\n  y\n```\nb": "x = 1\n  y",
        "```python\n1\n```\n```py\n2\n```\n```\n3\n```": "2",
        "```python\n1\n```\n```python\n2": "1",
        "  ```Python \r\n  x\r\n  ```\r\n": "  x",
        "```python\ns = '''\n```text\n'''\n```": "s = '''\n```text\n'''",
        "```python\n" * 200_000: None,
    }.items():
        assert python_block(text) == block


# Where the system can isolate, and where it cannot


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"), reason="not such a one")
def test_a_kernel_that_can_isolate_does():
    """So that a wall broken by us is not mistaken for one that the system lacks, with all other tests skipped."""
    libc = ctypes.CDLL(None)
    if libc.syscall(444, None, ctypes.c_size_t(0), 1) < 1 or libc.prctl(21, 0, 0, 0, 0) < 0:
        pytest.skip("this kernel has no Landlock or no seccomp")
    assert why_not_isolated() is None


@needs_isolation
@pytest.mark.parametrize(
    ("wall", "call", "broken"),
    [
        ("Landlock", "LANDLOCK_CREATE = 444", "LANDLOCK_CREATE = 9444"),
        ("seccomp", "PR_SET_SECCOMP = 22", "PR_SET_SECCOMP = 9022"),
    ],
)
def test_without_a_wall_no_program_is_run(
    wall: str, call: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the number of a call that no kernel knows."""
    cage = Path(CAGE).read_text(encoding="utf-8")
    assert call in cage
    (tmp_path / "cage.py").write_text(cage.replace(call, broken), encoding="utf-8")
    monkeypatch.setattr(sandbox, "CAGE", str(tmp_path / "cage.py"))
    with pytest.raises(CannotIsolate, match=rf"lacks {wall} \("):
        run_program("print('ran')")


def verdict_of(instructions: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a filter: a second, small implementation of the machine that it is for."""
    seen = [number, architecture, 0, 0, *(word for value in arguments for word in (value & 0xFFFFFFFF, value >> 32))]
    accumulator, position = 0, 0
    while True:
        step = instructions[8 * position : 8 * position + 8]
        operation, if_true, if_false = int.from_bytes(step[:2], "little"), step[2], step[3]
        operand = int.from_bytes(step[4:], "little")
        position += 1
        if operation == 0x20:
            accumulator = (seen + [0] * 12)[operand // 4]
        elif operation == 0x54:
            accumulator &= operand
        elif operation == 0x15:
            position += if_true if accumulator == operand else if_false
        else:
            assert operation == 0x06
            return operand


ALLOWED, REFUSED, NO_SUCH_CALL, KILLED = 0x7FFF0000, 0x50001, 0x50026, 0x80000000


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", 0xC000003E, 0), ("aarch64", 0xC00000B7, 1)])
def test_the_filter_of_system_calls(machine: str, architecture: int, column: int):
    """On both machines, though we only ever have one: the numbers are those of the kernel's own tables."""
    instructions = filter_for(machine)
    expected = [
        ((0, 63), (), ALLOWED),  # read
        ((41, 198), (1, 1, 0), REFUSED),  # socket
        ((53, 199), (1, 1 | 0o2000000, 0), ALLOWED),  # socketpair, AF_UNIX, a stream
        ((44, 206), (3, 0, 1, 0, 0, 0), ALLOWED),  # sendto nobody in particular
        ((44, 206), (3, 0, 1, 0, 0x7F0000000000, 16), REFUSED),
        ((56, 220), (0x3D0F00,), ALLOWED),  # clone, as threads are made
        ((56, 220), (0x10010000,), REFUSED),  # a thread in a namespace of users
        ((435, 435), (), NO_SUCH_CALL),  # clone3
        ((257, 56), (-100 & 0xFFFFFFFFFFFFFFFF, 0, 0o2000000), ALLOWED),  # openat, to read
        ((257, 56), (0, 0, 0o1000), REFUSED),  # emptied though only to be read
        ((72, 25), (3, 2), ALLOWED),  # fcntl F_SETFD
        ((72, 25), (3, 8), REFUSED),  # F_SETOWN
        ((302, 261), (1, 7), REFUSED),
        ((157, 167), (1, 0), REFUSED),  # PR_SET_PDEATHSIG
        ((62, 129), (1, 9), REFUSED),  # kill
        ((101, 117), (), REFUSED),  # ptrace
        ((425, 425), (), REFUSED),  # io_uring_setup
        ((5000, 5000), (), REFUSED),  # what there may be one day
    ]
    answers = [verdict_of(instructions, architecture, numbers[column], *words) for numbers, words, _ in expected]
    assert answers == [answer for _, _, answer in expected]
    assert verdict_of(instructions, 0x40000003, 1) == KILLED  # by way of 32 bits
    assert verdict_of(instructions, architecture, 0x40000001) == REFUSED  # x32
    with pytest.raises(OSError, match="riscv64"):
        filter_for("riscv64")


@needs_isolation
@pytest.mark.slow
def test_the_example_is_a_reward_function_and_leaves_no_program_behind_when_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """That of the module's docstring."""
    monkeypatch.chdir(tmp_path)
    code = (sandbox.__doc__ or "").split("# rewards.py")[1].split("\n\nEach run")[0].partition("\n")[2]
    (tmp_path / "rewards.py").write_text(textwrap.dedent(code), encoding="utf-8")
    program = "Here it is.\n```python\nprint(int(input()) * 2)\n```"
    completions = [program, [{"role": "assistant", "content": program.replace("* 2", "+ 2")}], "print(4)"]
    with FunctionReward("rewards.py:score") as reward:
        call = reward(["p"] * 3, completions, {"tests": [[["1", "2"], ["2", "4"]]] * 3})
    assert (call.values, call.failures) == ([1.0, 0.5, 0.0], [])
    endless = "```python\nimport time\nwhile True: time.sleep(0.01)\n```"
    with FunctionReward("rewards.py:score", timeout_s=1.5) as reward:
        call = reward(["p"], [endless], {"tests": [[["1", "2"]]]})
    assert "gave no answer within" in call.failures[0].reason
    running = [each for each in psutil.process_iter(["cmdline"]) if CAGE in (each.info["cmdline"] or [])]
    assert wait_until_gone([each.pid for each in running]) == []
