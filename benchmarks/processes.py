"""Measurements in processes of their own: settings go in as JSON, a result comes back as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 4 * 3600  # sixty steps of learning take most of an hour on a busy core


class Failed(Exception):
    """A process that gave no answer; `tail` is the end of what it said, `too_long` that it was ended by its time."""

    def __init__(self, sentence: str, tail: str, *, too_long: bool = False) -> None:
        super().__init__(sentence)
        self.tail, self.too_long = tail, too_long


def module_path(python: str, *, before: Sequence[str] = ()) -> str:
    """PYTHONPATH of a process: this checkout, the folders of `before`, and for this Python what it has now, where a
    bare machine keeps its packages. (Another Python has its own.) All absolute: a process begins in its own folder.
    """
    now = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
    folders = [str(ROOT), *before, *filter(None, now.split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(os.path.abspath(folder) for folder in folders))


def run(script: str, settings: dict[str, Any], *, options: Namespace, python: str = sys.executable) -> dict[str, Any]:
    """Run benchmarks.<script> with `settings`; its answer. Ends the benchmark when the process fails."""
    try:
        return attempt(script, settings, options=options, python=python)
    except Failed as failure:
        print(failure.tail, file=sys.stderr)
        raise SystemExit(str(failure)) from failure


def attempt(
    script: str,
    settings: dict[str, Any],
    *,
    options: Namespace,
    python: str = sys.executable,
    before: Sequence[str] = (),
    timeout: float = TIMEOUT_S,
) -> dict[str, Any]:
    """The same; raises Failed when the process fails or takes longer than `timeout` seconds."""
    folder = options.out / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.json")))
    question, reply = folder / f"{number:04d}-{script}.json", folder / f"{number:04d}-{script}.answer"
    common = {"answer": str(reply), "folder": str(question.with_suffix("")), "threads": options.threads}
    question.write_text(json.dumps({**common, **settings}))
    environment = {
        **os.environ,
        "PYTHONPATH": module_path(python, before=before),
        "OMP_NUM_THREADS": str(options.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-W", "ignore", "-m", f"benchmarks.{script}", str(question)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{script} took longer than {timeout:.0f} s", "", too_long=True) from error
    if done.returncode != 0 or not reply.is_file():
        sentence = f"{script} failed (exit code {done.returncode}); its settings are in {question}"
        raise Failed(sentence, (done.stdout + done.stderr)[-3000:])
    return json.loads(reply.read_text())
