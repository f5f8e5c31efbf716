"""The benchmarks' models by size, built from a config with random weights, and prompts of random words.

A random model would never end a completion, so it is taught for 60 steps when to: on random words of which one in 60 is
EOS. Completions are then of all lengths, as in practice. What the words are does not matter to time and memory.
"real" is no random model but the folder TINYRL_REAL_MODEL (python -m tinyrl.starter.smollm2), asked for sums in words.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POSITIONS = 1024
PAD, EOS, FIRST_WORD = 0, 1, 3  # token ids; 2 is the unknown word, then come w3, w4, ...
END_SHARE, LESSONS, LESSON_SHAPE, LESSON_RATE = 1 / 60, 60, (12, 96), 1e-3
PROMPT_WORDS = (48, 64)  # fewest and most
REAL_MODEL = "TINYRL_REAL_MODEL"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Shape:
    """A Qwen2-shaped model with tied embeddings. early_ends: completions end by themselves."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    early_ends: bool = True

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each linear layer of one block: query, key, value, output, gate, up, down."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        return [*attention, *[(self.hidden, self.intermediate)] * 2, (self.intermediate, self.hidden)]

    def qwen2(self, **others: Any) -> Any:
        """The library's configuration of it (a Qwen2Config)."""
        from transformers import Qwen2Config

        assert self.hidden // self.heads == self.head_size, "Qwen2's heads share the hidden size"
        return Qwen2Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            **others,
        )


SIZES = {
    shape.name: shape
    for shape in (
        Shape("xs", 32, 2, 64, heads=2, kv_heads=1, head_size=16, vocabulary=512),  # to try a command out
        Shape("s", 256, 6, 1024, heads=4, kv_heads=2, head_size=64, vocabulary=4096),
        Shape("m", 512, 8, 2048, heads=8, kv_heads=2, head_size=64, vocabulary=4096),
        Shape("v", 256, 6, 1024, heads=4, kv_heads=2, head_size=64, vocabulary=32768, early_ends=False),
        Shape("real", 576, 30, 1536, heads=9, kv_heads=3, head_size=64, vocabulary=49152),  # SmolLM2-135M-Instruct
    )
}


def copy_real(folder: Path) -> None:
    """The model and tokenizer of TINYRL_REAL_MODEL, without the template: the prompts are rendered already."""
    assert REAL_MODEL in os.environ, f"size real needs the folder of a model in {REAL_MODEL}"
    shutil.copytree(os.environ[REAL_MODEL], folder, ignore=shutil.ignore_patterns("chat_template.jinja"))


def build(shape: Shape, folder: Path) -> None:
    """Write the model and its tokenizer as `save_pretrained` does. The same shape gives the same weights."""
    if shape.name == "real":
        return copy_real(folder)
    import torch
    from transformers import Qwen2ForCausalLM

    from tests.tiny_models import tiny_tokenizer

    config = shape.qwen2(
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    if shape.early_ends:
        teach_ends(model)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer(vocabulary=[f"w{i}" for i in range(FIRST_WORD, shape.vocabulary)])
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
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


def prompt_texts(shape: Shape, count: int) -> list[str]:
    """Prompts of 48 to 64 random words, each one token. The first n do not depend on the count."""
    if shape.name == "real":
        from tinyrl.tasks import sums

        return [TURN.format(row["prompt"]) for row in sums.rows("train")[:count]]
    draw = random.Random(0)

    def text() -> str:
        length = draw.randint(*PROMPT_WORDS)
        return " ".join(f"w{draw.randrange(FIRST_WORD, shape.vocabulary)}" for _ in range(length))

    return [text() for _ in range(count)]
