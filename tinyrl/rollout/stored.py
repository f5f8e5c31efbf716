"""What a teacher said of given responses, in files: its likeliest tokens, so that training needs the teacher no more.

A folder holds `teacher.json` and numbered parts in safetensors. Of a response token: its id, the teacher's
log-probability of it, the K likeliest tokens, and the log-probabilities of these and of all others together: 8 K + 12
bytes. Numbers are float32; halves would change a loss in its third digit. The manifest is written last, so a folder
without one is not whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tinyrl.rollout.buffer import Rollout, given_rollout

MANIFEST = "teacher.json"
PART_BYTES = 1 << 26  # about, of a part


class Manifest(BaseModel):
    """teacher.json: how the numbers were made, and the size of each part."""

    model_config = ConfigDict(extra="forbid", strict=True)
    teacher: str
    top_k: Annotated[int, Field(gt=0)]
    temperature: float
    vocabulary: str  # vocabulary_digest of its tokenizer
    rows: Annotated[int, Field(gt=0)]
    tokens: int
    parts: dict[str, int]  # file name -> bytes


def vocabulary_digest(vocabulary: dict[str, int]) -> str:
    """Of a tokenizer's tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


def bytes_a_token(top_k: int) -> int:
    return 8 * top_k + 12


def write_stored(folder: Path, rollouts: Iterable[Rollout], *, about: dict[str, object]) -> Manifest:
    """Write what a teacher said of some rollouts. Raises ValueError where the folder is there already, OSError where
    the disk refuses.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is there already and not empty")
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, int] = {}
    rows = tokens = 0
    waiting: list[dict[str, Tensor]] = []

    def flush() -> None:
        name = f"part-{len(parts):05d}.safetensors"
        save_file({key: torch.cat([one[key] for one in waiting]) for key in waiting[0]}, folder / name)
        parts[name] = (folder / name).stat().st_size
        waiting.clear()

    for rollout in rollouts:
        assert rollout.teacher_top_ids is not None
        assert rollout.teacher_top_logprobs is not None
        assert rollout.teacher_logprobs is not None
        mask, prompts = rollout.loss_mask, [rollout.prompt_tokens[p] for p in rollout.prompt_index.tolist()]
        waiting.append({
            "prompt_tokens": torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32),
            "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            "response_tokens": rollout.response_tokens[mask].int(),
            "response_lengths": mask.sum(1),
            "logprobs": rollout.teacher_logprobs[mask],
            "top_ids": rollout.teacher_top_ids,
            "top_logprobs": rollout.teacher_top_logprobs,
        })  # fmt: skip
        rows, tokens = rows + len(rollout), tokens + int(mask.sum())
        if sum(x.nbytes for one in waiting for x in one.values()) > PART_BYTES:
            flush()
    if waiting:
        flush()
    manifest = Manifest.model_validate({**about, "rows": rows, "tokens": tokens, "parts": parts})
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2), encoding="utf-8")
    return manifest


class StoredRows:
    """The rows of such a folder, read as they are asked for. Raises ValueError where it is not whole."""

    def __init__(self, folder: Path) -> None:
        try:
            self.manifest = Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise ValueError(f"teacher.path={folder}: {MANIFEST} cannot be read ({error})") from None
        self.folder = folder
        self._place: list[tuple[str, int]] = []  # of each row: its part, and its number there
        self._starts: dict[str, tuple[list[int], list[int]]] = {}  # where rows begin in a part: prompts, responses
        for name, size in self.manifest.parts.items():
            part = folder / name
            if not part.is_file() or part.stat().st_size != size:
                there = f"{part.stat().st_size:,} bytes" if part.is_file() else "missing"
                raise ValueError(f"teacher.path={folder}: {name} is {there}, and {size:,} bytes were written")
            lengths = self._read(name, "prompt_lengths"), self._read(name, "response_lengths")
            prompts, responses = ([0, *x.cumsum(0).tolist()] for x in lengths)
            self._starts[name] = prompts, responses
            self._place += [(name, number) for number in range(len(prompts) - 1)]

    @property
    def fingerprint(self) -> str:
        """Of how the rows were made and how many bytes there are of them."""
        return hashlib.sha256(self.manifest.model_dump_json().encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._place)

    def take(self, rows: Sequence[int], *, num_rewards: int) -> Rollout:
        """Some rows as a rollout that a teacher has read, and so many rewards have not."""
        found: dict[str, list[Tensor]] = {key: [] for key in ("prompt", "response", "logprobs", "ids", "top")}
        for row in rows:
            name, number = self._place[row]
            prompts, responses = self._starts[name]
            answer = slice(responses[number], responses[number + 1])
            found["prompt"].append(self._read(name, "prompt_tokens", slice(prompts[number], prompts[number + 1])))
            found["response"].append(self._read(name, "response_tokens", answer))
            found["logprobs"].append(self._read(name, "logprobs", answer))
            found["ids"].append(self._read(name, "top_ids", answer))
            found["top"].append(self._read(name, "top_logprobs", answer))
        rollout = given_rollout(
            [x.tolist() for x in found["prompt"]],
            [x.tolist() for x in found["response"]],
            rows=list(rows),
            num_rewards=num_rewards,
        )
        rollout.teacher_logprobs = torch.zeros_like(rollout.sampling_logprobs)
        rollout.teacher_logprobs[rollout.loss_mask] = torch.cat(found["logprobs"])
        rollout.teacher_top_ids, rollout.teacher_top_logprobs = torch.cat(found["ids"]), torch.cat(found["top"])
        return rollout

    def _read(self, part: str, name: str, where: slice = slice(None)) -> Tensor:
        try:
            with safe_open(self.folder / part, "pt") as file:
                return file.get_slice(name)[where]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"teacher.path={self.folder}: {part} cannot be read ({error})") from None
