"""`tinyrl export`: the policy of a checkpoint as a folder that other programs read, checked before it is kept.

The folder appears whole or not at all: it is written under another name, and renamed when it has been checked.
torch is imported only where weights are merged or converted; an adapter is copied as it is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tinyrl
from tinyrl.config.sections import starter_path
from tinyrl.models.reading import ADAPTER_FILES, TOKENIZER_FILES
from tinyrl.models.tokens import DATE
from tinyrl.runs.checkpoint import checkpoint_of, checkpoint_step
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import open_run, run_of
from tinyrl.text import one_line
from tinyrl.tools.export.model_card import PICTURE, model_card

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
FACTS = "export.json"  # marks a folder as a tinyrl export
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank
OWN_FILES = (*ADAPTER_FILES, *TOKENIZER_FILES, "merges.txt", "tokenizer.model")


@dataclass(frozen=True)
class Bundle:
    """An exported folder, notes on it, and commands that use it, by purpose."""

    folder: Path
    notes: list[str]
    commands: dict[str, str]

    def render(self) -> str:
        lines = [one_line(line, 4096) for line in (str(self.folder), *self.notes)]
        return "\n".join([*lines, "", *(f"{what:9}  {one_line(line, 4096)}" for what, line in self.commands.items())])


def export(
    target: str,
    *,
    merge: bool = False,
    dtype: Dtype = "auto",
    output: str | None = None,
    overwrite: bool = False,
    accept_changes: bool = False,
    trust_remote_code: bool = False,
) -> Bundle:
    """Write the folder. Raises ValueError for what cannot be exported so, without loading torch; and, with nothing left
    behind, where the saved model is not the policy: by its log-probabilities in float32, by more than 1 % of greedy
    tokens in another dtype (unless `accept_changes`).
    """
    run = open_run(run_of(Path(target)) or target)
    config = run.read_config()
    lora, whole, rank = config.lora.enabled, merge or not config.lora.enabled, 0
    if not config.trains.policy:
        raise ValueError(f"{target} is a reward model; it is used as it is: reward.model={target}")
    if lora and merge and config.model.random_init:
        raise ValueError(f"{target}: its adapter is on weights drawn at random, which are in no file to merge it into")
    if not whole and dtype != "auto":
        raise ValueError(f"--dtype {dtype} is for a whole model; the adapter stays as it is (or say --merge)")
    kind = "model" if not lora else "merged" if merge else "adapter"
    folder = Path(output) if output else run.path / "export" / (kind if dtype == "auto" else f"{kind}-{dtype}")
    if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir() or any(folder.iterdir())):
        if not overwrite:
            raise ValueError(f"{folder} exists; choose another --output, or use --overwrite")
        if folder.is_symlink() or not (folder / FACTS).is_file():
            raise ValueError(f"--overwrite: {folder} is no exported folder (it has no {FACTS}), so it is left alone")
    checkpoint, saved, notes = checkpoint_of(Path(target)), None, list[str]()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.path.resolve().name).strip("-.") or "policy"  # as a repository may be
    writing = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir(parents=True)
        if lora:
            adapter = json.loads((checkpoint / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
            own = {"r": adapter["r"], "alpha": adapter["lora_alpha"]}
            config = config.model_copy(update={"lora": config.lora.model_copy(update=own)})
            rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
        if whole:
            from tinyrl.tools.export.merge import write_merged

            given = {"dtype": dtype, "run": run, "accept_changes": accept_changes}
            saved, notes = write_merged(config, checkpoint, writing, trust_remote_code=trust_remote_code, **given)
        else:
            for file in OWN_FILES:  # and nothing that only a resume needs
                if (checkpoint / file).is_file():
                    shutil.copyfile(checkpoint / file, writing / file)
        if day := config.task.chat_template.get(DATE):
            notes.append(f"the chat template shows today's date, which was {day} in training")
        step, picture = checkpoint_step(checkpoint), (run.path / PICTURE).is_file()
        if picture:
            shutil.copyfile(run.path / PICTURE, writing / PICTURE)
        steps = read_steps(run.metrics, [])
        card = model_card(config, steps, name=name, step=step, dtype=saved, notes=notes, picture=picture)
        (writing / "README.md").write_text(card, encoding="utf-8")
        facts = {"tinyrl": tinyrl.__version__, "run": run.path.resolve().name, "step": step, "dtype": saved}
        (writing / FACTS).write_text(json.dumps({**facts, "notes": notes}, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(writing, folder)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    base = None if whole else str(starter_path(config.model.path) or config.model.path)
    return Bundle(folder, notes, _commands(str(folder), name=name, base=base, rank=rank))


def _commands(folder: str, *, name: str, base: str | None, rank: int) -> dict[str, str]:
    """Return what can be done with an adapter of this rank for `base`, or with a whole model (base None)."""
    gguf = ["--outfile", f"{name}.gguf"]
    serve, convert = ["vllm", "serve", folder], ["python", "llama.cpp/convert_hf_to_gguf.py", folder, *gguf]
    if base is not None:
        most = next((each for each in RANKS if each >= rank), rank)
        options = ["--enable-lora", "--max-lora-rank", str(most), "--lora-modules", f"{name}={folder}"]
        serve = ["vllm", "serve", base, *options]
        of = ["--base" if Path(base).is_dir() else "--base-model-id", base]
        convert = ["python", "llama.cpp/convert_lora_to_gguf.py", folder, *of, *gguf]
    commands = {"serve": serve, "llama.cpp": convert, "upload": ["hf", "upload", f"OWNER/{name}", folder]}
    return {what: shlex.join(words) for what, words in commands.items()}
