"""The supervisor of a worker: starts it, waits for it, and ends every process that it leaves behind.

    python -P supervisor.py RUN MEMORY_BYTES COMMAND ...

On Linux it is a subreaper (prctl(2)): a process whose parent has ended becomes the supervisor's child, in whatever
group or session. So all that the command started is found, and ended: when the command is over, at SIGTERM, and when
the run (process RUN) is gone. The exit code is the command's, 128 + N after signal N. No process of the command may use
more than MEMORY_BYTES of its own (RLIMIT_DATA: without files and reserved address space; 0: no limit).
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
LOOK_AT_RUN_S = 0.3
PATIENCE_S = 1.0  # for killed processes to be gone; one that is stuck in the kernel must not hold the run


def main() -> None:
    """Run the command to its end, or to the run's."""
    run, memory_bytes, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    code = 0
    try:
        # A group of its own: a function that kills its group does not kill its supervisor.
        limit = int(memory_bytes)
        worker = subprocess.Popen(command, process_group=0, preexec_fn=lambda: limit_memory(limit))
        nothing = os.open(os.devnull, os.O_RDWR)
        for pipe in (0, 1, 2):  # are the worker's, whose end has to show
            os.dup2(nothing, pipe)
        while os.getppid() == int(run):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = worker.wait(LOOK_AT_RUN_S)
                break
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_children()
    os._exit(code if code >= 0 else 128 - code)


def end_children() -> None:
    """Kill all descendants, until there are none."""
    give_up = time.monotonic() + PATIENCE_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < give_up:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def limit_memory(num_bytes: int) -> None:
    """Limit this process and those that it starts, each by itself."""
    with contextlib.suppress(ValueError, OSError):  # above the limit that holds already
        if num_bytes:
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


if __name__ == "__main__":
    main()
