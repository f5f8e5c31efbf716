"""mini-swe-agent (2.4) as an agent: **it runs the shell commands that the model writes**, here in a container.

By default it runs them on the machine. This container, of bubblewrap, has the programs of /usr, an empty /tmp and the
folder of its episode; no network, no other file or process, none of our variables. Nothing limits memory and disk in
it. Where bubblewrap does not work every episode is refused before the model is asked. Set: container, address, key,
model, and cost_tracking, since nobody knows a price; prompts are those of its mini.yaml. Environment:
`pip install -c constraints.txt -e '.[serve]' mini-swe-agent==2.4.6`, and bubblewrap (`apt-get install bubblewrap`).
LiteLLM asks for a list of prices when it is imported; LITELLM_LOCAL_MODEL_COST_MAP=True: not. The first line makes a
model that was taught to play.

    python -m tests.agents.teach examples/mini_swe_agent.py:run taught
    tinyrl train grpo task.name=examples/boxes.py:TASK environment.agent=examples/mini_swe_agent.py:run \\
        model.path=taught/model lora.enabled=false optim.learning_rate=1e-3 generation.max_new_tokens=128 \\
        grpo.num_prompts=5 grpo.group_size=4 run.num_steps=4 run.eval_prompts=0

Seen: 80 episodes with 160 calls, none dropped.
"""

# pyright: reportMissingImports=none

from typing import Any

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.extra.bubblewrap import BubblewrapEnvironment
from minisweagent.models.litellm_model import LitellmModel

# A container with the programs of this machine, an empty /tmp and one folder that is the episode's: no network, no
# other file, no process of ours, none of our variables.
CONTAINER = [
    *("--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
]


CONFIG = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())


def container_of(boxes: dict[str, str]) -> BubblewrapEnvironment:
    container = BubblewrapEnvironment(**CONFIG["environment"], wrapper_args=CONTAINER)
    for colour, inside in boxes.items():
        (container.working_dir / colour).write_text(f"{inside}\n")
    return container


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    container = container_of(row["boxes"])
    tried = container.execute({"command": "true"})
    if tried["returncode"] != 0:
        raise RuntimeError(f"mini-swe-agent runs what the model writes, and bubblewrap does not work here: {tried}")
    settings = CONFIG["model"] | {
        "model_name": f"openai/{model}",
        "model_kwargs": {**CONFIG["model"]["model_kwargs"], "api_base": base_url, "api_key": api_key},
        "cost_tracking": "ignore_errors",
    }
    agent = DefaultAgent(LitellmModel(**settings), container, **CONFIG["agent"])
    return agent.run(f"{row['prompt']} A box is a file of that name.")["submission"]
