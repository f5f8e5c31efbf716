"""The fixed work of both sides: models by size, prompts, rows, and what a step does. Known to the peer's processes.

Models are built from a config with random weights, so nothing is downloaded. One for the CPU would never end a
completion, so it is taught for 60 steps when to: on random words of which one in 60 is EOS. Completions are then of all
lengths, as in practice. One for a GPU (Qwen2.5's shapes) has logits as sharp as a real model's instead, so that samples
are drawn from few words and differ; each completion has all the tokens it may have. What the words are does not matter
to time and memory. "real" is the folder TINYRL_REAL_MODEL (python examples/smollm2.py), asked for sums in words.

A folder holds model/ prompts.jsonl eval.jsonl, and where PPO needs one reward_model/. Run as a script with settings, it
writes one of a size.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from argparse import Namespace
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measuring, processes

LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
ROWS = 512  # prompts to train on; one more is held out
PPO_PROMPTS, PPO_EPOCHS = 64, 4
CHECKED_STEP = 3  # of training on text, counted from 1: gradients are compared there, when no LoRA matrix is zero
POSITIONS = 32768
PAD, EOS, FIRST_WORD = 0, 1, 3  # token ids; 2 is the unknown word, then come w3, w4, ...
END_SHARE, LESSONS, LESSON_SHAPE, LESSON_RATE = 1 / 60, 60, (12, 96), 1e-3
DEVIATION, DEVIATION_SHAPE = 4.0, (8, 64)  # of logits on a GPU, and the texts and tokens on which it is set
PROMPT_WORDS = (48, 64)  # fewest and most
REAL_MODEL = "TINYRL_REAL_MODEL"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

# ---- models ----


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. early_ends: completions end by themselves; tied: embedding and head are one matrix; family: the
    library's configuration class; own: what only that family's configuration has.
    """

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    early_ends: bool = False
    tied: bool = True
    family: str = "Qwen2Config"
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a block of Qwen2: query, key, value, output, gate, up, down."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        return [*attention, *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden)]

    def library_config(self) -> Any:
        """The library's configuration of it."""
        import transformers

        own = {**self.own}
        if self.family == "Qwen2Config":
            assert self.hidden // self.heads == self.head_size, "Qwen2's heads share the hidden size"
        else:
            own["head_dim"] = self.head_size
        return getattr(transformers, self.family)(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=POSITIONS,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **own,
        )


def family(name: str, config: str, **own: Any) -> Shape:
    """A model of another family with 19 to 21 million parameters, for a CPU."""
    sizes: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_size": 64, "vocabulary": 4096}
    return Shape(name, 384, 8, 1536, **sizes, family=config, own=own)


def linear_attention(heads: int, head_size: int) -> dict[str, Any]:
    """What Qwen3.5's configuration has for its layers without a cache of keys."""
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": head_size,
        "linear_value_head_dim": head_size,
    }


def experts(number: int, *, chosen: int, size: int) -> dict[str, Any]:
    """What Qwen3-MoE's configuration has for its experts."""
    return {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": size, "norm_topk_prob": True}


CPU_SHAPES = (
    Shape("xs", 32, 2, 64, heads=2, kv_heads=1, head_size=16, vocabulary=512, early_ends=True),  # to try a command out
    Shape("s", 256, 6, 1024, heads=4, kv_heads=2, head_size=64, vocabulary=4096, early_ends=True),
    Shape("m", 512, 8, 2048, heads=8, kv_heads=2, head_size=64, vocabulary=4096, early_ends=True),
    Shape("v", 256, 6, 1024, heads=4, kv_heads=2, head_size=64, vocabulary=32768),
    Shape("real", 576, 30, 1536, heads=9, kv_heads=3, head_size=64, vocabulary=49152),  # SmolLM2-135M-Instruct
)
GPU_SHAPES = (
    Shape("0.5b", 896, 24, 4864, heads=14, kv_heads=2, head_size=64, vocabulary=151936),
    Shape("1.5b", 1536, 28, 8960, heads=12, kv_heads=2, head_size=128, vocabulary=151936),
    Shape("3b", 2048, 36, 11008, heads=16, kv_heads=2, head_size=128, vocabulary=151936),
    Shape("7b", 3584, 28, 18944, heads=28, kv_heads=4, head_size=128, vocabulary=152064, tied=False),
    Shape("gemma3-1b", 1152, 26, 6912, heads=4, kv_heads=1, head_size=256, vocabulary=262144,
          family="Gemma3TextConfig", own={"sliding_window": 512}),
    Shape("qwen3.5-0.8b", 1024, 24, 3584, heads=8, kv_heads=2, head_size=256, vocabulary=248320,
          family="Qwen3_5TextConfig", own=linear_attention(16, 128)),
    # of Qwen3-30B-A3B eight of the 48 layers: 5.5 billion parameters, 11 GB
    Shape("qwen3-moe", 2048, 8, 6144, heads=32, kv_heads=4, head_size=128, vocabulary=151936, tied=False,
          family="Qwen3MoeConfig", own=experts(128, chosen=8, size=768)),
    # for a CPU
    Shape("tiny", 64, 2, 128, heads=4, kv_heads=2, head_size=16, vocabulary=500),
    Shape("tiny-gemma3", 64, 6, 128, heads=4, kv_heads=2, head_size=16, vocabulary=500,
          family="Gemma3TextConfig", own={"sliding_window": 8, "query_pre_attn_scalar": 16}),
    Shape("tiny-qwen3.5", 64, 4, 128, heads=4, kv_heads=2, head_size=16, vocabulary=500,
          family="Qwen3_5TextConfig", own=linear_attention(4, 16)),
    Shape("tiny-qwen3-moe", 64, 2, 128, heads=4, kv_heads=2, head_size=16, vocabulary=500,
          family="Qwen3MoeConfig", own=experts(4, chosen=2, size=32)),
)  # fmt: skip
FAMILY_SHAPES = (
    family("qwen3", "Qwen3Config"),
    family("gemma3", "Gemma3TextConfig", sliding_window=64, query_pre_attn_scalar=64),
    family("qwen3.5", "Qwen3_5TextConfig", **linear_attention(6, 64)),
    family("smollm3", "SmolLM3Config"),
)
SIZES, SHAPES, FAMILIES = (
    {shape.name: shape for shape in shapes} for shapes in (CPU_SHAPES, GPU_SHAPES, FAMILY_SHAPES)
)


def build(shape: Shape, folder: Path, *, device: str = "cpu") -> None:
    """Write the model and its tokenizer as `save_pretrained` does. The same shape gives the same weights."""
    if shape.name == "real":  # without the template: the prompts are rendered already
        assert REAL_MODEL in os.environ, f"size real needs the folder of a model in {REAL_MODEL}"
        shutil.copytree(os.environ[REAL_MODEL], folder, ignore=shutil.ignore_patterns("chat_template.jinja"))
        return
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tiny_models import tiny_tokenizer

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(shape.library_config())
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32)
    if shape.early_ends:
        teach_ends(model)
    elif shape.name in SHAPES:
        sharpen(model)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(vocabulary=[f"w{i}" for i in range(FIRST_WORD, shape.vocabulary)])
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    tokenizer.model_max_length = POSITIONS
    tokenizer.save_pretrained(folder)


def teach_ends(model: Any) -> None:
    """Train on random words among which EOS comes with probability END_SHARE, wherever it stands."""
    import torch

    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), LESSON_RATE, weight_decay=0.0)
    for _ in range(LESSONS):
        ids = torch.randint(FIRST_WORD, model.config.vocab_size, LESSON_SHAPE, generator=generator)
        ids[torch.rand(LESSON_SHAPE, generator=generator) < END_SHARE] = EOS
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def sharpen(model: Any) -> None:
    """Set the deviation of the logits, on random words, by the weight of the last norm."""
    import torch

    head, norm = model.get_output_embeddings().weight, model.get_decoder().norm.weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_WORD, len(head), DEVIATION_SHAPE, generator=generator).to(head.device)
    with torch.no_grad():
        states = model.get_decoder()(input_ids=ids).last_hidden_state
        norm.mul_(DEVIATION / (states @ head.T).float().std())


def write_reward_model(model: Path, out: Path) -> None:
    """A classification model of the same shape with one label, and the tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(str(out))
    PreTrainedTokenizerFast.from_pretrained(model).save_pretrained(str(out))


def write_start(model: Path, out: Path) -> None:
    """A fresh LoRA adapter, A random and B zero, as both sides make them; saved, so that A is the same on both."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(**LORA, task_type="CAUSAL_LM"))
    wrapped.save_pretrained(str(out))


# ---- prompts and rows ----


def random_words(shape: Shape, draw: random.Random, fewest: int, most: int) -> str:
    """So many random words, each one token."""
    count = draw.randint(fewest, most)
    return " ".join(f"w{draw.randrange(FIRST_WORD, shape.vocabulary)}" for _ in range(count))


def prompt_texts(shape: Shape, count: int, words: tuple[int, int] = PROMPT_WORDS) -> list[str]:
    """Prompts of random words. The first n do not depend on the count."""
    if shape.name == "real":
        from tinyrl.tasks import sums

        return [TURN.format(row["prompt"]) for row in sums.rows("train")[:count]]
    draw = random.Random(0)
    return [random_words(shape, draw, *words) for _ in range(count)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- a step of GRPO, and the folder of a size ----


@dataclass(frozen=True)
class Grpo:
    """A GRPO step: one update with all tokens weighing the same; a reward of rewards.py by name."""

    num_prompts: int = 8
    group_size: int = 8
    max_new_tokens: int = 128
    kl_coef: float = 0.04
    clip_eps: float = 0.2
    learning_rate: float = 1e-6
    reward: str = "even_words"

    @property
    def rows(self) -> int:
        return self.num_prompts * self.group_size


SPEED = Grpo()
LEARNING = Grpo(num_prompts=64, max_new_tokens=16, kl_coef=0.0, learning_rate=1e-3, reward="sorted_letters")


def prepare(
    shape: Shape,
    *,
    options: Namespace,
    words: tuple[int, int] = PROMPT_WORDS,
    device: str = "cpu",
    reward_model: bool = False,
    timeout: float = processes.TIMEOUT_S,
) -> Path:
    """The folder of a size's files, made where it is not there yet. Raises processes.Failed."""
    folder = options.out / "work" / shape.name
    lacks_reward_model = reward_model and not (folder / "reward_model" / "config.json").is_file()
    if lacks_reward_model or not (folder / "done").is_file():
        print(f"building {shape.name} ...", flush=True)
        question = {"shape": asdict(shape), "files": str(folder), "words": words, "device": device}
        processes.run("work", {**question, "reward_model": reward_model}, options=options, timeout=timeout)
    return folder


def write(settings: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(settings["threads"])
    folder, shape = Path(settings["files"]), Shape(**settings["shape"])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "done").is_file():
        build(shape, folder / "model", device=settings["device"])
        rows = [{"prompt": text} for text in prompt_texts(shape, ROWS + 1, settings["words"])]
        write_rows(folder / "prompts.jsonl", rows[:ROWS])
        write_rows(folder / "eval.jsonl", rows[ROWS:])
        (folder / "done").touch()
    if settings["reward_model"]:
        write_reward_model(folder / "model", folder / "reward_model")
    return {}


if __name__ == "__main__":
    measuring.serve(write)
