"""A process that imports the libraries once and runs each command in a fork of its own, as the `tinyrl` script would.

    python -m tests.faults.fuzz.zygote < one JSON object a line      (argv, cwd, cpu_s, wall_s)
    one JSON line each: code (negative: the signal that ended it), cpu_s, hung, stdout, stderr

It never computes itself: a fork of a process whose OpenMP threads have run hangs at the first parallel loop.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

MOST_BYTES = 12 << 30  # of address space: what asks for more gets the allocator's error, and the machine lives
KEPT = 20_000  # characters of output


class Zygote:
    """The side of the test: one process, asked for one command after another."""

    def __init__(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[3],
        )

    def run(self, argv: list[str], cwd: Path, *, cpu_s: float, wall_s: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"argv": argv, "cwd": str(cwd), "cpu_s": cpu_s, "wall_s": wall_s}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Answer orders until the input ends; in a fork, run the command and return."""
    _import_everything()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        folder = Path(order["cwd"]).parent
        outputs = [folder / "stdout", folder / "stderr"]
        pid = os.fork()
        if pid == 0:
            return _run(order, outputs)
        answer = _wait(pid, order["wall_s"])
        texts = [path.read_bytes().decode("utf-8", "replace")[-KEPT:] for path in outputs]
        print(json.dumps({**answer, "stdout": texts[0], "stderr": texts[1]}), file=answers, flush=True)


def _import_everything() -> None:
    from tinyrl.cli.options import configure_libraries

    configure_libraries()
    import peft  # noqa: F401

    import tinyrl.evaluation.versus
    import tinyrl.rewards.trial
    import tinyrl.tools.report.page
    import tinyrl.trainers.grpo
    import tinyrl.trainers.ppo
    import tinyrl.trainers.reward_model
    import tinyrl.trainers.sft
    import tinyrl.training.resume  # noqa: F401
    from tinyrl.models import templates

    templates.SECONDS = 0.5
    gc.freeze()


def _run(order: dict[str, Any], outputs: list[Path]) -> None:
    """The command; what it raises but SystemExit goes on to the interpreter, which prints it and ends with 1.

    An interpreter that ends takes itself apart first, which with all libraries loaded costs more than most cases do.
    """
    _become(order, outputs)
    from tinyrl.cli.commands import main as tinyrl

    try:
        tinyrl()
    except SystemExit as ended:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1)


def _become(order: dict[str, Any], outputs: list[Path]) -> None:
    """The process of one command: its own group, folder, arguments, output files, limits."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    os.chdir(order["cwd"])
    sys.argv = ["tinyrl", *order["argv"]]
    seconds = int(order["cpu_s"] + resource.getrusage(resource.RUSAGE_SELF).ru_utime + 1)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _wait(pid: int, wall_s: float) -> dict[str, Any]:
    """The end of the fork, or the end that is made of it and its group once `wall_s` seconds have passed."""
    until, hung = time.monotonic() + wall_s, False
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > until and not hung:
            hung = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)
    return {"code": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime, "hung": hung}


if __name__ == "__main__":
    main()
