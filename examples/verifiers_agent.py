"""Tasks of a `verifiers` taskset (0.4) as an agent's episodes: its own harness plays one, its own reward counts.

**verifiers' default harness, `bash`, runs what the model writes**: it takes a container (--env.agent.runtime.type). The
harness `null` runs the taskset's tools and nothing else. Set: address, key, model and harness. Environment: vf-eval is
of one with `pip install verifiers==0.4.0 uv` and the taskset, which needs nothing of tinyrl; uv has to be on the path.

    export VF_EVAL="$PWD/vf/bin/vf-eval --env.agent.harness.id null --env.agent.runtime.type subprocess"
    export VF_TASKSET=boxes_taskset PYTHONPATH=$PWD/examples PATH=$PWD/vf/bin:$PATH
    python -m tests.agents.teach examples/verifiers_agent.py:run taught --task examples/verifiers_agent.py:TASK --most 6
    tinyrl train grpo task.name=examples/verifiers_agent.py:TASK environment.agent=examples/verifiers_agent.py:run \\
        model.path=taught/model lora.enabled=false optim.learning_rate=1e-3 generation.max_new_tokens=128 \\
        environment.max_concurrency=2 grpo.num_prompts=6 grpo.group_size=4 run.num_steps=1 run.eval_prompts=0

A row names a task: {"prompt": "wordle 3", "taskset": "wordle", "idx": 3}; those of TASK are the tasks of VF_TASKSET, 0
to 71 to train on and 72 to 89 held out. Words of VF_EVAL behind the program are vf-eval's.

Seen: 24 episodes with 47 calls, none dropped; 20 s an episode on two busy cores, two at a time.
"""

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tinyrl.tasks import Task


def run(row, base_url, api_key, model):
    """Return the reward that the taskset gave, as a text."""
    program, *words = shlex.split(os.environ["VF_EVAL"])
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(program, row["taskset"], *words, "--client.base-url", base_url, "--client.api-key-var", "OPENAI_API_KEY"),
            *("--model", model, "--select.include.idx", str(row["idx"])),
            *("--no-push", "--no-rich", "--output-dir", folder, "--run.name", "episode"),
        ]
        environment = {**os.environ, "OPENAI_API_KEY": api_key}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        episode = json.loads(Path(folder, "episode", "traces.jsonl").read_text().splitlines()[0])
    if episode["errors"]:
        raise RuntimeError(f"{episode['errors'][0]['type']}: {episode['errors'][0]['message']}")
    return str(sum(one["score"] * one["weight"] for one in episode["traces"][0]["rewards"].values()))


def rows(split):
    name = os.environ["VF_TASKSET"]
    numbers = {"train": range(72), "eval": range(72, 90)}[split]
    return [{"prompt": f"{name} {number}", "taskset": name, "idx": number} for number in numbers]


def given(prompts: list[str], completions: list[str], **columns: list[Any]) -> list[float | None]:
    """Return the rewards that `run` returned."""
    return [number_in(completion) for completion in completions]


def number_in(text: str) -> float:
    """Return the number that a text is; 0 for another, as of an episode that ran out of tokens or turns."""
    try:
        return float(text)
    except ValueError:
        return 0.0


TASK = Task(name="verifiers", summary="tasks of VF_TASKSET", rows=rows, verify=given, columns=("taskset", "idx"))
