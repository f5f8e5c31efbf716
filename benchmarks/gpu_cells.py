"""What one cell of the GPU table measures, each in a process of its own (`settings["kind"]`)."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.fixed_work import Grpo, texts
from benchmarks.gpu_shapes import Work

KEPT = ("policy/sampling_gap", "policy/capped_weights", "memory/peak_gb")


def run_tests(settings: dict[str, Any]) -> dict[str, Any]:
    """`pytest -m gpu` on a file: its last line, and the names of what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *settings["words"]]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    return {"outcome": lines[-1], "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def recipe_of(settings: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """The benchmarks' recipe of settings["method"] for the cell's work."""
    from benchmarks import our_recipe

    files, work, options = Path(settings["files"]), Work(**settings["work"]), Namespace(threads=settings["threads"])
    if settings["method"] == "grpo":
        grpo = Grpo(num_prompts=work.prompts, group_size=work.group, max_new_tokens=work.new)
        recipe = our_recipe.grpo(files, steps=steps, options=options, work=grpo)
    else:
        recipe = our_recipe.ppo(files, critic="adapter", steps=steps, options=options, seed=0)
        recipe["ppo"] |= {"num_prompts": work.rows, "minibatch_size": work.rows}
    recipe["generation"] |= {"max_new_tokens": work.new, "max_prompt_tokens": work.prompt}
    recipe["model"]["dtype"] = settings["dtype"]
    return recipe


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Steps of `tinyrl train grpo|ppo` (PPO: critic and reward model on the same base, four epochs)."""
    from benchmarks import our_training

    recipe = recipe_of(settings, steps=settings["repeats"] + 1)
    result = our_training.measure({**settings, "recipe": recipe})
    lines = result.pop("lines")[1:]
    means = {key: [line[key] for line in lines if key in line] for key in KEPT}
    found = {key: sum(values) / len(values) for key, values in means.items() if values}
    return {**{key: result[key] for key in ("seconds", "tokens", "phases")}, "peak_gb": found.get("memory/peak_gb"),
            "gap": found.get("policy/sampling_gap")}  # fmt: skip


def peer(settings: dict[str, Any]) -> dict[str, Any]:
    """Steps of TRL's trainer on the same folder, with the Python of an environment that has TRL."""
    work = Work(**settings["work"])
    grpo = Grpo(num_prompts=work.prompts, group_size=work.group, max_new_tokens=work.new)
    more = {"steps": settings["repeats"] + 1, "seed": 0, "work": vars(grpo), "prompts": work.rows, "new": work.new}
    more["scored_at_a_time"] = settings["micro_batch"]
    result = import_module(f"benchmarks.peer_{settings['method']}").measure({**settings, **more})
    return {**{key: result[key] for key in ("seconds", "tokens", "phases")}, "peak_gb": peak_gb()}


def sample(settings: dict[str, Any]) -> dict[str, Any]:
    """Calls of a sampling engine: fused, fused without graphs, or hf; the first call captures graphs."""
    from benchmarks import our_recipe
    from tinyrl.config.recipe import load_config
    from tinyrl.generation.engine import Request
    from tinyrl.generation.select import engine_of
    from tinyrl.rollout.components import Options, Parts

    work, name = Work(**settings["work"]), settings["engine"]
    recipe = recipe_of({**settings, "method": "grpo"}, steps=1)
    overrides = [*settings["overrides"], f"generation.engine={'hf' if name == 'hf' else 'fused'}"]
    config = load_config("grpo", str(our_recipe.write({**settings, "recipe": recipe})), overrides=overrides)
    parts = Parts(config, options=Options(device=settings["device"]))
    longest = config.generation.max_new_tokens
    engine: Any = engine_of(config.generation, parts.roles, parts.tokenizer, stop=[], longest_response=longest)[0]
    if name == "fused without graphs":
        engine.by_graphs = False
    ids: list[Any] = [parts.tokenizer(text)["input_ids"] for text in texts(Path(settings["files"]))[: work.prompts]]
    requests = [Request(tokens, prompt_row=i) for i, tokens in enumerate(ids)]
    seconds, tokens = [], []
    for number in range(settings["repeats"] + 1):
        start = time.perf_counter()
        groups = engine.sample(requests, work.group, seed=0, step=number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(completion.tokens) for group in groups for completion in group))
    return {"seconds": seconds[1:], "tokens": tokens[1:], "peak_gb": peak_gb()}


def learn(settings: dict[str, Any]) -> dict[str, Any]:
    """What GRPO teaches a real model of right sums: SFT for the form, then the recipe, judged as `benchmarks real`."""
    from benchmarks import judge, our_training
    from benchmarks.real import FORM, in_folder, recipe_of, write_rendered
    from tinyrl.cli.commands import app
    from tinyrl.tasks import sums

    folder, options = Path(settings["folder"]), Namespace(threads=settings["threads"])
    data, form = folder / "data", folder / "form"
    sums.write(data)

    def trained(recipe: dict[str, Any], model: Path, name: str) -> dict[str, Any]:
        recipe = in_folder(recipe, model.parent, data)
        recipe["model"] |= {"path": str(model), "dtype": settings["dtype"]}
        (folder / name).mkdir(parents=True, exist_ok=True)
        return our_training.measure({**settings, "recipe": recipe, "folder": str(folder / name), "overrides": []})

    taught = recipe_of("sft", options=options, **{**FORM, "num_steps": settings["form"]})
    started = trained(taught, Path(settings["real_model"]), "sft")
    words = ["export", started["adapter"], "--merge", "--dtype", "float32", "--output", str(form / "model")]
    if app(words, standalone_mode=False):
        raise SystemExit("the model that was taught the form could not be written")
    write_rendered(form, data, taught["task"]["system_prompt"])
    recipe = recipe_of("grpo", options=options, seed=settings["seed"], num_steps=settings["steps"])
    result = trained(recipe, form / "model", "grpo")
    before, after = judge.held_out(form, None), judge.held_out(form, result["adapter"])
    return {"before": before["exact"], "after": after["exact"], "seconds": result["seconds"]}


def peak_gb() -> float:
    """The most that was allocated on a GPU; on a CPU the most that the process held."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else measuring.peak_mb() / 1e3


KINDS = {"tests": run_tests, "train": train, "peer": peer, "sample": sample, "learn": learn}


def main() -> None:
    settings = measuring.job()
    measuring.answer(settings, **KINDS[settings["kind"]](settings))


if __name__ == "__main__":
    main()
