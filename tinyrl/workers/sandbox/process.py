"""A sandbox's process, pipes and clock, seen from outside, where the program in it cannot reach.

Nothing waits without a deadline or on a pipe that may be full, nothing is kept beyond its limit, and nothing is written
to disk: source, arguments and input go in by pipe. Whether programs can be isolated here is tried out: one is told to
break out.
"""

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO

from tinyrl.workers.sandbox.isolation import ENVIRONMENT, CannotIsolate, Limits, launch_command

START_S = 30.0  # for the sandbox to be ready, on a busy machine
GRACE_S = 1.0  # for the launcher to end the program; after this we end both
CHUNK_BYTES = 1 << 16
MAX_LINE_CHARS = 300

_Stream = tuple[IO[bytes], bytearray]  # a pipe, and what is to go in or has come out


@dataclass(frozen=True)
class Job:
    """What a program is given: its source, its input, and, if a function of it is called, the arguments as JSON."""

    source: bytes
    stdin: bytes = b""
    function: str | None = None
    arguments: bytes = b""


@dataclass
class Run:
    """The raw result of a run."""

    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    reply: bytearray = field(default_factory=bytearray)
    stopped: str = ""  # why we ended it
    wait_status: int | None = None  # None: the launcher was gone before it could report
    seconds: float = 0.0  # from when the program could start
    cpu_seconds: float = 0.0


def execute(job: Job, limits: Limits) -> Run:
    """Run a program in a fresh sandbox to its end, or to the end of a limit.

    Raises CannotIsolate when a wall is missing, OSError when the sandbox cannot be started.
    """
    run, status = Run(), bytearray()
    with contextlib.ExitStack() as stack:
        (job_end, jobs), (replies, reply_end), (told, status_end) = (_pipe(stack) for _ in range(3))
        theirs = [job_end, status_end]
        call: list[str] = []
        if job.function is not None:
            theirs.append(reply_end)
            call = [str(reply_end.fileno()), job.function]
        command = launch_command(
            limits,
            harness_arguments=[str(job_end.fileno()), str(len(job.source)), *call],
            status=status_end.fileno(),
        )
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=ENVIRONMENT,
            pass_fds=[end.fileno() for end in theirs],
            start_new_session=True,  # one kill reaches all of it
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        for end in (job_end, reply_end, status_end):
            end.close()
        feeds = [(process.stdin, bytearray(job.stdin)), (jobs, bytearray(job.source + job.arguments))]
        drains = [(process.stdout, run.stdout), (process.stderr, run.stderr), (replies, run.reply)]
        for pipe in (process.stdin, process.stdout, process.stderr, jobs, replies, told):
            stack.enter_context(pipe)
            os.set_blocking(pipe.fileno(), False)
        stack.callback(_end, process, (told, status))
        _exchange(run, feeds, drains, (told, status), limits)
    _understand(run, status.decode())
    return run


def _exchange(run: Run, feeds: list[_Stream], drains: list[_Stream], told: _Stream, limits: Limits) -> None:
    """Move what goes in and comes out until the launcher has no more to say, or a limit is reached."""
    started, deadline = None, time.monotonic() + START_S
    with selectors.DefaultSelector() as pipes:
        for stream in feeds:
            pipes.register(stream[0], selectors.EVENT_WRITE, stream)
        for stream in [*drains, told]:
            pipes.register(stream[0], selectors.EVENT_READ, stream)
        while told[0] in pipes.get_map() and not run.stopped:
            for key, direction in pipes.select(max(0.0, deadline - time.monotonic())):
                pipe, data = key.data
                move = _take if direction == selectors.EVENT_READ else _give
                if not move(pipe, data):
                    pipes.unregister(pipe)
                    if direction == selectors.EVENT_WRITE:
                        pipe.close()  # the end of the program's input
            if started is None and told[1].endswith(b"\n"):
                started = time.monotonic()
                deadline = started + limits.wall_s
            if time.monotonic() > deadline:
                run.stopped = "timed out"
            _cut(run, drains, limits)
    with contextlib.suppress(BlockingIOError):  # a process that it left behind may hold a pipe open
        for stream in drains:
            while not run.stopped and _take(*stream):
                _cut(run, drains, limits)
    run.seconds = time.monotonic() - started if started is not None else 0.0


def _cut(run: Run, drains: list[_Stream], limits: Limits) -> None:
    """Keep what may be kept, and stop the run if there was more."""
    for _, data in drains:
        if len(data) > limits.output_bytes:
            del data[limits.output_bytes :]
            run.stopped = "output too long"


def _give(pipe: IO[bytes], data: bytearray) -> bool:
    """Write some of the data; False when there is no more, or nobody to read it."""
    try:
        del data[: os.write(pipe.fileno(), data[:CHUNK_BYTES])]
    except BrokenPipeError:
        return False
    return bool(data)


def _take(pipe: IO[bytes], data: bytearray) -> bool:
    """Read some more; False when it has ended."""
    received = os.read(pipe.fileno(), CHUNK_BYTES)
    data += received
    return bool(received)


def _end(process: subprocess.Popen[bytes], told: _Stream) -> None:
    """Have the launcher end the program and say how; whatever comes of that, leave no process behind."""
    os.kill(process.pid, signal.SIGTERM)  # nobody has waited for it, so the number is still its own
    deadline = time.monotonic() + GRACE_S
    with selectors.DefaultSelector() as pipes:
        pipes.register(told[0], selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0 and (not pipes.select(left) or _take(*told)):
            pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel must not hold us as well
        process.wait(GRACE_S)


def _understand(run: Run, told: str) -> None:
    """Read the launcher's status: ready or why not, and how the program ended."""
    first, _, last = told.partition("\n")
    if first.startswith("refused: "):
        raise CannotIsolate(f"The sandbox lacks {first.removeprefix('refused: ')}.")
    if first != "ready":
        why = last_line(run.stderr.decode("utf-8", errors="replace")) or "it said nothing"
        raise OSError(f"A sandbox could not be started: {why}")
    words = last.split()
    if len(words) == 3:
        run.wait_status, run.cpu_seconds = int(words[1]), float(words[2])


def last_line(text: str) -> str:
    """The last line of a text that says something, blanks collapsed and length limited; "" where none does."""
    said = next((line for line in reversed(text.split("\n")) if line.strip()), "")
    line = "".join(c if c.isprintable() else "?" for c in " ".join(said[: 4 * MAX_LINE_CHARS].split()))
    return line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 1]}…"


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Both ends of a pipe, closed with the stack."""
    reading, writing = os.pipe()
    return stack.enter_context(open(reading, "rb", buffering=0)), stack.enter_context(open(writing, "wb", buffering=0))


# ---- Whether programs can be isolated here ----

CANARY = "sings"
PROBE = """
import os, socket
port, parent, canary = input().split(" ", 2)
def attempt(what, action):
    try:
        action()
    except OSError:
        return
    if what:
        print(what)
attempt("it reached the network", lambda: socket.create_connection(("127.0.0.1", int(port)), timeout=5))
attempt("it read a file of ours", lambda: open(canary).read())
attempt("", lambda: open(canary, "w"))
attempt("it read our environment", lambda: open(f"/proc/{parent}/environ").read())
attempt("it could signal us", lambda: os.kill(int(parent), 0))
attempt("it started a process", lambda: os.fork() or os._exit(0))
"""


@functools.cache
def why_not_isolated() -> str | None:
    """Why programs cannot be isolated on this system, or None if they can. Found out once, in a moment."""
    if sys.platform != "linux":
        return f"that takes Linux with Landlock and seccomp, and this is {sys.platform}"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        canary = stack.enter_context(tempfile.NamedTemporaryFile("w+", prefix="tinyrl-"))
        canary.write(CANARY)
        canary.flush()
        os.chmod(canary.name, 0o666)  # noqa: S103  so that nothing protects it but the sandbox
        given = f"{server.getsockname()[1]} {os.getpid()} {canary.name}\n"
        try:
            run = execute(Job(PROBE.encode(), stdin=given.encode()), Limits())
        except (CannotIsolate, OSError) as error:
            return last_line(str(error)).rstrip(".")
        canary.seek(0)
        overwritten = canary.read() != CANARY  # checked here: in the scratch folder such a file may be made
    if run.stopped or run.wait_status != 0:
        how = run.stopped or last_line(run.stderr.decode("utf-8", errors="replace"))
        return f"a program that tried to break out of a sandbox did not come to its end ({how})"
    reached = run.stdout.decode("utf-8", errors="replace").split("\n")[:-1] + ["it wrote to one"] * overwritten
    return f"a program in a sandbox was not held: {', '.join(reached)}" if reached else None
