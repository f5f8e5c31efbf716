"""Agents that attack or are killed, in real runs: the other episodes are those of a run without it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.faults.children import Child, train, workers_left
from tests.training.rows import write_rows
from tinyrl.config.schema import Config
from tinyrl.runs.run_dir import RunDir
from tinyrl.training import on_policy

AGENT = """
    import json, os, signal, urllib.request


    def ask(base_url, api_key, prompt):
        content = json.dumps({"model": "policy", "prompt": prompt, "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(base_url + "/completions", content, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]


    def endless(url, key):
        while True:
            ask(url, key, "more")  # its turns are used up, and answers empty


    def killed(url, key):
        ask(url, key, "x")
        os.kill(os.getpid(), signal.SIGKILL)


    def raises(url, key):
        ask(url, key, "x")
        raise RuntimeError("planted")


    def run(row, base_url, api_key):
        if row["kind"] != "honest":
            globals()[row["kind"]](base_url, api_key)
        said = ask(base_url, api_key, row["prompt"])
        return said + ask(base_url, api_key, row["prompt"] + said + " and")
"""
FAILS = {"killed": "SIGKILL", "raises": "planted"}
KINDS = ["honest", "honest", "endless", *FAILS, "honest"]


def settings_for(folder: Path, model: Path, kinds: list[str], **run: Any) -> Config:
    """A run whose rows are played as `kinds` say, two episodes each."""
    (folder / "agent.py").write_text(textwrap.dedent(AGENT), encoding="utf-8")
    rows = ({"prompt": f"Say {number}", "kind": kind} for number, kind in enumerate(kinds))
    held = write_rows(folder / "held.jsonl", [{"prompt": "Held out", "kind": "honest"}])
    data = {"name": "rows", "data": str(write_rows(folder / "rows.jsonl", rows)), "eval_data": str(held)}
    use = f"{folder / 'agent.py'}:run"
    return running.config(
        "grpo",
        model,
        task={**data, "max_samples": None},
        environment={"agent": use, "max_concurrency": 4, "timeout_s": run.pop("timeout_s", 60.0)},
        generation={"max_new_tokens": 8},
        grpo={"num_prompts": len(kinds), "group_size": 2},
        run={"num_steps": 1, "eval_every": 0, "eval_prompts": 0, "save_every": 1, **run},
    )


def said_in(run: RunDir) -> dict[str, list[str]]:
    """What the agents returned, by prompt."""
    said: dict[str, list[str]] = {}
    for line in map(json.loads, run.samples.read_text().splitlines()):
        said.setdefault(line["prompt"], []).append(line["completion"])
    return said


@pytest.mark.slow
def test_hostile_agents_leave_the_other_episodes_as_they_would_be(model: Path, tmp_path: Path) -> None:
    runs = []
    for name, kinds in (("quiet", ["honest"] * len(KINDS)), ("attacked", KINDS)):
        (folder := tmp_path / name).mkdir()
        settings = settings_for(folder, model, kinds, timeout_s=30.0)
        child = Child(train_showing_all, settings, folder, output=folder / "said.txt")
        assert child.end() == 0, child.said
        assert "Traceback" not in child.said
        assert workers_left({child.pid}) == []
        runs.append(RunDir(folder / "run"))
    quiet, attacked = map(said_in, runs)
    for number, kind in enumerate(KINDS):
        if kind == "honest":
            assert sorted(attacked[f"Say {number}"]) == sorted(quiet[f"Say {number}"]), kind
            assert all(len(said) for said in attacked[f"Say {number}"])
    assert said_in(runs[1])[f"Say {KINDS.index('endless')}"] == ["", ""]  # cut off, and scored as such
    failed = [json.loads(line) for line in (runs[1].path / "failed_rewards.jsonl").read_text().splitlines()]
    reasons = {(KINDS[int(line["prompt"].split()[1])], line["reason"].partition(" (")[0]) for line in failed}
    assert {kind for kind, _ in reasons} == {*FAILS}
    assert all(FAILS[kind] in reason for kind, reason in reasons), reasons


@pytest.mark.parametrize(("kinds", "code"), [(["raises", "killed"], 3), (["raises", "honest"], 0)])
def test_a_run_whose_every_episode_the_agent_failed_exits_3_with_its_errors(
    kinds: list[str], code: int, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found, run, _ = running.train(settings_for(tmp_path, model, kinds), tmp_path)
    assert (found, len(running.metrics(run))) == (code, 2)
    said = capfd.readouterr().err
    assert f"agent `run` failed in {4 if code else 2} of 4 episodes" in said
    last = said.splitlines()[-1]
    assert all(f"2 x `run` {how}" in last for how in ("raised RuntimeError", "died of SIGKILL")) == (code == 3)
    for line in map(json.loads, run.samples.read_text().splitlines()):  # what was said before an agent failed, too
        asked = line["conversations"][0]["messages"][0]["content"]
        assert asked == ("x" if line["reward"] is None else line["prompt"])


def train_showing_all(settings: Config, folder: Path) -> None:
    """Train, with every episode in samples.jsonl."""
    on_policy.SHOWN_SAMPLES = 100
    train(settings, folder)
