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

Each run is a fresh interpreter behind Landlock and seccomp, and in namespaces of its own where the system has them. It
has the standard library, its input, and a scratch folder in memory that is empty and soon gone (none where namespaces
are forbidden, as in most containers: there no file can be written). It has no network, no installed packages, no other
file, none of our environment, and cannot start a process or signal one. Time, memory, output, files and threads end at
`Limits`. A run costs some 40 ms beside the program's own time, and an endless one `wall_s`: choose it, and `workers`,
so that a batch of such cases stays within reward.timeout_s.

A program can print or return answers and nothing else: expected ones never enter the sandbox, are compared here, and
each case has a run of its own. What is not promised: that a program cannot learn the time, the names and sizes of
files, or what kind of machine this is; that one which exploits a bug in the kernel stays inside.

Linux on x86_64 or aarch64, with Landlock (5.13 or later). Elsewhere CannotIsolate is raised and nothing is run. This
folder imports nothing else of tinyrl: some of its files are run by path.
"""

import json
import math
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, TypedDict, Unpack

from tinyrl.workers.sandbox.isolation import CannotIsolate, Limits
from tinyrl.workers.sandbox.process import Job, Run, execute, last_line, why_not_isolated

# ---- A completion's program, and what it answered ----

TOLERANCE = 1e-9  # between numbers of which one is a float, relative to the larger
NEAR_ZERO = 1e-12  # where exactly 0 is expected, to which nothing is relatively close


def python_block(text: str) -> str | None:
    """The contents of the last complete ```python block of a text (```py will do), or None if there is none."""
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
    """Whether two texts are equal line by line; a run of blanks counts as one, and those at the ends do not count."""
    return _words(printed) == _words(expected)


def same_value(returned: Any, expected: Any) -> bool:
    """Whether two JSON values are the same. True is not 1; 1 is 1.0; floats may differ by TOLERANCE."""
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(same_value(returned[key], expected[key]) for key in returned)
    kinds = {type(returned), type(expected)}
    if kinds <= {int, float}:
        return returned == expected or (float in kinds and _close(returned, expected))
    return len(kinds) == 1 and returned == expected


def _close(returned: Any, expected: Any) -> bool:
    try:
        return math.isclose(returned, expected, rel_tol=TOLERANCE, abs_tol=0.0 if expected else NEAR_ZERO)
    except OverflowError:  # an int that no float can be near
        return False


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]


# ---- Code as a reward ----


NOT_JSON = "did not return a value that is JSON"
DEFAULT_LIMITS = Limits()
SIGNALS = {each.value: each.name for each in signal.Signals}


class Options(TypedDict, total=False):
    """Runs are made `workers` at a time (default: 1), each within `limits`."""

    limits: Limits
    workers: int


@dataclass(frozen=True)
class Outcome:
    """How a program ended. Text is what could be read as UTF-8, up to `Limits.output_bytes`."""

    reason: str  # "ok", "timed out", "out of CPU time", "out of memory", "output too long", "killed by SIGSEGV", ...
    stdout: str
    stderr: str
    exit_code: int | None  # None: it was ended by a signal
    seconds: float
    cpu_seconds: float
    value: Any = None  # what the function returned, where one was called and `ok`

    @property
    def ok(self) -> bool:
        """It came to its end by itself, with exit code 0, and returned a value where one was asked for."""
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


def run_program(source: str, *, stdin: str = "", limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Run a program as a script. Raises CannotIsolate; what the program does is never raised."""
    return _run(Job(_bytes(source), stdin=_bytes(stdin)), limits)


def call_function(
    source: str, function: str, arguments_list: Sequence[Sequence[Any]], **options: Unpack[Options]
) -> list[Outcome]:
    """Call a function of a program once for each list of arguments, each in a run of its own; `workers` at a time.

    Arguments and values are JSON: a returned tuple is a list, keys of objects are text, and NaN or an infinity is not a
    value. "Solution.solve" is a method, of an instance made without arguments. ValueError: an argument is not JSON.
    """
    jobs = [Job(_bytes(source), function=function, arguments=_json(list(each))) for each in arguments_list]
    return _run_all(jobs, **options)


def passes_tests(source: str, cases: Sequence[Sequence[str]], **options: Unpack[Options]) -> list[Verdict]:
    """Run a program on each case, (stdin, expected stdout), and say which it passed: exit code 0 and `same_output`."""
    jobs = [Job(_bytes(source), stdin=_bytes(stdin)) for stdin, _ in cases]
    outcomes = _run_all(jobs, **options)
    return [
        Verdict(outcome.ok and same_output(outcome.stdout, expected), outcome)
        for outcome, (_, expected) in zip(outcomes, cases, strict=True)
    ]


def passes_calls(
    source: str, function: str, cases: Sequence[tuple[Sequence[Any], Any]], **options: Unpack[Options]
) -> list[Verdict]:
    """Call a function on each case, (arguments, expected value), as call_function does; passed is `same_value`."""
    wanted = [json.loads(_json(expected)) for _, expected in cases]
    arguments_list = [arguments for arguments, _ in cases]
    outcomes = call_function(source, function, arguments_list, **options)
    return [
        Verdict(outcome.ok and same_value(outcome.value, expected), outcome)
        for outcome, expected in zip(outcomes, wanted, strict=True)
    ]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")  # a lone surrogate is the program's problem, not ours


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Arguments and expected values of a function must be JSON: {error}.") from error


def _run_all(jobs: list[Job], *, workers: int = 1, limits: Limits = DEFAULT_LIMITS) -> list[Outcome]:
    with ThreadPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(lambda job: _run(job, limits), jobs))


def _run(job: Job, limits: Limits) -> Outcome:
    if why_not := why_not_isolated():
        raise CannotIsolate(f"Programs cannot be isolated on this system: {why_not}. None is run.")
    run = execute(job, limits)
    code = None if run.stopped or run.wait_status is None else os.waitstatus_to_exitcode(run.wait_status)
    stdout, stderr = (data.decode("utf-8", errors="replace") for data in (run.stdout, run.stderr))
    reason, value = run.stopped or _how_it_ended(run, code, stderr, limits), None
    if reason == "ok" and job.function is not None:
        reason, value = _returned(run.reply)
    return Outcome(
        reason=reason,
        stdout=stdout,
        stderr=stderr,
        exit_code=code if code is None or code >= 0 else None,
        seconds=run.seconds,
        cpu_seconds=run.cpu_seconds,
        value=value,
    )


def _how_it_ended(run: Run, code: int | None, stderr: str, limits: Limits) -> str:
    if code is None:
        return "ended with its sandbox"
    if code == 0:
        return "ok"
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and run.cpu_seconds >= limits.cpu_s):
        return "out of CPU time"
    if code < 0:
        return f"killed by {SIGNALS.get(-code, f'signal {-code}')}"
    last = last_line(stderr)
    if last.startswith("MemoryError") or last == "lost sys.stderr":  # the latter: not enough left even to say so
        return "out of memory"
    return f"exit code {code}: {last}".rstrip(": ")


def _returned(reply: bytearray) -> tuple[str, Any]:
    """ "ok" and the value, or what is wrong with it."""
    try:
        return "ok", json.loads(reply, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return NOT_JSON, None


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
