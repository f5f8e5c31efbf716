"""Damaged and odd model, tokenizer, template and adapter folders, in every role: a sentence, or a model that computes.

Each case is a sound folder with one damage of tests/models/damages.py; the ways in are those of a run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models import damages
from tests.models.building import CPU, lora_roles, stir
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.models import templates
from tinyrl.models.build import build_reward_model, build_roles
from tinyrl.models.loading import check_vocabulary, load_tokenizer
from tinyrl.models.logprobs import ValueHead
from tinyrl.models.lora import save_adapter
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reward_model import SCORE_HEAD
from tinyrl.models.roles import Roles
from tinyrl.rewards.model_text import TextFormat, reward_tokens
from tinyrl.tasks.prompts import render_prompt

MOST_LINES, MOST_CHARACTERS = 6, 500

# What a role can live with, or never reads: everything else has to be refused.
HARMLESS = {
    "policy": {
        "auto_map to code",  # not run: the library's own class is taken
        "tokenizer one added token more",  # rows that hold it are refused
        "pad beyond the embedding",  # never read
        "added tokens far away",
        "template a folder",
    },
    "adapter": {
        "adapter for classification",
        "layers to transform far away",
    },
}
HARMLESS["critic"] = HARMLESS["policy"] | {"generation config null", "architectures a number"}
HARMLESS["reward model"] = HARMLESS["critic"] | {"eos absent", "eos empty"}
HARMLESS["reward adapter"] = HARMLESS["adapter"]

# What the sentence says where it matters most: which weights.
SAYS = {
    "one weight missing": r"model\.layers\.0\.mlp\.down_proj\.weight",
    "keys renamed": r"model\.embed_tokens\.weight .*network\.embed_tokens\.weight",
    "an embedding one row short": r"embed_tokens\.weight in shape 257 x 32.* 258 x 32",
    "a billion layers": r"config\.json: num_hidden_layers=1000000000",
    "weights cut at the end": r"model\.safetensors",
    "config null": r"config\.json",
    "pad_token_id beyond the vocabulary": r"config\.json: .*Padding_idx",
    "tokenizer one word more": r"'zzzz' \(token 258\)",
    "eos a number": r"tokenizer_config\.json",
    "r a billion": "r=1000000000",
    "targets a bad regex": "adapter_config.json",
    "adapter weights empty": r"adapter_model\.safetensors",
}


class Sound:
    """Sound folders, and how each role of a run uses one."""

    def __init__(self, tiny: TinyModels, root: Path) -> None:
        self.root, self.base = root, tiny("llama")
        adapter = root / "adapter"
        roles = lora_roles(self.base)
        stir(roles.parameters["policy"])
        assert roles.peft is not None
        save_adapter(roles.peft, "default", adapter)
        shutil.copytree(adapter, root / "reward adapter")
        head = {name: tensor.detach() for name, tensor in ValueHead(32).state_dict().items()}
        save_file(head, root / "reward adapter" / SCORE_HEAD)
        self.folders = {
            "policy": self.base,
            "critic": tiny.reward("llama", seed=3),
            "reward model": tiny.reward("llama"),
            "adapter": adapter,
            "reward adapter": root / "reward adapter",
        }

    def damaged(self, role: str, damage: damages.Damage) -> Path:
        folder = self.root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folders[role], folder)
        damage(folder)
        return folder

    def use(self, role: str, folder: Path) -> None:
        """What a run does with the folder before its first step, and its numbers."""
        sections: dict[str, dict[str, Any]] = {
            "policy": {"model": {"path": str(folder)}},
            "critic": {"critic": {"kind": "separate", "path": str(folder)}},
            "adapter": {"model": {"path": str(self.base), "adapter": str(folder)}},
        }
        settings = {"method": "ppo", "model": {"path": str(self.base)}, **sections.get(role, {})}
        settings["critic"] = settings.get("critic", {"kind": "shared"})
        settings["reward"] = {"model": str(folder)} if role.startswith("reward") else {}
        config = Config.model_validate(settings)
        tokenizer = load_tokenizer(config.model.path)
        roles = build_roles(config, device=CPU, dtype=torch.float32)
        model = build_reward_model(config, roles, dtype=torch.float32)
        check_vocabulary(tokenizer, roles.causal, path=config.model.path)
        assert render_prompt(tokenizer, "a question").tokens
        if model is not None:
            text_format, room = TextFormat.of_config(model.model.config), model.max_tokens
            tokens = reward_tokens(model.tokenizer, "a question", "an answer", text_format=text_format, max_tokens=room)
            assert model.scores([tokens], micro_batches=MicroBatches(CPU, 100)) != []
        assert all(torch.isfinite(numbers).all() for numbers in numbers_of(roles))


def numbers_of(roles: Roles) -> list[torch.Tensor]:
    batch = roles.batch([[2, 3, 4]], [[5, 6]], last_tokens=True)
    with torch.no_grad(), roles.acting("policy"):
        numbers = [roles.logprobs("policy", batch, temperature=1.0)[0]]
    if roles.critic_kind == "separate":
        with torch.no_grad(), roles.acting("critic"):
            numbers.append(roles.values(batch))
    if roles.score_head is not None:
        with torch.no_grad(), roles.acting("reward"):
            numbers.append(roles.scores(batch))
    return numbers


@pytest.fixture(scope="module")
def sound(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tiny, tmp_path_factory.mktemp("folders"))


WEIGHTS = {**damages.FILES, **damages.KEYS}
READ_TOO = {**damages.TOKENIZERS, **damages.TEMPLATES}
CASES = {
    "policy": {**WEIGHTS, **damages.VALUES, **READ_TOO},
    "critic": WEIGHTS,
    "reward model": {**WEIGHTS, **READ_TOO},
    "adapter": damages.ADAPTERS,
    "reward adapter": {**damages.ADAPTERS, **damages.HEADS},
}


def wrong(answer: str | None, name: str, role: str) -> str | None:
    """What is wrong with how a damage was answered (None: it was used); None where nothing is."""
    if answer is None:
        return None if name in HARMLESS[role] else "was used as if it were sound"
    if len(answer.splitlines()) > MOST_LINES or max(map(len, answer.splitlines())) > MOST_CHARACTERS:
        return f"is answered at length: {answer}"
    return None if re.search(SAYS.get(name, ""), answer) else f"is answered by: {answer}"


def answer_to(use: Callable[[], None]) -> str | None:
    try:
        use()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("role", CASES)
@pytest.mark.wide
def test_a_damaged_folder_is_refused_in_a_sentence(sound: Sound, role: str, monkeypatch: pytest.MonkeyPatch):
    """Any other exception than a ValueError fails here with its own traceback."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    sound.use(role, sound.folders[role])
    for name, damage in CASES[role].items():
        folder = sound.damaged(role, damage)
        said = answer_to(lambda folder=folder: sound.use(role, folder))
        found = wrong(said, name, role)
        assert found is None, f"{role}: {name} {found}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "role", "name"),
    [
        ("sft", "policy", "weights cut in half"),
        ("ppo", "reward model", "template that recurses"),
        ("eval", "policy", "config null"),
    ],
)
def test_a_command_answers_in_a_sentence(sound: Sound, tmp_path: Path, method: str, role: str, name: str):
    """In a process of its own: exit code 2, no traceback, nothing written."""
    folder = sound.damaged(role, CASES[role][name])
    rows = [{"prompt": f"{n}", "answer": "1", "text": "a", "chosen": "a", "rejected": "b"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    key = {"critic": "critic.path", "reward model": "reward.model", "adapter": "model.adapter"}.get(role)
    settings = [f"model.path={sound.base}", f"{key}={folder}"] if key else [f"model.path={folder}"]
    settings += ["task.data=rows.jsonl", "--output-dir=runs", "run.threads=1"]
    settings += ["generation.max_new_tokens=8"] if method in ("grpo", "ppo") else []
    words = ["eval", str(folder), "--task=sort"] if method == "eval" else ["train", method, *settings]
    done = subprocess.run(
        [sys.executable, "-m", "tinyrl", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert wrong(done.stderr.strip(), name, role) is None
    assert not (tmp_path / "runs").exists()
