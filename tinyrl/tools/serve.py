"""`tinyrl serve`: a run's policy, or a model, behind the protocols of OpenAI and Anthropic (endpoint/endpoint.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn

from tinyrl.endpoint.endpoint import Endpoint
from tinyrl.endpoint.server import LOCAL, server_config
from tinyrl.evaluation.targets import Target
from tinyrl.generation.engines import select_engine
from tinyrl.generation.live import LiveScheduler
from tinyrl.generation.request import SampledRole
from tinyrl.models.policy_files import restore_policy
from tinyrl.process.launched import Options
from tinyrl.rollout.load import load_policy, resolve_threads

GRACE_S = 2  # for answers under way when a signal comes
END_S = 4.5  # after the signal the process ends in any case, also in the middle of a long step or a long text


class Server(uvicorn.Server):
    """uvicorn's server, which ends the process END_S after a signal whatever it is doing. Nothing is lost by that."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        deadline = threading.Timer(END_S, os._exit, [0])
        deadline.daemon = True
        deadline.start()
        super().handle_exit(sig, frame)


def listen(host: str, port: int, *, key: str | None) -> socket.socket:
    """Bind an address. Raises ValueError if that fails, or if other machines could reach it without a key."""
    if host not in (*LOCAL, "::1") and not key:
        raise ValueError(f"--host {host} can be reached from other machines, so set a key for clients: TINYRL_KEY")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as error:
        bound.close()
        raise ValueError(f"{host}:{port} cannot be listened on: {error.strerror}") from None
    return bound


def names_of(target: Target) -> dict[str, SampledRole]:
    """Return the names that clients may give, with what answers. A run's policy has two: some clients take what stands
    before a slash for a provider. "base" is the model under an adapter; where its run is called so too, neither is.
    """
    if target.checkpoint is None or target.run is None:
        name = Path(target.name).name if Path(target.name).is_dir() else target.name
        return {name: "base"}
    names: dict[str, SampledRole] = {target.name: "policy"}
    run = target.run.resolve().name
    has_base = target.config.lora.enabled
    if not (has_base and run == "base"):
        names[run] = "policy"
    if has_base and run != "base":
        names["base"] = "base"
    return names


@contextlib.contextmanager
def served(
    target: Target, *, options: Options, max_rows: int, key: str | None = None, hosts: list[str] | None = None
) -> Iterator[Endpoint]:
    """Load a target and yield its endpoint. hosts: names it may be called by. Raises ValueError for bad settings."""
    config = target.config
    generation = target.config.generation
    policy = load_policy(config, options=options)
    if target.checkpoint is not None:
        restore_policy(policy, target.checkpoint, only="policy")
    resolve_threads(policy)
    local = "auto" if generation.engine == "server" else generation.engine
    settings = generation.model_copy(update={"engine": local, "stop": [], "max_rows": max_rows})
    with policy.trying_images():
        engine, why = select_engine(settings, policy, policy.tokenizer, longest=policy.positions)
    print(f"engine {engine.name}: {why}", flush=True)
    names = names_of(target)
    policy.tokenizer.name_or_path = next(iter(names))  # errors of its template go to clients, not the folder's place
    scheduler = LiveScheduler(engine, max_rows=max_rows)
    endpoint = Endpoint(
        scheduler,
        names,
        defaults=generation,
        positions=policy.positions,
        variables=config.task.chat_template_kwargs,
        key=key,
        hosts=hosts,
        expander=policy.image_expander,
        note=lambda text: print(f"note: {text}", flush=True),
    )
    try:
        yield endpoint
    finally:
        scheduler.close()
        endpoint.close()


def serve(target: Target, bound: socket.socket, *, key: str | None, options: Options, max_rows: int) -> None:
    """Answer at a bound address until a signal comes; answers under way then have a few seconds."""
    host, port = bound.getsockname()[:2]
    hosts = LOCAL if host in (*LOCAL, "::1") else None
    with bound, served(target, options=options, max_rows=max_rows, key=key, hosts=hosts) as endpoint:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        print(f"{', '.join(endpoint.models)} at {url}", flush=True)
        server = Server(server_config(endpoint, log_level="warning", grace_s=GRACE_S))
        # uvicorn raises the signal that ended it once more; that is an ordinary end here.
        before = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            server.run([bound])
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
