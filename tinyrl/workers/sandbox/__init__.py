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
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

TOLERANCE = 1e-9  # between numbers of which one is a float, relative to the larger
NEAR_ZERO = 1e-12  # where exactly 0 is expected, to which nothing is relatively close
START_S = 30.0  # for a sandbox to be ready, on a busy machine
MIN_MEMORY_BYTES = 64 << 20  # an interpreter alone needs about half
MAX_LINE_CHARS = 300
CHUNK_BYTES = 1 << 16
NOT_JSON = "did not return a value that is JSON"

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


class CannotIsolate(ValueError):
    """This system cannot isolate a program, so it is not run."""


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use. ValueError: a limit that cannot be kept."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_bytes: int = 512 << 20  # address space; files in scratch come on top
    output_bytes: int = 1 << 20  # of stdout, of stderr, and of a returned value, each
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


def run_program(source: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Run a program as a script. Raises CannotIsolate; what the program does is never raised."""
    return _run(source, "", b"", stdin, limits)


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
    given = [_json(list(arguments)) for arguments in arguments_list]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda each: _run(source, function, each, "", limits), given))


def passes_tests(
    source: str, cases: Sequence[Sequence[str]], *, workers: int = 1, limits: Limits = DEFAULT_LIMITS
) -> list[Verdict]:
    """Run a program on each case, (stdin, expected stdout); passed is exit code 0 and `same_output`."""
    with ThreadPoolExecutor(workers) as pool:
        outcomes = list(pool.map(lambda case: _run(source, "", b"", case[0], limits), cases))
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
    given = [arguments for arguments, _ in cases]
    outcomes = call_function(source, function, given, workers=workers, limits=limits)
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


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Arguments and expected values of a function must be JSON: {error}.") from error


# ---- One run, seen from outside, where the program cannot reach ----


@functools.cache
def why_not_isolated() -> str | None:
    """Return why programs cannot be isolated on this system, or None if they can. Found out once, in a moment."""
    if sys.platform != "linux":
        return f"that takes Linux with Landlock and seccomp, and this is {sys.platform}"
    try:
        _run("", "", b"", "", DEFAULT_LIMITS)
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


def _run(source: str, function: str, arguments: bytes, stdin: str, limits: Limits) -> Outcome:
    """Run a program in a fresh sandbox to its end, or to the end of a limit.

    Nothing waits without a deadline and nothing is written to disk. Raises CannotIsolate where a wall is missing,
    OSError where the sandbox cannot be started.
    """
    if sys.platform != "linux":
        raise CannotIsolate(f"Programs cannot be isolated: {why_not_isolated()}. None is run.")
    # A lone surrogate is the program's problem, not ours.
    program, entered = source.encode("utf-8", "surrogatepass"), stdin.encode("utf-8", "surrogatepass")
    stopped, started, refused, outputs = "", None, "", dict[Any, bytearray]()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as pipes:
        job, standard_input = (_in_memory(stack, data) for data in (program + arguments, entered))
        reading, writing = os.pipe()
        replies = stack.enter_context(open(reading, "rb", buffering=0))
        values = (limits.cpu_s, limits.memory_bytes, limits.scratch_bytes, limits.threads)
        words = [os.getpid(), writing, job, len(program), function, *values]
        try:
            process = subprocess.Popen(
                [*PYTHON, CAGE, *map(str, words), *visible_paths()],
                stdin=standard_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=ENVIRONMENT,
                pass_fds=[writing, job],
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        finally:
            os.close(writing)
        assert process.stdout
        assert process.stderr
        outputs.update({pipe: bytearray() for pipe in (process.stdout, process.stderr, replies)})
        for pipe in outputs:
            stack.callback(pipe.close)
            pipes.register(pipe, selectors.EVENT_READ)
        ended = os.pidfd_open(process.pid)
        stack.callback(os.close, ended)
        pipes.register(ended, selectors.EVENT_READ)
        deadline, reply = time.monotonic() + START_S, outputs[replies]
        try:
            while pipes.get_map() and not stopped:
                for key, _ in pipes.select(max(0.0, deadline - time.monotonic())):
                    received = b"" if key.fileobj == ended else os.read(key.fd, CHUNK_BYTES)
                    if not received:
                        pipes.unregister(key.fileobj)
                        continue
                    output = outputs[key.fileobj]
                    output += received
                    if started is None and b"\n" in reply:
                        started = time.monotonic()
                        deadline = started + limits.wall_s
                        first, _, rest = reply.partition(b"\n")
                        refused, reply[:] = first.decode().removeprefix("ready"), rest
                    if len(output) > limits.output_bytes and started is not None:
                        del output[limits.output_bytes :]
                        stopped = "output too long"
                if pipes.get_map() and time.monotonic() > deadline:
                    stopped = stopped or "timed out"
        finally:
            os.kill(process.pid, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        stdout, stderr = (outputs[pipe].decode("utf-8", "replace") for pipe in (process.stdout, process.stderr))
        seconds = time.monotonic() - (started or 0.0)
    if refused:
        raise CannotIsolate(f"Programs cannot be isolated: the sandbox lacks {refused.removeprefix('refused: ')}.")
    if started is None:
        raise OSError(f"A sandbox could not be started: {stopped or last_line(stderr) or 'it wrote nothing'}")
    code, cpu_seconds, value = process.returncode, usage.ru_utime + usage.ru_stime, None
    last = last_line(stderr)
    if stopped:
        reason, code = stopped, -signal.SIGKILL
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_seconds >= limits.cpu_s):
        reason = "out of CPU time"
    elif code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
    elif code and (last.startswith("MemoryError") or last == "lost sys.stderr"):  # not enough left even to write so
        reason = "out of memory"
    elif code:
        reason = f"exit code {code}: {last}".rstrip(": ")
    else:
        reason = "ok"
        if function:
            try:
                value = json.loads(reply, parse_constant=_refuse, parse_float=_finite)
            except (ValueError, RecursionError):
                reason = NOT_JSON
    return Outcome(reason, stdout, stderr, code if code >= 0 else None, seconds, cpu_seconds, value)


def _in_memory(stack: contextlib.ExitStack, data: bytes) -> int:
    """Return an open file in memory with the data, closed with the stack, that can only be read."""
    with open(os.memfd_create("given"), "wb", buffering=0) as file:
        while data:
            data = data[file.write(data) :]
        opened = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
    stack.callback(os.close, opened)
    return opened


def last_line(text: str) -> str:
    """Return the last line of a text that is not blank, blanks collapsed and length limited; "" where none is."""
    found = next((line for line in reversed(text.split("\n")) if line.strip()), "")
    line = "".join(c if c.isprintable() else "?" for c in " ".join(found[: 4 * MAX_LINE_CHARS].split()))
    return line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 1]}…"


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
