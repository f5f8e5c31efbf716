"""Does `tinyrl verify` find what was altered, and nothing on honest runs?

    python -m benchmarks.verification --honest 20 --altered 100

Honest runs: methods and seeds in turn, on the embedded default. Alterations: one value of one line of metrics.jsonl or
samples.jsonl, one number of one tensor by its last bit (with a manifest written anew), a line less, two lines changed
over; each on a copy of one of the runs, all of whose stretches are then repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tinyrl.config.recipe import load_config
from tinyrl.config.schema import Config
from tinyrl.rollout.components import Options
from tinyrl.runs import checkpoint as checkpoints
from tinyrl.runs.records import VOLATILE
from tinyrl.runs.run_dir import RunDir
from tinyrl.training.launch import start
from tinyrl.training.verify import Found, verify

METHODS = ("grpo", "ppo")
SMALL = ["run.num_steps=3", "run.save_every=1", "run.keep_checkpoints=9", "run.eval_every=2", "run.eval_prompts=8",
         "run.threads=1"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--honest", type=int, default=20)
    parser.add_argument("--altered", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [_trained(METHODS[i % len(METHODS)], i, Path(folder)) for i in range(asked.honest)]
        alarms = sum(_differs(run) for run in runs)
        print(f"honest runs: {alarms} of {len(runs)} said to differ", flush=True)
        rng, missed = random.Random(asked.seed), list[str]()
        for i in range(asked.altered):
            copy = RunDir(Path(folder) / "altered" / "run")
            shutil.rmtree(copy.path.parent, ignore_errors=True)
            shutil.copytree(runs[i % len(runs)].path, copy.path)
            what = _alter(copy, rng)
            if not _differs(copy):
                missed.append(what)
        print(f"alterations: {asked.altered - len(missed)} of {asked.altered} found", *missed, sep="\n  ")


def _trained(method: str, seed: int, folder: Path) -> RunDir:
    config: Config = load_config(method, None, overrides=[*SMALL, f"run.seed={seed}"])
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        launch = start(
            config,
            options=Options(device="cpu"),
            output_dir=str(folder),
            name=f"run-{seed}",
            overwrite=False,
            command=["benchmark"],
        )
        launch.go(report=lambda run: None)
    return launch.run


def _differs(run: RunDir) -> bool:
    with contextlib.redirect_stderr(io.StringIO()):
        found: list[Found] = list(verify(run, options=Options(device="cpu"), num=None))
    return any(one.different for one in found)


def _alter(run: RunDir, rng: random.Random) -> str:
    kind = rng.choice(["metrics", "samples", "weights", "optimizer", "less", "changed over"])
    if kind in ("weights", "optimizer"):
        return _alter_tensor(run, rng, "optimizer.safetensors" if kind == "optimizer" else "adapter_model.safetensors")
    path = (
        run.metrics
        if kind == "metrics"
        else run.samples
        if kind == "samples"
        else rng.choice([run.metrics, run.samples])
    )
    lines = path.read_text().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    if kind == "less":
        del lines[at]
    elif kind == "changed over":
        at = rng.randrange(1, len(lines))
        while lines[at - 1] == lines[at]:
            at = rng.randrange(1, len(lines))
        lines[at - 1], lines[at] = lines[at], lines[at - 1]
    else:
        row: dict[str, Any] = json.loads(lines[at])
        key = rng.choice([k for k, v in row.items() if isinstance(v, int | float | str) and not k.startswith(VOLATILE)])
        row[key] = f"{row[key]}." if isinstance(row[key], str) else row[key] + rng.choice([1, 0.5, -0.25])
        lines[at] = json.dumps(row) + "\n"
        kind = f"{kind}: {key}"
    path.write_text("".join(lines))
    return f"{kind} in {path.name}, line {at + 1}"


def _alter_tensor(run: RunDir, rng: random.Random, file: str) -> str:
    folder = rng.choice(checkpoints.list_checkpoints(run.checkpoints)[1:])  # step 0 has no moments yet
    tensors = load_file(folder / file)
    name = rng.choice([name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()])
    flat = tensors[name].view(-1)
    at = rng.randrange(flat.numel())
    flat[at] = torch.nextafter(flat[at], torch.tensor(torch.inf, dtype=flat.dtype))
    save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / checkpoints.MANIFEST).unlink()
    checkpoints._seal(folder, checkpoints.checkpoint_step(folder))  # pyright: ignore[reportPrivateUsage]
    return f"{name}[{at}] of {folder.name}/{file}"


if __name__ == "__main__":
    main()
