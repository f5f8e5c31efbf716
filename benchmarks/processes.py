"""Measurements in processes of their own: settings go in as JSON, a result comes back as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 4 * 3600  # sixty steps of learning take most of an hour on a busy core


class Failed(Exception):
    """A process that gave no answer; `tail` is the end of what it said."""

    def __init__(self, sentence: str, tail: str) -> None:
        super().__init__(sentence)
        self.tail = tail


def run(
    script: str,
    settings: dict[str, Any],
    *,
    options: Namespace,
    python: str = sys.executable,
    timeout: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Run benchmarks.<script> with `settings`; its answer. Raises Failed when the process fails or takes longer than
    `timeout` seconds.
    """
    folder = options.out / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.json")))
    question, reply = folder / f"{number:04d}-{script}.json", folder / f"{number:04d}-{script}.answer"
    common = {"answer": str(reply), "folder": str(question.with_suffix("")), "threads": options.threads}
    question.write_text(json.dumps({**common, **settings}))
    # Its path is this checkout, and for this Python what it has now; absolute, since it begins in its own folder.
    now = os.environ.get("PYTHONPATH", "") if python == sys.executable else ""
    path = [str(ROOT), *(os.path.abspath(each) for each in now.split(os.pathsep) if each)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
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
        raise Failed(f"{script} took longer than {timeout:.0f} s", "") from error
    if done.returncode != 0 or not reply.is_file():
        sentence = f"{script} failed (exit code {done.returncode}); its settings are in {question}"
        raise Failed(sentence, (done.stdout + done.stderr)[-3000:])
    return json.loads(reply.read_text())
