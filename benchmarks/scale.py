"""A step's time against the number of devices and the length of responses: a model, fed with one device's numbers.

    python -m benchmarks.scale measure OUT.json [--sizes s m] [--threads 1]    (a quiet machine)
    python -m benchmarks.scale draw OUT.json docs/scale.png                    the figure, and its tables

A step on N devices, with T completion tokens, and P tokens of prompts, each of which is read once:

    sampling = L * decode_s + (decode_row_s * T + read_s * P) / N     L: the longest response
    training = (read_s + learn_s) * (P + T) / N                       the reference's pass, and the update
    exchange = (N - 1) / N * (2 * gradient + rollout bytes) / bandwidth + EXCHANGES * latency
    alone    = what rank 0 does by itself: rewards, the optimizer, records

A decoding step costs decode_s whatever its rows (weights are read, kernels launched), and decode_row_s for each row
that is still alive; the rows alive at every step sum up to T. So sampling ends at L * decode_s, however many devices
there are: that, `alone` and `exchange` are where data parallel stops paying. A server takes the place of one device:
the others wait for it, read its completions once more, and send it an adapter.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import our_recipe
from benchmarks.fixed_work import prepare
from benchmarks.our_scaling import full_length
from benchmarks.sizes import SIZES

EXCHANGES = 12  # of a GRPO step: prompts' completions and their sizes, scores, two passes, gradients, flags
TOKEN_BYTES = 8 + 4  # of a rollout, exchanged: a token's id and its log-probability
PROBED_TOKENS = 4 * 64  # that the stale-policy guard samples and reads
DEVICES = (1, 2, 4, 8, 16, 32)
LENGTHS = (64, 256, 1024, 4096)
END_SHARE = 1 / 2  # of the longest response, that one has on average


@dataclass(frozen=True)
class Link:
    """What joins devices: bytes a second, and seconds until the first byte of an exchange is there."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """Seconds measured on one device with one model (see the head of this file), and the bytes of its gradient."""

    name: str
    decode_s: float
    decode_row_s: float
    read_s: float
    learn_s: float
    alone_s: float
    gradient_bytes: int


@dataclass(frozen=True)
class Step:
    """What a step does: rows of up to `longest` tokens, half as many on average."""

    rows: int = 512
    group: int = 8
    prompt: int = 256
    longest: int = 512

    @property
    def new(self) -> float:
        """Completion tokens."""
        return self.rows * self.longest * END_SHARE

    @property
    def prompts(self) -> float:
        """Tokens of prompts, each read once for its group."""
        return self.rows / self.group * self.prompt


def sampling_s(device: Device, step: Step, devices: int = 1) -> float:
    """Seconds of sampling on so many devices."""
    shared = device.decode_row_s * step.new + device.read_s * step.prompts
    return step.longest * device.decode_s + shared / devices


def training_s(device: Device, step: Step, devices: int = 1) -> float:
    """Seconds of the reference's pass and of the update."""
    return (device.read_s + device.learn_s) * (step.prompts + step.new) / devices


def exchange_s(device: Device, step: Step, devices: int, link: Link) -> float:
    """Seconds of gathering the rollout and of summing the gradient in a ring."""
    if devices == 1:
        return 0.0
    moved = (2 * device.gradient_bytes + TOKEN_BYTES * step.new) * (devices - 1) / devices
    return moved / link.bandwidth + EXCHANGES * link.latency


def parallel_s(device: Device, step: Step, devices: int, link: Link) -> float:
    """Seconds of a step in so many processes."""
    shared = sampling_s(device, step, devices) + training_s(device, step, devices)
    return shared + exchange_s(device, step, devices, link) + device.alone_s


def served_s(device: Device, step: Step, devices: int, link: Link, *, faster: float) -> float:
    """Seconds of a step where one of the devices is a server that samples `faster` times as fast as our engine does
    alone. Its completions are read once more, for its log-probabilities are not ours.
    """
    assert devices > 1, "the server has a device of its own"
    trainers = devices - 1
    probe = PROBED_TOKENS / 4 * device.decode_s + PROBED_TOKENS * (device.decode_row_s + device.read_s)
    sync = device.gradient_bytes / link.bandwidth + link.latency + probe
    again = device.read_s * (step.prompts + step.new) / trainers
    sampled = sampling_s(device, step) / faster + again + sync
    shared = training_s(device, step, trainers)
    return sampled + shared + exchange_s(device, step, trainers, link) + device.alone_s


def break_even(device: Device, step: Step, devices: int, link: Link) -> float:
    """How many times as fast as our engine a server has to sample, to be as fast as data parallel on as many devices;
    infinite where no server is.
    """
    left = parallel_s(device, step, devices, link) - served_s(device, step, devices, link, faster=math.inf)
    return sampling_s(device, step) / left if left > 0 else math.inf


def pays_until(device: Device, step: Step, link: Link, *, least: float = 1.5) -> int:
    """The largest number of devices up to which every doubling makes a step at least `least` times as fast."""
    devices = 1
    while devices < 1024:
        now, then = (parallel_s(device, step, n, link) for n in (devices, 2 * devices))
        if now / then < least:
            return devices
        devices *= 2
    return devices


# ---- measuring ----


def measure(size: str, options: Namespace) -> Device:
    """On this machine, with the benchmark's model of a size and its GRPO step: medians of some repeats."""
    import torch

    from tinyrl.config.recipe import load_config
    from tinyrl.rollout.components import Options
    from tinyrl.trainers import grpo
    from tinyrl.training.optim import role_optimizers
    from tinyrl.training.planning import learn, read, trained, widest

    files = prepare(full_length(SIZES[size]), options=options)
    recipe = options.out / f"{size}.yaml"
    recipe.write_text(json.dumps(our_recipe.grpo(files, steps=1, options=options)))
    config = load_config("grpo", str(recipe), overrides=[])
    torch.set_num_threads(options.threads)
    parts = grpo.Grpo(config, options=Options(device=options.device))
    try:
        update = parts.longest_step()[0]
        micro, _ = widest(update, parts.micro_batches.tokens)
        tokens = update.sizes.cost(micro)
        optimizer = role_optimizers(config.optim, parts.roles.parameters)["policy"].optimizer

        def step() -> None:
            for p in trained(parts.roles):
                p.grad = torch.zeros_like(p)
            optimizer.step()

        decode_s, decode_row_s = decoding(parts, config.grpo.num_prompts)
        return Device(
            f"{size}, {options.threads} thread{'s' * (options.threads > 1)}",
            decode_s,
            decode_row_s,
            timed(lambda: read(parts, update, micro)) / tokens,
            timed(lambda: learn(parts, update, micro)) / tokens,
            timed(step),
            sum(p.numel() * p.itemsize for p in trained(parts.roles)),
        )
    finally:
        parts.close()


def decoding(parts: Any, num_prompts: int) -> tuple[float, float]:
    """Seconds of a decoding step, and of each of its rows: by the difference of calls of few and of more tokens, with
    few and with more rows.
    """
    from tinyrl.generation.engine import Request

    prompts = [p.tokens for p in parts.train_prompts[:num_prompts]]

    def sampled(group: int, new: int) -> float:
        requests = [Request(tokens, prompt_row=i, max_new_tokens=new) for i, tokens in enumerate(prompts)]
        return timed(lambda: parts.engine.sample(requests, group, seed=0, step=0))

    few, many = (2, 16)
    seconds = {group: (sampled(group, 12) - sampled(group, 4)) / 8 for group in (few, many)}
    row = max(0.0, seconds[many] - seconds[few]) / ((many - few) * num_prompts)
    return max(0.0, seconds[few] - few * num_prompts * row), row


def timed(work: Any, *, repeats: int = 7) -> float:
    """The median of some runs after a first one, in seconds."""
    import torch

    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("what", choices=["measure", "draw"])
    parser.add_argument("file", type=Path)
    parser.add_argument("picture", type=Path, nargs="?")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["s", "m"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.what == "measure":
        with tempfile.TemporaryDirectory() as folder:
            options.out = Path(folder)
            found = [asdict(measure(size, options)) for size in options.sizes]
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        print(options.file.read_text())
    else:
        from benchmarks.scale_figure import draw, tables

        devices = [Device(**one) for one in json.loads(options.file.read_text())]
        print(tables(devices))
        if options.picture is not None:
            draw(devices, options.picture)


if __name__ == "__main__":
    main()
