"""Tests of a device, run by pytest in a process of its own: how many passed, and which failed with what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.processes import ROOT

MOST_SAID = 300  # characters of a failure


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """words: what pytest is given, `-m gpu` where there is no other mark among them."""
    report = Path(settings["folder"]) / "report.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    mark = [] if "-m" in settings["words"] else ["-m", "gpu"]
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *mark, *settings["words"]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1) or not report.is_file():
        raise SystemExit(f"pytest ended with exit code {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    return outcomes(report)


def outcomes(report: Path) -> dict[str, Any]:
    """By pytest's own report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.attrib["name"]: said for case in cases if (said := _failure(case)) is not None}
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def _failure(case: ElementTree.Element) -> str | None:
    for kind in ("failure", "error"):
        found = case.find(kind)
        if found is not None:
            return (found.attrib.get("message") or kind)[:MOST_SAID]
    return None
