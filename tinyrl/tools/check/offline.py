"""Estimate the memory and disk of a run from its model's config.json, without loading a weight.

The peak is what stays (weights, adapters, Adam's moments) plus the larger of sampling (copy, cache) and updating
(gradients, activations of a full micro-batch, a chunk of logits). Completions are taken to be as long as they may be,
so a run whose completions end early takes less. Prompts and rows of evaluation are those that were read, or as many as
settings allow where none were.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.formatting import format_bytes
from tinyrl.runs.finding import Finding
from tinyrl.runs.records import json_object
from tinyrl.runs.resolve import has_vision_tower
from tinyrl.tasks import load_task
from tinyrl.tools.check.reward import has_environment
from tinyrl.tools.check.section import CheckSection

PROCESS = {"cpu": 0.45e9, "cuda": 0.0}  # Python, torch and its libraries; on a GPU only tensors are counted
BYTES_A_WEIGHT = {"4bit": 0.5 + 0.127 / 8, "8bit": 1.0}  # NF4 with its scales (2305.14314, section 3), LLM.int8
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
ROOM_FOR_CACHE = 0.4  # of the free memory: the sampler decodes fewer rows at a time where all would need more


@dataclass(frozen=True)
class Experts:
    """Experts of each layer: how many, the width of one, and how many a token goes to."""

    count: int
    inner: int
    chosen: int


@dataclass(frozen=True)
class Shapes:
    """Sizes of a decoder: width, MLP width, layers, query heads x head size, key heads x head size, vocabulary. With
    experts the MLP is the shared one, of width 0 where there is none.
    """

    width: int
    inner: int
    layers: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    experts: Experts | None = None

    @property
    def linear(self) -> int:
        """Return the weights of the linear layers: q, k, v, o, gate, up, down."""
        return self.layers * self.width * (2 * self.queries + 2 * self.keys + 3 * self.inner)

    @property
    def of_experts(self) -> int:
        """Return the weights of all experts."""
        return 0 if self.experts is None else self.layers * self.width * 3 * self.experts.inner * self.experts.count

    @property
    def all(self) -> int:
        return self.linear + self.of_experts + self.embeddings

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.width * (1 if self.tied else 2)

    def lora(self, rank: int, modules: list[str] | None) -> int:
        """Return the weights of an adapter on these modules (None: all linear layers)."""
        outputs = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys, "o_proj": self.queries,
                   "gate_proj": self.inner, "up_proj": self.inner, "down_proj": self.inner}  # fmt: skip
        return self.layers * rank * sum(self.width + outputs[m] for m in modules or outputs if outputs.get(m))

    def lora_of_experts(self, rank: int, parameters: str | list[str] | None) -> int:
        """Return the weights of an adapter on the experts, as lora.target_parameters names their matrices."""
        if self.experts is None or parameters is None or parameters == "peft":
            return 0
        sides = {"gate_up_proj": self.width + 2 * self.experts.inner, "down_proj": self.width + self.experts.inner}
        ends = [*sides] if isinstance(parameters, str) else [name.rpartition(".")[2] for name in parameters]
        return self.layers * self.experts.count * rank * sum(size for name, size in sides.items() if name in ends)

    def activations(self, dtype_bytes: int, *, recomputed: bool) -> int:
        """Return the bytes that one token takes until its backward pass, through our own layers: what each layer saves,
        or where layers are recomputed, their inputs beside the attention of one layer, whose norm is in float32.
        """
        if not recomputed:
            inner = self.inner if self.experts is None else self.inner + self.experts.chosen * self.experts.inner
            return dtype_bytes * self.layers * (2 * self.width + 2 * self.queries + 2 * self.keys + 3 * inner)
        in_float32 = 0 if dtype_bytes == 4 else 2 * 4 * self.width
        return dtype_bytes * ((self.layers + 6) * self.width + 4 * (self.queries + self.keys)) + in_float32

    def tile(self, dtype_bytes: int) -> int:
        """Return the bytes that one token of a tile takes in the MLP of a recomputed layer and its backward pass."""
        inner = self.inner if self.experts is None else self.inner + self.experts.chosen * self.experts.inner
        return dtype_bytes * 6 * inner


@dataclass(frozen=True)
class ReadRows:
    """Sizes of the rows of a run. prompt_tokens: of the longest prompt; eval_rows: held-out rows that there are."""

    prompt_tokens: int
    eval_rows: int


def allowed_rows(config: Config) -> ReadRows:
    """Return the largest sizes that settings allow."""
    return ReadRows(prompt_tokens=config.generation.max_prompt_tokens, eval_rows=config.run.eval_prompts)


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


# Sizes in config.json, and GPT-2's names of them.
SIZES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "vocab_size": "vocab_size",
    "intermediate_size": "n_inner",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
# Sizes of experts: by one of these names.
EXPERT_SIZES = {
    "count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "inner": ("moe_intermediate_size", "intermediate_size"),
    "chosen": ("num_experts_per_tok",),
}
NEEDED_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


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
    facts = json_object(file)
    facts = facts.get("text_config") or facts
    unusual = f"{path}: its config.json does not name its sizes as usual"
    if not isinstance(facts, dict):
        raise ValueError(f"{unusual} (text_config={facts!r:.40})")
    sizes = {}
    for name, other in SIZES.items():
        value = facts.get(name) or facts.get(other)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{unusual} ({name}={value!r:.40})")
        sizes[name] = value
    missing = [name for name in NEEDED_SIZES if sizes[name] is None]
    if missing:
        raise ValueError(f"{unusual} ('{missing[0]}')")
    width = sizes["hidden_size"]
    heads = sizes["num_attention_heads"]
    vocabulary = sizes["vocab_size"]
    size = sizes["head_dim"] or width // heads
    keys = sizes["num_key_value_heads"] or heads
    inner = sizes["intermediate_size"] or 4 * width
    experts = _experts_in(facts)
    if experts is not None:
        shared = facts.get("shared_expert_intermediate_size")
        inner = shared if isinstance(shared, int) else 0
    tied = bool(facts.get("tie_word_embeddings", True))
    layers = sizes["num_hidden_layers"]
    return Shapes(width, inner, layers, heads * size, keys * size, vocabulary, tied=tied, experts=experts)


def _experts_in(facts: dict[str, Any]) -> Experts | None:
    """Read the experts of each layer from a config.json; None where it names none."""
    sizes = dict[str, int]()
    for field, names in EXPERT_SIZES.items():
        value = next((facts[name] for name in names if facts.get(name)), None)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return None
        sizes[field] = value
    return Experts(**sizes)


def estimate(config: Config, *, device: str, room: float, read: ReadRows | None = None) -> dict[str, dict[str, float]]:
    """Return bytes by part: `always`, `updating` and, where the method samples, `sampling`, in a process on `device`
    (cpu, cuda) that may hold `room` bytes. read: sizes of the rows; None: those that settings allow.
    """
    from tinyrl.models.device import CHUNK_ELEMENTS, LOGIT_BYTES, MICRO_BATCH_TOKENS, gpu_chunk_tokens  # with torch

    read = read or allowed_rows(config)
    shapes = read_shapes(config.model.path)
    lora = config.lora
    low = config.model.dtype in ("bfloat16", "float16") or (config.model.dtype == "auto" and device == "cuda")
    dtype_bytes = 2 if low else 4

    def weights(of: Shapes, few_bits: str | None = None) -> float:
        """Experts are never of few bits, which bitsandbytes has for linear layers alone."""
        return BYTES_A_WEIGHT.get(few_bits or "", dtype_bytes) * of.linear + dtype_bytes * (of.all - of.linear)

    modules = None if isinstance(lora.target_modules, str) else lora.target_modules

    def adapter_on(of: Shapes) -> int:
        return of.lora(lora.r, modules) + of.lora_of_experts(lora.r, lora.target_parameters)

    adapter = adapter_on(shapes)
    trained = adapter if lora.enabled else shapes.all
    always: dict[str, float] = {"process": PROCESS[device], "adapter": 4 * adapter if lora.enabled else 0}
    always["base"] = weights(shapes, config.model.quantization) if lora.enabled else 4 * trained
    if config.has_reference and not lora.enabled:
        always["reference"] = weights(shapes)
    if config.uses("critic") and config.critic.kind in ("adapter", "separate"):
        own = read_shapes(config.critic.path or config.model.path) if config.critic.kind == "separate" else shapes
        critic = adapter_on(own) if lora.enabled else own.all
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
    chunk = CHUNK_ELEMENTS["cpu"]
    if device == "cuda":
        left = max(0.0, room - sum(always.values()))
        chunk = gpu_chunk_tokens(shapes.vocabulary, free=left) * shapes.vocabulary
    if config.samples:
        tokens = max(tokens, longest_text(config, read))  # which goes alone where it is longer than a micro-batch
    recomputed = config.model.gradient_checkpointing
    activations = tokens * shapes.activations(dtype_bytes, recomputed=recomputed)
    if recomputed:
        activations += min(tokens, MICRO_BATCH_TOKENS[device]) * shapes.tile(dtype_bytes)
    updating: dict[str, float] = {
        "gradients": 4 * trained,
        "activations": activations,
        "logits": LOGIT_BYTES * min(chunk, tokens * shapes.vocabulary) if config.trains.policy else 0,
    }
    if not config.samples or config.generation.engine == "server":
        return {"always": always, "updating": updating}
    room -= sum(always.values())
    sampling = sampling_bytes(config, shapes, read, dtype_bytes=dtype_bytes, room=room)
    return {"always": always, "updating": updating, "sampling": sampling}


def sampling_bytes(
    config: Config, shapes: Shapes, read: ReadRows, *, dtype_bytes: int, room: float
) -> dict[str, float]:
    """Return the bytes of merged weights and of the cache of keys and values, which takes a share of the `room`."""
    of_experts = shapes.of_experts if shapes.lora_of_experts(1, config.lora.target_parameters) else 0
    copy = 4 * (shapes.linear + of_experts) if dtype_bytes == 4 else 0  # float32 samples from them, where they fit
    eval_rows = min(config.run.eval_prompts, read.eval_rows)
    rows = min(max(config.on_policy.batch_size, eval_rows), config.generation.max_rows or 1 << 30)
    cache = rows * longest_text(config, read) * 2 * shapes.layers * shapes.keys * dtype_bytes
    return {"copy": copy, "cache": min(cache, max(0.0, ROOM_FOR_CACHE * (room - copy)))}


def longest_text(config: Config, read: ReadRows) -> int:
    """Return the most tokens of a prompt with its completion: of an episode with the replies between its turns, whose
    own tokens generation.max_new_tokens limits together. The template's text around a reply is not counted.
    """
    longest = read.prompt_tokens + config.generation.max_new_tokens
    environment = config.environment
    task = load_task(config.task.name or "rows")
    if environment.agent or has_environment(config, task):
        longest += (environment.max_turns - 1) * environment.max_observation_tokens
    return longest


def of_long_texts(config: Config, *, device: str) -> dict[str, float]:
    """Return the bytes that 1,000 tokens of a text take in an update: `stored`, and `recomputed` by
    model.gradient_checkpointing.
    """
    low = config.model.dtype in ("bfloat16", "float16") or (config.model.dtype == "auto" and device == "cuda")
    shapes = read_shapes(config.model.path)
    dtype_bytes = 2 if low else 4
    return {
        "stored": 1000 * shapes.activations(dtype_bytes, recomputed=False),
        "recomputed": 1000 * shapes.activations(dtype_bytes, recomputed=True),
    }


def check_memory(
    config: Config, *, device: str, memory: str | None = None, read: ReadRows | None = None
) -> CheckSection:
    """Compare the estimate with `memory` or what this machine has, and the checkpoints with the disk. read: sizes of
    the rows; None: those that settings allow.
    """
    if memory is None:
        from tinyrl.models.device import make_device, memory_room  # with torch

        here = make_device(device, dtype=config.model.dtype).device
        device = here.type
        room = float(memory_room(here))
    else:
        device = "cpu" if device == "cpu" else "cuda"
        room = bytes_of(memory)
    parts = estimate(config, device=device, room=room, read=read)
    always = sum(parts["always"].values())
    phases = {k: sum(v.values()) for k, v in parts.items() if k != "always"}
    highest = max(phases, key=lambda name: phases[name])
    peak = always + phases[highest]
    needed = (config.run.keep_checkpoints + 2) * (parts["updating"]["gradients"] + parts["always"]["Adam"])
    free = shutil.disk_usage(Path.cwd()).free
    most = f"most of it while {highest}; {format_bytes(room)} are there"
    lines = [f"by arithmetic about {format_bytes(peak)} on {device}, {most}"]
    if config.samples:
        sizes = read or allowed_rows(config)
        whose = "as settings allow them" if read is None else "as they were read"
        rows = f"{min(config.run.eval_prompts, sizes.eval_rows):,} rows of evaluation"
        lines.append(f"  for prompts of up to {sizes.prompt_tokens:,} tokens and {rows}, {whose}")
    for name, of in parts.items():
        largest = sorted(of.items(), key=lambda part: -part[1])
        lines.append(f"  {name}: {', '.join(f'{part} {format_bytes(count)}' for part, count in largest if count)}")
    long = of_long_texts(config, device=device)
    lines.append(
        f"a text longer than a micro-batch takes {format_bytes(long['stored'])} for 1,000 tokens while updating, and "
        f"{format_bytes(long['recomputed'])} with model.gradient_checkpointing=true"
    )
    if has_vision_tower(config.model.path):
        lines.append("rows with images take more: the model's vision tower, which is not counted here")
    lines.append(f"disk: checkpoints take about {format_bytes(needed)}; {format_bytes(free)} are free")
    facts = {"peak": peak, "room": room, "disk": needed, "parts": parts, "long texts": long}
    section = CheckSection("memory", lines, facts)
    if peak > room:
        finding = Finding(
            name="not enough memory",
            what=f"It takes about {format_bytes(peak)}, and {format_bytes(room)} are there.",
            change="A smaller run.micro_batch_tokens or generation.max_new_tokens; model.gradient_checkpointing=true; "
            "model.quantization=4bit (LoRA); a smaller model.",
            figures={"needed": peak},
        )
        section.findings.append(finding)
    if needed > free:
        finding = Finding(
            name="not enough disk",
            what=f"Checkpoints take about {format_bytes(needed)}, and {format_bytes(free)} are there.",
            change="Fewer of them: run.keep_checkpoints.",
            figures={"needed": needed},
        )
        section.findings.append(finding)
    return section


def bytes_of(text: str) -> float:
    """Parse an amount of memory in GB, such as 24, or with its unit, such as 24GB. Raises ValueError for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])i?B?)?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"--memory {text}: an amount in GB, such as 24, or with its unit, such as 512MB")
    return float(match[1]) * UNITS[(match[2] or "G").upper()]
