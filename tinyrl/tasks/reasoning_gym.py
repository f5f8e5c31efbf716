"""reasoning-gym's families of generated problems (2505.24760), each with a verifier of its own: over a hundred.

    task.data=leg_counting                                          one family
    task.data='leg_counting,chain_sum?min_terms=2&max_terms=3'      several, with the settings that make them harder

Problems are drawn by a fixed seed; a problem that is held out is not trained on. Verifiers run in a worker process.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import urllib.parse
from typing import Any

import yaml

from tinyrl.data.readers import Row
from tinyrl.tasks import Task
from tinyrl.tasks.grading import by_row, marked_answer
from tinyrl.text import did_you_mean

SIZES = {"train": 4000, "eval": 512}  # problems of all families together, before repeated ones are left out
ASKED = "\n\nEnd with the answer alone inside <answer></answer>."


def generate(spec: str | None, split: str, seed: int) -> list[Row]:
    """Draw problems of the families that `spec` names, family by family in turn; the same every time. Raises ValueError
    for an unknown family or setting.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("task.name=reasoning_gym needs reasoning-gym: pip install 'tinyrl[reasoning]'")
    from reasoning_gym.factory import DATASETS

    families = []
    for part in (spec or "leg_counting").split(","):
        name, _, query = part.strip().partition("?")
        if name not in DATASETS:
            near = did_you_mean(name, [*DATASETS])
            raise ValueError(f"task.data: reasoning-gym has no family '{name}' among its {len(DATASETS)}.{near}")
        settings = {key: yaml.safe_load(value) for key, value in urllib.parse.parse_qsl(query)}
        families.append((name, json.dumps(settings, sort_keys=True)))
    each = SIZES[split] // len(families)
    drawn = 2 * seed + (split == "eval")
    seen = {row["prompt"] for row in generate(spec, "eval", seed)} if split == "train" else set[str]()
    problems = [_problems(name, settings, drawn, each) for name, settings in families]
    rows = list[Row]()
    for index in range(each):
        for (name, settings), problem in zip(families, problems, strict=True):
            text = str(problem[index]["question"]) + ASKED
            if text not in seen:
                seen.add(text)
                answer = problem[index]["answer"]
                where = {"family": name, "settings": settings, "seed": drawn, "size": each, "index": index}
                rows.append({"prompt": text, "answer": None if answer is None else str(answer), "problem": where})
    return rows


@functools.lru_cache(maxsize=64)
def _problems(name: str, settings: str, seed: int, size: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task.data: reasoning-gym's {name}: {error}") from None


def score(text: str, row: Row) -> float:
    """Return reasoning-gym's own score, 0 to 1, of the text in <answer></answer>, or of all if there is none."""
    inside = marked_answer(text)
    where = row["problem"]
    problems = _problems(where["family"], where["settings"], where["seed"], where["size"])
    return float(problems.score_answer(text.strip() if inside is None else inside.strip(), problems[where["index"]]))


verify = by_row(score)

TASK = Task(
    name="reasoning_gym",
    summary="generated problems of reasoning-gym, by family and difficulty: task.data=chain_sum?max_terms=3",
    verify=verify,
    gold=lambda row: None if row.get("answer") is None else f"<answer>{row['answer']}</answer>",
    columns=("prompt", "problem"),
    generate=generate,
    grader="tinyrl.tasks.reasoning_gym:verify",
)
