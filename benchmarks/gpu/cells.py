"""The cells of the table: what is measured where, in the order of worth, and about how long each takes on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks.gpu.shapes import SHAPES, TINY, Work, of_vocabulary, parameters
from benchmarks.sizes import Shape

PACKAGE = "benchmarks.gpu"
FIRST = ("1.5b", "0.5b")  # shapes that are compared before anything else
METHODS = {"grpo": "trl", "ppo": "trl.experimental.ppo"}  # with the peer's module
SECONDS = {"sampling": 80.0, "grpo": 100.0, "ppo": 160.0}  # of a shape of 1.5 billion parameters
SEEDS, REAL_SEEDS = 5, 3
TESTS = {  # `pytest -m gpu` in slices, first what is true of a GPU alone
    "graphs": (["tests/gpu/test_graphs.py"], 60),
    "sampling": (["tests/gpu/test_sampling.py"], 150),
    "learning": (["tests/gpu/test_learning.py"], 200),
    "methods and environments": (["tests/gpu/test_runs.py", "-k", "form or text or environment"], 240),
    "stops and resumes": (["tests/gpu/test_runs.py", "-k", "resumes"], 200),
}
FOUR_BIT = ("7b",)
PEER_MICRO_BATCH = 16
LONG = Work(prompts=8)


@dataclass(frozen=True)
class Cell:
    """One measurement: `module` of this package with `settings`; section and row say where it stands in the table.

    shape: whose folder it needs; seconds: about what it takes; peer: the package that its Python must have; needs: the
    option that it cannot do without; by_itself: never measured in the process of the slice.
    """

    name: str
    section: str
    module: str
    settings: dict[str, Any]
    shape: Shape | None = None
    seconds: float = 60.0
    peer: str | None = None
    needs: str | None = None
    by_itself: bool = False


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
    tests: dict[str, tuple[list[str], int]] = field(default_factory=lambda: TESTS)
    real_steps: tuple[int, int] = (8, 12)  # of SFT and of GRPO
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
        tests = {"sampling": (["tests/gpu/test_sampling.py", "-k", "same_tokens or kernels", "-m", "not gpu"], 60)}
        axes: Any = {"lengths": (4, 8), "groups": (4,), "words": (1024,), "scaled": few, "attended": (few,), "seeds": 1}
        return Profile((TINY,), work, device, "float32", **axes, tests=tests, real_steps=(1, 2), learning=fewer)
    shapes = tuple(SHAPES[name] for name in names)
    attended = tuple(replace(LONG, group=group, new=new) for group, new in ((8, 512), (16, 2048), (8, 8192)))
    return Profile(
        shapes, Work(), device, "bfloat16", (2048, 8192, 512, 1024, 4096), (8, 16, 32, 64), (32768, 65536, 151936),
        LONG, attended, SEEDS,
    )  # fmt: skip


def cells(profile: Profile) -> list[Cell]:
    """All of them, in their order of worth: the first half hour has one of each kind, the rest goes on from there."""
    shapes = profile.shapes
    first = [shape for shape in shapes if shape.name in FIRST] or list(shapes)
    own_tests, real, lengths = list(tests(profile)), list(real_learning(profile)), scaling(profile, "response length")
    found = [own_tests[0], Cell("ceilings", "machine", "ceilings", profile.common, seconds=20)]
    found += [cell for shape in first for cell in sampling(profile, shape)]
    found += [*training(profile, first[0], "grpo"), *training(profile, first[-1], "ppo"), real[0]]
    found += [next(lengths), next(lengths)]
    found += [cell for shape in first for method in METHODS for cell in training(profile, shape, method)]
    found += [*real, *lengths, *own_tests, *(cell for shape in first for cell in other_engines(profile, shape))]
    found += [*scaling(profile, "group size", "vocabulary"), *attention(profile), *learning(profile)]
    for shape in shapes:
        found += [*sampling(profile, shape), *(cell for how in METHODS for cell in training(profile, shape, how))]
        found += other_engines(profile, shape)
    for shape in shapes:
        settings = {**profile.common, "shape": asdict(shape), "device": "cpu"}
        found.append(Cell(f"launches {shape.name}", "launches", "launches", settings))
    each = {cell.name: cell for cell in found}  # in the place where it is named first
    return sorted(each.values(), key=lambda cell: cell.settings["device"] == "cpu")


def settings_of(profile: Profile, shape: Shape, **more: Any) -> dict[str, Any]:
    """Of a cell on a shape's folder: its work, and a base in 4 bits where the shape asks for that."""
    four = ["model.quantization=4bit"] if shape.name in FOUR_BIT else []
    own = {"quantization": "4bit" if four else None, "overrides": four, "work": asdict(profile.work)}
    return {**profile.common, **own, "micro_batch": min(PEER_MICRO_BATCH, profile.work.rows), **more}


def tests(profile: Profile) -> Iterator[Cell]:
    """The tests of a device."""
    for name, (words, seconds) in profile.tests.items():
        settings = {**profile.common, "words": words}
        yield Cell(f"tests of {name}", "tests", "suite", settings, seconds=seconds, by_itself=True)


def sampling(profile: Profile, shape: Shape) -> Iterator[Cell]:
    """tinyrl's two engines, the library's continuous batching, and vLLM. A base in 4 bits has no fused decoder."""
    four = shape.name in FOUR_BIT
    ways = {"fused": "sampling", "hf": "sampling", "continuous batching": "library", "vLLM": "served"}
    for engine, module in ways.items():
        if not (four and engine in ("fused", "vLLM")):
            yield engine_cell(profile, shape, engine, module)


def other_engines(profile: Profile, shape: Shape) -> Iterator[Cell]:
    """The library's `generate`, and what graphs are worth."""
    yield engine_cell(profile, shape, "generate", "library")
    if shape.name not in FOUR_BIT:
        yield engine_cell(profile, shape, "fused without graphs", "sampling")


def engine_cell(profile: Profile, shape: Shape, engine: str, module: str) -> Cell:
    fast, peer = engine in ("fused", "vLLM"), "vllm" if engine == "vLLM" else None
    settings = settings_of(profile, shape, engine=engine, repeats=2 if fast else 1)
    name, seconds = f"sampling {shape.name} {engine}", SECONDS["sampling"] * size_of(shape)
    return Cell(name, "sampling", module, settings, shape, seconds=seconds, peer=peer)


def size_of(shape: Shape) -> float:
    """About how many times longer than for 1.5 billion parameters it takes."""
    return max(0.5, parameters(shape) / 1.5e9)


def real_learning(profile: Profile) -> Iterator[Cell]:
    """What GRPO teaches a real model, by seed."""
    for seed in range(min(profile.seeds, REAL_SEEDS)):
        form, steps = profile.real_steps
        settings = {**profile.common, "seed": seed, "form": form, "steps": steps}
        yield Cell(f"real model, seed {seed}", "real", "real", settings, seconds=120, needs="real_model")


def training(profile: Profile, shape: Shape, method: str) -> Iterator[Cell]:
    """A method by both sides (PPO not on a base in 4 bits)."""
    if method == "ppo" and shape.name in FOUR_BIT:
        return
    settings = settings_of(profile, shape, method=method, repeats=1 if method == "ppo" else 2)
    seconds = SECONDS[method] * size_of(shape)
    yield Cell(f"{method} {shape.name} tinyrl", method, "training", settings, shape, seconds=seconds)
    peer = METHODS[method]
    yield Cell(f"{method} {shape.name} TRL", method, "peers", settings, shape, seconds=2 * seconds, peer=peer)


def attention(profile: Profile) -> Iterator[Cell]:
    """A layer of the first shape."""
    shape = profile.shapes[0]
    for work in profile.attended:
        settings = {**profile.common, "shape": asdict(shape), "work": asdict(work), "repeats": 5}
        yield Cell(f"attention {work.group} x {work.new}", "attention", "attention", settings)


def scaling(profile: Profile, *axes: str) -> Iterator[Cell]:
    """GRPO of the first shape, along some axes."""
    shape, work = profile.shapes[0], profile.scaled
    points = [("response length", n, shape, replace(work, new=n)) for n in profile.lengths]
    points += [("group size", n, shape, replace(work, group=n)) for n in profile.groups]
    points += [("vocabulary", n, of_vocabulary(shape, n), work) for n in profile.words]
    for axis, x, of, what in points:
        if axis not in axes:
            continue
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
