"""A run's LoRA adapters on a serving engine: each version as a plain PEFT folder, loaded under a name of its own.

A name is never used twice: an adapter loaded again under its old name would be sampled with cached prefixes of the old
weights (vllm-project/vllm#42125).
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from tinyrl.generation.server_client import ServerClient
from tinyrl.models.roles import Roles
from tinyrl.models.weights_io import save_adapter

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class ServedAdapters:
    """Which weights of each adapter the server has, and under which name. Folders are in `folder`, made at the first
    load, under the system's one for temporary files (TMPDIR), and deleted in the end.
    """

    def __init__(self, server: ServerClient, roles: Roles) -> None:
        self.server, self.roles = server, roles
        self.loads = 0
        self._run = secrets.token_hex(4)  # other runs may use the same server
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._served: dict[str, tuple[str, dict[str, Tensor]]] = {}

    @property
    def folder(self) -> Path:
        """Where versions are written for the server to read."""
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tinyrl-adapters-")
        return Path(self._temporary.name)

    def name_of(self, adapter: str) -> str | None:
        """The name under which the server has an adapter's weights as they are now; None: it does not have them.

        Numbers are compared, since not every optimizer says which tensors it has written to.
        """
        name, weights = self._served.get(adapter, (None, {}))
        now = self.roles.adapter_parameters(adapter)
        return name if name and all(torch.equal(now[n].detach().cpu(), kept) for n, kept in weights.items()) else None

    def load(self, adapter: str) -> str:
        """Give the server an adapter's weights as they are now, and take the version before from it; the new name.

        Raises ServerError.
        """
        assert self.roles.peft is not None, "the configuration asks for LoRA"
        self.loads += 1
        name = f"tinyrl-{self._run}-{self.loads}"
        save_adapter(self.roles.peft, adapter, self.folder / name)
        self.server.post(LOAD, {"lora_name": name, "lora_path": str(self.folder / name)})
        self._unload(adapter)
        now = self.roles.adapter_parameters(adapter)
        self._served[adapter] = (name, {n: p.detach().to("cpu", copy=True) for n, p in now.items()})
        return name

    def forget(self) -> None:
        """The server was started anew and has none of them."""
        self._served.clear()

    def close(self) -> None:
        """Take every version from the server, if it is still there, and delete the folders."""
        for adapter in list(self._served):
            self._unload(adapter)
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _unload(self, adapter: str) -> None:
        name, _ = self._served.pop(adapter, (None, {}))
        if name is not None:
            self.server.tell(UNLOAD, {"lora_name": name})  # started anew or away, it has no such adapter
            shutil.rmtree(self.folder / name, ignore_errors=True)
