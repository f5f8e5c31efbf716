"""`tinyrl doctor` of the machine: versions, device, threads, memory, and what is missing for what."""

import json
from importlib import metadata

import pytest
from typer.testing import CliRunner

from tinyrl.cli.commands import app
from tinyrl.tools import machine

TOPICS = ["versions", "device", "threads", "memory", "disk", "sandbox", "missing"]


def test_the_command_names_what_is_here() -> None:
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    topics = [line.split()[0] for line in shown.output.splitlines() if not line.startswith(" ")]
    assert [*dict.fromkeys(topics)] == TOPICS
    assert f"torch {metadata.version('torch')}" in " ".join(shown.output.split())
    assert [*json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)] == TOPICS


def requiring(monkeypatch: pytest.MonkeyPatch, *requirements: str) -> list[str]:
    monkeypatch.setattr(machine.metadata, "requires", lambda name: [*requirements])
    return [line for line in machine.look_at_machine()["missing"] if "disk" not in line and "CUDA" not in line]


def test_missing_packages_are_named_with_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = requiring(
        monkeypatch,
        "torch>=2.0",
        "pip-that-is-not-there>=1; extra == 'math'",
        "another-that-is-not-there>=1; extra == 'dev'",
        "nor-that; extra == 'math'",
    )
    absent = "pip-that-is-not-there (not installed), nor-that (not installed)"
    assert lines == [f"{absent}, for task.grading=math: pip install 'tinyrl[math]'"]


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version("torch")
    [line] = requiring(monkeypatch, "torch>=99")
    assert line == f"torch, which tinyrl needs: {version} is installed, and >=99 is needed; pip install 'torch>=99'"
    assert requiring(monkeypatch, "torch>=2.0") == ["nothing"]
