"""Damaged model, tokenizer, template and adapter folders, in every role: a sentence, or a model that computes.

Each case is a sound folder with one damage; the ways in are those of a run.
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.building import CPU, lora_roles, stir
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.models import tokens as templates
from tinyrl.models.batches import MicroBatches
from tinyrl.models.build import build_reward_model, build_roles
from tinyrl.models.loading import check_vocabulary, load_tokenizer
from tinyrl.models.logprobs import ValueHead
from tinyrl.models.lora import save_adapter
from tinyrl.models.reward_model import SCORE_HEAD
from tinyrl.rewards.model_text import TextFormat, reward_tokens
from tinyrl.tasks.prompts import render_prompt

Damage = Callable[[Path], Any]
MOST_LINES, MOST_CHARACTERS = 6, 500
WEIGHTS, ADAPTER, TEMPLATE = "model.safetensors", "adapter_model.safetensors", "chat_template.jinja"


def in_json(name: str, **changes: Any) -> Damage:
    """Fields of a JSON file set to other values; `...` takes one away."""

    def damage(folder: Path) -> None:
        values = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))

    return damage


def written(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, share: float) -> Damage:
    """Only the first part of a file was written."""
    return lambda folder: (folder / name).write_bytes((data := (folder / name).read_bytes())[: int(len(data) * share)])


def tensors(name: str, change: Callable[[str, Tensor], dict[str, Tensor]]) -> Damage:
    """Weights changed one by one: (name, tensor) -> {name: tensor}."""

    def damage(folder: Path) -> None:
        changed = [change(key, tensor) for key, tensor in load_file(folder / name).items()]
        all_of_them = {key: tensor.contiguous() for part in changed for key, tensor in part.items()}
        save_file(all_of_them, folder / name, {"format": "pt"})

    return damage


def each(pattern: str, change: Callable[[Tensor], Tensor | None], name: str = WEIGHTS) -> Damage:
    """Weights whose names match, changed; None takes one away."""

    def one(key: str, tensor: Tensor) -> dict[str, Tensor]:
        found = change(tensor) if re.search(pattern, key) else tensor
        return {} if found is None else {key: found}

    return tensors(name, one)


def in_vocabulary(folder: Path) -> None:
    """An ordinary token more than the embedding has rows."""
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["zzzz"] = max(values["model"]["vocab"].values()) + 1
    (folder / "tokenizer.json").write_text(json.dumps(values))


HARMLESS = None
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Name: the damage, and what the sentence has to name; HARMLESS where the role can live with it, or never reads it.
WEIGHT_FILES: dict[str, tuple[Damage, str | None]] = {
    "config null": (written("config.json", "null"), r"config\.json"),
    "config nested deep": (written("config.json", '{"a":' * 20_000 + "1" + "}" * 20_000), r"config\.json"),
    "weights cut at the end": (cut(WEIGHTS, 0.999), r"model\.safetensors"),
    "weights with a huge header": (written(WEIGHTS, (1 << 60).to_bytes(8, "little") + b"{}"), r"model\.safetensors"),
    "weights absent": (lambda folder: (folder / WEIGHTS).unlink(), "safetensors"),
    "one weight missing": (each(r"layers\.0\.mlp\.down_proj", lambda _: None), r"layers\.0\.mlp\.down_proj\.weight"),
    "keys renamed": (tensors(WEIGHTS, lambda n, t: {n.replace("model.", "network."): t}), r"model\.embed_tokens"),
    "more layers in config": (in_json("config.json", num_hidden_layers=4), r"layers\.2"),
    "fewer layers in config": (in_json("config.json", num_hidden_layers=1), r"layers\.1"),
    "a billion layers": (in_json("config.json", num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "a billion wide": (in_json("config.json", hidden_size=10**9), "hidden_size=1000000000"),
    "an embedding one row short": (each("embed_tokens", lambda t: t[:-1]), r"embed_tokens\.weight in shape 257 x 32"),
    "weights that are not finite": (each("down_proj", lambda t: t * torch.nan), "not finite"),
}
OTHER_FILES: dict[str, tuple[Damage, str | None]] = {
    "index null": (written("model.safetensors.index.json", "null"), HARMLESS),  # beside a whole file it is not read
    "hidden_size a text": (in_json("config.json", hidden_size="abc"), "hidden_size"),
    "num_attention_heads 3": (in_json("config.json", num_attention_heads=3), ""),
    "pad_token_id beyond": (in_json("config.json", pad_token_id=258), r"config\.json.*Padding_idx"),
    "auto_map to code": (in_json("config.json", auto_map={"AutoConfig": "code.Config"}), HARMLESS),  # not run
    "tokenizer cut": (cut("tokenizer.json", 0.5), r"tokenizer\.json"),
    "tokenizer one word more": (in_vocabulary, r"'zzzz' \(token 258\)"),
    "eos a number": (in_json("tokenizer_config.json", eos_token=5), r"tokenizer_config\.json"),
    "eos beyond the embedding": (in_json("tokenizer_config.json", eos_token="<never seen>"), "never seen"),
    "template that raises": (written(TEMPLATE, "{{ raise_exception('no thanks') }}"), "no thanks"),
    "template of nothing": (written(TEMPLATE, "{# nothing #}"), "renders nothing"),
    "template that recurses": (written(TEMPLATE, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "template"),
    "template that loops": (written(TEMPLATE, "{% macro m() %}" + LOOP + "{% endmacro %}{{ m() }}"), "does not end"),
    "template of one huge text": (written(TEMPLATE, "{{ 'x' * 10**15 }}"), "memory"),
    "template that reaches out": (written(TEMPLATE, "{{ ''.__class__.__mro__[1].__subclasses__() }}"), "template"),
    "template that includes a file": (written(TEMPLATE, "{% include '/etc/passwd' %}"), "template"),
    "template not UTF-8": (written(TEMPLATE, b"{{ '\xff' }}"), "template"),
}
CONFIG = "adapter_config.json"
ADAPTERS: dict[str, tuple[Damage, str | None]] = {
    "config null": (written(CONFIG, "null"), "adapter_config"),
    "of another type": (in_json(CONFIG, peft_type="IA3"), "IA3; tinyrl knows LORA"),
    "for classification": (in_json(CONFIG, task_type="SEQ_CLS"), HARMLESS),
    "weights empty": (written(ADAPTER, b""), r"adapter_model\.safetensors"),
    "one weight missing": (each(r"layers\.1\.mlp\.down_proj\.lora_B", lambda _: None, ADAPTER), "lacks weights"),
    "weights too many": (tensors(ADAPTER, lambda n, t: {n: t, f"more.{n}": t.clone()}), "no place for"),
    "not finite": (each("down_proj", lambda t: t * torch.nan, ADAPTER), "not finite"),
    "r of 8 for weights of 4": (in_json(CONFIG, r=8), "size mismatch"),
    "r a billion": (in_json(CONFIG, r=10**9), "r=1000000000"),
    "r a text": (in_json(CONFIG, r="four"), "adapter_config"),
    "targets a bad regex": (in_json(CONFIG, target_modules="(("), "adapter_config.json"),
    "targets of nothing": (in_json(CONFIG, target_modules="nothing_like_it"), "nothing_like_it"),
    "layer replication": (in_json(CONFIG, layer_replication=[[0, 2], [1, 2]]), "layer_replication"),
    "modules to save": (in_json(CONFIG, modules_to_save=["embed_tokens"]), "modules_to_save"),
    "a changed base": (in_json(CONFIG, init_lora_weights="pissa"), "init_lora_weights=pissa"),
    "dora without its weights": (in_json(CONFIG, use_dora=True), "lacks weights"),
}
CASES = {
    "policy": WEIGHT_FILES | OTHER_FILES,
    "critic": {
        name: WEIGHT_FILES[name] for name in ("config null", "one weight missing", "weights that are not finite")
    },
    "reward model": {name: case for name, case in (WEIGHT_FILES | OTHER_FILES).items() if "template" not in name},
    "adapter": ADAPTERS,
    "reward adapter": {
        "head empty": (written(SCORE_HEAD, b""), r"score_head\.safetensors"),
        "head of another shape": (each("weight", lambda t: t[:, :-1], SCORE_HEAD), r"score_head\.safetensors"),
        "head not finite": (each("weight", lambda t: t * torch.nan, SCORE_HEAD), "not finite"),
        "config null": ADAPTERS["config null"],
    },
}


class Sound:
    """Sound folders, and how each role of a run uses one."""

    def __init__(self, tiny: TinyModels, root: Path) -> None:
        self.root, self.base = root, tiny("llama")
        roles = lora_roles(self.base)
        stir(roles.parameters["policy"])
        assert roles.peft is not None
        save_adapter(roles.peft, "default", root / "adapter")
        shutil.copytree(root / "adapter", root / "reward adapter")
        head = {name: tensor.detach() for name, tensor in ValueHead(32).state_dict().items()}
        save_file(head, root / "reward adapter" / SCORE_HEAD)
        self.folders = {
            "policy": self.base,
            "critic": tiny.reward("llama", seed=3),
            "reward model": tiny.reward("llama"),
            "adapter": root / "adapter",
            "reward adapter": root / "reward adapter",
        }

    def damaged(self, role: str, damage: Damage) -> Path:
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
        batch = roles.batch([[2, 3, 4]], [[5, 6]], last_tokens=True)
        with torch.no_grad(), roles.acting("policy"):
            assert roles.logprobs("policy", batch, temperature=1.0)[0].isfinite().all()


@pytest.fixture(scope="module")
def sound(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Sound:
    return Sound(tiny, tmp_path_factory.mktemp("folders"))


def wrong(answer: str | None, wanted: str | None) -> str | None:
    """What is wrong with how a damage was answered (None: it was used); None where nothing is."""
    if answer is None or wanted is None:  # HARMLESS
        return None if answer is wanted else f"is answered by: {answer}"
    if len(answer.splitlines()) > MOST_LINES or max(map(len, answer.splitlines())) > MOST_CHARACTERS:
        return f"is answered at length: {answer}"
    return None if re.search(wanted, answer) else f"is answered by: {answer}"


@pytest.mark.parametrize("role", CASES)
@pytest.mark.wide
def test_a_damaged_folder_is_refused_in_a_sentence(sound: Sound, role: str, monkeypatch: pytest.MonkeyPatch):
    """Any other exception than a ValueError fails here with its own traceback."""
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    sound.use(role, sound.folders[role])
    for name, (damage, wanted) in CASES[role].items():
        answer = None
        try:
            sound.use(role, sound.damaged(role, damage))
        except ValueError as error:
            answer = str(error)
        found = wrong(answer, wanted)
        assert found is None, f"{role}: {name} {found}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "role", "name"),
    [("sft", "policy", "weights cut at the end"), ("ppo", "reward model", "one weight missing")],
)
def test_a_command_answers_in_a_sentence(sound: Sound, tmp_path: Path, method: str, role: str, name: str):
    """In a process of its own: exit code 2, no traceback, nothing written."""
    damage, wanted = CASES[role][name]
    folder = sound.damaged(role, damage)
    rows = [{"prompt": f"{n}", "answer": "1", "text": "a"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"model.path={folder}"] if role == "policy" else [f"model.path={sound.base}", f"reward.model={folder}"]
    words = ["train", method, *settings, "task.data=rows.jsonl", "--output-dir=runs", "run.threads=1"]
    command = [sys.executable, "-m", "tinyrl", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert wrong(done.stderr.strip(), wanted) is None
    assert not (tmp_path / "runs").exists()
