"""Code as a reward: a completion's program runs where it can do no harm, and is judged where it can forge nothing.

    # rewards.py, for rows with a column of tests: [[stdin, expected stdout], ...]
    from tinyrl.workers.sandbox import passes_tests, python_block
    from tinyrl.tasks.grading import answer_text

    def score(prompts, completions, tests, **columns):
        return [share_passed(python_block(answer_text(c)), t) for c, t in zip(completions, tests)]

    def share_passed(program, tests):
        if program is None:
            return 0.0
        verdicts = passes_tests(program, tests, workers=4)
        return sum(verdict.passed for verdict in verdicts) / len(verdicts)

Each run is a fresh interpreter behind Landlock, seccomp and resource limits (cage.py). It has the standard library and
its input. It has no network, no installed packages, no file to write, none of our environment, and cannot start a
process or signal one. Time, memory, output and threads end at `Limits`. A run costs some 40 ms beside the program's own
time, and an endless one `wall_s`: choose it, and `workers`, so that a batch of such cases stays within
reward.timeout_s.

A program can print answers and nothing else: expected ones never enter the sandbox, are compared here, and
each case has a run of its own. What is not promised: that a program cannot learn the time, the names and sizes of
files, or what kind of machine this is; that one which exploits a bug in the kernel stays inside.

Linux on x86_64 or aarch64, with Landlock (5.13 or later). Elsewhere CannotIsolate is raised and nothing is run.
"""

import functools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from tinyrl.text import one_line

START_S = 30.0  # for a sandbox to be ready, on a busy machine
MAX_LINE_CHARS = 300

CAGE = str(Path(__file__).with_name("cage.py"))
# No installed packages, no .pyc written, none of our folders on its path.
PYTHON = (os.path.realpath(sys.executable), "-s", "-S", "-B", "-P", "-X", "utf8")
ENVIRONMENT = {
    **{"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OPENSSL_CONF": "/dev/null", "MALLOC_ARENA_MAX": "1"},
    **{"HOME": "/", "TMPDIR": "/"},
}
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
    """Limits of one run of a program."""

    wall_s: float = 10.0
    cpu_s: int = 10  # whole seconds
    memory_bytes: int = 512 << 20  # address space, of which an interpreter alone takes some 32 MB
    output_bytes: int = 1 << 20  # of stdout, and of stderr
    threads: int = 32


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """How a program ended. Text is what could be read as UTF-8, up to `Limits.output_bytes`."""

    reason: str  # "ok", "timed out", "out of CPU time", "out of memory", "output too long", "killed by SIGSEGV", ...
    stdout: str
    stderr: str
    exit_code: int | None  # None: it was ended by a signal

    @property
    def ok(self) -> bool:
        """Return whether it came to its end by itself, with exit code 0."""
        return self.reason == "ok"


@dataclass(frozen=True)
class Verdict:
    """Verdict on one case, and the run that decided it."""

    passed: bool
    outcome: Outcome

    @property
    def reason(self) -> str:
        """Return "passed", "wrong answer", or how the run failed."""
        return "passed" if self.passed else "wrong answer" if self.outcome.ok else self.outcome.reason


# ---- Programs and their verdicts ----


def passes_tests(
    source: str, cases: Sequence[Sequence[str]], *, workers: int = 1, limits: Limits = DEFAULT_LIMITS
) -> list[Verdict]:
    """Run a program on each case, (stdin, expected stdout); passed is exit code 0 and `same_output`."""

    def verdict_of(case: Sequence[str]) -> Verdict:
        outcome = run_program(source, stdin=case[0], limits=limits)
        return Verdict(outcome.ok and same_output(outcome.stdout, case[1]), outcome)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(verdict_of, cases))


def python_block(text: str) -> str | None:
    """Return the contents of the last complete ```python block of a text (```py will do), or None."""
    found = None
    lines = None
    for line in text.split("\n"):
        fence = line.strip().lower()
        if lines is None:
            lines = [] if fence in ("```python", "```py", "```python3") else None
        elif fence == "```":
            found = "\n".join(lines)
            lines = None
        else:
            lines.append(line.rstrip("\r"))
    return found


def same_output(printed: str, expected: str) -> bool:
    """Return whether two texts are equal line by line; a run of blanks counts as one, those at the ends as none."""
    first, second = ([line.split() for line in text.strip().split("\n")] for text in (printed, expected))
    return first == second


# ---- One run, seen from outside, where the program cannot reach ----


@functools.cache
def why_not_isolated() -> str | None:
    """Return why programs cannot be isolated on this system, or None if they can. Found out once, in a moment."""
    if sys.platform != "linux":
        return f"that takes Linux with Landlock and seccomp, and this is {sys.platform}"
    try:
        run_program("")
    except (CannotIsolate, OSError) as error:
        return _last_line(str(error)).rstrip(".")
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
    Raises CannotIsolate where a wall is missing, or the sandbox cannot be started.
    """
    with _in_memory(stdin) as given:
        caged = Caged(source, limits, stdin=given.fileno())
    ended = os.pidfd_open(caged.pid)
    late = True
    try:
        late = not _waited(ended, limits.wall_s)
    finally:
        os.close(ended)
        outcome = caged.end(late=late)
    return outcome


class Caged:
    """A process that isolates itself and becomes a program; killed, and looked at, from outside."""

    def __init__(self, source: str, limits: Limits, *, stdin: int) -> None:
        if sys.platform != "linux":
            raise CannotIsolate(f"Programs cannot be isolated: {why_not_isolated()}. None is run.")
        self._limits = limits
        self._outputs = (_in_memory(""), _in_memory(""))
        # What is written beyond a limit shows that it was.
        most = (limits.cpu_s, limits.memory_bytes, limits.output_bytes + 1, limits.threads)
        reading, writing = os.pipe()
        with _in_memory(source) as job, os.fdopen(reading, "rb", 0) as pipe:
            numbers = [str(int(number)) for number in (os.getpid(), writing, job.fileno(), *most)]
            with os.fdopen(writing, "wb", 0):
                self._process = subprocess.Popen(
                    [*PYTHON, CAGE, *numbers, *visible_paths()],
                    stdin=stdin,
                    stdout=self._outputs[0],
                    stderr=self._outputs[1],
                    env=ENVIRONMENT,
                    pass_fds=[writing, job.fileno()],
                    start_new_session=True,  # Ctrl-C is ours to handle
                )
            self.pid = self._process.pid
            ready = pipe.read(4096) if _waited(reading, START_S) else b""
        if ready != b"ready\n":
            why = f"did not start: {_last_line(self.end().stderr)}" if not ready else f"lacks {ready.decode().strip()}"
            raise CannotIsolate(f"Programs cannot be isolated: the sandbox {why}.")

    def end(self, *, late: bool = False) -> Outcome:
        """Kill the process, if it has not ended, and return its outcome; `late`: it had no time left."""
        os.kill(self.pid, signal.SIGKILL)  # nobody has waited for it, so the number is still its own
        _, status, usage = os.wait4(self.pid, 0)
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        cpu_seconds = usage.ru_utime + usage.ru_stime
        (stdout, stderr), too_long = self._written()
        for file in self._outputs:
            file.close()
        last = _last_line(stderr)
        if too_long:
            reason = "output too long"
            code = -signal.SIGKILL
        elif late:
            reason = "timed out"
        elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_seconds >= self._limits.cpu_s):
            reason = "out of CPU time"
        elif code < 0:
            reason = f"killed by {signal.Signals(-code).name}"
        elif code and (last.startswith("MemoryError") or last == "lost sys.stderr"):  # not enough left even to write so
            reason = "out of memory"
        else:
            reason = f"exit code {code}: {last}".rstrip(": ") if code else "ok"
        return Outcome(reason, stdout, stderr, code if code >= 0 else None)

    def _written(self) -> tuple[list[str], bool]:
        """Return stdout and stderr so far, and whether one is too long."""
        most = self._limits.output_bytes
        written = [os.pread(file.fileno(), most + 1, 0) for file in self._outputs]
        return [data[:most].decode("utf-8", "replace") for data in written], any(len(data) > most for data in written)


class Session(Caged):
    """A program that lives from request to request: it reads lines from its standard input, a socket, and answers each
    by a byte written there, after what it printed. Between requests it is frozen.
    """

    def __init__(self, source: str, limits: Limits) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            super().__init__(source, limits, stdin=theirs.fileno())

    def ask(self, request: bytes, *, wall_s: float) -> Outcome:
        """Send a line; return what was printed until the answer. Where none comes in time the process has ended, and
        the outcome is that of the process.
        """
        for file in self._outputs:  # the offset is the program's too
            os.ftruncate(file.fileno(), 0)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
        os.kill(self.pid, signal.SIGCONT)
        answer = b""
        late = False
        try:
            self._socket.settimeout(wall_s)
            self._socket.sendall(request + b"\n")
            answer = self._socket.recv(1)
        except TimeoutError:
            late = True
        except OSError:  # it has ended
            pass
        texts, too_long = self._written()
        if not answer or too_long:
            outcome = self.end(late=late)
            return replace(outcome, reason="exit code 0") if outcome.ok else outcome
        os.kill(self.pid, signal.SIGSTOP)
        return Outcome("ok", *texts, exit_code=0)

    def end(self, *, late: bool = False) -> Outcome:
        self._socket.close()
        return super().end(late=late)

    def memory_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _in_memory(text: str) -> IO[bytes]:
    """Return an open file in memory with the text; a lone surrogate is the program's problem."""
    file = os.fdopen(os.memfd_create("file"), "w+b")
    file.write(text.encode("utf-8", "surrogatepass"))
    file.seek(0)
    return file


def _waited(descriptor: int, seconds: float) -> bool:
    """Wait for a pipe to be readable or a process to end; return whether it did in time."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def _last_line(text: str) -> str:
    """Return the last line of a text that is not blank, for a sentence; "" where none is."""
    return one_line(next((line for line in reversed(text.split("\n")) if line.strip()), ""), MAX_LINE_CHARS)
