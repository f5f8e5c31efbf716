"""The cases of each kind: command lines, settings, recipes, rows, models and adapters, runs."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.fuzz import odd
from tests.faults.fuzz.case import Case, Prepare
from tests.faults.fuzz.sound import ROWS, ROWS_OF, Sound, copied, write_rows
from tests.models import damages
from tinyrl.config.errors import fields_of, section_class
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.recipe import load_config, packaged_recipes
from tinyrl.config.settings import SECTIONS
from tinyrl.runs import checkpoint as checkpoints

DRY = "--dry-run"


def together(*steps: Prepare) -> Prepare:
    return lambda folder: [step(folder) for step in steps]


def words(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Commands, options and arguments that are odd by themselves."""
    random = Random(f"words {seed}")
    commands = ("train", "eval", "report", "checkpoints", "reward", "recipes", "tasks", "settings")
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
    fields = [(section, key) for section in SECTIONS for key in fields_of(section_class(section))]
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
    fields = [(section, key) for section in SECTIONS for key in fields_of(section_class(section))]
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
            ([DRY], [DRY], [], ["reward.functions=[{use: 'rows.py:score'}]"] if method in ("grpo", "ppo") else [])
        )
        if random.random() < 0.2:
            argv = ["reward", "test", "rows.py:score", "--data", file]
        yield Case(f"rows {seed}.{n}: {what}", argv, together(write_rows, odd.writing(file, content)))


def models(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Models and adapters in every role with a damage: of the table, a file's mutation, files swapped or gone."""
    random = Random(f"models {seed}")
    table = {**damages.FILES, **damages.KEYS, **damages.VALUES, **damages.TOKENIZERS, **damages.TEMPLATES}
    roles: dict[str, tuple[str, Path, dict[str, damages.Damage]]] = {
        "model.path": ("grpo ppo sft reward", sound.model, table),
        "critic.path": ("ppo", sound.model, table),
        "reward.model": ("grpo ppo", sound.reward_model, table),
        "model.adapter": ("grpo ppo sft", sound.adapter, damages.ADAPTERS),
    }
    for n in range(count):
        role = random.choice([*roles])
        methods, source, known = roles[role]
        what = random.choice([*known])
        damage = known[what]
        if random.random() < 0.7:
            file = random.choice(sorted(path.name for path in source.iterdir() if path.is_file()))
            what, damage = f"{file} changed", file_changed(file, random)
        method = random.choice(methods.split())
        argv = [*sound.train(method, **{role.replace(".", "__"): Path("odd")}), *random.choice(([DRY], []))]
        if role == "model.path" and random.random() < 0.15:
            argv = ["eval", "odd", "--task=sort", "--num-prompts=2"]
        prepare = together(write_rows, copied(source, "odd"), lambda folder, damage=damage: damage(folder / "odd"))
        yield Case(f"models {seed}.{n}: {role}, {what}", argv, prepare)


def file_changed(file: str, random: Random) -> damages.Damage:
    """A damage that needs to know nothing of a file but whether it is JSON, lines of JSON, YAML or bytes."""
    draw = Random(random.random())  # of its own: a case must not depend on whether the ones before it ran

    def damage(folder: Path) -> None:
        path = folder / file
        kind = draw.random()
        if kind < 0.1:
            path.unlink()
        elif kind < 0.2:
            path.write_bytes(draw.choice([*odd.TEXTS.values()]))
        elif kind < 0.3:
            others = sorted(p for p in path.parent.rglob("*") if p.is_file())
            path.write_bytes(draw.choice(others).read_bytes())
        elif kind < 0.35:
            path.unlink()
            os.symlink(draw.choice((path.name, "/dev/zero", "nowhere", "..")), path)
        elif path.suffix == ".json":
            path.write_bytes(odd.as_json(odd.changed_value(json.loads(path.read_text()), draw)))
        elif path.suffix == ".jsonl":
            lines = path.read_text().splitlines()
            at = draw.randrange(len(lines))
            lines[at] = odd.as_json(odd.changed_value(json.loads(lines[at]), draw)).decode()
            path.write_text("\n".join(lines) + draw.choice(("", "\n")))
        elif path.suffix == ".yaml":
            path.write_text(odd.changed(path.read_text(), draw), encoding="utf-8", errors="surrogatepass")
        else:
            content = bytearray(path.read_bytes())
            for _ in range(draw.choice((1, 1, 20))):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content[: draw.choice((len(content), draw.randrange(len(content))))])

    return damage


def runs(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """Runs, finished and stopped on the way, with a damage to one of their files; every command that reads one."""
    random = Random(f"runs {seed}")
    dry = [
        "train",
        "grpo",
        f"model.path={sound.model}",
        "task.data=prompts.jsonl",
        *("generation.max_new_tokens=4", DRY),
    ]
    commands = (
        ["train", "--resume", "odd"], ["train", "--resume", "odd"], ["train", "--resume", "odd",
        "--allow-config-change"],
        ["train", "--resume", "odd", "run.num_steps=3", "--allow-config-change"], ["report", "odd"], ["checkpoints",
        "odd"],
        ["checkpoints", "odd", "--json"], ["eval", "odd", "--num-prompts=2"], ["eval", "odd", "--vs=start",
        "--num-prompts=2"],
        ["eval", str(sound.finished), "--vs=odd", "--num-prompts=2"], [*dry, "model.adapter=odd"], [*dry,
        "reward.model=odd"],
        [*dry[:2], "model.path=odd", *dry[3:]],
    )  # fmt: skip
    for n in range(count):
        source = random.choice((sound.stopped, sound.finished))
        files = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
        likely = [name for name in files if Path(name).suffix in (".yaml", ".json", ".jsonl")]
        file = random.choice(random.choice((files, likely, ["config.yaml"])))
        argv = random.choice(commands)
        steps: list[Prepare] = [write_rows, copied(source, "odd")]
        damage = file_changed(file, random)
        steps.append(lambda folder, damage=damage: damage(folder / "odd"))
        what = file
        if file.startswith("checkpoints/") and random.random() < 0.7:
            what, name = f"{file}, sealed again", str(Path(*Path(file).parts[:2]))
            steps.append(lambda folder, name=name: sealed(folder / "odd" / name))
        yield Case(f"runs {seed}.{n}: {source.name}, {what}", argv, together(*steps))


def sealed(checkpoint: Path) -> None:
    """A checkpoint's manifest made to agree with what its files are now."""
    manifest = checkpoint / checkpoints.MANIFEST
    manifest.unlink(missing_ok=True)
    checkpoints._seal(checkpoint, checkpoints.checkpoint_step(checkpoint))


def found(sound: Sound, seed: int, count: int) -> Iterator[Case]:
    """What the fuzz has found, kept whatever the seeds."""
    one_prompt = together(
        write_rows,
        odd.writing("one.jsonl", b'{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}\n' * 9),
    )
    for method in ("sft", "reward"):
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
        ["checkpoints", "odd"],
        ["eval", "odd", "--num-prompts=2"],
    ):
        yield Case(" ".join(argv), argv, run)
    for argv in (["recipes"], ["tasks"], ["settings"]):
        yield Case(argv[0], argv)


KINDS = {f.__name__: f for f in (found, words, settings, numbers, recipes, rows, models, runs)}
