"""What the fuzz damages: rows, tiny models, an adapter, and runs, made once; and the settings that use them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests import running
from tests.models.building import lora_roles, stir
from tests.tiny_models import TinyModels
from tinyrl.models.lora import save_adapter

CHAT = [{"role": "user", "content": "How many?"}]
PROMPTS = [{"prompt": f"{n} and 1 are", "answer": f"{n + 1}", "level": n} for n in range(12)]
CHATS = [{"prompt": CHAT, "answer": "1"}] * 12
TEXTS = [{"prompt": f"{n} and", "completion": f" {n}"} for n in range(12)]
PAIRS = [{"prompt": f"say {n}:", "chosen": f" {n}", "rejected": " no"} for n in range(12)]
TALKS = [{"messages": [*CHAT, {"role": "assistant", "content": f"{n}"}]} for n in range(12)]
ROWS = {"prompts": PROMPTS, "chats": CHATS, "text": TEXTS, "pairs": PAIRS, "talks": TALKS}
ROWS_OF = {"grpo": "prompts", "ppo": "prompts", "distill": "prompts", "sft": "text", "reward": "pairs", "dpo": "pairs"}
REWARD = "def score(prompts, completions, **columns):\n    return [float(len(c)) for c in completions]\n"
SMALL = ["run.threads=1", "run.num_steps=1", "run.eval_prompts=2", "run.eval_every=0"]
SAMPLES = ["generation.max_new_tokens=4"]
OF_METHOD = {
    "grpo": [*SAMPLES, "grpo.num_prompts=2", "grpo.group_size=2"],
    "ppo": [*SAMPLES, "ppo.num_prompts=4", "ppo.minibatch_size=2", "ppo.num_epochs=1"],
    "distill": [*SAMPLES, "distill.num_prompts=2", "teacher.path=start", "teacher.hint=one more"],
    "sft": [],
    "reward": [],
    "dpo": [],
}


class Sound:
    """Paths of sound models, adapter and runs, below `root`."""

    def __init__(self, root: Path, tiny: TinyModels) -> None:
        self.root = root
        self.model, self.reward_model = tiny("llama"), tiny.reward("llama")
        self.adapter = root / "adapter"
        roles = lora_roles(self.model)
        stir(roles.parameters["policy"])
        assert roles.peft is not None
        save_adapter(roles.peft, "default", self.adapter)
        _, finished, looks = running.train(self.settings("grpo"), root, name="finished")
        self.finished = finished.path
        _, stopped, _ = running.train(self.settings("ppo"), root, name="stopped", stop_at=looks * 2 // 3)
        self.stopped = stopped.path

    def settings(self, method: str):
        write_rows(self.root)
        often = {"num_steps": 2, "save_every": 1, "eval_every": 1, "eval_prompts": 2}
        rows = {"name": "rows", "data": str(self.root / "prompts.jsonl")}
        return running.config(method, self.model, task=rows, run=often)

    def train(self, method: str, **folders: Path) -> list[str]:
        """The words of a short training run on the tiny models and the rows of `write_rows`, folders replaced."""
        where = {"model.path": self.model, **{key.replace("__", "."): path for key, path in folders.items()}}
        data = f"task.data={ROWS_OF[method]}.jsonl"
        return ["train", method, *(f"{k}={p}" for k, p in where.items()), data, *SMALL, *OF_METHOD[method]]


def write_rows(folder: Path) -> None:
    """Sound rows of every shape, and a reward function."""
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.py").write_text(REWARD)


def copied(source: Path, name: str):
    """Prepares a case: a copy of a folder, under `name`."""
    return lambda folder: shutil.copytree(source, folder / name)
