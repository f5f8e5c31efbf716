"""Measurements in processes of their own: settings go in as JSON, a result comes back as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 4 * 3600  # sixty steps of learning take most of an hour on a busy core


def run(script: str, settings: dict[str, Any], *, options: Namespace, python: str = sys.executable) -> dict[str, Any]:
    """Run tests.benchmarks.<script> with `settings`; its answer. Ends the benchmark when the process fails."""
    folder = options.out / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*.json")))
    question, reply = folder / f"{number:04d}-{script}.json", folder / f"{number:04d}-{script}.answer"
    common = {"answer": str(reply), "folder": str(question.with_suffix("")), "threads": options.threads}
    question.write_text(json.dumps({**common, **settings}))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(options.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-W", "ignore", "-m", f"tests.benchmarks.{script}", str(question)]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0 or not reply.is_file():
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
        raise SystemExit(f"{script} failed (exit code {done.returncode}); its settings are in {question}")
    return json.loads(reply.read_text())
