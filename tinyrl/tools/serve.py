"""`tinyrl serve`: a run's policy, or a model, behind OpenAI's protocol on this machine (generation/endpoint.py)."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from tinyrl.evaluation.targets import Target
from tinyrl.generation.endpoint import LOCAL, Endpoint
from tinyrl.generation.engine import LocalEngine, SampledRole, SamplingParams, SamplingSettings
from tinyrl.generation.engines import select_engine
from tinyrl.generation.scheduler import LiveScheduler
from tinyrl.models.roles import load_policy
from tinyrl.rollout.components import Options, Parts, resolve_threads

BASE = "base"  # the name of the model without its adapter
GRACE_S = 5  # for answers under way when a signal comes


def listen(host: str, port: int, *, key: str | None) -> socket.socket:
    """Bind an address. Raises ValueError where it cannot be had, or others could reach it without a key."""
    if host not in (*LOCAL, "::1") and not key:
        raise ValueError(
            f"--host {host} can be reached from other machines, so it needs a key: TINYRL_KEY in the "
            "environment, which clients bring as their API key"
        )
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise ValueError(f"{host}:{port} cannot be listened on: {error.strerror}") from None
    return bound


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


def serve(target: Target, bound: socket.socket, *, key: str | None, options: Options, max_rows: int) -> None:
    """Answer at a bound address until a signal comes; answers under way then have a few seconds."""
    host, port = bound.getsockname()[:2]
    hosts = LOCAL if host in (*LOCAL, "::1") else None
    with bound, served(target, options=options, max_rows=max_rows, key=key, hosts=hosts) as endpoint:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        print(f"{', '.join(endpoint.models)} at {url}", flush=True)
        server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="warning", timeout_graceful_shutdown=GRACE_S))
        # uvicorn raises the signal that ended it once more; that is an ordinary end here.
        before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.run([bound])
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
