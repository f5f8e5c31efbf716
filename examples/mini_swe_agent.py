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
