"""One task of a `verifiers` taskset (0.4) as an agent's episode: its own harness plays it, its own reward is returned.

vf-eval is that of an environment with verifiers, uv and the taskset, which needs nothing of tinyrl. A row says which
task: {"prompt": "wordle 3", "taskset": "wordle", "idx": 3}. Words of VF_EVAL behind the program are vf-eval's.

    VF_EVAL='/venv/bin/vf-eval --env.agent.harness.id null --env.agent.runtime.type subprocess' \\
        tinyrl train grpo task.data=tasks.jsonl 'reward.functions=[{use: rewards.py:given}]' \\
        environment.agent=examples/verifiers_agent.py:run
"""

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path


def run(row, base_url, api_key, model):
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
    return sum(one["score"] * one["weight"] for one in episode["traces"][0]["rewards"].values())
