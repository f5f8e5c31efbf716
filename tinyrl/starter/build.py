"""The build of the embedded default: `python -m tinyrl.starter.build OUT` (about five minutes on one core).

Writes the generated text, a tokenizer and an untrained model's config into OUT/work, trains with the package's own
`tinyrl train sft` and `tinyrl train reward` (recipes starter-sft and starter-reward), and leaves OUT/model and
OUT/reward_model with CHECKSUMS.json beside them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tinyrl.starter.text import language_rows, reward_pairs
from tinyrl.starter.tokenizer import EOS, MAX_LENGTH, PAD, VOCABULARY_SIZE, build_tokenizer

SEED = 0
LANGUAGE_ROWS, REWARD_ROWS, EVAL_ROWS = 102_400, 25_600, 2_000
KEPT = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
SHAPES: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256},
    "reward_model": {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 192},
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_blank_models(work: Path) -> None:
    """A folder with tokenizer and config for each shape; `model.random_init` draws the weights from the run's seed."""
    from transformers import LlamaConfig

    tokenizer = build_tokenizer(SEED)
    for name, shape in SHAPES.items():
        config = LlamaConfig(
            **shape,
            vocab_size=VOCABULARY_SIZE,
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


def build(out: Path) -> None:
    """Generate, train, and copy what is kept; CHECKSUMS.json holds SHA-256 of the weights and the held-out numbers."""
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    write_rows(work / "language.jsonl", language_rows(LANGUAGE_ROWS, SEED))
    write_rows(work / "language_eval.jsonl", language_rows(EVAL_ROWS, SEED + 1))
    write_rows(work / "pairs.jsonl", reward_pairs("train", num_rows=REWARD_ROWS, seed=SEED))
    write_rows(work / "pairs_eval.jsonl", reward_pairs("eval", num_rows=EVAL_ROWS, seed=SEED))
    write_blank_models(work)
    facts: dict[str, Any] = {}
    for method, recipe, model, data in (
        ("sft", "starter-sft", "model", "language"),
        ("reward", "starter-reward", "reward_model", "pairs"),
    ):
        checkpoint = train(method, recipe, work=work, model=model, data=data)
        (out / model).mkdir(exist_ok=True)
        for name in KEPT:
            if (checkpoint / name).is_file():
                shutil.copyfile(checkpoint / name, out / model / name)
        last = json.loads((work / f"{model}_run" / "metrics.jsonl").read_text().splitlines()[-1])
        digest = hashlib.sha256((out / model / "model.safetensors").read_bytes()).hexdigest()
        facts[model] = {"sha256": digest, **{k: v for k, v in last.items() if k.startswith("eval/")}}
    (out / "CHECKSUMS.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tinyrl.starter.build OUT")
    build(Path(sys.argv[1]))
