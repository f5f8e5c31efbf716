"""A probe of whether programs can be isolated here, by trying to break out of a sandbox."""

import contextlib
import functools
import os
import socket
import sys
import tempfile

from tinyrl.workers.sandbox.isolation import CannotIsolate, Limits
from tinyrl.workers.sandbox.process import Job, execute, last_line

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
            run = execute(Job(PROBE.encode(), stdin=given.encode()), Limits(), must_isolate=True)
        except (CannotIsolate, OSError) as error:
            return last_line(str(error)).rstrip(".")
        canary.seek(0)
        overwritten = canary.read() != CANARY  # checked here: in the scratch folder such a file may be made
    if run.stopped or run.wait_status != 0 or run.missing:
        how = run.stopped or last_line(run.stderr.decode("utf-8", errors="replace"))
        return f"a program that tried to break out of a sandbox did not come to its end ({how})"
    reached = run.stdout.decode("utf-8", errors="replace").split("\n")[:-1] + ["it wrote to one"] * overwritten
    return f"a program in a sandbox was not held: {', '.join(reached)}" if reached else None
