"""Episodes of three turns with a scripted tool: tinyrl in one cache, tinyrl turn by turn, and TRL's tool loop.

The tool answers the first two turns with the same 48 words, whatever the policy wrote. On both sides a turn has at most
128 tokens, one that is cut off there is answered too, and an episode has room for three of that length. What differs:
TRL reads a prompt for each sample, and at each turn the whole episode again; its turns wait for the longest of them;
it makes the prompts' tokens at each rollout; its tool runs in the trainer's process, and calls are not looked for.
"""

from __future__ import annotations

import shutil
import statistics
from argparse import Namespace
from pathlib import Path

from benchmarks import our_recipe, processes, same_work, scripted_tool
from benchmarks.fixed_work import SPEED, prepare
from benchmarks.results import Result, above_imports, alternate, pooled, time_ratios
from benchmarks.same_work import Check
from benchmarks.scripted_tool import ANSWER, TURNS
from benchmarks.sizes import SIZES
from benchmarks.tables import machine, markdown, spread, versions

COLUMNS = [
    "seconds a rollout",
    "ms a chosen token",
    "tokens chosen",
    "read",
    "peak MB above imports",
    "times faster",
    "per chosen token",
]
PEER = "TRL's tool loop"
WAYS = {  # (engine, whether every turn is sampled from the episode's beginning)
    "tinyrl, fast turns (fused)": ("fused", False),
    "tinyrl, plain turns (fused)": ("fused", True),
    "tinyrl, plain turns (hf)": ("hf", True),
}
ROLE_TOKENS = 3  # of the template around an answer: the tool's word, EOS, the policy's word
LONGEST = TURNS * SPEED.max_new_tokens + (TURNS - 1) * (len(ANSWER.split()) + ROLE_TOKENS)


def with_template(files: Path) -> Path:
    """The size's files once more, with a chat template beside the tokenizer."""
    folder = files.with_name(f"{files.name}-turns")
    shutil.copytree(files, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("reward_model"))
    (folder / "model" / "chat_template.jinja").write_text(scripted_tool.TEMPLATE, encoding="utf-8")
    return folder


def ours_once(files: Path, engine: str, *, plainly: bool, pair: int, options: Namespace) -> Result:
    recipe = our_recipe.grpo(files, steps=1, options=options, seed=pair)
    recipe["environment"] = {
        "use": f"{scripted_tool.__file__}:respond",
        "max_turns": TURNS,
        "max_observation_tokens": len(ANSWER.split()),
    }
    overrides = [*options.set, f"generation.engine={engine}"]
    question = {"files": str(files), "steps": options.steps, "recipe": recipe, "overrides": overrides}
    return processes.run("our_turns", {**question, "plainly": plainly}, options=options)


def peer_once(files: Path, *, pair: int, options: Namespace) -> Result:
    question = {"files": str(files), "steps": options.steps, "seed": pair, "longest": LONGEST}
    return processes.run("peer_turns", question, options=options, python=options.peer_python)


def per_token(results: list[Result]) -> list[float]:
    """Milliseconds a chosen token of each process."""
    return [1000 * sum(result["seconds"]) / sum(result["tokens"]) for result in results]


def row(name: str, results: list[Result], peer: list[Result], *, show_ratio: bool) -> list[str]:
    tokens, read = (f"{statistics.mean(pooled(results, key)):.0f}" for key in ("tokens", "read"))
    ratios = ["-", "-"]
    if show_ratio:
        by_token = [p / o for p, o in zip(per_token(peer), per_token(results), strict=True)]
        ratios = [f"**{spread(values)}**" for values in (time_ratios(peer, results), by_token)]
    memory = spread(above_imports(results), 0)
    return [name, spread(pooled(results, "seconds")), spread(per_token(results)), tokens, read, memory, *ratios]


def same_answers(ours: list[Result], peer: list[Result]) -> Check:
    """Tokens read between turns, which are the same number at every step."""
    counts = [sorted({*pooled(side, "read")}) for side in (ours, peer)]
    return Check(counts[0] == counts[1], f"tokens read a step: tinyrl {counts[0]}, peer {counts[1]}")


def one_size(size: str, *, options: Namespace) -> None:
    files = with_template(prepare(SIZES[size], options=options))
    of = f"{SPEED.num_prompts} prompts x {SPEED.group_size}, {TURNS} turns of at most {SPEED.max_new_tokens} new tokens"
    print(f"\n## Episodes, model {size}: {of}, {len(ANSWER.split())} words read between two\n", flush=True)
    sides = {
        name: lambda pair, engine=engine, plainly=plainly: ours_once(
            files, engine, plainly=plainly, pair=pair, options=options
        )
        for name, (engine, plainly) in WAYS.items()
    }
    if options.peer_python:
        sides = {PEER: lambda pair: peer_once(files, pair=pair, options=options), **sides}
    results = alternate(sides, options.pairs)
    print(machine(options))
    peer = results.pop(PEER, [])
    first = next(iter(results.values()))  # the other ways sample with the same random numbers
    may_compare = False
    if peer:
        checks = [
            same_work.same_tokens(pooled(first, "tokens"), pooled(peer, "tokens")),
            same_answers(first, peer),
        ]
        may_compare = same_work.report(checks, options=options)
    rows = [row(name, of_way, peer, show_ratio=may_compare) for name, of_way in results.items()]
    rows += [row(PEER, peer, peer, show_ratio=False)] if peer else []
    print("\n" + markdown([versions([first[0], *peer[:1]]), *COLUMNS], rows))


def main(options: Namespace) -> None:
    for size in options.sizes:
        one_size(size, options=options)
