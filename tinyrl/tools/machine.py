"""What this machine has, and what is missing for what (`tinyrl doctor`)."""

from __future__ import annotations

import contextlib
import os
import shutil
import textwrap
from importlib import metadata
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from tinyrl.runs.diagnosis import columns
from tinyrl.runs.run_dir import versions
from tinyrl.workers.process import CGROUP_LIMIT
from tinyrl.workers.sandbox import why_not_isolated

PURPOSES = {
    "quantization": "a 4-bit base, 8-bit Adam",
    "math": "task.grading=math",
    "track": "TensorBoard, trackio, wandb",
}
LITTLE_DISK = 2e9


def look_at_machine() -> dict[str, list[str]]:
    """Lines by topic; "missing" has what keeps something from working, and what to do."""
    memory, why = psutil.virtual_memory(), why_not_isolated()
    limit = CGROUP_LIMIT.read_text(encoding="ascii").strip() if CGROUP_LIMIT.is_file() else "max"
    container = f", of which this container may use {int(limit) / 1e9:,.1f}" if limit.isdigit() else ""
    free = shutil.disk_usage(Path.cwd()).free
    missing = _missing_packages()
    if not torch.cuda.is_available() and Path("/dev/nvidia0").exists():
        missing.append("torch sees no CUDA device, and there is one: install a torch build with CUDA")
    if free < LITTLE_DISK:
        missing.append("room on the disk: checkpoints may not fit")
    return {
        "versions": [", ".join(f"{name} {version}" for name, version in versions().items())],
        "device": [_device(index) for index in range(torch.cuda.device_count())] or ["cpu, float32"],
        "threads": [_threads()],
        "memory": [f"{memory.available / 1e9:,.1f} of {memory.total / 1e9:,.1f} GB free{container}"],
        "disk": [f"{free / 1e9:,.1f} GB free here"],
        "sandbox": ["programs can be isolated"] if why is None else [f"programs cannot be isolated: {why}"],
        "missing": missing or ["nothing"],
    }


def render(facts: dict[str, list[str]]) -> str:
    lines = [(topic, line) for topic, lines in facts.items() for line in lines]
    return "\n".join(textwrap.fill(line, columns(), initial_indent=f"{topic:12}", subsequent_indent=" " * 12)
                     for topic, line in lines)  # fmt: skip


def _device(index: int) -> str:
    free, total = torch.cuda.mem_get_info(index)
    has_it = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = "bfloat16" if has_it else "float16 with a scaled loss, for it has no bfloat16"
    return f"cuda:{index} {torch.cuda.get_device_name(index)}, {free / 1e9:,.1f} of {total / 1e9:,.1f} GB free, {dtype}"


def _threads() -> str:
    cores = len(psutil.Process().cpu_affinity() or [0]) if psutil.LINUX else psutil.cpu_count() or 1
    names = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    load = psutil.getloadavg()[0]
    return (
        f"{cores} core{'s' * (cores != 1)} to use, torch takes {torch.get_num_threads()}"
        + (f"; {', '.join(names)} is set" if names else "")
        + (f"; others are computing here (load {load:.1f})" if load > 0.8 * cores else "")
    )


def _missing_packages() -> list[str]:
    """A line for each package that tinyrl needs and that is absent or too old, and for each extra with such ones."""
    requirements, lines, of_extra = list[str](), [], dict[str, list[str]]()
    with contextlib.suppress(metadata.PackageNotFoundError):  # used without being installed
        requirements = metadata.requires("tinyrl") or []
    for requirement in map(Requirement, requirements):
        marker, problem = requirement.marker, _problem(requirement)
        if problem and marker is None:
            lines.append(f"{requirement.name}, which tinyrl needs: {problem}; pip install '{requirement}'")
        elif problem and marker and not marker.evaluate({"extra": "dev"}):  # those of `dev` are for development
            for extra in [name for name in PURPOSES if marker.evaluate({"extra": name})][:1]:
                of_extra.setdefault(extra, []).append(f"{requirement.name} ({problem})")
    for extra, packages in of_extra.items():
        lines.append(f"{', '.join(packages)}, for {PURPOSES[extra]}: pip install 'tinyrl[{extra}]'")
    return lines


def _problem(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return None if fits else f"{version} is installed, and {requirement.specifier} is needed"
