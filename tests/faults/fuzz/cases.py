"""The cases of each kind: command lines, settings, recipes, rows; those of folders are in folders.py."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.fuzz import odd
from tests.faults.fuzz.case import DRY, Case, together
from tests.faults.fuzz.folders import models, runs
from tests.faults.fuzz.sound import ROWS, ROWS_OF, Sound, copied, write_rows
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.recipe import load_config, packaged_recipes
from tinyrl.config.settings import SECTIONS, fields_of


def words(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Commands, options and arguments that are odd by themselves."""
    random = Random(f"words {seed}")
    commands = ("train", "eval", "report", "show", "reward", "list")
    options = (
        "--resume", "--name", "--output-dir", "--overwrite", DRY, "--allow-config-change", "--device", "--debug=",
        "--vs", "--task",
        "--split", "--num-prompts", "--samples", "--json", "--data", "--num-rows", "--timeout", "--version", "--help",
    )  # fmt: skip
    things = [value for value in odd.VALUES if "\0" not in value and value not in ("--debug", "starter")]
    for n in range(count):
        argv = [random.choice(commands)]
        argv += {"train": [random.choice([*METHODS])], "reward": ["test", "rows.py:score"]}.get(argv[0], [])
        for _ in range(random.randint(1, 3)):
            argv.append(random.choice((random.choice(options), random.choice(things))))
        if argv[0] == "train":  # or it would train the embedded default
            argv += [DRY]
        yield Case(f"words {seed}.{n}", argv, write_rows)


def settings(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Every field of the schema in turn, with an odd value; now and then two at once."""
    random = Random(f"settings {seed}")
    fields = [(section, key) for section in SECTIONS for key in fields_of(section)]
    random.shuffle(fields)
    for n in range(count):
        chosen = [fields[n % len(fields)], *random.sample(fields, random.choice((0, 0, 0, 1)))]
        section = chosen[0][0]
        method = random.choice([m for m in METHODS if reads(m, section)])
        base = [*sound.train(method, model__path=Path("starter")), "task.name=rows"]
        drawn = [[f"{section}.{key}={random.choice(odd.VALUES)}" for section, key in chosen] for _ in range(30)]
        wanted = random.random() < 0.6  # past the schema, where one of the drawn gets so far
        changes = next((some for some in drawn if wanted and accepted(method, [*base[2:], *some])), drawn[0])
        yield Case(f"settings {seed}.{n}", [*base, *changes, DRY], write_rows)


def reads(method: str, section: str) -> bool:
    return section not in OPTIONAL_SECTIONS or section in METHODS[method].sections


def accepted(method: str, overrides: list[str]) -> bool:
    """Whether the schema has nothing against these settings."""
    try:
        load_config(method, None, overrides=overrides)
    except ValueError:
        return False
    return True


def numbers(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Numbers that the schema allows, at their ends, in a run of one step: the arithmetic bears them or stops."""
    random = Random(f"numbers {seed}")
    fields = [(section, key) for section in SECTIONS for key in fields_of(section)]
    values = ("0", "1", "1e-300", "1e-30", "1e30", "1000000", "1e300", "0.999999999", "3")
    for n in range(count):
        method = random.choice([*METHODS])
        used = [f for f in fields if reads(method, f[0]) and f[1] not in ("num_steps", "threads")]
        base, changes = sound.train(method), []
        while not changes or not accepted(method, [*base[2:], *changes]):
            changes = [f"{s}.{key}={random.choice(values)}" for s, key in random.sample(used, random.choice((1, 1, 2)))]
        yield Case(f"numbers {seed}.{n}", [*base, *changes], write_rows)


def recipes(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Texts that are no recipe, and packaged recipes with mutations."""
    random = Random(f"recipes {seed}")
    sources = {name: path.read_text() for name, path in packaged_recipes().items() if name.startswith("starter")}
    texts = list(odd.TEXTS.items())
    for n in range(count):
        if n < len(texts):
            method, (what, content) = random.choice([*METHODS]), texts[n]
        else:
            what = random.choice([*sources])
            method = what.partition("-")[2]
            content = odd.changed(sources[what], random).encode("utf-8", "surrogatepass")
        prepare = together(write_rows, odd.writing("odd.yaml", content))
        yield Case(f"recipes {seed}.{n}: {what}", ["train", method, "odd.yaml", "run.threads=1", DRY], prepare)


FORMATS: dict[str, Callable[[list[Any]], bytes]] = {
    "jsonl": lambda rows: b"".join(odd.as_json(row) + b"\n" for row in rows),
    "json": odd.as_json,
    "csv": lambda rows: _as_csv(rows).encode("utf-8", "surrogatepass"),
}


def _as_csv(rows: list[Any]) -> str:
    out = io.StringIO()
    mappings = [row for row in rows if isinstance(row, dict)]
    writer = csv.writer(out)
    names = list(dict.fromkeys(name for row in mappings for name in row))
    writer.writerow(names)
    for row in mappings:
        cells = [row.get(name) for name in names]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])
    return out.getvalue().replace("\0", "0")


def rows(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Files of rows: no rows at all, or sound ones of which some are odd; read by each method and `reward test`."""
    random = Random(f"rows {seed}")
    texts = list(odd.TEXTS.items())
    for n in range(count):
        suffix = random.choice(("jsonl", "jsonl", "json", "csv"))
        method = random.choice([*METHODS])
        if n < len(texts):
            what, content = texts[n]
            suffix = random.choice((suffix, suffix, "parquet"))
        else:
            what = ROWS_OF[method] if random.random() < 0.8 else random.choice([*ROWS])
            sound_rows: list[Any] = list(ROWS[what])
            for at in random.sample(range(12), random.choice((1, 1, 12))):
                sound_rows[at] = odd.changed_value(sound_rows[at], random)
            content = FORMATS[suffix](sound_rows)
            if random.random() < 0.2:
                content = odd.changed(content.decode("utf-8", "replace"), random).encode("utf-8", "surrogatepass")
        file = f"odd.{suffix}"
        argv = [*sound.train(method, model__path=Path("starter")), f"task.data={file}"]
        argv += random.choice(
            (
                [DRY],
                [DRY],
                [],
                ["reward.functions=[{use: 'rows.py:score'}]"] if method in ("grpo", "ppo", "distill") else [],
            )
        )
        if random.random() < 0.2:
            argv = ["reward", "test", "rows.py:score", "--data", file]
        yield Case(f"rows {seed}.{n}: {what}", argv, together(write_rows, odd.writing(file, content)))


def found(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """What the fuzz has found, kept whatever the seeds."""
    one_prompt = together(
        write_rows,
        odd.writing("one.jsonl", b'{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}\n' * 9),
    )
    for method in ("sft", "reward", "dpo"):
        yield Case(f"{method} on one prompt", [*sound.train(method), "task.data=one.jsonl"], one_prompt)
    recipes = {"method a list": b"method: [grpo]\n", "method a mapping": b"method: {grpo: 1}\ngrpo: {}\n"}
    for name, content in recipes.items():
        yield Case(name, ["train", "grpo", "odd.yaml", DRY], odd.writing("odd.yaml", content))


def unharmed(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """The commands of the other kinds with nothing odd about them."""
    for method in METHODS:
        yield Case(method, sound.train(method), write_rows)
        yield Case(f"{method} {DRY}", [*sound.train(method, model__path=Path("starter")), DRY], write_rows)
    for key, folder in {"model.adapter": sound.adapter, "reward.model": sound.reward_model}.items():
        yield Case(key, [*sound.train("grpo"), f"{key}={folder}", DRY], write_rows)
    yield Case("critic.path", [*sound.train("ppo"), f"critic.path={sound.model}", DRY], write_rows)
    yield Case("reward test", ["reward", "test", "rows.py:score", "--data", "prompts.jsonl"], write_rows)
    run = copied(sound.stopped, "odd")
    for argv in (
        ["train", "--resume", "odd"],
        ["report", "odd"],
        ["show", "odd"],
        ["eval", "odd", "--num-prompts=2"],
    ):
        yield Case(" ".join(argv), argv, run)
    for what in ("recipes", "tasks", "settings"):
        yield Case(f"list {what}", ["list", what])


KINDS = {f.__name__: f for f in (found, words, settings, numbers, recipes, rows, models, runs)}
