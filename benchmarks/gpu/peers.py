"""Steps of TRL's trainers on the same folder, with the Python of an environment that has TRL."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from benchmarks.fixed_work import Grpo
from benchmarks.gpu.meter import peak_gb
from benchmarks.gpu.shapes import Work


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """method: grpo or ppo. The micro-batch is settings["micro_batch"] sequences."""
    work = Work(**settings["work"])
    grpo = Grpo(num_prompts=work.prompts, group_size=work.group, max_new_tokens=work.new)
    more = {"steps": settings["repeats"] + 1, "seed": 0, "work": vars(grpo), "prompts": work.rows, "new": work.new}
    more["scored_at_a_time"] = settings["micro_batch"]
    result = import_module(f"benchmarks.peer_{settings['method']}").measure({**settings, **more})
    peak = peak_gb(torch.device(settings["device"]), result["imports_mb"])
    return {**{key: result[key] for key in ("seconds", "tokens", "phases")}, "peak_gb": peak}
