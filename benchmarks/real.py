"""Every method on a real model (TINYRL_REAL_MODEL), beside TRL: what it learns of sums, seconds, memory.

The recipes smollm2-sums-* as they ship, at other seeds than those they were chosen on; TRL has their settings, rows and
prompts, token by token. What a policy can do is the exact probability of the right equation (judge.py).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.fixed_work import LORA, read_rows, write_rows
from benchmarks.results import Result, above_imports, alternate, interval, pooled
from benchmarks.sizes import REAL_MODEL
from benchmarks.tables import machine, markdown, spread, versions

METHODS = ("sft", "reward", "dpo", "grpo", "ppo")
RECIPES = Path(__file__).parents[1] / "recipes"
FORM = {"num_steps": 8, "seed": 100}  # the SFT that comes before dpo, grpo and ppo
JUDGED = 128  # held-out sums
PEER_MICRO_BATCH = 8
MEASURES = {
    "exact": "probability of the right equation",
    "greedy": "right greedily",
    "loss": "loss, held out",
    "accuracy": "accuracy, held out",
}


def recipe_of(method: str, *, options: Namespace, seed: int, **run: Any) -> dict[str, Any]:
    """The recipe, as a dictionary, with a seed and the LoRA of the benchmarks."""
    import yaml

    recipe = yaml.safe_load((RECIPES / f"smollm2-sums-{method}.yaml").read_text())
    recipe["lora"] = {"r": LORA["r"], "alpha": LORA["lora_alpha"], "target_modules": LORA["target_modules"]}
    recipe["run"] |= {"seed": seed, "threads": options.threads, **run}
    if method in ("grpo", "ppo"):
        recipe["run"]["eval_prompts"] = 1  # the judge says more, and TRL does not evaluate while it trains
    return recipe


def start_of(method: str) -> str:
    return "real" if method in ("sft", "reward") else "form"


def prepare(options: Namespace) -> dict[str, Path]:
    """Folders by start, as fixed_work.py's: the real model, and the one that eight steps of SFT made of it."""
    work = options.out / "work"
    folders = {"real": work / "real", "form": work / "form"}
    data = work / "data"
    if not (folders["form"] / "done").is_file():
        from tinyrl.cli.commands import app
        from tinyrl.tasks import sums

        sums.write(data)
        shutil.copytree(os.environ[REAL_MODEL], folders["real"] / "model", dirs_exist_ok=True)
        recipe = recipe_of("sft", options=options, **FORM)
        question = {"recipe": in_folder(recipe, folders["real"], data), "overrides": []}
        trained = processes.run("our_training", question, options=options)
        words = ["export", trained["adapter"], "--merge", "--dtype", "float32", "--overwrite"]
        assert not app([*words, "--output", str(folders["form"] / "model")], standalone_mode=False)
        for folder in folders.values():
            write_rendered(folder, data, recipe["task"]["system_prompt"])
        (folders["form"] / "done").touch()
    return {**folders, "data": data}


def in_folder(recipe: dict[str, Any], folder: Path, data: Path) -> dict[str, Any]:
    """The recipe with its model and files where they are."""
    files = {key: str(data / Path(recipe["task"][key]).name) for key in ("data", "eval_data") if key in recipe["task"]}
    return {**recipe, "model": {**recipe["model"], "path": str(folder / "model")}, "task": {**recipe["task"], **files}}


def write_rendered(folder: Path, data: Path, system: str) -> None:
    """The rows with prompts as the template renders them, and eval.jsonl for the judge."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for file in data.glob("*.jsonl"):
        rows = read_rows(file)
        for row in rows:
            turns = [{"role": "system", "content": system}, {"role": "user", "content": row["prompt"]}]
            row["prompt"] = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        write_rows(folder / file.name, rows)
    write_rows(folder / "eval.jsonl", read_rows(folder / "answers.eval.jsonl")[:JUDGED])


def judged(files: Path, adapter: str | None, *, options: Namespace) -> Result:
    return processes.run("judge", {"files": str(files), "adapter": adapter}, options=options)


def sides_of(method: str, folders: dict[str, Path], *, options: Namespace) -> dict[str, Any]:
    """A run of either side, by pair; a policy's is judged at once."""
    files = folders[start_of(method)]

    def with_verdict(result: Result) -> Result:
        if method != "reward":
            result["held_out"] |= judged(files, result["adapter"], options=options)
        return result

    def ours(pair: int) -> Result:
        recipe = in_folder(recipe_of(method, options=options, seed=pair), files, folders["data"])
        return with_verdict(
            processes.run("our_training", {"recipe": recipe, "overrides": options.set}, options=options)
        )

    def peer(pair: int) -> Result:
        recipe = recipe_of(method, options=options, seed=pair)
        rows = Path(recipe["task"].get("data", "answers.jsonl")).name
        question = {
            "recipe": recipe,
            "files": str(files),
            "rows": rows,
            "held_out": rows.replace(".jsonl", ".eval.jsonl"),
            "eval_prompts": recipe["run"]["eval_prompts"],
            "clip_eps_high": 0.28,  # of preset dapo
            "steps": recipe["run"]["num_steps"],
            "seed": pair,
            "micro_batch": PEER_MICRO_BATCH,
        }
        python = options.ppo_peer_python if method == "ppo" else options.peer_python
        return with_verdict(processes.run("peer_real", question, options=options, python=python))

    return {"tinyrl": ours, "TRL": peer}


def mean_of(results: list[Result], measure: str) -> str:
    values = [result["held_out"][measure] for result in results]
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, high = interval(values)
    return f"{statistics.mean(values):.3f} ({low:.3f} to {high:.3f})"


def tables(method: str, before: dict[str, float], results: dict[str, list[Result]]) -> str:
    """Learning by measure, then time and memory."""
    found = [name for name in MEASURES if all(name in r["held_out"] for r in results["tinyrl"])]
    shared = [name for name in found if all(name in r["held_out"] for r in results["TRL"])]
    rows = [
        [MEASURES[name], f"{before[name]:.3f}" if name in before else "", *(mean_of(results[s], name) for s in results)]
        for name in shared
    ]
    learning = markdown([f"{method}: {versions([results[s][0] for s in results])}", "before", *results], rows)
    ratios = {
        key: [
            statistics.median(p[key]) / statistics.median(o[key])
            for o, p in zip(results["tinyrl"], results["TRL"], strict=True)
        ]
        for key in ("seconds", "cpu")
    }
    cost = [
        ["seconds a step", *(spread(pooled(results[s], "seconds")) for s in results), spread(ratios["seconds"])],
        ["of CPU time", *(spread(pooled(results[s], "cpu")) for s in results), spread(ratios["cpu"])],
        ["peak MB above imports", *(spread(above_imports(results[s]), 0) for s in results), ""],
    ]
    return learning + "\n\n" + markdown([method, *results, "TRL / tinyrl"], cost)


def main(options: Namespace) -> None:
    folders = prepare(options)
    before = {start: judged(folders[start], None, options=options) for start in ("real", "form")}
    print(f"\n## A real model\n\n{machine(options)}\n", flush=True)
    for method in options.methods:
        results = alternate(sides_of(method, folders, options=options), options.pairs)
        (options.out / f"{method}.json").write_text(json.dumps(results))
        print(tables(method, before[start_of(method)], results) + "\n", flush=True)
