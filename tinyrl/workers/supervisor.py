"""The supervisor of a worker: a small process between the run and user code, which ends all that the code starts.

    python -P supervisor.py RUN MEMORY_BYTES REQUESTS REPLIES

It forks the worker (worker.py), with the pipes REQUESTS and REPLIES, and waits. When the worker ends, when the run asks
(SIGTERM) or when the run (process RUN) is gone, it kills what is left, and ends as the worker did: with its exit code,
or by its signal. It runs no user code, so it cannot hang.

On Linux orphans of the worker become children of the supervisor, a "subreaper", and so nothing escapes it: no other
session, no empty environment. The run is not made one, since a notebook has children of its own. Elsewhere, and where a
function has killed its supervisor, the processes are found by their session, which the supervisor leads, and by a MARK
in their environment.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

MARK = "TINYRL_WORKER"
POLL_S = 0.1
PATIENCE_S = 1.0  # for killed processes to be gone; one that is stuck in the kernel must not hold the run
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PACKAGES = os.path.abspath(f"{__file__}/../../..")  # the folder that has `tinyrl`


class Ended(Exception):
    """The run wants no more of this worker, or is gone."""


def main() -> None:
    """Fork the worker and supervise it; in the worker, answer requests to their end."""
    run, memory_bytes, requests, replies = map(int, sys.argv[1:])
    supervisor = os.getpid()
    adopts = _prctl(PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)  # a function that kills its group does not reach the supervisor
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        sys.path.insert(0, PACKAGES)
        from tinyrl.workers.worker import serve  # in the worker alone, which finds tinyrl so

        sys.path.remove(PACKAGES)
        serve(requests, replies, memory_bytes=memory_bytes)
        return
    os.close(requests)
    os.close(replies)
    status = _wait_for(worker, run=run)
    _kill_all(adopts=adopts)
    _end_like(status)


def _prctl(option: int, value: int) -> bool:
    """Call prctl(2); return whether this system has it and did as asked."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def _wait_for(worker: int, *, run: int) -> int:
    """Wait for the worker to end and return its status, or end it once the run asks for that or is gone; return 0."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Ended

    def end_with_the_run() -> None:
        while os.getppid() == run:
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        signal.signal(signal.SIGTERM, end)
        threading.Thread(target=end_with_the_run, daemon=True).start()
        ended, status = os.wait()
        while ended != worker:  # an orphan
            ended, status = os.wait()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except Ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        return 0
    return status


def _kill_all(*, adopts: bool) -> None:
    """Kill the processes that the worker has started, until there are no more."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        if not _has_children() and adopts:
            return
        import psutil  # which takes some milliseconds to import, and most workers start nothing

        found = psutil.Process().children(recursive=True)
        found += [] if adopts else marked(os.getpid(), os.environ[MARK])
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not found:
            return
        time.sleep(0.001)


def _has_children() -> bool:
    """Reap the children that have ended; return whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def marked(session: int, mark: str) -> list:
    """Return the processes of a supervisor's session, and those with its mark, but for itself."""
    import psutil

    def is_marked(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid not in (session, os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                return os.getsid(process.pid) == session or process.environ().get(MARK) == mark
        return False

    return [process for process in psutil.process_iter() if is_marked(process)]


def kill_marked(session: int, mark: str) -> None:
    """Kill what a supervisor that could not do it has left behind."""
    import psutil

    give_up = time.monotonic() + PATIENCE_S
    while (found := marked(session, mark)) and time.monotonic() < give_up:
        for process in found:
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process.kill()


def _end_like(status: int) -> None:
    """End as a process with this status did."""
    if os.WIFSIGNALED(status):
        import resource  # Windows has none

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the dump would be ours
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
