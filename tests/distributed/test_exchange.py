"""Two processes against one: what they exchange; the same samples, metrics and weights for every method."""

from __future__ import annotations

import json
import math
import string
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

from tests import running
from tests.distributed.ranks import Ranks
from tests.faults.children import Child
from tests.tiny_models import tiny_model, tiny_reward_model
from tests.training.rows import write_rows
from tinyrl.config.schema import Config
from tinyrl.models import parallel
from tinyrl.models.parallel import World, check_alike, join, sum_step
from tinyrl.process.errors import Interrupted
from tinyrl.process.launched import Launched
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.launch import _check_alike


def try_exchange(folder: Path) -> None:
    """Every exchange once; what each process got goes into a file."""
    world = join(on_cpu=True)
    mine = float(world.rank + 1)
    tensor, whole = torch.tensor([mine, math.nan if world.rank else 1.0]), torch.tensor([[world.rank + 1]])
    world.sum(tensor, whole)
    learnt, unused, elsewhere = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    learnt.grad = torch.tensor([mine, -2 * mine])
    elsewhere.grad = torch.tensor([5.0, 7.0]) if world.rank else None
    metrics = sum_step(world, {"a": mine, **({"b": 3.0} if world.rank else {})}, [learnt, unused, elsewhere])
    check_alike(world, {"rows": "same"}, what="inputs", advice="")
    config = config_of({"method": "grpo", "run": {"seed": world.rank}})
    with pytest.raises(ValueError, match=r"different settings or inputs: run\.seed \(0 and 1\)"):
        _check_alike(SimpleNamespace(config=config, row_fingerprints={}, world=world), "")  # pyright: ignore
    with pytest.raises(ValueError, match=r"processes 0 and 1 .* rows \(1\.0 and 2\.0\)"):
        check_alike(world, {"rows": mine, "prompts": 3}, what="inputs", advice="")
    got = {
        "own": world.own("abcde"),
        "merged": world.merge([letter.upper() for letter in world.own("abcde")]),
        "gathered": world.gather({"rank": world.rank, "nan": math.nan, "text": "\u00e9" * (1 + world.rank)}),
        "on main": world.on_main(lambda: ["from", world.rank]),
        "sums": [tensor.tolist(), whole.tolist()],
        "gradients": [None if p.grad is None else p.grad.tolist() for p in (learnt, unused, elsewhere)],
        "metrics": metrics,
    }
    (folder / f"{world.rank}.json").write_text(json.dumps(got))


def test_what_processes_exchange(tmp_path: Path) -> None:
    ranks = Ranks(try_exchange, tmp_path, folder=tmp_path)
    assert ranks.end() == [0, 0], ranks.said
    for rank, own in enumerate((["a", "c", "e"], ["b", "d"])):
        got = json.loads((tmp_path / f"{rank}.json").read_text())
        assert str(got) == str({
            "own": own,
            "merged": ["A", "B", "C", "D", "E"],
            "gathered": [{"rank": i, "nan": math.nan, "text": "\u00e9" * (1 + i)} for i in range(2)],
            "on main": ["from", 0],
            "sums": [[3.0, math.nan], [[3]]],
            "gradients": [[3.0, -6.0], None, [5.0, 7.0]],
            "metrics": {"a": 3.0, "b": 3.0},
        })  # fmt: skip


class NeverDone:
    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize(("leaves", "message"), [(True, r"1 has left \(SIGTERM\)"), (False, "the store, has gone")])
def test_a_process_that_leaves_or_takes_the_store_with_it_is_not_waited_for(leaves: bool, message: str) -> None:
    """In the middle of an exchange whose broken connection gloo has missed."""
    master = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    two = World(Launched(0, 2, 0, 2), TCPStore("127.0.0.1", master.port, None, is_master=False))
    if leaves:
        other = World(Launched(1, 2, 1, 2), TCPStore("127.0.0.1", master.port, None, is_master=False))
        other.announce("SIGTERM")
    else:
        del master
    with pytest.raises(Interrupted, match=message):
        two._exchange(lambda async_op: NeverDone())


def test_an_error_of_several_processes_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SAID_S", 0.0)
    one = World(Launched(1, 2, 1, 2))
    for one.why_left, prints in (("", True), ("process 0 has left (exit code 2)", False), ("process 1 has left", True)):
        assert one.speaks() == prints


STEPS = 3
RELATIVE, ABSOLUTE, OF_WEIGHTS = 1e-5, 1e-6, 1e-4
OF_KL = 1e-5  # nats of a response: a difference of two sums of log-probabilities, a hundred times as large
REPLY = """
def respond(prompts, transcripts, **columns):
    return [None if len(t) > 2 else f"{len(t[-1]['content']) % 3} more" for t in transcripts]

def variety(prompts, completions, **columns):
    return [float(len({c for message in messages for c in message["content"]})) for messages in completions]
"""


def cases(folder: Path) -> dict[str, Config]:
    """Small runs, of every kind that exchanges something of its own; their files are made in `folder`."""
    model, judge = tiny_model(folder / "model", "llama"), str(tiny_reward_model(folder / "judge", "llama"))
    (folder / "env.py").write_text(REPLY)
    pairs = ({"prompt": f"{n} of", "chosen": f" {n} and more", "rejected": " no" * (1 + n % 3)} for n in range(40))
    data = str(write_rows(folder / "pairs.jsonl", pairs))
    environment = {
        "environment": {"name": f"{folder / 'env.py'}:respond"},
        "generation": {"max_new_tokens": 24, "stop": list(string.ascii_letters)},
        "reward": {"functions": [{"use": f"{folder / 'env.py'}:variety"}]},
    }
    several = {"num_prompts": 5, "group_size": 3, "num_epochs": 2, "minibatch_size": 5, "kl_coef": 0.05}
    full = {"lora": {"enabled": False}, "optim": {"learning_rate": 1e-4}}
    odd = {"preset": "a2c", "num_prompts": 7, "minibatch_size": 7}
    teacher = {"path": str(tiny_model(folder / "other", "qwen2"))}
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("grpo", {**environment, "grpo": {**several, "dynamic_sampling_rounds": 2}}),
        "ppo": ("ppo", {"ppo": {"target_kl": 1.0}, "run": {"micro_batch_tokens": 60}}),
        "ppo-judged": ("ppo", {**full, "reward": {"model": judge}, "critic": {"kind": "shared"}, "ppo": odd}),
        "distill": ("distill", {"distill": {"num_prompts": 5, "group_size": 2}, "teacher": teacher}),
        "kto": ("dpo", {"task": {"name": "rows", "data": data}, "dpo": {"batch_size": 7, "loss": "kto"}}),
    }  # fmt: skip
    rare = {"num_steps": STEPS, "save_every": 0, "eval_every": 0, "eval_prompts": 5}
    for sections in (sections for _, sections in made.values()):
        sections["run"] = rare | sections.get("run", {})
        sections.setdefault("optim", {"learning_rate": 1e-3})
    return {name: running.config(method, model, **sections) for name, (method, sections) in made.items()}


SAMPLED = ("grpo", "ppo", "ppo-judged", "distill")


def train_all(settings: dict[str, Config], folder: Path) -> None:
    for name, config in settings.items():
        code, *_ = running.train(config, folder, name=name)
        if code:
            sys.exit(code)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the runs of one process, and of two."""
    folder = tmp_path_factory.mktemp("runs")
    settings = cases(folder)
    assert set(settings) == {*SAMPLED, "kto"}
    alone = Child(train_all, settings, folder / "one", output=folder / "one.txt")
    together = Ranks(train_all, settings, folder / "two", folder=folder)
    assert together.end() == [0, 0], together.said
    assert alone.end() == 0, alone.said
    return folder / "one", folder / "two"


def samples(run: RunDir) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.samples.read_text().splitlines()]
    kept = ("kind", "prompt_index", "sample", "completion", "finish_reason", "episode")
    return [{key: line.get(key) for key in kept} for line in lines if line["step"] == 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAMPLED, "kto"])
def test_samples_metrics_and_weights_agree(name: str, both: tuple[Path, Path]) -> None:
    runs = [RunDir(folder / name) for folder in both]
    if name in SAMPLED:
        one, two = map(samples, runs)
        assert len(one) > 1
        assert two == one
    one, two = map(running.lasting, runs)
    assert [line["step"] for line in two] == [*range(STEPS + 1)]
    for ours, theirs in zip(one, two, strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            if isinstance(value, float) and not math.isnan(value):
                absolute = OF_KL if key.endswith("/kl") else ABSOLUTE
                assert theirs[key] == pytest.approx(value, rel=RELATIVE, abs=absolute), (ours["step"], key)
            elif not isinstance(value, list | float):
                assert theirs[key] == value, (ours["step"], key)
    one, two = (running.weights(run, STEPS) for run in runs)
    assert set(one) == set(two)
    for key, tensor in one.items():
        assert float((two[key].double() - tensor.double()).abs().max()) < OF_WEIGHTS, key
