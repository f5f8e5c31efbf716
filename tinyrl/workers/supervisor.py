"""The supervisor of a worker: starts it, waits for it, and ends whatever it leaves behind.

    python -P supervisor.py RUN MEMORY_BYTES COMMAND ...

On Linux it is a subreaper (prctl(2)): a process whose parent has ended becomes the supervisor's child, whatever group
or session it moved to. So all that a function started is found, and ended: when the worker is over, when SIGTERM says
so, and when the run (process RUN) is gone. Then the supervisor ends as the worker did, with its exit code or signal.
Elsewhere only those are found whose parents live.

No process of the command may use more than MEMORY_BYTES of memory of its own (RLIMIT_DATA, which leaves out files and
address space that is only reserved; 0: no limit).
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

import psutil

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOOK_AT_RUN_S = 0.3
PATIENCE_S = 1.0  # for killed processes to be gone; one that is stuck in the kernel must not hold the run
PAUSE_S = 0.002

worker = 0


def main() -> None:
    """Start the command and wait for its end, or for the order to end it."""
    global worker
    run, memory_bytes, *command = sys.argv[1:]
    supervisor = os.getpid()
    set_property(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: leave())
    signal.signal(signal.SIGALRM, lambda *_: None if os.getppid() == int(run) else leave())
    worker = os.fork()
    if not worker:
        os.setpgid(0, 0)  # a function that kills its own group does not kill its supervisor
        set_property(PR_SET_PDEATHSIG, signal.SIGKILL)
        limit_memory(int(memory_bytes))
        if os.getppid() == supervisor:
            os.execv(command[0], command)
        os._exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in (0, 1, 2):  # the worker's, whose end has to show
        os.dup2(nothing, pipe)
    signal.setitimer(signal.ITIMER_REAL, LOOK_AT_RUN_S, LOOK_AT_RUN_S)
    ended, status = os.wait()
    while ended != worker:
        ended, status = os.wait()
    end_all()
    end_like(status)


def leave() -> None:
    """End everything, at once."""
    end_all()
    os._exit(0)


def end_all() -> None:
    """Kill all processes that come from the worker, until there are none."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(PAUSE_S)


def limit_memory(num_bytes: int) -> None:
    """Limit this process and those that it starts, each by itself."""
    if num_bytes:
        with contextlib.suppress(ValueError, OSError):  # more than is allowed here: then that limit stands
            resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def end_like(status: int) -> None:
    """End with the exit code or by the signal that a wait status tells of."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def set_property(option: int, value: int) -> None:
    """Set a property of this process, where the system has it."""
    if LINUX:
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


if __name__ == "__main__":
    main()
