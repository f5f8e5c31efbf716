"""The command that starts a serving engine for a run: vLLM's, with what the run needs of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from tinyrl.generation.server_client import ServerClient
from tinyrl.models.loading import POLICY_ADAPTER
from tinyrl.models.roles import Roles

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank allows
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class ServeCommand:
    """base: what the policy's base was loaded from; rank: of the adapters; adapters: sampled from at a time."""

    base: str
    rank: int
    adapters: int
    longest: int
    host: str
    port: int

    def __str__(self) -> str:
        most = next((allowed for allowed in RANKS if allowed >= self.rank), self.rank)
        several = f" --max-loras {self.adapters}" if self.adapters > 1 else ""
        where = f" --host {self.host}" + (f" --port {self.port}" if self.port != DEFAULT_PORT else "")
        return (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {shlex.quote(self.base)} --enable-lora "
            f"--max-lora-rank {most}{several} --logprobs-mode processed_logprobs "
            f"--max-model-len {self.longest}{where}"
        )


def serve_command(roles: Roles, server: ServerClient, *, longest: int) -> ServeCommand:
    """For a run whose sequences have at most `longest` tokens."""
    assert roles.peft is not None
    rank = roles.peft.peft_config[POLICY_ADAPTER].r  # pyright: ignore[reportAttributeAccessIssue]
    base = str(roles.causal.name_or_path)
    return ServeCommand(base, rank, 2 if roles.reference_adapter else 1, longest, server.host, server.port)
