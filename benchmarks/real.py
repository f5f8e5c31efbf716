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
from benchmarks.judge import judged
from benchmarks.tables import Result, alternate, comparison, interval, machine, markdown, versions
from benchmarks.work import LORA, REAL_MODEL, read_rows, write_rows

STARTS = {"sft": "real", "reward": "real", "dpo": "form", "grpo": "form", "ppo": "form"}
METHODS = tuple(STARTS)
PAD = "<|endoftext|>"  # the tokenizer's own pad ends turns, too: PPO would not see where the question ends
RECIPES = Path(__file__).parents[1] / "recipes"
FORM = {"num_steps": 8, "seed": 100}  # the SFT that comes before dpo, grpo and ppo
JUDGED = 128  # held-out sums
PEER_MICRO_BATCH = 8
MEASURES = {"exact": "probability of the right equation", "greedy": "right greedily"}
MEASURES |= {"loss": "loss, held out", "accuracy": "accuracy, held out"}


def recipe_of(method: str, *, options: Namespace, seed: int, **run: Any) -> dict[str, Any]:
    """The recipe, as a dictionary, with a seed and the LoRA of the benchmarks."""
    import yaml

    recipe = yaml.safe_load((RECIPES / f"smollm2-sums-{method}.yaml").read_text())
    recipe["lora"] = {"r": LORA["r"], "alpha": LORA["lora_alpha"], "target_modules": LORA["target_modules"]}
    recipe["run"] |= {"seed": seed, "threads": options.threads, **run}
    if method in ("grpo", "ppo"):
        recipe["run"]["eval_prompts"] = 1  # the judge says more, and TRL does not evaluate while it trains
    return recipe


def prepare(options: Namespace) -> dict[str, Path]:
    """Folders by start, as work.py's: the real model, and the one that eight steps of SFT made of it."""
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
        trained = processes.run("ours", question, options=options)
        words = ["export", trained["adapter"], "--merge", "--dtype", "float32"]
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


def peer_question(recipe: dict[str, Any], files: Path, *, seed: int) -> dict[str, Any]:
    """The recipe as TRL's trainer is told it. Prompts come rendered, so both sides read the same tokens."""
    method, steps = recipe["method"], recipe["run"]["num_steps"]
    section = recipe["reward_model" if method == "reward" else method]
    optim, rows = recipe["optim"], Path(recipe["task"].get("data", "answers.jsonl")).name
    question = {"method": method, "files": str(files), "rows": rows, "pad": PAD, "seed": seed}
    question |= {"learning_rate": optim["learning_rate"], "schedule": optim.get("schedule", "constant")}
    question |= {"micro_batch": PEER_MICRO_BATCH, "samples": section.get("batch_size", 0)}
    if method not in ("grpo", "ppo"):
        held_out = {"held_out": rows.replace(".jsonl", ".eval.jsonl"), "eval_prompts": recipe["run"]["eval_prompts"]}
        own = {"reward": {"per_device_eval_batch_size": 16}, "dpo": {"beta": recipe.get("dpo", {}).get("beta")}}
        return question | held_out | {"config": {"max_steps": steps, "max_length": 96, **own.get(method, {})}}
    new, prompts = recipe["generation"]["max_new_tokens"], section["num_prompts"]
    question |= {"reward": "right_sums", "samples": prompts * section.get("group_size", 1)}
    if method == "grpo":
        config = {"max_steps": steps, "num_generations": section["group_size"], "beta": 0.0, "loss_type": "dapo"}
        config |= {"max_completion_length": new, "epsilon": 0.2, "epsilon_high": 0.28, "scale_rewards": "group"}
    else:
        config = {"total_episodes": prompts * steps, "num_mini_batches": 1, "num_ppo_epochs": section["num_epochs"]}
        config |= {"local_rollout_forward_batch_size": prompts, "response_length": new, "stop_token": "eos"}
        config |= {"kl_coef": section["kl_coef"], "num_sample_generations": 0}
    return question | {"config": {**config, "temperature": 1.0}}


def sides_of(method: str, folders: dict[str, Path], *, options: Namespace) -> dict[str, Any]:
    """A run of either side, by pair; a policy's is judged at once."""
    files = folders[STARTS[method]]

    def with_verdict(result: Result) -> Result:
        if method != "reward":
            result["held_out"] |= judged(files, result["adapter"], options=options)
        return result

    def ours(pair: int) -> Result:
        recipe = in_folder(recipe_of(method, options=options, seed=pair), files, folders["data"])
        return with_verdict(processes.run("ours", {"recipe": recipe, "overrides": options.set}, options=options))

    def peer(pair: int) -> Result:
        question = peer_question(recipe_of(method, options=options, seed=pair), files, seed=pair)
        python = options.ppo_peer_python if method == "ppo" else options.peer_python
        return with_verdict(processes.run("peer", question, options=options, python=python))

    return {"tinyrl": ours, "TRL": peer}


def mean_of(results: list[Result], measure: str) -> str:
    values = [result["held_out"][measure] for result in results]
    if len(values) < 2:
        return f"{values[0]:.3f}"
    low, high = interval(values)
    return f"{statistics.mean(values):.3f} ({low:.3f} to {high:.3f})"


def tables(method: str, before: dict[str, float], results: dict[str, list[Result]]) -> str:
    """Learning by measure, then time and memory."""
    shared = [name for name in MEASURES if all(name in r["held_out"] for side in results.values() for r in side)]
    first = {name: f"{before[name]:.3f}" if name in before else "" for name in shared}
    rows = [[MEASURES[name], first[name], *(mean_of(side, name) for side in results.values())] for name in shared]
    learning = markdown([f"{method}: {versions([results[s][0] for s in results])}", "before", *results], rows)
    return learning + "\n\n" + comparison(results, base="tinyrl")


def main(options: Namespace) -> None:
    folders = prepare(options)
    before = {start: judged(folders[start], None, options=options) for start in ("real", "form")}
    print(f"\n## A real model\n\n{machine(options)}\n", flush=True)
    for method in options.methods:
        results = alternate(sides_of(method, folders, options=options), options.pairs)
        (options.out / f"{method}.json").write_text(json.dumps(results))
        print(tables(method, before[STARTS[method]], results) + "\n", flush=True)
