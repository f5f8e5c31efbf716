"""Code as a reward: a completion's program runs where it can do no harm, and is judged where it can forge nothing.

    # rewards.py, for rows with a column of tests: [[stdin, expected stdout], ...]
    from tinyrl.workers.sandbox import passes_tests, python_block
    from tinyrl.tasks.grading import completion_text

    def score(prompts, completions, tests, **columns):
        return [share_passed(python_block(completion_text(c)), t) for c, t in zip(completions, tests)]

    def share_passed(program, tests):
        if program is None:
            return 0.0
        verdicts = passes_tests(program, tests, workers=4)
        return sum(verdict.passed for verdict in verdicts) / len(verdicts)

Each run is a fresh interpreter behind Landlock, seccomp and resource limits (cage.py). It has the standard library, its
input, and a scratch folder in memory that is empty and soon gone (none where mounting is forbidden, as in most
containers: there no file can be written). It has no network, no installed packages, no other file, none of our
environment, and cannot start a process or signal one. Time, memory, output, files and threads end at `Limits`. A run
costs some 40 ms beside the program's own time, and an endless one `wall_s`: choose it, and `workers`, so that a batch
of such cases stays within reward.timeout_s.

A program can print or return answers and nothing else: expected ones never enter the sandbox, are compared here, and
each case has a run of its own. What is not promised: that a program cannot learn the time, the names and sizes of
files, or what kind of machine this is; that one which exploits a bug in the kernel stays inside.

Linux on x86_64 or aarch64, with Landlock (5.13 or later). Elsewhere CannotIsolate is raised and nothing is run.
"""

import contextlib
import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tinyrl.text import one_line

TOLERANCE = 1e-9  # between numbers of which one is a float, relative to the larger
NEAR_ZERO = 1e-12  # where exactly 0 is expected, to which nothing is relatively close
START_S = 30.0  # for a sandbox to be ready, on a busy machine
MIN_MEMORY_BYTES = 64 << 20  # an interpreter alone needs about half
MAX_LINE_CHARS = 300
MAX_WAIT_MS = 2**31 - 1  # of poll(2)

CAGE = str(Path(__file__).with_name("cage.py"))
# No installed packages, no .pyc written, none of our folders on its path.
PYTHON = (os.path.realpath(sys.executable), "-s", "-S", "-B", "-P", "-X", "utf8")
ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OPENSSL_CONF": "/dev/null", "MALLOC_ARENA_MAX": "1"}
ALSO_READABLE = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom", "/dev/zero")
LIST_LIBRARIES = """
import contextlib, ctypes, os, sys
found = [entry.path for path in sys.path if os.path.isdir(path) for entry in os.scandir(path)]
for file in ["libgcc_s.so.1", *(path for path in found if path.endswith(".so") and "tkinter" not in path)]:
    with contextlib.suppress(OSError):
        ctypes.CDLL(file)
with open("/proc/self/maps") as maps:
    print(*{line[line.index("/"):].rstrip("\\n") for line in maps if "/" in line}, sep="\\n")
"""
CALL = """
import json, os, sys
found = sys.modules["program"] = type(sys)("program")
exec(compile({source!a}, "program.py", "exec"), found.__dict__)
for part in {function!r}.split("."):
    found = getattr(found() if isinstance(found, type) else found, part)
returned = json.dumps(found(*json.loads({arguments!r})))
sys.stdout.flush()
os.write(1, b"\\n" + returned.encode())
"""


class CannotIsolate(ValueError):
    """This system cannot isolate a program, so it is not run."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use. ValueError: a limit that cannot be kept."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 << 20  # address space; files in scratch come on top
    output_bytes: int = 1 << 20  # of stdout with a returned value, and of stderr
    scratch_bytes: int = 16 << 20  # all files together, in memory; 0: no file can be written
    threads: int = 32

    def __post_init__(self) -> None:
        if not (math.isfinite(self.wall_s) and self.wall_s > 0):
            raise ValueError(f"Limits: wall_s must be a number of seconds above 0, not {self.wall_s}.")
        least = {"cpu_s": 1, "memory_bytes": MIN_MEMORY_BYTES, "output_bytes": 1, "scratch_bytes": 0, "threads": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < minimum:
                raise ValueError(f"Limits: {name} must be a whole number from {minimum}, not {value!r}.")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """How a program ended. Text is what could be read as UTF-8, up to `Limits.output_bytes`."""

    reason: str  # "ok", "timed out", "out of CPU time", "out of memory", "output too long", "killed by SIGSEGV", ...
    stdout: str
    stderr: str
    exit_code: int | None  # None: it was ended by a signal
    seconds: float  # from when the program could start
    cpu_seconds: float
    value: Any = None  # what the function returned, where one was called and `ok`

    @property
    def ok(self) -> bool:
        """Whether it came to its end by itself, with exit code 0, and a value where one was asked for."""
        return self.reason == "ok"


@dataclass(frozen=True)
class Verdict:
    """Whether one case was passed, and the run that decided it."""

    passed: bool
    outcome: Outcome

    @property
    def reason(self) -> str:
        """ "passed", "wrong answer", or how the run failed."""
        return "passed" if self.passed else "wrong answer" if self.outcome.ok else self.outcome.reason


# ---- Programs and their verdicts ----


def call_function(
    source: str,
    function: str,
    arguments_list: Sequence[Sequence[Any]],
    *,
    workers: int = 1,
    limits: Limits = DEFAULT_LIMITS,
) -> list[Outcome]:
    """Call a function of a program once for each list of arguments, each in a run of its own; `workers` at a time.

    Arguments and values are JSON: a returned tuple is a list, keys of objects are text, and NaN or an infinity is not a
    value. "Solution.solve" is a method, of an instance made without arguments. ValueError: an argument is not JSON.
    """
    calls = [CALL.format(source=source, function=function, arguments=_json([*each])) for each in arguments_list]

    def value_of(program: str) -> Outcome:
        outcome = run_program(program, limits=limits)
        printed, _, returned = outcome.stdout.rpartition("\n")
        if not outcome.ok:
            return outcome
        try:
            value = json.loads(returned, parse_constant=_finite, parse_float=_finite)
        except (ValueError, RecursionError):
            return replace(outcome, reason="did not return a value that is JSON")
        return replace(outcome, stdout=printed, value=value)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(value_of, calls))


def passes_tests(
    source: str, cases: Sequence[Sequence[str]], *, workers: int = 1, limits: Limits = DEFAULT_LIMITS
) -> list[Verdict]:
    """Run a program on each case, (stdin, expected stdout); passed is exit code 0 and `same_output`."""
    with ThreadPoolExecutor(workers) as pool:
        outcomes = list(pool.map(lambda case: run_program(source, stdin=case[0], limits=limits), cases))
    pairs = zip(outcomes, cases, strict=True)
    return [Verdict(outcome.ok and same_output(outcome.stdout, expected), outcome) for outcome, (_, expected) in pairs]


def passes_calls(
    source: str,
    function: str,
    cases: Sequence[tuple[Sequence[Any], Any]],
    *,
    workers: int = 1,
    limits: Limits = DEFAULT_LIMITS,
) -> list[Verdict]:
    """Call a function on each case, (arguments, expected value), as call_function does; passed is `same_value`."""
    wanted = [json.loads(_json(expected)) for _, expected in cases]
    outcomes = call_function(source, function, [given for given, _ in cases], workers=workers, limits=limits)
    pairs = zip(outcomes, wanted, strict=True)
    return [Verdict(outcome.ok and same_value(outcome.value, expected), outcome) for outcome, expected in pairs]


def python_block(text: str) -> str | None:
    """Return the contents of the last complete ```python block of a text (```py will do), or None."""
    found, lines = None, None
    for line in text.split("\n"):
        fence = line.strip().lower()
        if lines is None:
            lines = [] if fence in ("```python", "```py", "```python3") else None
        elif fence == "```":
            found, lines = "\n".join(lines), None
        else:
            lines.append(line.rstrip("\r"))
    return found


def same_output(printed: str, expected: str) -> bool:
    """Return whether two texts are equal line by line; a run of blanks counts as one, those at the ends as none."""
    first, second = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    return first == second


def same_value(returned: Any, expected: Any) -> bool:
    """Return whether two JSON values are the same. True is not 1; 1 is 1.0; floats may differ by TOLERANCE."""
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(same_value(returned[key], expected[key]) for key in returned)
    kinds = {type(returned), type(expected)}
    if kinds == {int, float} or kinds == {float}:
        with contextlib.suppress(OverflowError):  # an int that no float can be near
            zero = 0.0 if expected else NEAR_ZERO
            return math.isclose(returned, expected, rel_tol=TOLERANCE, abs_tol=zero)  # pyright: ignore
    return len(kinds) == 1 and returned == expected


def _json(value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Arguments and expected values of a function must be JSON: {error}.") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not JSON")
    return number


# ---- One run, seen from outside, where the program cannot reach ----


@functools.cache
def why_not_isolated() -> str | None:
    """Return why programs cannot be isolated on this system, or None if they can. Found out once, in a moment."""
    if sys.platform != "linux":
        return f"that takes Linux with Landlock and seccomp, and this is {sys.platform}"
    try:
        run_program("")
    except (CannotIsolate, OSError) as error:
        return last_line(str(error)).rstrip(".")
    return None


@functools.cache
def visible_paths() -> tuple[str, ...]:
    """Return the paths that a program may look at, as cage.py takes them.

    That is the standard library and the shared libraries that the interpreter's own modules are linked with: no
    installed package (an answer may lie in one), nothing of /proc, /etc or a home.
    """
    library = os.path.dirname(os.__file__)
    entries = [entry.path for entry in os.scandir(library) if not entry.name.endswith("-packages")]
    command = [*PYTHON, "-c", LIST_LIBRARIES]
    listed = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True)
    linked = [path for path in listed.stdout.splitlines() if not path.startswith(library)]
    there = sorted(path for path in {*entries, *linked, *ALSO_READABLE} if os.path.exists(path))
    return (f"l{library}", *(f"{'d' if os.path.isdir(path) else 'f'}{path}" for path in there), "w/dev/null")


def run_program(source: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Run a program as a script, in a fresh sandbox, to its end or to the end of a limit.

    What the program does is never raised. Nothing waits without a deadline; what it reads and writes is in memory.
    Raises CannotIsolate where a wall is missing, OSError where the sandbox cannot be started.
    """
    if sys.platform != "linux":
        raise CannotIsolate(f"Programs cannot be isolated: {why_not_isolated()}. None is run.")
    with contextlib.ExitStack() as stack:
        job, given, *outputs = (_in_memory(stack, text) for text in (source, stdin, "", ""))
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        # What is written beyond a limit shows that it was.
        file_bytes = max(limits.scratch_bytes, limits.output_bytes + 1)
        values = (limits.cpu_s, limits.memory_bytes, limits.scratch_bytes, file_bytes, limits.threads)
        words = [os.getpid(), writing, job.fileno(), *values]
        try:
            process = subprocess.Popen(
                [*PYTHON, CAGE, *map(str, words), *visible_paths()],
                stdin=given,
                stdout=outputs[0],
                stderr=outputs[1],
                env=ENVIRONMENT,
                pass_fds=[writing, job.fileno()],
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        finally:
            os.close(writing)
        ended, late = os.pidfd_open(process.pid), False
        stack.callback(os.close, ended)
        try:
            ready = os.read(reading, 4096).decode() if _waited(reading, START_S) else ""
            started = time.monotonic()
            if ready == "ready\n":
                late = not _waited(ended, limits.wall_s)
        finally:
            os.kill(process.pid, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
            _, status, usage = os.wait4(process.pid, 0)
            code = process.returncode = os.waitstatus_to_exitcode(status)
        seconds, cpu_seconds = time.monotonic() - started, usage.ru_utime + usage.ru_stime
        written = [os.pread(file.fileno(), limits.output_bytes + 1, 0) for file in outputs]
    stdout, stderr = (data[: limits.output_bytes].decode("utf-8", "replace") for data in written)
    last = last_line(stderr)
    if not ready:
        raise OSError(f"A sandbox could not be started: {last or 'it wrote nothing'}")
    if ready != "ready\n":
        raise CannotIsolate(f"Programs cannot be isolated: the sandbox lacks {ready.strip()}.")
    if any(len(data) > limits.output_bytes for data in written):
        reason, code = "output too long", -signal.SIGKILL
    elif late:
        reason = "timed out"
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_seconds >= limits.cpu_s):
        reason = "out of CPU time"
    elif code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
    elif code and (last.startswith("MemoryError") or last == "lost sys.stderr"):  # not enough left even to write so
        reason = "out of memory"
    else:
        reason = f"exit code {code}: {last}".rstrip(": ") if code else "ok"
    return Outcome(reason, stdout, stderr, code if code >= 0 else None, seconds, cpu_seconds)


def _in_memory(stack: contextlib.ExitStack, text: str) -> IO[bytes]:
    """Return an open file in memory with the text, closed with the stack; a lone surrogate is the program's problem."""
    file = stack.enter_context(os.fdopen(os.memfd_create("file"), "w+b", buffering=0))
    data = text.encode("utf-8", "surrogatepass")
    while data:
        data = data[file.write(data) :]
    file.seek(0)
    return file


def _waited(descriptor: int, seconds: float) -> bool:
    """Wait for a pipe to be readable or a process to end; return whether it did in time."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(min(1000 * seconds, MAX_WAIT_MS)))


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank, for a sentence; "" where none is."""
    return one_line(next((line for line in reversed(text.split("\n")) if line.strip()), ""), MAX_LINE_CHARS)
