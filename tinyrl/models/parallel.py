"""The processes of a run: what they exchange, and how they end together. The only file with torch.distributed.

Data parallel: every process (rank) runs the same program on the same rows, rollout and weights. Costly work is shared
out and its results are exchanged, so that all decide alike; rank 0 calls reward functions and writes. A process may
leave at any moment: whoever waits for it gets Interrupted, and rank 0, whose state is whole between two steps, saves.
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

from tinyrl.errors import GuardStop, Interrupted
from tinyrl.runs.launched import VOICE, Launched, launched
from tinyrl.runs.signals import check_stop

FOREVER = timedelta(days=14)  # longer than anything that one waits for
SHORTEST_S, LONGEST_S = 5e-5, 5e-3  # between two looks at whether an exchange is done
ARRIVES_S = 0.5  # within which what a process sent before its end has arrived
PATIENCE_S, SAID_S = 30.0, 2.0  # with which others wait for rank 0: until it has saved, and for its error message
LEFT, MAIN_LEFT, SAID = "tinyrl/left", "tinyrl/main_left", "tinyrl/said"  # keys of the store
BUCKET_BYTES = 1 << 26  # of a gradient buffer, so that a large model's gradients are not held twice
CHECK_EVERY = 25  # steps

Item = TypeVar("Item")


class World:
    """The processes of a run, each of which calls the same methods in the same order; by default a single one, which
    exchanges nothing. Values are JSON. State: the key-value store of the launch; why a process has left, by a thread.
    """

    def __init__(self, launch: Launched | None = None, store: Store | None = None) -> None:
        launch = launch or Launched()
        self.rank, self.size, self.local_size = launch.rank, launch.world_size, launch.local_world_size
        self.is_main = self.rank == 0  # calls reward functions and writes
        self.store, self.why_left, self.main_left = store, "", threading.Event()
        if store is not None:
            threading.Thread(target=self._watch, args=(store.clone(),), daemon=True).start()  # pyright: ignore

    def own(self, items: Sequence[Item]) -> list[Item]:
        """Return this process's share of things that cost about the same: every size-th."""
        return list(items[self.rank :: self.size])

    def merge(self, own: list[Item]) -> list[Item]:
        """Put together in order what each process made of its `own` things."""
        each = self.gather(own)
        return [each[i % self.size][i // self.size] for i in range(sum(map(len, each)))]

    def on_main(self, compute: Callable[[], Item]) -> Item:
        """Compute a value on rank 0 and return it on every process."""
        return self.gather(compute() if self.is_main else None)[0]  # pyright: ignore[reportReturnType]

    def gather(self, value: Item) -> list[Item]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.tensor([0]) for _ in range(self.size)]
        self._exchange(distributed.all_gather, lengths, torch.tensor([len(data)]))
        longest = int(max(lengths))
        each = [data.new_empty(longest) for _ in lengths]
        self._exchange(distributed.all_gather, each, nn.functional.pad(data, (0, longest - len(data))))
        return [json.loads(bytes(x[: int(n)].numpy())) for x, n in zip(each, lengths, strict=True)]

    def sum(self, *tensors: Tensor) -> None:
        """Add up tensors over all processes, in place."""
        for tensor in tensors if self.size > 1 else ():
            self._exchange(distributed.all_reduce, tensor)

    def _exchange(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Wait for a collective. Raises Interrupted on a signal, and where another process has left."""
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
        """Tell the others that this process leaves, so that nobody waits for it."""
        if self.store is not None and not self.why_left:
            self.why_left = f"process {self.rank} has left ({reason})"  # a later reason does not replace it
            with contextlib.suppress(RuntimeError):  # the store has gone
                self.store.set(LEFT, self.why_left)

    def speaks(self, sentence: str) -> bool:
        """Return whether this process is to print an error: rank 0, and another one what rank 0 does not print."""
        assert self.store is not None
        with contextlib.suppress(RuntimeError):
            if not self.is_main:
                self.store.wait([SAID], timedelta(seconds=SAID_S))
                return self.store.get(SAID).decode() != sentence
            self.store.set(SAID, sentence)
        return True


ALONE = _world = World()


def world() -> World:
    """Return the processes of this launch; a single one before `join`."""
    return _world


def join(*, on_cpu: bool) -> World:
    """Connect the processes of a launch, once. Raises ValueError where they cannot be, or have too few GPUs."""
    global _world
    launch = launched()
    if launch.world_size == 1 or _world.size > 1:
        return _world
    if not on_cpu and launch.local_world_size > (gpus := torch.cuda.device_count()):
        raise ValueError(f"{launch.local_world_size} processes were launched on a machine with {gpus} GPUs, and each "
                         f"needs its own: accelerate launch --num_processes {gpus} -m tinyrl ...")  # fmt: skip
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=FOREVER)))
    except distributed.DistNetworkError as error:
        address = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        why = f"{address}: the processes could not be connected; is the port taken (--main_process_port)? {error}"
        raise ValueError(why.splitlines()[0][:300]) from error
    if not on_cpu:
        torch.cuda.set_device(launch.local_rank)
    backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"  # so no small exchange of the CPU's stalls the GPU
    keys = PrefixStore("tinyrl/group", store)
    distributed.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=FOREVER)
    _world = World(launch, store)
    VOICE.connected = _world.speaks
    return _world


def leave(exit_code: int) -> None:
    """End a process, called last. After anything but success it ends here, without waiting for unanswered exchanges;
    rank 0 goes first, since a launcher ends all processes when one has failed.
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
    """Add up gradients, in place, and metrics over the processes. What has no gradient anywhere is left without one."""
    if world.size == 1:
        return metrics
    each = world.gather((metrics, [p.grad is not None for p in parameters]))
    learning = [p for p, *has in zip(parameters, *(has for _, has in each), strict=True) if any(has)]
    for p in learning:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    grads: list[Any] = [p.grad for p in learning]
    buckets = distributed._compute_bucket_assignment_by_size(grads, [BUCKET_BYTES])[0] if grads else []  # pyright: ignore
    for parts in [[grads[i] for i in bucket] for bucket in buckets]:
        buffer = torch.cat([grad.reshape(-1) for grad in parts])
        world.sum(buffer)
        for grad, summed in zip(parts, buffer.split([grad.numel() for grad in parts]), strict=True):
            grad.copy_(summed.view_as(grad))
    names = dict.fromkeys(name for theirs, _ in each for name in theirs)
    return {name: sum(theirs.get(name, 0.0) for theirs, _ in each) for name in names}


def check_replicas(world: World, parameters: dict[str, dict[str, nn.Parameter]]) -> None:
    """Raise GuardStop, on every process, where trained weights differ from rank 0's in a single bit."""
    if world.size == 1:
        return
    named = {f"{role} {name}": p for role, of_role in parameters.items() for name, p in of_role.items()}
    sums = {name: int(torch.hash_tensor(p.detach()).view(torch.int64)) for name, p in named.items()}
    advice = "Are they on unlike devices or versions? The last checkpoint is that of process 0"
    check_alike(world, sums, what="checksums of weights", advice=advice, error=GuardStop)


def check_alike(
    world: World, own: dict[str, Any], *, what: str, advice: str, error: type[Exception] = ValueError
) -> None:
    """Raise `error`, on every process, where a value of one differs from rank 0's, by its name."""
    first, *others = world.gather(own)
    for rank, other in enumerate(others, start=1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            each = (f"{n} ({json.dumps(first.get(n))} and {json.dumps(other.get(n))})" for n in names[:3])
            raise error(f"processes 0 and {rank} have {len(names)} different {what}: {', '.join(each)}. {advice}")
