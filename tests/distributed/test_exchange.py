"""What two processes exchange, and the gradient that they make together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from tests import running
from tests.distributed.ranks import Ranks
from tests.faults.children import Child
from tests.tiny_models import tiny_model
from tinyrl.config.schema import Config
from tinyrl.errors import Interrupted
from tinyrl.models import parallel
from tinyrl.models.micro_batches import SequenceLengths
from tinyrl.models.parallel import ALONE, World, check_alike, join, sum_step
from tinyrl.runs.launched import Launched
from tinyrl.training.launch import _check_alike
from tinyrl.training.step import RoleOptimizer


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
        assert one.speaks("an error") == prints


def test_a_process_by_itself_exchanges_nothing() -> None:
    ALONE.sum(tensor := torch.tensor([1.0]))
    assert tensor.tolist() == [1.0]
    found = (ALONE.own("abc"), ALONE.merge(["a"]), ALONE.gather(2), ALONE.on_main(lambda: 3))
    assert found == (["a", "b", "c"], ["a"], [2], 3)
    assert sum_step(ALONE, metrics := {"a": 1.0}, []) is metrics


@pytest.mark.parametrize("packed", [True, False])
def test_shares_are_even_and_keep_groups_together(packed: bool) -> None:
    """Eight groups of two on two processes: four groups each, where a prompt is read once for its group."""
    groups = [i // 2 for i in range(16)]
    sizes = SequenceLengths([10] * 16, [3 + i for i in groups], groups, packed)
    shares = sizes.shares(range(16), 2)
    assert sorted(row for share in shares for row in share) == [*range(16)]
    costs = [sum(sizes.cost([row]) for row in share) for share in shares]
    assert max(costs) - min(costs) <= 2
    if packed:
        assert {groups[row] for row in shares[0]}.isdisjoint(groups[row] for row in shares[1])


def train_and_keep_gradients(settings: Config, folder: Path, name: str) -> None:
    """Train, and write down every gradient before it is clipped."""
    plain, kept = RoleOptimizer.clip, {}

    def keeping(optimizer: RoleOptimizer, max_norm: float) -> float:
        for parameter_name, p in optimizer.parameters.items():
            if p.grad is not None:
                kept[f"{len(kept)} {parameter_name}"] = p.grad.clone()
        return plain(optimizer, max_norm)

    setattr(RoleOptimizer, "clip", keeping)  # noqa: B010  pyright knows it as a method
    code, *_ = running.train(settings, folder, name=name)
    assert code == 0
    save_file(kept, folder / f"{name}-{join(on_cpu=True).rank}.safetensors")


def test_the_gradient_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    """PPO's first step, policy and critic; relative to the gradient of all parameters."""
    once = {"num_steps": 1, "eval_prompts": 0, "save_every": 0}
    model = tiny_model(tmp_path / "model", "llama")
    settings = running.config("ppo", model, ppo={"num_epochs": 1, "minibatch_size": 8}, run=once)
    alone = Child(train_and_keep_gradients, settings, tmp_path, "one", output=tmp_path / "one.txt")
    ranks = Ranks(train_and_keep_gradients, settings, tmp_path, "two", folder=tmp_path)
    assert ranks.end() == [0, 0], ranks.said
    assert alone.end() == 0, alone.said
    one, two, on_the_other = (load_file(tmp_path / f"{n}.safetensors") for n in ("one-0", "two-0", "two-1"))
    assert len(one) > 20
    assert set(one) == set(two)
    flat: list[Tensor] = [torch.cat([x[key].reshape(-1) for key in one]).double() for x in (one, two)]
    assert float((flat[1] - flat[0]).norm() / flat[0].norm()) < 1e-6
    assert all(torch.equal(two[key], on_the_other[key]) for key in two)


class Two(World):
    """Two processes, of which the other one has what `theirs` says."""

    def __init__(self, theirs: dict[str, Any]) -> None:
        super().__init__(Launched(0, 2, 0, 2))
        self.theirs = theirs

    def gather(self, value: Any) -> list[Any]:
        return [value, {**value, **self.theirs}]


def test_settings_that_differ_are_named() -> None:
    trainer: Any = SimpleNamespace(config=Config.model_validate({"method": "grpo", "run": {"seed": 1}}))
    trainer.row_fingerprints, trainer.world = {}, Two({})
    _check_alike(trainer, "")
    for theirs, named in (({"run.seed": 7}, r"run\.seed \(1 and 7\)"), ({"method": "ppo"}, "method")):
        trainer.world = Two(theirs)
        with pytest.raises(ValueError, match=f"1 different settings or inputs: {named}"):
            _check_alike(trainer, "")
