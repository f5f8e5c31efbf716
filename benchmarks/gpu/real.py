"""What GRPO teaches a real model of right sums: some steps of SFT for the form, then the recipe, in one process.

As `python -m benchmarks real` does for TRL's side and ours on a CPU; what is learnt is the exact probability of the
right equation on held-out sums.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import judge, our_training
from benchmarks.compare_real import FORM, in_folder, recipe_of, write_rendered
from tinyrl.cli.commands import app
from tinyrl.tasks import sums


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """real_model: its folder; form and steps: of SFT and of GRPO; dtype: of the base."""
    folder, options = Path(settings["folder"]), Namespace(threads=settings["threads"])
    data, form = folder / "data", folder / "form"
    sums.write(data)
    taught = recipe_of("sft", options=options, **{**FORM, "num_steps": settings["form"]})
    started = _trained(taught, Path(settings["real_model"]), data, settings=settings, name="sft")
    words = ["export", started["adapter"], "--merge", "--dtype", "float32", "--output", str(form / "model")]
    if app(words, standalone_mode=False):
        raise SystemExit("the model that was taught the form could not be written")
    write_rendered(form, data, taught["task"]["system_prompt"])
    recipe = recipe_of("grpo", options=options, seed=settings["seed"], num_steps=settings["steps"])
    result = _trained(recipe, form / "model", data, settings=settings, name="grpo")
    gaps = [line["policy/sampling_gap"] for line in result["lines"] if "policy/sampling_gap" in line]
    return {
        "before": judge.held_out(form, None),
        "after": judge.held_out(form, result["adapter"]),
        "seconds": result["seconds"],
        "gap": sum(gaps) / len(gaps) if gaps else 0.0,
    }


def _trained(recipe: dict[str, Any], model: Path, data: Path, *, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A run of a recipe from a model's folder."""
    recipe = in_folder(recipe, model.parent, data)
    recipe["model"] |= {"path": str(model), "dtype": settings["dtype"]}
    folder = Path(settings["folder"]) / name
    folder.mkdir(parents=True, exist_ok=True)
    return our_training.measure({**settings, "recipe": recipe, "folder": str(folder), "overrides": []})
