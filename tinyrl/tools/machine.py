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
    why = why_not_isolated()
    return {
        "versions": [", ".join(f"{name} {version}" for name, version in versions().items())],
        "device": _device(),
        "threads": [_threads()],
        "memory": [_memory()],
        "disk": [f"{shutil.disk_usage(Path.cwd()).free / 1e9:,.1f} GB free here"],
        "sandbox": ["programs can be isolated"] if why is None else [f"programs cannot be isolated: {why}"],
        "missing": _missing() or ["nothing"],
    }


def render(facts: dict[str, list[str]]) -> str:
    width = columns()
    return "\n".join(
        textwrap.fill(line, width, initial_indent=f"{topic:12}", subsequent_indent=" " * 12)
        for topic, lines in facts.items()
        for line in lines
    )


def _device() -> list[str]:
    if not torch.cuda.is_available():
        return ["cpu, float32"]
    lines = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has_it else "float16 with a scaled loss, for it has no bfloat16"
        name = torch.cuda.get_device_name(index)
        lines.append(f"cuda:{index} {name}, {free / 1e9:,.1f} of {total / 1e9:,.1f} GB free, {dtype}")
    return lines


def _threads() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = f"{cores} core{'s' * (cores != 1)} to use, torch takes {torch.get_num_threads()} (a run times what is best)"
    set_ones = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    said += f"; {', '.join(set_ones)} is set" if set_ones else ""
    return said + (f"; others are computing here (load {busy:.1f})" if busy > 0.8 * cores else "")


def _memory() -> str:
    memory = psutil.virtual_memory()
    text = CGROUP_LIMIT.read_text(encoding="ascii").strip() if CGROUP_LIMIT.is_file() else "max"
    limit = f", of which this container may use {int(text) / 1e9:,.1f}" if text.isdigit() else ""
    return f"{memory.available / 1e9:,.1f} of {memory.total / 1e9:,.1f} GB free{limit}"


def _missing() -> list[str]:
    """Packages that are absent or too old, a GPU that torch does not see, room on the disk."""
    requirements, lines, of_extra = list[str](), [], dict[str, list[str]]()
    with contextlib.suppress(metadata.PackageNotFoundError):  # used without being installed
        requirements = metadata.requires("tinyrl") or []
    for requirement in map(Requirement, requirements):
        extra = next((name for name in PURPOSES if _only_for(requirement, name)), None)
        problem = _problem(requirement)
        if problem and extra is not None:
            of_extra.setdefault(extra, []).append(f"{requirement.name} ({problem})")
        elif problem and requirement.marker is None:  # others are for development
            asked = str(requirement).partition(";")[0].strip()
            lines.append(f"{requirement.name}, which tinyrl needs: {problem}; pip install '{asked}'")
    for extra, packages in of_extra.items():
        lines.append(f"{', '.join(packages)}, for {PURPOSES[extra]}: pip install 'tinyrl[{extra}]'")
    if not torch.cuda.is_available() and Path("/dev/nvidia0").exists():
        lines.append("torch sees no CUDA device, and there is one: install a torch build with CUDA")
    if shutil.disk_usage(Path.cwd()).free < LITTLE_DISK:
        lines.append("room on the disk: checkpoints may not fit")
    return lines


def _only_for(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": "dev"})


def _problem(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return None if fits else f"{version} is installed, and {requirement.specifier} is needed"
