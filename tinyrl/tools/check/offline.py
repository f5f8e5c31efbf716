"""Estimate the memory and disk of a run from its model's config.json, without loading a weight.

The peak is what stays (weights, adapters, Adam's moments) plus the larger of sampling (copy, cache) and updating
(gradients, activations of a full micro-batch, a chunk of logits). Sequences are taken to be as long as they may be, so
a run whose completions end early takes less.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.runs.findings import Finding, columns
from tinyrl.text import escape_control

PROCESS = {"cpu": 0.45e9, "cuda": 0.0}  # Python, torch and its libraries; on a GPU only tensors are counted
LOGITS = 3 * 4  # bytes of a logit in float32: itself, its exponential and its gradient
BYTES_A_WEIGHT = {"4bit": 0.5 + 0.127 / 8, "8bit": 1.0}  # NF4 with its scales (2305.14314, section 3), LLM.int8
ROOM_FOR_CACHE = 0.4  # of the free memory: the sampler decodes fewer rows at a time where all would need more


@dataclass(frozen=True)
class Shapes:
    """Sizes of a decoder: width, MLP width, layers, query heads x head size, key heads x head size, vocabulary."""

    width: int
    inner: int
    layers: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool

    @property
    def linear(self) -> int:
        """Return the weights of the linear layers: q, k, v, o, gate, up, down."""
        return self.layers * self.width * (2 * self.queries + 2 * self.keys + 3 * self.inner)

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.width * (1 if self.tied else 2)

    def lora(self, rank: int, modules: list[str] | None) -> int:
        """Return the weights of an adapter on these modules (None: all linear layers)."""
        outputs = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys, "o_proj": self.queries,
                   "gate_proj": self.inner, "up_proj": self.inner, "down_proj": self.inner}  # fmt: skip
        return self.layers * rank * sum(self.width + outputs[m] for m in modules or outputs if m in outputs)

    def activations(self, dtype_bytes: int, *, recomputed: bool) -> int:
        """Return the bytes that one token takes until its backward pass, through our own layers: what each layer saves,
        or where layers are recomputed, their inputs beside one layer with the gradients of its MLP.
        """
        saved = 2 * self.width + 2 * self.queries + 2 * self.keys + 3 * self.inner
        if recomputed:
            return dtype_bytes * (self.layers * self.width + saved + 4 * self.inner)
        return dtype_bytes * self.layers * saved


# Models that recipes name, so that they can be estimated where the hub cannot be reached.
KNOWN_SHAPES = {
    "Qwen/Qwen2.5-0.5B": Shapes(896, 4864, 24, 14 * 64, 2 * 64, 151_936, tied=True),
    "Qwen/Qwen2.5-0.5B-Instruct": Shapes(896, 4864, 24, 14 * 64, 2 * 64, 151_936, tied=True),
    "Qwen/Qwen2.5-1.5B-Instruct": Shapes(1536, 8960, 28, 12 * 128, 2 * 128, 151_936, tied=True),
    "Qwen/Qwen2.5-3B-Instruct": Shapes(2048, 11_008, 36, 16 * 128, 2 * 128, 151_936, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": Shapes(3584, 18_944, 28, 28 * 128, 4 * 128, 152_064, tied=False),
    "Qwen/Qwen3-1.7B-Base": Shapes(2048, 6144, 28, 16 * 128, 8 * 128, 151_936, tied=True),
    "Qwen/Qwen3-4B-Instruct-2507": Shapes(2560, 9728, 36, 32 * 128, 8 * 128, 151_936, tied=True),
    "meta-llama/Llama-3.2-1B-Instruct": Shapes(2048, 8192, 16, 32 * 64, 8 * 64, 128_256, tied=True),
}


def read_shapes(path: str) -> Shapes:
    """Read the shapes of a model in a folder, embedded, known here or in the hub's cache; ValueError for another."""
    file = (starter_path(path) or Path(path).expanduser()) / "config.json"
    if not file.is_file():
        if path in KNOWN_SHAPES:
            return KNOWN_SHAPES[path]
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(path, "config.json"))
        except OSError as error:
            raise ValueError(f"{path}: its config.json cannot be read ({error})") from error
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    facts = facts.get("text_config") or facts
    try:
        width = facts.get("hidden_size") or facts["n_embd"]
        heads = facts.get("num_attention_heads") or facts["n_head"]
        size, inner = facts.get("head_dim") or width // heads, facts.get("intermediate_size") or facts.get("n_inner")
        layers, keys = facts.get("num_hidden_layers") or facts["n_layer"], facts.get("num_key_value_heads") or heads
        vocabulary, tied = facts["vocab_size"], facts.get("tie_word_embeddings", True)
    except KeyError as error:
        raise ValueError(f"{path}: its config.json does not name its sizes as usual ({error})") from None
    return Shapes(width, inner or 4 * width, layers, heads * size, keys * size, vocabulary, tied=tied)


def estimate(config: Config, *, device: str, room: float) -> dict[str, dict[str, float]]:
    """Return bytes by part: `always`, `updating` and, where the method samples, `sampling`, in a process on `device`
    (cpu, cuda) that may hold `room` bytes.
    """
    from tinyrl.models.device import CHUNK_ELEMENTS, MICRO_BATCH_TOKENS  # with torch

    shapes, lora = read_shapes(config.model.path), config.lora
    low = config.model.dtype in ("bfloat16", "float16") or (config.model.dtype == "auto" and device == "cuda")
    dtype_bytes = 2 if low else 4

    def weights(of: Shapes, few_bits: str | None = None) -> float:
        return BYTES_A_WEIGHT.get(few_bits or "", dtype_bytes) * of.linear + dtype_bytes * of.embeddings

    modules = None if isinstance(lora.target_modules, str) else lora.target_modules
    adapter = shapes.lora(lora.r, modules)
    trained = adapter if lora.enabled else shapes.linear + shapes.embeddings
    always: dict[str, float] = {"process": PROCESS[device], "adapter": 4 * adapter if lora.enabled else 0}
    always["base"] = weights(shapes, config.model.quantization) if lora.enabled else 4 * trained
    if config.has_reference and not lora.enabled:
        always["reference"] = weights(shapes)
    if config.uses("critic") and config.critic.kind in ("adapter", "separate"):
        own = read_shapes(config.critic.path or config.model.path) if config.critic.kind == "separate" else shapes
        critic = own.lora(lora.r, modules) if lora.enabled else own.linear + own.embeddings
        always["critic"] = 4 * critic + (weights(own) if lora.enabled and config.critic.kind == "separate" else 0)
        trained += critic
    reward = config.reward.model
    if reward is not None and not (Path(reward).expanduser() / "adapter_config.json").is_file():
        always["reward model"] = weights(read_shapes(reward))
    if config.teacher.kind == "model":
        always["teacher"] = weights(read_shapes(str(config.teacher.path)), config.teacher.quantization)
    always["Adam"] = (8 if config.optim.optimizer == "adamw" else 2) * trained
    tokens = config.run.micro_batch_tokens
    tokens = MICRO_BATCH_TOKENS[device] if tokens == "auto" else tokens
    if config.samples:
        tokens = max(tokens, longest_text(config))  # which goes alone where it is longer than a micro-batch
    updating: dict[str, float] = {
        "gradients": 4 * trained,
        "activations": tokens * shapes.activations(dtype_bytes, recomputed=config.model.gradient_checkpointing),
        "logits": LOGITS * min(CHUNK_ELEMENTS[device], tokens * shapes.vocabulary) if config.trains.policy else 0,
    }
    if not config.samples or config.generation.engine == "server":
        return {"always": always, "updating": updating}
    generation = config.generation
    copy = 4 * shapes.linear if dtype_bytes == 4 else 0  # float32 samples from merged weights, where they fit
    rows = min(max(config.on_policy.batch_size, config.run.eval_prompts), generation.max_rows or 1 << 30)
    cache = rows * longest_text(config) * 2 * shapes.layers * shapes.keys * dtype_bytes
    free = max(0.0, ROOM_FOR_CACHE * (room - sum(always.values()) - copy))
    return {"always": always, "updating": updating, "sampling": {"copy": copy, "cache": min(cache, free)}}


def longest_text(config: Config) -> int:
    """Return the most tokens of a prompt with its completion, or with all turns of an episode."""
    generation, environment = config.generation, config.environment
    new = generation.max_new_tokens
    if environment.name or environment.tools or environment.agent:
        new += (environment.max_turns - 1) * (environment.max_observation_tokens + generation.max_new_tokens)
    return generation.max_prompt_tokens + new


def of_long_texts(config: Config, *, device: str) -> dict[str, float]:
    """Return the bytes that 1,000 tokens of a text take in an update: `stored`, and `recomputed` by
    model.gradient_checkpointing.
    """
    low = config.model.dtype in ("bfloat16", "float16") or (config.model.dtype == "auto" and device == "cuda")
    shapes, dtype_bytes = read_shapes(config.model.path), 2 if low else 4
    return {
        "stored": 1000 * shapes.activations(dtype_bytes, recomputed=False),
        "recomputed": 1000 * shapes.activations(dtype_bytes, recomputed=True),
    }


def check_memory(config: Config, *, device: str, memory: str | None = None) -> CheckSection:
    """Compare the estimate with `memory` or what this machine has, and the checkpoints with the disk."""
    if memory is None:
        from tinyrl.models.device import make_accelerator, memory_room

        here = make_accelerator(device, dtype=config.model.dtype).device
        device, room = here.type, float(memory_room(here))
    else:
        device, room = "cpu" if device == "cpu" else "cuda", bytes_of(memory)
    parts = estimate(config, device=device, room=room)
    always, phases = sum(parts["always"].values()), {k: sum(v.values()) for k, v in parts.items() if k != "always"}
    highest = max(phases, key=lambda name: phases[name])
    peak = always + phases[highest]
    needed = (config.run.keep_checkpoints + 2) * (parts["updating"]["gradients"] + parts["always"]["Adam"])
    free = shutil.disk_usage(Path.cwd()).free
    lines = [f"by arithmetic about {size(peak)} on {device}, most of it while {highest}; {size(room)} are there"]
    for name, of in parts.items():
        listed = ", ".join(f"{part} {size(count)}" for part, count in sorted(of.items(), key=lambda p: -p[1]) if count)
        lines.append(f"  {name}: {listed}")
    long = of_long_texts(config, device=device)
    lines.append(
        f"a text longer than a micro-batch takes {size(long['stored'])} for 1,000 tokens while updating, and "
        f"{size(long['recomputed'])} with model.gradient_checkpointing=true"
    )
    lines.append(f"disk: checkpoints take about {size(needed)}; {size(free)} are free")
    rules = (
        ("not enough memory", peak, room, "It takes", "A smaller run.micro_batch_tokens or generation.max_new_tokens; "
         "model.gradient_checkpointing=true; model.quantization=4bit (LoRA); a smaller model."),
        ("not enough disk", needed, free, "Checkpoints take", "Fewer of them: run.keep_checkpoints."),
    )  # fmt: skip
    found = [Finding(name, f"{what} about {size(most)}, and {size(there)} are there.", change, {"needed": most})
             for name, most, there, what, change in rules if most > there]  # fmt: skip
    return CheckSection(
        "memory", lines, {"peak": peak, "room": room, "disk": needed, "parts": parts, "long texts": long}, found
    )


def size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def bytes_of(text: str) -> float:
    """Parse an amount of memory, such as 24GB. Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"--memory {text}: an amount such as 24GB")
    return float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ")


# ---- the page ----

INDENT, MOST_LINES = 13, 20


@dataclass
class CheckSection:
    """A part of the page: lines to read, the same as facts for --json, and what was found wrong."""

    name: str
    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def render(self) -> str:
        """Return the section as at most MOST_LINES lines of the terminal, its name on the left."""
        wrapped = list[str]()
        for line in "\n".join(filter(None, self.lines)).split("\n"):
            indent = " " * (2 + len(line) - len(line.lstrip()))
            wrap = textwrap.TextWrapper(columns() - INDENT, subsequent_indent=indent, break_on_hyphens=False)
            wrapped += wrap.wrap(escape_control(line))
        if len(wrapped) > MOST_LINES:
            wrapped = [*wrapped[: MOST_LINES - 1], f"... {len(wrapped) - MOST_LINES + 1} more lines"]
        return "\n".join(f"{self.name if i == 0 else '':{INDENT}}{line}" for i, line in enumerate(wrapped or ["-"]))
