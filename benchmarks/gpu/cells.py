"""The cells of the table: what is measured where, in the order of worth, and about how long each takes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.gpu.shapes import SHAPES, TINY, Work, of_vocabulary
from benchmarks.sizes import Shape

PACKAGE = "benchmarks.gpu"
ENGINES = {"fused": 2, "fused without graphs": 1, "hf": 1}  # with how often each is timed
LIBRARY = {"generate": 1, "continuous batching": 1}
SEEDS = 5
FOUR_BIT = ("7b",)
PEER_MICRO_BATCH = 16
LONG = Work(prompts=8)


@dataclass(frozen=True)
class Cell:
    """One measurement: `module` of this package with `settings`; section and row say where it stands in the table.

    shape: whose folder it needs; seconds: about what it takes; peer: the package that its Python must have.
    """

    name: str
    section: str
    module: str
    settings: dict[str, Any]
    shape: Shape | None = None
    seconds: float = 60.0
    peer: str | None = None


@dataclass(frozen=True)
class Profile:
    """Shapes, work and axes of one table."""

    shapes: tuple[Shape, ...]
    work: Work
    device: str
    dtype: str
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    words: tuple[int, ...]
    scaled: Work
    attended: tuple[Work, ...]
    seeds: int
    learning: dict[str, list[str]] = field(default_factory=dict)

    @property
    def common(self) -> dict[str, Any]:
        """Settings of every cell."""
        return {"device": self.device, "dtype": self.dtype, "overrides": [], "quantization": None, "repeats": 2}


def profile_of(names: list[str], *, device: str) -> Profile:
    """`tiny` is for a CPU and takes seconds; else the Qwen2.5 shapes named, on the device."""
    if names == ["tiny"]:
        work = Work(prompts=2, group=2, prompt=8, new=8)
        short = ["run.num_steps=2", "run.eval_prompts=8", "run.eval_every=0", "run.save_every=0", "run.threads=1"]
        fewer = {
            "sort": [*short, "grpo.num_prompts=8"],
            "reviews": [*short, "ppo.num_prompts=8", "ppo.minibatch_size=8", "ppo.num_epochs=1"],
        }
        few = replace(work, new=6)
        return Profile((TINY,), work, device, "float32", (4, 8), (4,), (1024,), few, (few,), 1, fewer)
    shapes = tuple(SHAPES[name] for name in names)
    attended = tuple(replace(LONG, group=group, new=new) for group, new in ((8, 512), (16, 2048), (8, 8192)))
    return Profile(
        shapes, Work(), device, "bfloat16", (512, 1024, 2048, 4096, 8192), (8, 16, 32, 64), (32768, 65536, 151936),
        LONG, attended, SEEDS,
    )  # fmt: skip


def cells(profile: Profile) -> list[Cell]:
    """All of them."""
    found = [Cell("ceilings", "machine", "ceilings", profile.common, seconds=20)]
    for shape in profile.shapes:
        found += [*sampling(profile, shape), *training(profile, shape)]
    found += [*attention(profile), *scaling(profile), *learning(profile)]
    for shape in profile.shapes:
        settings = {**profile.common, "shape": asdict(shape), "device": "cpu"}
        found.append(Cell(f"launches {shape.name}", "launches", "launches", settings))
    return sorted(found, key=lambda cell: cell.settings["device"] == "cpu")  # a lent GPU does not wait for these


def settings_of(profile: Profile, shape: Shape, **more: Any) -> dict[str, Any]:
    """Of a cell on a shape's folder: its work, and a base in 4 bits where the shape asks for that."""
    four = ["model.quantization=4bit"] if shape.name in FOUR_BIT else []
    own = {"quantization": "4bit" if four else None, "overrides": four, "work": asdict(profile.work)}
    return {**profile.common, **own, "micro_batch": min(PEER_MICRO_BATCH, profile.work.rows), **more}


def sampling(profile: Profile, shape: Shape) -> Iterator[Cell]:
    """tinyrl's engines and the library's. A base in 4 bits has no fused decoder."""
    engines = {"hf": 1} if shape.name in FOUR_BIT else ENGINES
    for module, ways in (("sampling", engines), ("library", LIBRARY)):
        for engine, repeats in ways.items():
            settings = settings_of(profile, shape, engine=engine, repeats=repeats)
            yield Cell(f"sampling {shape.name} {engine}", "sampling", module, settings, shape, seconds=120)


def training(profile: Profile, shape: Shape) -> Iterator[Cell]:
    """Both methods by both sides (PPO not on a base in 4 bits)."""
    methods = {"grpo": "trl"} if shape.name in FOUR_BIT else {"grpo": "trl", "ppo": "trl.experimental.ppo"}
    for method, package in methods.items():
        settings = settings_of(profile, shape, method=method)
        seconds = 150 if method == "grpo" else 350
        yield Cell(f"{method} {shape.name} tinyrl", method, "training", settings, shape, seconds=seconds)
        yield Cell(f"{method} {shape.name} TRL", method, "peers", settings, shape, seconds=2 * seconds, peer=package)


def attention(profile: Profile) -> Iterator[Cell]:
    """A layer of the first shape."""
    shape = profile.shapes[0]
    for work in profile.attended:
        settings = {**profile.common, "shape": asdict(shape), "work": asdict(work), "repeats": 5}
        yield Cell(f"attention {work.group} x {work.new}", "attention", "attention", settings)


def scaling(profile: Profile) -> Iterator[Cell]:
    """GRPO of the first shape, along each axis."""
    shape, work = profile.shapes[0], profile.scaled
    points = [("response length", n, shape, replace(work, new=n)) for n in profile.lengths]
    points += [("group size", n, shape, replace(work, group=n)) for n in profile.groups]
    points += [("vocabulary", n, of_vocabulary(shape, n), work) for n in profile.words]
    for axis, x, of, what in points:
        settings = settings_of(profile, of, method="grpo", repeats=1, work=asdict(what), axis=axis, x=x)
        yield Cell(f"{axis} {x}", "scaling", "training", settings, of, seconds=120)


def learning(profile: Profile) -> Iterator[Cell]:
    """float32 on the CPU beside bfloat16 on the device, with its correction and, for GRPO, without."""
    arms: dict[str, tuple[str, str, list[str]]] = {
        "float32, CPU": ("cpu", "float32", []),
        "bfloat16": (profile.device, "bfloat16", []),
        "bfloat16, no correction": (profile.device, "bfloat16", ["grpo.mismatch=none"]),
    }
    for task in ("sort", "reviews"):
        for arm, (device, dtype, overrides) in arms.items():
            if task == "reviews" and overrides:
                continue
            for seed in range(profile.seeds):
                own = {"device": device, "dtype": dtype, "overrides": [*overrides, *profile.learning.get(task, [])]}
                settings = {**profile.common, **own, "task": task, "seed": seed, "arm": arm}
                yield Cell(f"learning {task}, {arm}, seed {seed}", "learning", "learning", settings, seconds=150)
