"""`tinyrl serve`: a run's policy, or a model, behind OpenAI's protocol on this machine (generation/endpoint.py)."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tinyrl.evaluation.targets import Target
from tinyrl.generation.draws import SamplingParams
from tinyrl.generation.endpoint import LOCAL, Endpoint
from tinyrl.generation.engine import LocalEngine, SampledRole, SamplingSettings
from tinyrl.generation.live import LiveScheduler
from tinyrl.generation.select import select_engine
from tinyrl.models.roles import load_policy
from tinyrl.rollout.components import Options, Parts, resolve_threads

BASE = "base"  # the name of the model without its adapter
GRACE_S = 5  # for answers under way when a signal comes


@dataclass(frozen=True)
class Address:
    """Where to listen; key: what clients bring (None: nothing, which is for this machine alone)."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None

    @property
    def is_local(self) -> bool:
        return self.host in LOCAL or self.host == "::1"


def check_address(address: Address) -> None:
    """ValueError where others could reach it without a key, or where nothing can listen there."""
    if not address.is_local and not address.key:
        raise ValueError(
            f"--host {address.host} can be reached from other machines, so it needs a key: TINYRL_KEY in the "
            "environment, which clients bring as their API key"
        )
    with listening(address):
        pass


@contextlib.contextmanager
def listening(address: Address) -> Iterator[socket.socket]:
    """A bound socket. Raises ValueError where the address cannot be had."""
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((address.host.strip("[]"), address.port))
        except OSError as error:
            raise ValueError(f"{address.host}:{address.port} cannot be listened on: {error.strerror}") from None
        yield bound


@contextlib.contextmanager
def served(
    target: Target, *, options: Options, max_rows: int, key: str | None = None, hosts: list[str] | None = None
) -> Iterator[Endpoint]:
    """The endpoint of a target, loaded. hosts: names it may be called by. ValueError for what a user can fix."""
    config, generation = target.config, target.config.generation
    parts = Parts(config, options=options)
    if target.checkpoint is not None:
        load_policy(parts.roles, target.checkpoint)
    resolve_threads(parts)
    engine, why = select_engine(
        parts.roles,
        parts.tokenizer,
        SamplingSettings(generation.temperature, generation.max_new_tokens, max_rows=max_rows),
        wanted="auto" if generation.engine == "server" else generation.engine,
        dtype=parts.roles.dtype,
        longest=parts.positions,
    )
    assert isinstance(engine, LocalEngine)
    print(f"engine {engine.name}: {why}", flush=True)
    name = Path(target.name).name if Path(target.name).is_dir() else target.name
    names: dict[str, SampledRole] = {name: "base" if target.checkpoint is None else "policy"}
    if target.checkpoint is not None and config.lora.enabled:
        names[BASE] = "base"
    parts.tokenizer.name_or_path = name  # errors of its template go to clients, whom the folder does not concern
    scheduler = LiveScheduler(engine, max_rows=max_rows)
    try:
        yield Endpoint(
            scheduler,
            names,
            defaults=SamplingParams(generation.temperature, generation.top_p, generation.top_k),
            max_new_tokens=generation.max_new_tokens,
            positions=parts.positions,
            variables=config.task.chat_template,
            key=key,
            hosts=hosts,
        )
    finally:
        scheduler.close()


def serve(target: Target, address: Address, *, options: Options, max_rows: int) -> None:
    """Answer until a signal comes; answers under way then have a few seconds."""
    hosts = LOCAL if address.is_local else None
    loaded = served(target, options=options, max_rows=max_rows, key=address.key, hosts=hosts)
    with loaded as endpoint, listening(address) as bound:
        host, port = bound.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        print(f"{', '.join(endpoint.models)} at {url}", flush=True)
        # uvicorn raises the signal that ended it once more; that is an ordinary end here.
        before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            uvicorn.Server(uvicorn.Config(endpoint.app, log_level="warning", timeout_graceful_shutdown=GRACE_S)).run(
                [bound]
            )
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
