"""The build of the embedded models: `python -m tinyrl.starter.build OUT` (about nine minutes on one core).

Writes the generated text, tokenizers and untrained models' configs into OUT/work, trains with the package's own
`tinyrl train sft` and `tinyrl train reward` (recipes starter-sft, starter-reward and lookup-sft), and leaves a folder a
model in OUT with CHECKSUMS.json beside them. `... OUT lookup_model` builds that one alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyrl.starter.lookup import vocabulary
from tinyrl.starter.text import episode_rows, language_rows, reward_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# ---- The tokenizers of the embedded models ----
# The starter's is byte-level BPE learnt from the language model's corpus, so any text round-trips. A space and a letter
# are one token, as a test checks: the sorting task needs that. The lookup model's knows the words of its world, each
# with the space before it, and reads every other word as <unk>.


VOCABULARY_SIZE = 768
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MAX_LENGTH = 256
_CORPUS_ROWS = 20_000


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """Learn the starter's tokenizer; the same seed gives the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (row["prompt"] + row["completion"] for row in language_rows(_CORPUS_ROWS, seed))
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_lookup_tokenizer() -> PreTrainedTokenizerFast:
    """The lookup model's tokenizer: one token a word."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s?\S+"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


# ---- The build of the embedded models ----


SEED = 0
LANGUAGE_ROWS, REWARD_ROWS, EPISODE_ROWS, EVAL_ROWS = 102_400, 25_600, 128_000, 2_000
KEPT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Plan:
    """How one model is built: the command that trains it, its rows (written to DATA.jsonl), its shape.

    bfloat16: the trained weights are shipped rounded, at half the size.
    """

    method: str
    recipe: str
    data: str
    shape: dict[str, Any]
    bfloat16: bool = False


PLANS = {
    "model": Plan(
        "sft",
        "starter-sft",
        "language",
        {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256},
    ),
    "reward_model": Plan(
        "reward",
        "starter-reward",
        "pairs",
        {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192},
    ),
    "lookup_model": Plan(
        "sft",
        "lookup-sft",
        "episodes",
        {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256},
        bfloat16=True,
    ),
}


def rows_of(data: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(rows to train on, held-out rows) of one kind of generated data."""
    if data == "language":
        return language_rows(LANGUAGE_ROWS, SEED), language_rows(EVAL_ROWS, SEED + 1)
    if data == "episodes":
        return episode_rows(EPISODE_ROWS, SEED), episode_rows(EVAL_ROWS, SEED + 1)
    return reward_pairs("train", num_rows=REWARD_ROWS, seed=SEED), reward_pairs("eval", num_rows=EVAL_ROWS, seed=SEED)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def tokenizer_of(model: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one embedded model."""
    return build_lookup_tokenizer() if model == "lookup_model" else build_tokenizer(SEED)


def write_blank_models(work: Path, names: Iterable[str] = PLANS) -> None:
    """A folder with tokenizer and config for each model; `model.random_init` draws the weights from the run's seed."""
    from transformers import LlamaConfig

    for name in names:
        tokenizer = tokenizer_of(name)
        config = LlamaConfig(
            **PLANS[name].shape,
            vocab_size=len(tokenizer),
            max_position_embeddings=MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.get_vocab()[EOS],
            pad_token_id=tokenizer.get_vocab()[PAD],
            architectures=["LlamaForCausalLM"],
        )
        config.save_pretrained(work / name)
        tokenizer.save_pretrained(work / name)


def train(method: str, recipe: str, *, work: Path, model: str, data: str) -> Path:
    """Run `tinyrl train METHOD RECIPE` on generated rows; the folder of its last checkpoint."""
    command = [
        sys.executable,
        "-m",
        "tinyrl",
        "train",
        method,
        recipe,
        f"model.path={work / model}",
        f"task.data={work / data}.jsonl",
        f"task.eval_data={work / data}_eval.jsonl",
        f"run.seed={SEED}",
        "--output-dir",
        str(work),
        "--name",
        f"{model}_run",
        "--overwrite",
    ]
    subprocess.run(command, check=True)
    return sorted((work / f"{model}_run" / "checkpoints").iterdir())[-1]


def round_to_bfloat16(folder: Path) -> None:
    """Round the weights in a model's folder, and say so in its config."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")


def build(out: Path, names: Iterable[str] = PLANS) -> None:
    """Generate, train, and copy what is kept; CHECKSUMS.json holds SHA-256 of the weights and the held-out numbers
    (those of the lookup model before its weights are rounded).
    """
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    write_blank_models(work, names)
    facts: dict[str, Any] = {}
    for model in names:
        plan = PLANS[model]
        rows, held_out = rows_of(plan.data)
        write_rows(work / f"{plan.data}.jsonl", rows)
        write_rows(work / f"{plan.data}_eval.jsonl", held_out)
        checkpoint = train(plan.method, plan.recipe, work=work, model=model, data=plan.data)
        (out / model).mkdir(exist_ok=True)
        for name in KEPT:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, out / model / name)
        if plan.bfloat16:
            round_to_bfloat16(out / model)
        last = json.loads((work / f"{model}_run" / "metrics.jsonl").read_text().splitlines()[-1])
        digest = hashlib.sha256((out / model / "model.safetensors").read_bytes()).hexdigest()
        facts[model] = {"sha256": digest, **{k: v for k, v in last.items() if k.startswith("eval/")}}
    (out / "CHECKSUMS.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(PLANS):
        sys.exit(f"usage: python -m tinyrl.starter.build OUT [{'|'.join(PLANS)} ...]")
    build(Path(sys.argv[1]), sys.argv[2:] or PLANS)
