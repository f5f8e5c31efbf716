"""Cases of folders: models and adapters in every role, runs; a damage to one of their files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tests.faults.fuzz import odd
from tests.faults.fuzz.case import DRY, Case, Prepare, together
from tests.faults.fuzz.sound import Sound, copied, write_rows
from tests.models import damages
from tinyrl.runs import checkpoint as checkpoints


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
        ["train", "--resume", "odd", "run.num_steps=3", "--allow-config-change"], ["report", "odd"], ["show", "odd"],
        ["show", "odd", "--json"], ["eval", "odd", "--num-prompts=2"], ["eval", "odd", "--vs=start",
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
