"""kill -9 of the server that judges: the run says so and ends with a checkpoint, and goes on once it is there again."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import running
from tests.faults.children import ROOT, Child, before_call, go_on, train
from tests.tiny_models import sharp_model
from tests.trainers.test_resume import assert_same
from tinyrl.config.schema import Config
from tinyrl.rewards import judge
from tinyrl.rewards.judge import Cache
from tinyrl.runs.run_dir import RunDir

BEGIN = '{"score":'
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def judging_model(folder: Path) -> Path:
    """A model that says a score after everything that it reads, and which one depends on all of it: behind '>' comes
    BEGIN, behind that a digit, then a brace and the end.
    """
    sharp_model(folder, max_position_embeddings=4096)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([BEGIN])
    tokenizer.chat_template = TEMPLATE
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in (">", BEGIN, "}", *"0123456789")}
    follows = {ids[">"]: [ids[BEGIN]], ids["}"]: [tokenizer.eos_token_id]}
    follows |= {ids[BEGIN]: [ids[digit] for digit in "0123456789"]}
    follows |= {ids[digit]: [ids["}"]] for digit in "0123456789"}
    with torch.no_grad():
        read, written = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        read[ids[BEGIN]].normal_(generator=torch.Generator().manual_seed(0))
        written.mul_(0.05)
        for token, nexts in follows.items():
            read[token] *= 10 / read[token].norm()
            for following in nexts:
                written[following] += read[token]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Served:
    """`tinyrl serve` in a process of its own; port 0: any that is free."""

    def __init__(self, model: Path, port: int = 0) -> None:
        command = [sys.executable, "-m", "tinyrl", "serve", str(model), "--port", str(port)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = next(line for line in self.process.stdout if " at http" in line).split()[-1]
        self.port = int(re.findall(r":(\d+)/", self.url)[0])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL


def settings_for(folder: Path, model: Path, judge: str, port: int) -> Config:
    (folder / "rubric.md").write_text("Letters.", encoding="utf-8")
    values = {"use": "judge", "url": f"http://127.0.0.1:{port}/v1", "model": judge, "max_tokens": 8}
    values |= {"rubric": str(folder / "rubric.md"), "cache": str(folder / "cache.sqlite"), "allow_weak": True}
    reward = {"functions": [values], "timeout_s": 20.0}
    return running.config("grpo", model, reward=reward, run={"num_steps": 2, "eval_every": 0, "eval_prompts": 0})


def train_until_reply(settings: Config, folder: Path, number: int, server: int) -> None:
    """Train, and kill the server when the number-th reply is to be kept."""
    before_call(Cache, "keep", number, do=lambda: os.kill(server, signal.SIGKILL))
    judge.WAITS_S = (0.1, 0.2)
    train(settings, folder)


def go_on_without(path: Path) -> None:
    judge.WAITS_S = (0.1, 0.2)
    go_on(path)


def test_a_judge_that_is_killed_stops_the_run_which_goes_on_when_it_is_back(model: Path, tmp_path: Path) -> None:
    server = Served(judging_model(tmp_path / "judge"))
    runs, asked, kept = [], 0.0, 0
    for name in ("whole", "killed"):
        (folder := tmp_path / name).mkdir()
        settings = settings_for(folder, model, "judge", server.port)
        if name == "whole":
            child = Child(train, settings, folder, output=folder / "said.txt")
            assert child.end() == 0, child.said
            lines = map(json.loads, (folder / "run" / "samples.jsonl").read_text().splitlines())
            assert len({line["reward"] for line in lines}) > 2, "one that always says the same would show nothing"
            asked = sum(line.get("judge/requests", 0) for line in running.metrics(RunDir(folder / "run")))
            with sqlite3.connect(folder / "cache.sqlite") as base:  # those asked before the run, too
                [kept] = base.execute("SELECT count(*) FROM replies").fetchone()
        else:
            pid, number = server.process.pid, int(kept - asked / 4)
            child = Child(train_until_reply, settings, folder, number, pid, output=folder / "said.txt")
            assert child.end() == 75, child.said
            assert f"judge at http://127.0.0.1:{server.port}" in child.said
            assert server.process.wait(10) == -signal.SIGKILL
        runs.append(RunDir(folder / "run"))
    whole, killed = runs
    again = Child(go_on_without, killed.path, output=tmp_path / "gone.txt")
    assert again.end() == 75, "it is still gone"
    back = Served(tmp_path / "judge", server.port)
    try:
        child = Child(go_on, killed.path, output=tmp_path / "back.txt")
        assert child.end() == 0, child.said
    finally:
        back.kill()
    assert_same(killed, whole, 2)
