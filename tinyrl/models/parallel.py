"""Data parallel training: the only file with torch.distributed.

Every process (rank) runs the same program on the same rows, samples and weights. Costly work is split, its results are
exchanged, and so all ranks decide alike; rank 0 calls reward functions and writes files. A rank may leave at any time:
the others get Interrupted where they wait for it, and rank 0 saves.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tinyrl.process.errors import GuardStop, Interrupted
from tinyrl.process.launched import Launched, launched
from tinyrl.process.signals import check_stop

FOREVER = timedelta(days=14)  # the timeout of exchanges: a rank may sample or save for long
SHORTEST_S = 5e-5
LONGEST_S = 5e-3  # polling interval of an exchange
ARRIVES_S = 0.5  # time for the last message of a rank that has left
PATIENCE_S = 30.0
SAID_S = 2.0  # other ranks wait for rank 0 to save, and to leave with an error
LEFT = "tinyrl/left"
MAIN_LEFT = "tinyrl/main_left"  # keys of the store
BUCKET_BYTES = 1 << 26  # gradients are summed in buffers of this size, not copied all at once
CHECK_EVERY = 25  # steps between comparisons of the ranks' weights

T = TypeVar("T")


class World:
    """The ranks of a run, each of which calls the same methods in the same order; by default one, which exchanges
    nothing. Values are JSON. State: the launch's key-value store; why a rank has left, set by a thread.
    """

    def __init__(self, launch: Launched | None = None, store: Store | None = None) -> None:
        launch = launch or Launched()
        self.rank = launch.rank
        self.size = launch.world_size
        self.local_size = launch.local_world_size
        self.is_main = self.rank == 0
        self.store = store
        self.why_left = ""
        self.main_left = threading.Event()
        if store is not None:
            threading.Thread(target=self._watch, args=(store.clone(),), daemon=True).start()  # pyright: ignore

    def own(self, items: Sequence[T]) -> list[T]:
        """Return this rank's share of items of similar cost: every size-th."""
        return list(items[self.rank :: self.size])

    def merge(self, own: list[T]) -> list[T]:
        """Put the results of all ranks' `own` items together, in order."""
        each = self.gather(own)
        return [each[i % self.size][i // self.size] for i in range(sum(map(len, each)))]

    def on_main(self, compute: Callable[[], T]) -> T:
        """Compute a value on rank 0 and return it on every rank."""
        computed = [compute()] if self.is_main else []
        return self.gather(computed)[0][0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.tensor([0]) for _ in range(self.size)]
        self._exchange(distributed.all_gather, lengths, torch.tensor([len(data)]))
        each = [data.new_empty(int(max(lengths))) for _ in lengths]
        self._exchange(distributed.all_gather, each, nn.functional.pad(data, (0, len(each[0]) - len(data))))
        return [json.loads(bytes(x[: int(n)].numpy())) for x, n in zip(each, lengths, strict=True)]

    def sum(self, *tensors: Tensor) -> None:
        """Sum tensors over all ranks, in place."""
        for tensor in tensors if self.size > 1 else ():
            self._exchange(distributed.all_reduce, tensor)

    def _exchange(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective operation. Raises Interrupted on a signal, and where another rank has left."""
        pause = SHORTEST_S
        try:
            work = collective(*arguments, async_op=True)
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_S)
                check_stop()
                if self.why_left:
                    time.sleep(ARRIVES_S)
                    if not work.is_completed():
                        raise Interrupted(self.why_left)
            work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            time.sleep(ARRIVES_S)
            raise Interrupted(self.why_left or f"another process has gone ({error})"[:200]) from error

    def _watch(self, store: Store) -> None:
        try:
            store.wait([LEFT], FOREVER)
            self.why_left = store.get(LEFT).decode()
            store.wait([MAIN_LEFT], FOREVER)
        except RuntimeError:
            time.sleep(ARRIVES_S)
            self.why_left = self.why_left or "process 0 or the launcher, which holds the store, has gone"
        self.main_left.set()

    def announce(self, reason: str) -> None:
        """Tell the other ranks that this one leaves, so that none waits for it. The first reason stays."""
        if self.store is not None and not self.why_left:
            self.why_left = f"process {self.rank} has left ({reason})"
            with contextlib.suppress(RuntimeError):  # the store has gone
                self.store.set(LEFT, self.why_left)

    def speaks(self) -> bool:
        """Return whether this rank prints an error: rank 0 does, others one that rank 0 has not left with as well."""
        if not self.is_main:
            time.sleep(SAID_S)
        return self.is_main or not self.why_left or self.why_left.startswith(f"process {self.rank} ")


ALONE = _world = World()


def world() -> World:
    """Return the ranks of this launch; a single one before `join`."""
    return _world


def join(*, on_cpu: bool) -> World:
    """Connect the ranks of a launch, once. Raises ValueError where they cannot connect, or have too few GPUs."""
    global _world
    launch = launched()
    if launch.world_size == 1 or _world.size > 1:
        return _world
    if not on_cpu and launch.local_world_size > (gpus := torch.cuda.device_count()):
        raise ValueError(f"{launch.local_world_size} processes were launched, and this machine has {gpus} GPUs")
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=FOREVER)))
    except distributed.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} (--main_process_port)"
        raise ValueError(f"the processes could not be connected at {address}: {error}".splitlines()[0][:300]) from error
    if not on_cpu:
        torch.cuda.set_device(launch.local_rank)
    backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"  # values are gathered on the CPU, without stalling the GPU
    keys = PrefixStore("tinyrl/group", store)
    distributed.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=FOREVER)
    _world = World(launch, store)
    return _world


def leave(exit_code: int) -> None:
    """Leave the launch; call this last. A failed process ends here, without waiting for unanswered exchanges. Rank 0
    goes first, since a launcher ends all processes when one has failed.
    """
    if _world.store is None:
        return
    if exit_code == 0:
        return distributed.destroy_process_group()
    _world.announce(f"exit code {exit_code}")
    if _world.is_main:
        with contextlib.suppress(RuntimeError):
            _world.store.set(MAIN_LEFT, "")
    else:
        _world.main_left.wait(PATIENCE_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


# ---- a step of training ----


def sum_step(world: World, metrics: dict[str, float], parameters: Sequence[nn.Parameter]) -> dict[str, float]:
    """Sum gradients, in place, and metrics over the ranks. A parameter without a gradient on any rank stays so."""
    if world.size == 1:
        return metrics
    each = world.gather((metrics, [p.grad is not None for p in parameters]))
    for p, *has in zip(parameters, *(has for _, has in each), strict=True):
        if p.grad is None and any(has):
            p.grad = torch.zeros_like(p)
    grads = [p.grad for p in parameters if p.grad is not None]
    buckets = distributed._compute_bucket_assignment_by_size(grads, [BUCKET_BYTES])[0] if grads else []  # pyright: ignore
    for parts in [[grads[i] for i in bucket] for bucket in buckets]:
        buffer = torch.cat([grad.reshape(-1) for grad in parts])
        world.sum(buffer)
        for grad, summed in zip(parts, buffer.split([grad.numel() for grad in parts]), strict=True):
            grad.copy_(summed.view_as(grad))
    names = dict.fromkeys(name for theirs, _ in each for name in theirs)
    return {name: sum(theirs.get(name, 0.0) for theirs, _ in each) for name in names}


def check_replicas(world: World, parameters: dict[str, dict[str, nn.Parameter]]) -> None:
    """Raise GuardStop, on every rank, where trained weights differ from rank 0's in a single bit."""
    if world.size > 1:
        named = {f"{role} {name}": p for role, of_role in parameters.items() for name, p in of_role.items()}
        sums = {name: int(torch.hash_tensor(p.detach()).view(torch.int64)) for name, p in named.items()}
        check_alike(world, sums, what="checksums of weights", advice="Do devices or versions differ?", error=GuardStop)


def check_alike(
    world: World, own: dict[str, Any], *, what: str, advice: str, error: type[Exception] = ValueError
) -> None:
    """Raise `error`, on every rank, naming the values of one that differ from rank 0's."""
    first, *others = world.gather(own)
    for rank, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            each = (f"{n} ({json.dumps(first.get(n))} and {json.dumps(other.get(n))})" for n in names[:3])
            raise error(f"processes 0 and {rank} have {len(names)} different {what}: {', '.join(each)}. {advice}")
