"""Agents that attack or are killed, in real runs: the other episodes are those of a run without it."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import running
from tests.faults.children import Child, before_call, resumed, train, workers_left
from tinyrl.config.schema import Config
from tinyrl.generation.agents import AgentEpisode
from tinyrl.runs.checkpoint import newest_sound
from tinyrl.runs.run_dir import RunDir
from tinyrl.training import on_policy

AGENT = """
    import json, os, signal, socket, time, urllib.error, urllib.request
    from pathlib import Path

    FOLDER = Path(__file__).parent
    HALF, before = [], None  # before: the key of the episode that this process has played before


    def send(base_url, api_key, content, path="/completions"):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        request = urllib.request.Request(base_url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:  # refused before all of it was sent: the server closes, and its answer may be lost
            return 413


    def ask(base_url, api_key, prompt, **fields):
        body = {"model": "policy", "prompt": prompt, "max_tokens": 2, **fields}
        return send(base_url, api_key, json.dumps(body).encode())


    def endless(url, key):
        while True:
            ask(url, key, "more")


    def malformed(url, key):
        assert send(url, key, b" " * (1 << 25) + b"{}") == 413
        for content in (b"", b"{", b"[" * 100_000, b"null", json.dumps({"model": "policy"}).encode()):
            assert send(url, key, content) == 400
        for prompt, fields in (([-1], {}), ([10**30], {}), ([[5], [6]], {}), ("x", {"n": 2}), ("x" * 100_000, {})):
            assert ask(url, key, prompt, **fields) == 400
        assert ask(url, key, "x", model="another") == send(url, key, b"{}", "/nothing") == 404
        host, port = url.split("/")[2].split(":")
        HALF.append(half := socket.create_connection((host, int(port))))  # and never the rest
        half.sendall(b"POST /v1/completions HTTP/1.1\\r\\nContent-Length: 99\\r\\n")
        socket.create_connection((host, int(port))).sendall(os.urandom(1000))


    def replayed(url, key):
        deadline = time.monotonic() + 20
        while not (keys := [file.read_text() for file in FOLDER.glob("key-*")]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert keys
        for other in (*keys, "", "x", key[:-1], key + "0", key.upper(), key + "\\u00e9"):
            assert send(url, other.encode().decode("latin-1"), b"{}") == 401


    def killed(url, key):
        ask(url, key, "x")
        os.kill(os.getpid(), signal.SIGKILL)


    def raises(url, key):
        ask(url, key, "x")
        raise RuntimeError("planted")


    def run(row, base_url, api_key):
        global before
        if before is not None:
            (FOLDER / f"new-{os.getpid()}").write_text(before)
            os.rename(FOLDER / f"new-{os.getpid()}", FOLDER / f"key-{os.getpid()}")
        before = api_key
        if row["kind"] != "honest":
            globals()[row["kind"]](base_url, api_key)
        said = ask(base_url, api_key, row["prompt"])
        return said + ask(base_url, api_key, row["prompt"] + said + " and")

"""
FAILS = {"endless": "gave no answer", "killed": "SIGKILL", "raises": "planted"}
COSTS_NOTHING = ["malformed", "replayed"]  # all of it is refused
KINDS = ["honest", *COSTS_NOTHING, "honest", *FAILS, "honest"]


def settings_for(folder: Path, model: Path, kinds: list[str], **run: Any) -> Config:
    """A run whose rows are played as `kinds` say, two episodes each."""
    (folder / "agent.py").write_text(textwrap.dedent(AGENT), encoding="utf-8")
    rows = [{"prompt": f"Say {number}", "kind": kind} for number, kind in enumerate(kinds)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "held.jsonl").write_text('{"prompt": "Held out", "kind": "honest"}\n')
    use = f"{folder / 'agent.py'}:run"
    data = {"name": "rows", "data": str(folder / "rows.jsonl"), "eval_data": str(folder / "held.jsonl")}
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
    """Those whose calls were refused, too: a refused call has cost their episode nothing."""
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
        if kind in ("honest", *COSTS_NOTHING):
            assert sorted(attacked[f"Say {number}"]) == sorted(quiet[f"Say {number}"]), kind
            assert all(len(said) for said in attacked[f"Say {number}"])
    failed = [json.loads(line) for line in (runs[1].path / "failed_rewards.jsonl").read_text().splitlines()]
    reasons = {(KINDS[int(line["prompt"].split()[1])], line["reason"].partition(" (")[0]) for line in failed}
    assert {kind for kind, _ in reasons} == {*FAILS}
    assert all(FAILS[kind] in reason for kind, reason in reasons), reasons


def train_showing_all(settings: Config, folder: Path) -> None:
    """Train, with every episode in samples.jsonl."""
    on_policy.SHOWN_SAMPLES = 100
    train(settings, folder)


def test_a_run_ended_by_kill_9_while_agents_play_is_resumed(model: Path, tmp_path: Path) -> None:
    """In the second step; its episodes are played again, and draw by the same random numbers."""
    kinds = ["honest", "honest", "honest"]
    runs = []
    for name in ("whole", "killed"):
        (folder := tmp_path / name).mkdir()
        settings = settings_for(folder, model, kinds, num_steps=2)
        child = Child(train_until_call, settings, folder, 15 if name == "killed" else 0, output=folder / "said.txt")
        assert child.end() == (0 if name == "whole" else -signal.SIGKILL), child.said
        runs.append(RunDir(folder / "run"))
        assert workers_left({child.pid}) == []
    assert newest_sound(runs[1].checkpoints)[0] == runs[1].checkpoints / "step-000001"
    resumed(runs[1])
    everyone = psutil.process_iter(["cmdline"])  # a dead one that nobody waited for has no command line
    assert not [one.pid for one in everyone if str(tmp_path / "killed") in " ".join(one.info["cmdline"] or [])]
    whole, killed = map(said_in, runs)
    assert {prompt: sorted(said) for prompt, said in killed.items()} == {p: sorted(said) for p, said in whole.items()}
    ours, theirs = (running.metrics(run)[-1] for run in runs)
    assert ours["policy/loss"] == pytest.approx(theirs["policy/loss"], abs=1e-4)


def train_until_call(settings: Config, folder: Path, number: int) -> None:
    """Train, and kill this process at the number-th call of an agent (12 in a step); 0: never."""
    if number:
        before_call(AgentEpisode, "call", number, do=lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(settings, folder)
