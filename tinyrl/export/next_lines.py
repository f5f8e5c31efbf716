"""Commands that use an exported folder: served with vLLM, converted for llama.cpp, uploaded."""

from __future__ import annotations

import shlex
from pathlib import Path

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank


def next_lines(folder: Path, *, name: str, base: str | None, rank: int) -> list[tuple[str, str]]:
    """(what for, command). base: what the adapter of `rank` is for; None: the folder holds a whole model."""
    where, gguf = str(folder), f"{name}.gguf"
    upload = ("upload", ["hf", "upload", f"OWNER/{name}", where])
    if base is None:
        lines = [
            ("serve", ["vllm", "serve", where]),
            ("llama.cpp", ["python", "llama.cpp/convert_hf_to_gguf.py", where, "--outfile", gguf]),
            upload,
        ]
    else:
        most = next((each for each in RANKS if each >= rank), rank)
        lora = ["--enable-lora", "--max-lora-rank", str(most), "--lora-modules", f"{name}={where}"]
        is_folder = Path(base).is_dir()
        named = ["--base" if is_folder else "--base-model-id", base]
        lines = [
            ("serve", ["vllm", "serve", base, *lora]),
            ("llama.cpp", ["python", "llama.cpp/convert_lora_to_gguf.py", where, *named, "--outfile", gguf]),
            upload,
        ]
    return [(what, shlex.join(words)) for what, words in lines]
