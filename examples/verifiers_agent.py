"""One task of a `verifiers` taskset (0.4) as an agent's episode: its own harness plays it, its own reward is printed.

It runs in an environment that has verifiers, uv and the taskset, and needs nothing of tinyrl. A row says which task:
{"prompt": "wordle 3", "taskset": "wordle", "idx": 3}. Words behind the file are vf-eval's.

tinyrl train grpo task.data=tasks.jsonl 'reward.functions=[{use: rewards.py:given}]'
    'environment.agent=[/venv/bin/python, examples/verifiers_agent.py, --env.agent.harness.id, "null",
    --env.agent.runtime.type, subprocess]'
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

row = json.load(sys.stdin)
with tempfile.TemporaryDirectory() as folder:
    command = [
        *(Path(sys.executable).with_name("vf-eval"), row["taskset"], *sys.argv[1:]),
        *("--client.base-url", os.environ["OPENAI_BASE_URL"], "--client.api-key-var", "OPENAI_API_KEY"),
        *("--model", os.environ["OPENAI_MODEL"], "--select.include.idx", str(row["idx"])),
        *("--no-push", "--no-rich", "--output-dir", folder, "--run.name", "episode"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    episode = json.loads(Path(folder, "episode", "traces.jsonl").read_text().splitlines()[0])
if episode["errors"]:
    sys.exit(f"{episode['errors'][0]['type']}: {episode['errors'][0]['message']}")
given = episode["traces"][0]["rewards"].values()
print(sum(one["score"] * one["weight"] for one in given))
