"""What commands share: options, completions, libraries that keep quiet, processes that end together."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tinyrl.cli.errors import address_space

if TYPE_CHECKING:
    from tinyrl.rollout.components import Options

# Turns of the loop in which an OpenMP thread waits before it sleeps: the most that costs nothing when alone. Two
# threads on two cores, seconds of a GRPO step of a small model, alone and beside a process that computes: 300,000 turns
# (libgomp's own) 3.2 alone, 30,000 3.1 and 20, 10,000 3.7 and 12.
SPINS = "30000"
LIBRARIES_GB = 1.0  # of address space that a build of torch for CPUs, transformers and PEFT take at least
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # of torch; the second is the older name


def complete_setting(incomplete: str) -> list[str]:
    from tinyrl.config.recipe import packaged_recipes
    from tinyrl.config.settings import SECTIONS, fields_of, section_class

    keys = [f"{section}.{key}=" for section in SECTIONS for key in fields_of(section_class(section))]
    return [name for name in [*packaged_recipes(), *keys] if name.startswith(incomplete)]


Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where to run")]
Debug = Annotated[bool, typer.Option("--debug", help="show a traceback with an error")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="run Python code that comes with a hub model")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@dataclass(frozen=True)
class RunOptions:
    device: str
    trust_remote_code: bool
    debug: bool

    def of_parts(self) -> Options:
        """Those that loading takes; torch is imported now."""
        from tinyrl.rollout.components import Options

        return Options(device=self.device, trust_remote_code=self.trust_remote_code)


@contextmanager
def ending_together() -> Iterator[None]:
    """Around what several processes do: one that ends tells the others, and none is left behind."""
    code = None
    try:
        yield
        code = 0
    except typer.Exit as end:
        code = end.exit_code
        raise
    finally:
        distributed = sys.modules.get("tinyrl.models.distributed")  # not yet, where an error came before torch
        if distributed is not None and distributed.world().size > 1:
            if code is None:  # a bug, whose traceback nobody would see after this
                traceback.print_exc()
            distributed.leave(1 if code is None else code)


def quiet_libraries() -> None:
    """Before torch is imported: keep libraries' progress bars and advice from drowning what a run says, and their
    threads from spinning. Raises MemoryError where there is no room for them, which their C++ would end or hang on.

    Threads of OpenMP that wait for each other spin, by default for milliseconds. Where another process has their core,
    they then take turns with it at every barrier, and a step takes ten times as long. A person's own setting is kept.

    torch's large tensors begin at a page (THP_MEM_ALLOC_ENABLE), where glibc can give what one leaves to the next of
    its size. Elsewhere scraps of less than 100 bytes stay between them: a third of a pass's peak was gaps. On a GPU
    segments grow, for micro-batches of every size would leave gaps of their own.
    """
    limit = address_space()
    if limit is not None and limit < LIBRARIES_GB * 1e9:
        raise MemoryError(f"the libraries alone take {LIBRARIES_GB:g} GB of address space")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not ALLOCATOR & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
