"""The build of the embedded models: `python -m examples.embedded_models.build OUT` (about nine minutes on one core).

Writes the generated text, tokenizers and untrained models' configs into OUT/work, trains with the package's own
`tinyrl train sft` and `tinyrl train reward` (by the recipes beside this file), and leaves a folder a model in OUT with
CHECKSUMS.json beside them. `... OUT lookup_model` builds that one alone, `... OUT
teacher` the adapter that `tinyrl train distill` learns from.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from examples.embedded_models.reviews import reward_pairs
from examples.embedded_models.text import episode_rows, language_rows, vocabulary
from tinyrl.data.writers import write_rows

HERE = Path(__file__).parent
VOCABULARY_SIZE = 768
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MAX_LENGTH = 256
_CORPUS_ROWS = 20_000
SEED = 0
LANGUAGE_ROWS, REWARD_ROWS, EPISODE_ROWS, EVAL_ROWS = 102_400, 25_600, 128_000, 2_000
KEPT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class Plan(NamedTuple):
    """How one model is built: the command that trains it, and its rows (written to DATA.jsonl)."""

    method: str
    recipe: str
    data: str


PLANS = {
    "model": Plan("sft", "sft", "language"),
    "reward_model": Plan("reward", "reward", "pairs"),
    "lookup_model": Plan("sft", "lookup-sft", "episodes"),  # shipped rounded to bfloat16, at half the size
}


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
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
    return _of_library(tokenizer)


def build_lookup_tokenizer() -> PreTrainedTokenizerFast:
    ids = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s?\S+"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return _of_library(tokenizer, unk_token=UNKNOWN)


def _of_library(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        **special,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def rows_of(data: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    if data == "language":
        return language_rows(LANGUAGE_ROWS, SEED), language_rows(EVAL_ROWS, SEED + 1)
    if data == "episodes":
        return episode_rows(EPISODE_ROWS, SEED), episode_rows(EVAL_ROWS, SEED + 1)
    return reward_pairs("train", num_rows=REWARD_ROWS, seed=SEED), reward_pairs("eval", num_rows=EVAL_ROWS, seed=SEED)


def write_blank_models(work: Path, names: Iterable[str] = PLANS) -> None:
    """A folder with tokenizer and config for each model; `model.random_init` draws the weights from the run's seed."""
    for name in names:
        tokenizer = build_lookup_tokenizer() if name == "lookup_model" else build_tokenizer(SEED)
        layers, inner = (2, 192) if name == "reward_model" else (3, 256)
        config = LlamaConfig(
            hidden_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=inner,
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


def train(name: str, work: Path, *arguments: str) -> Path:
    """Run `tinyrl train ARGUMENTS`; the folder of its last checkpoint."""
    command = [sys.executable, "-m", "tinyrl", "train", *arguments, f"run.seed={SEED}"]
    command += ["--output-dir", str(work), "--name", f"{name}_run", "--overwrite"]
    subprocess.run(command, check=True)
    return sorted((work / f"{name}_run" / "checkpoints").iterdir())[-1]


def write_rounded(weights: Path, out: Path) -> None:
    """Weights as bfloat16."""
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(rounded, out, metadata={"format": "pt"})


def build(out: Path, names: Iterable[str] = PLANS) -> None:
    """Generate, train, and copy what is kept; CHECKSUMS.json holds SHA-256 of the weights and the held-out numbers
    (those of the lookup model before its weights are rounded).
    """
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    write_blank_models(work, names)
    facts: dict[str, Any] = {}
    for model in names:
        method, recipe, data = PLANS[model]
        for end, rows in zip(("", "_eval"), rows_of(data), strict=True):
            write_rows(work / f"{data}{end}.jsonl", rows)
        where = [f"task.data={work / data}.jsonl", f"task.eval_data={work / data}_eval.jsonl"]
        checkpoint = train(model, work, method, str(HERE / f"{recipe}.yaml"), f"model.path={work / model}", *where)
        (out / model).mkdir(exist_ok=True)
        for name in KEPT:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, out / model / name)
        if model == "lookup_model":
            write_rounded(checkpoint / "model.safetensors", out / model / "model.safetensors")
            config = json.loads((checkpoint / "config.json").read_text())
            (out / model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2) + "\n")
        last = json.loads((work / f"{model}_run" / "metrics.jsonl").read_text().splitlines()[-1])
        digest = hashlib.sha256((out / model / "model.safetensors").read_bytes()).hexdigest()
        facts[model] = {"sha256": digest, **{k: v for k, v in last.items() if k.startswith("eval/")}}
    (out / "CHECKSUMS.json").write_text(json.dumps(facts, indent=1) + "\n")


def build_teacher(out: Path) -> None:
    """The adapter of `tinyrl train grpo`, which sorts, rounded to bfloat16: what `tinyrl train distill` learns from."""
    checkpoint = train("teacher", out / "work", "grpo")
    (out / "teacher").mkdir(exist_ok=True)
    shutil.copyfile(checkpoint / "adapter_config.json", out / "teacher" / "adapter_config.json")
    write_rounded(checkpoint / "adapter_model.safetensors", out / "teacher" / "adapter_model.safetensors")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= {*PLANS, "teacher"}:
        sys.exit(f"usage: python -m examples.embedded_models.build OUT [{'|'.join(PLANS)}|teacher ...]")
    if sys.argv[2:] == ["teacher"]:
        build_teacher(Path(sys.argv[1]))
    else:
        build(Path(sys.argv[1]), sys.argv[2:] or PLANS)
