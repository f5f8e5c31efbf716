"""tinyrl's side of training on text: `tinyrl train sft|reward|dpo` in this process, timed as the peer's is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft  # noqa: F401
import transformers  # noqa: F401
from safetensors.torch import save_file

from benchmarks import measuring, our_recipe
from benchmarks.our_training import lines_of, watched_steps
from benchmarks.text_work import CHECKED_STEP
from tinyrl.cli.commands import app
from tinyrl.training.update import Updater

LOSSES = {"sft": "loss", "reward": "preference/loss", "dpo": "preference/loss"}


def keep_gradients(path: str) -> None:
    """Write the LoRA gradients of one optimizer step to a file, by their names in the base model."""
    accumulate, calls = Updater._accumulate, [0]

    def watched(self: Updater, passes: Any) -> dict[str, float]:
        metrics = accumulate(self, passes)
        calls[0] += 1
        if calls[0] == CHECKED_STEP:
            named = self.roles.parameters["policy"].items()
            save_file({n: p.grad.clone() for n, p in named if p.grad is not None and "lora_" in n}, path)
        return metrics

    Updater._accumulate = watched  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    imports, settings = measuring.resident_mb(), measuring.job()
    keep_gradients(settings["gradients"])
    run, method = Path(settings["folder"]) / "run", settings["recipe"]["method"]
    command = ["train", method, str(our_recipe.write(settings)), *settings["overrides"]]
    with watched_steps() as steps:
        code = app(
            [*command, "--output-dir", str(run.parent), "--name", run.name, "--device", "cpu"], standalone_mode=False
        )
    if code:
        raise SystemExit(f"tinyrl ended with exit code {code}")
    losses = [line[LOSSES[method]] for line in lines_of(run)]
    measuring.answer(settings, **steps.result(), losses=losses, imports_mb=imports, peak_mb=measuring.peak_mb())


if __name__ == "__main__":
    main()
