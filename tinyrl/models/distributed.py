"""The processes of a run: what they exchange, and how they end together. The only file with torch.distributed.

Data parallel: every process (rank) goes through the same program, with the same rows, rollout and weights. Work that
costs something is shared out: prompts to sample, rows of a pass, rows of a minibatch. The results are exchanged, so
that every process knows all of them and decides alike. Rank 0 calls reward functions and writes.

A process may leave at any moment, since what rank 0 holds between two optimizer steps is whole by itself: whoever waits
for one that has left gets Interrupted, and rank 0 saves. Waiting has no time limit, for a reward may be slow; a signal,
a word from another process and a broken connection end it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tinyrl.errors import Interrupted
from tinyrl.runs.launched import VOICE, Launched, launched
from tinyrl.runs.signals import check_stop

TIMEOUT = timedelta(days=14)  # of a collective: longer than anything that one waits for
LOOK_EVERY_S = 0.25  # at whether another process has left, while waiting
SHORTEST_S, LONGEST_S = 5e-5, 5e-3  # between two looks at whether an exchange is done
ANSWER_S = 5.0  # within which the store answers, unless rank 0, which may hold it, is stopped (SIGSTOP)
PATIENCE_S = 60.0  # with which others wait for rank 0, which saves, before they end
SAID_S = 2.0  # with which they wait for what rank 0 says of an error
STOPPED, HERE, LEFT, SAID = "tinyrl/stopped", "tinyrl/here/", "tinyrl/left", "tinyrl/said"  # keys of the store
ENDED, HELD = ("Z", "X"), ("T", "t")  # what Linux says of a process that has ended, and of a stopped one (SIGSTOP)

Item = TypeVar("Item")


class World:
    """The processes of a run. This one: a single process, which exchanges nothing."""

    rank = 0
    size = 1
    local_size = 1  # of them on this machine

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which calls reward functions and writes."""
        return self.rank == 0

    def own(self, items: Sequence[Item]) -> list[Item]:
        """This process's share of things that cost about the same: every size-th."""
        return list(items[self.rank :: self.size])

    def merge(self, own: list[Item]) -> list[Item]:
        """All things again, in order, from what each process made of its `own`: JSON values."""
        return own

    def sum(self, *tensors: Tensor) -> None:
        """Add up tensors over all processes, in place."""

    def gather(self, value: Item) -> list[Item]:
        """The values of all processes, by rank: JSON values."""
        return [value]

    def on_main(self, compute: Callable[[], Item]) -> Item:
        """What `compute` gives on rank 0: a JSON value."""
        return compute()

    def agree(self, what: str, value: str) -> None:
        """Raise ValueError, on every process, where a value is not the same on all; `what` names it."""

    def announce(self, reason: str) -> None:
        """Tell the others that this process leaves, so that nobody waits for it."""


ALONE = World()


class Processes(World):
    """Several processes, connected. Every one calls the same methods in the same order.

    State: the key-value store of the launch, through which a process says that it leaves.
    """

    def __init__(self, launch: Launched, store: Store) -> None:
        self.rank, self.size, self.local_size = launch.rank, launch.world_size, launch.local_world_size
        self.store, self.launcher = store, os.getppid()
        self._asking = ThreadPoolExecutor(1)  # no thread of ours waits for the store without an end
        self._asked: Future[Any] | None = None  # the last question
        places = [store.get(f"{HERE}{rank}").decode().rpartition(" ") for rank in range(self.size)]
        self.nearby = {rank: pid for rank, (host, _, pid) in enumerate(places) if host == platform.node()}

    def merge(self, own: list[Item]) -> list[Item]:
        each = self.gather(own)
        return [each[i % self.size][i // self.size] for i in range(sum(map(len, each)))]

    def sum(self, *tensors: Tensor) -> None:
        for work in [self._begin(dist.all_reduce, tensor) for tensor in tensors]:
            self._finish(work)

    def gather(self, value: Item) -> list[Item]:
        data = _as_bytes(value)
        lengths = [int(length) for length in self._all(torch.tensor([len(data)]))]
        padded = self._all(torch.nn.functional.pad(data, (0, max(lengths) - len(data))))
        return [_from_bytes(x[:n]) for x, n in zip(padded, lengths, strict=True)]

    def on_main(self, compute: Callable[[], Item]) -> Item:
        data = _as_bytes(compute()) if self.is_main else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._finish(self._begin(dist.broadcast, length, src=0))
        if not self.is_main:
            data = torch.empty(int(length), dtype=torch.uint8)
        self._finish(self._begin(dist.broadcast, data, src=0))
        return _from_bytes(data)

    def agree(self, what: str, value: str) -> None:
        for rank, other in enumerate(self.gather(value)):
            if other != value:
                raise ValueError(
                    f"{what} of process {self.rank} and of process {rank} differ: all of them must read the same files "
                    "with the same versions, and an environment must not open its episodes at random"
                )

    def announce(self, reason: str) -> None:
        def tell() -> None:
            if not self.store.check([STOPPED]):
                self.store.set(STOPPED, f"process {self.rank} has left ({reason})")

        with contextlib.suppress(RuntimeError):  # the store has gone with the launcher
            self._ask(tell)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        self._finish(self._begin(dist.all_gather, out, tensor))
        return out

    def _begin(self, collective: Callable[..., Any], *given: Any, **options: Any) -> Any:
        try:
            return collective(*given, async_op=True, **options)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _finish(self, work: Any) -> None:
        """Wait for an exchange. Raises Interrupted on a signal, and where another process or the launcher has left."""
        if os.getppid() != self.launcher:
            raise Interrupted("the launcher has gone")
        pause, look = SHORTEST_S, time.monotonic() + LOOK_EVERY_S
        try:
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_S)
                check_stop()
                if time.monotonic() > look:
                    self._look(work)
                    look = time.monotonic() + LOOK_EVERY_S
            work.wait()
        except torch.OutOfMemoryError:  # a RuntimeError too
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _look(self, work: Any) -> None:
        """Look whether another process has left; where the store is slow to answer, at the next look.

        One may have left while this one, which holds the store, was stopped: it could not say so, and gloo, which was
        stopped too, does not always notice that the connection has gone.
        """
        if self._asked is None:
            self._asked = self._asking.submit(self._why_stopped)
        if wait([self._asked], timeout=LONGEST_S).done:
            found, self._asked = self._asked.result(), None
            if found is not None:
                raise Interrupted(found)
        gone = [rank for rank, pid in self.nearby.items() if _state(pid) in ENDED]
        if gone:
            time.sleep(LOOK_EVERY_S)  # what it sent before its end arrives
            if not work.is_completed():
                raise Interrupted(f"process {gone[0]} has gone")

    def _why_stopped(self) -> str | None:
        return self.store.get(STOPPED).decode() if self.store.check([STOPPED]) else None

    def _ask(self, question: Callable[[], Item]) -> Item:
        """What the store says. Raises RuntimeError where it does not answer in time."""
        before, patience = self._asked, ANSWER_S
        if before is not None and wait([before], timeout=patience).done:
            self._asked = before = None
        if before is None:
            self._asked = self._asking.submit(question)
            if wait([self._asked], timeout=patience).done:
                answer, self._asked = self._asked, None
                return answer.result()
        raise RuntimeError("the store of the launch does not answer")

    def _lost(self, error: RuntimeError) -> Interrupted:
        """What a broken connection means: it is said by who left, or nobody could say it."""
        with contextlib.suppress(RuntimeError):
            found = self._ask(self._why_stopped)
            if found is not None:
                return Interrupted(found)
        return Interrupted(f"another process has gone ({str(error).strip().splitlines()[0][:120]})")

    def speaks(self, sentence: str) -> bool:
        """Whether this process is to say a sentence: rank 0, and another one what rank 0 does not say."""
        with contextlib.suppress(RuntimeError):
            if self.is_main:
                self._ask(lambda: self.store.set(SAID, sentence))
                return True
            until = time.monotonic() + SAID_S
            while time.monotonic() < until:
                if self._ask(lambda: self.store.check([SAID])):
                    return self._ask(lambda: self.store.get(SAID)).decode() != sentence
                time.sleep(LONGEST_S)
        return True

    def wait_for_main(self) -> None:
        """Wait until rank 0 has left, is stopped or is no more: a launcher ends all when the first has failed."""
        until = time.monotonic() + PATIENCE_S
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < until and (0 not in self.nearby or _state(self.nearby[0]) not in (*ENDED, *HELD)):
                if self._ask(lambda: self.store.check([LEFT])):
                    return
                time.sleep(0.05)


def _state(pid: str) -> str:
    """What Linux says a process of this machine does, by a letter: "X" where there is none; "" on other systems."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "X" if sys.platform == "linux" else ""


def _as_bytes(value: Any) -> Tensor:
    """A value as JSON (NaN too), in a tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode("ascii")), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(bytes(data.numpy()))


_world: World = ALONE


def world() -> World:
    """The processes of this launch; a single one before `join` and where nothing launched several."""
    return _world


def join(*, on_cpu: bool) -> World:
    """Connect the processes of a launch, once. A signal ends the wait for those that are still to come. Raises
    ValueError where there are not enough GPUs.

    On GPUs tensors of the GPU go by NCCL and those of the CPU by gloo, so that no small exchange stalls the device.
    """
    global _world
    launch = launched()
    if launch.world_size == 1 or _world.size > 1:
        return _world
    gpus = 0 if on_cpu else torch.cuda.device_count()
    if not on_cpu and launch.local_world_size > gpus:
        raise ValueError(
            f"{launch.local_world_size} processes were launched on a machine with {gpus} GPUs, and each needs its own: "
            f"accelerate launch --num_processes {gpus} -m tinyrl ..."
        )
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    except dist.DistNetworkError as error:
        raise ValueError(_unconnected(error)) from error
    store.set(f"{HERE}{rank}", f"{platform.node()} {os.getpid()}")
    while not store.check([f"{HERE}{other}" for other in range(size)]):
        check_stop()
        time.sleep(LONGEST_S)
    if not on_cpu:
        torch.cuda.set_device(launch.local_rank)
    backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"
    group_store = PrefixStore("tinyrl/group", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=size, timeout=TIMEOUT)
    _world = Processes(launch, store)
    VOICE.connected = _world.speaks
    return _world


def _unconnected(error: Exception) -> str:
    """Why the processes of a launch could not be connected, without the frames that torch adds."""
    where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in str(error):
        return f"{where}: the port is taken by another program; choose another (--main_process_port, --master-port)"
    return f"{where}: the processes could not be connected: {str(error).strip().splitlines()[0][:200]}"


def leave(exit_code: int) -> None:
    """The end of a process, to be called last. After anything but success it ends here: what other processes have not
    answered would be waited for.
    """
    ours = _world
    if not isinstance(ours, Processes):
        return
    if exit_code == 0:
        dist.destroy_process_group()
        return
    ours.announce(f"exit code {exit_code}")
    if ours.is_main:
        with contextlib.suppress(RuntimeError):
            ours._ask(lambda: ours.store.set(LEFT, ""))
    else:
        ours.wait_for_main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
