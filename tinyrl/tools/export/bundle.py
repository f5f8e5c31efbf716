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
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.models.reading import ADAPTER_FILES, TOKENIZER_FILES
from tinyrl.models.templates import DATE
from tinyrl.runs.checkpoint import checkpoint_of, checkpoint_step
from tinyrl.runs.records import read_steps
from tinyrl.runs.run_dir import RunDir, open_run, run_of
from tinyrl.text import one_line
from tinyrl.tools.export.model_card import PICTURE, model_card

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
FACTS = "export.json"  # by which a folder is known as ours
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank
OWN_FILES = (*ADAPTER_FILES, *TOKENIZER_FILES, "merges.txt", "tokenizer.model")


@dataclass(frozen=True)
class Bundle:
    """An exported folder: what there is to know of it, and (what for, command) of what can be done with it."""

    folder: Path
    notes: tuple[str, ...]
    commands: list[tuple[str, str]]

    def render(self) -> str:
        width = max(len(what) for what, _ in self.commands)
        said = [one_line(line, 4096) for line in (str(self.folder), *self.notes)]
        return "\n".join([*said, "", *(f"{what:{width}}  {one_line(line, 4096)}" for what, line in self.commands)])


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
    config, rank = run.read_config(), 0
    folder = _folder_of(run, config, target, merge=merge, dtype=dtype, output=output, overwrite=overwrite)
    checkpoint, whole = checkpoint_of(Path(target)), merge or not config.lora.enabled
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run.path.resolve().name).strip("-.") or "policy"  # as a repository may be
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir()
        saved, notes = None, tuple[str, ...]()
        if config.lora.enabled:
            lora = json.loads((checkpoint / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
            own = {"r": lora["r"], "alpha": lora["lora_alpha"]}
            config = config.model_copy(update={"lora": config.lora.model_copy(update=own)})
            rank = max([lora["r"], *(lora.get("rank_pattern") or {}).values()])
        if whole:
            saved, notes = _write_model(run, config, checkpoint, writing, dtype, accept_changes, trust_remote_code)
        else:
            for file in OWN_FILES:  # and nothing that only a resume needs
                if (checkpoint / file).is_file():
                    shutil.copyfile(checkpoint / file, writing / file)
        if day := config.task.chat_template.get(DATE):
            notes += (f"the chat template shows today's date, which was {day} in training",)
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
    return Bundle(folder, notes, next_lines(folder, name=name, base=base, rank=rank))


def _folder_of(
    run: RunDir, config: Config, target: str, *, merge: bool, dtype: Dtype, output: str | None, overwrite: bool
) -> Path:
    """Where to export to, once it is known that this can be exported there."""
    lora = config.lora.enabled
    if not config.trains.policy:
        raise ValueError(f"{target} is a reward model; it is used as it is: reward.model={target}")
    if lora and merge and config.model.random_init:
        raise ValueError(f"{target}: its adapter is on weights drawn at random, which are in no file to merge it into")
    if lora and not merge and dtype != "auto":
        raise ValueError(f"--dtype {dtype} is for a whole model; the adapter stays as it is (or say --merge)")
    kind = "adapter" if lora and not merge else "model" if not lora else "merged"
    folder = Path(output) if output else run.path / "export" / (kind if dtype == "auto" else f"{kind}-{dtype}")
    if os.path.lexists(folder) and not (folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())):
        if not overwrite:
            raise ValueError(f"{folder} exists; choose another --output, or use --overwrite")
        if folder.is_symlink() or not (folder / FACTS).is_file():
            raise ValueError(f"--overwrite: {folder} is no exported folder (it has no {FACTS}), so it is left alone")
    return folder


def _write_model(
    run: RunDir, config: Config, checkpoint: Path, folder: Path, dtype: Dtype, accept_changes: bool, trust: bool
) -> tuple[str, tuple[str, ...]]:
    """Save the whole model and check it; its dtype, and notes."""
    from tinyrl.models.loading import load_tokenizer
    from tinyrl.tools.export.merge import MOST_CHANGED, MOST_GAP, dtype_of, write_merged

    saved = dtype_of(config, dtype, trust_remote_code=trust)
    tokenizer = load_tokenizer(config.model.path, revision=config.model.revision, trust_remote_code=trust)
    found = write_merged(config, checkpoint, folder, dtype=saved, run=run, tokenizer=tokenizer, trust_remote_code=trust)
    name, share = str(saved).removeprefix("torch."), f"{found.changed:.2%} of {found.positions} greedy tokens"
    if name == "float32" and not found.gap <= MOST_GAP:
        raise ValueError(
            f"the saved model is not the policy: log-probabilities differ by up to {found.gap:.2g} on average over the "
            f"vocabulary (allowed: {MOST_GAP:g}), so it is not kept"
        )
    if not found.changed <= MOST_CHANGED and not accept_changes:
        raise ValueError(
            f"in {name} {share} change, more than {MOST_CHANGED:.0%}, so it is not kept: --dtype float32 keeps them, "
            "--accept-changes keeps this all the same"
        )
    notes = [
        f"{name}: log-probabilities differ by at most {found.gap:.2g} on average over the vocabulary, {share} change"
    ]
    if config.model.quantization:
        notes.append(
            f"trained on a {config.model.quantization} base and merged into the unquantised one: what it says differs "
            "a little from what it said in training"
        )
    return name, tuple(notes)


def next_lines(folder: Path, *, name: str, base: str | None, rank: int) -> list[tuple[str, str]]:
    """(what for, command). base: what the adapter of `rank` is for; None: the folder holds a whole model."""
    where, gguf = str(folder), f"{name}.gguf"
    serve, convert = ["vllm", "serve", where], ["python", "llama.cpp/convert_hf_to_gguf.py", where, "--outfile", gguf]
    if base is not None:
        most = next((each for each in RANKS if each >= rank), rank)
        lora = ["--enable-lora", "--max-lora-rank", str(most), "--lora-modules", f"{name}={where}"]
        serve = ["vllm", "serve", base, *lora]
        of = ["--base" if Path(base).is_dir() else "--base-model-id", base]
        convert = ["python", "llama.cpp/convert_lora_to_gguf.py", where, *of, "--outfile", gguf]
    lines = {"serve": serve, "llama.cpp": convert, "upload": ["hf", "upload", f"OWNER/{name}", where]}
    return [(what, shlex.join(words)) for what, words in lines.items()]
