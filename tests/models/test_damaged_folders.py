"""Damaged model, tokenizer and adapter folders, in every role: a ValueError that names what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import FixedLength
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.building import CPU, lora_roles, stir
from tests.tiny_models import TinyModels
from tinyrl.models.batch import examples
from tinyrl.models.build import build_policy, build_reward_model
from tinyrl.models.device import Device
from tinyrl.models.loading import check_vocabulary, load_causal_lm, load_tokenizer, read_config
from tinyrl.models.logprobs import ValueHead
from tinyrl.models.lora import save_adapter
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reward_model import SCORE_HEAD
from tinyrl.models.tokens import template_text, token_ids
from tinyrl.runs.resolve import config_of

Damage = Callable[[Path], Any]
WEIGHTS, ADAPTER, CONFIG = "model.safetensors", "adapter_model.safetensors", "adapter_config.json"


def in_json(name: str, **changes: Any) -> Damage:
    """Set fields of a JSON file to other values."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def written(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(name: str, share: float) -> Damage:
    """Keep only the first part of a file."""
    return lambda folder: (folder / name).write_bytes((data := (folder / name).read_bytes())[: int(len(data) * share)])


def each(pattern: str, change: Callable[[Tensor], Tensor | None], name: str = WEIGHTS, *, rename: str = "") -> Damage:
    """Change the weights whose names match; None takes one away."""

    def damage(folder: Path) -> None:
        found = load_file(folder / name)
        changed = {rename + key: change(t) if re.search(pattern, key) else t for key, t in found.items()}
        kept = {key: tensor.contiguous() for key, tensor in changed.items() if tensor is not None}
        save_file(kept, folder / name, {"format": "pt"})

    return damage


def in_vocabulary(folder: Path) -> None:
    """Add an ordinary token more than the embedding has rows."""
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["zzzz"] = max(values["model"]["vocab"].values()) + 1
    (folder / "tokenizer.json").write_text(json.dumps(values))


# The damages of each role's folder, each with what the error has to name.
LACKS, NOT_FINITE = each(r"layers\.0\.mlp\.down_proj", lambda _: None), each("down_proj", lambda t: t * torch.nan)
MODEL: list[tuple[Damage, str]] = [
    (written("config.json", "null"), r"config\.json"),
    (cut(WEIGHTS, 0.999), r"model\.safetensors"),
    (lambda folder: (folder / WEIGHTS).unlink(), "safetensors"),
    (LACKS, r"layers\.0\.mlp\.down_proj\.weight"),
    (in_json("config.json", num_hidden_layers=1), r"layers\.1"),
    (each("embed_tokens", lambda t: t[:-1]), r"embed_tokens\.weight.*257"),
    (NOT_FINITE, "not finite"),
    (cut("tokenizer.json", 0.5), r"tokenizer\.json"),
    (in_vocabulary, r"'zzzz' \(token 258\)"),
    (in_json("tokenizer_config.json", eos_token="<never seen>"), "never seen"),
]
ADAPTERS: list[tuple[Damage, str]] = [
    (written(CONFIG, "null"), CONFIG),
    (in_json(CONFIG, peft_type="IA3"), "IA3"),
    (written(ADAPTER, b""), r"adapter_model\.safetensors"),
    (each(r"layers\.1\.mlp\.down_proj\.lora_B", lambda _: None, ADAPTER), "layers.1.mlp"),
    (each("$", lambda t: t, ADAPTER, rename="more."), "unexpected"),
    (each("down_proj", lambda t: t * torch.nan, ADAPTER), "finite"),
    (in_json(CONFIG, r=8), r"the shape \(4, 64\) there, and \(8, 64\) here"),
    (in_json(CONFIG, r=10**9), "r=1000000000"),
    (in_json(CONFIG, target_modules="(("), CONFIG),
    (in_json(CONFIG, modules_to_save=["embed_tokens"]), "modules_to_save"),
    (in_json(CONFIG, init_lora_weights="pissa"), "init_lora_weights=pissa"),
    (in_json(CONFIG, use_dora=True), "magnitude"),
]
CASES = {
    "policy": MODEL,
    "critic": [(LACKS, "down_proj"), (NOT_FINITE, "not finite")],
    "reward model": [(LACKS, "down_proj"), (NOT_FINITE, "not finite"), (in_vocabulary, "zzzz")],
    "adapter": ADAPTERS,
    "reward adapter": [
        (written(SCORE_HEAD, b""), SCORE_HEAD),
        (each("weight", lambda t: t[:, :-1], SCORE_HEAD), SCORE_HEAD),
        (each("weight", lambda t: t * torch.nan, SCORE_HEAD), "finite"),
    ],
}


@pytest.fixture(scope="module")
def sound(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound folders, by role."""
    root = tmp_path_factory.mktemp("folders")
    roles = lora_roles(tiny("llama"))
    stir(roles.parameters["policy"])
    assert roles.adapters.peft is not None
    save_adapter(roles.adapters.peft, "default", root / "adapter")
    shutil.copytree(root / "adapter", root / "reward adapter")
    head = {name: tensor.detach() for name, tensor in ValueHead(32).state_dict().items()}
    save_file(head, root / "reward adapter" / SCORE_HEAD)
    own = {"policy": tiny("llama"), "critic": tiny.reward("llama", seed=3), "reward model": tiny.reward("llama")}
    return own | {name: root / name for name in ("adapter", "reward adapter")}


def use(role: str, folder: Path, base: Path) -> None:
    """Load the folder as a run does before its first step, and compute."""
    sections: dict[str, dict[str, Any]] = {
        "policy": {"model": {"path": str(folder)}},
        "critic": {"critic": {"kind": "separate", "path": str(folder)}},
        "adapter": {"model": {"path": str(base), "adapter": str(folder)}},
    }
    reward = {"model": str(folder)} if role.startswith("reward") else {}
    settings = {"method": "ppo", "model": {"path": str(base)}, "critic": {"kind": "shared"}, "reward": reward}
    config = config_of(settings | sections.get(role, {}))
    tokenizer = load_tokenizer(config.model.path)
    roles = build_policy(config, tokenizer=tokenizer, device=Device(CPU, torch.float32))
    model = build_reward_model(config, roles, dtype=torch.float32)
    check_vocabulary(tokenizer, roles.causal, path=config.model.path)
    if model is not None:
        assert model.reward_scores([[2, 3]], micro_batches=MicroBatches(CPU, 100)) != []
    batch = roles.batch_of(examples([[2, 3, 4]], [[5, 6]]), last_tokens=True)
    with torch.no_grad(), roles.acting("policy"):
        assert roles.logprobs("policy", batch, temperature=1.0)[0].isfinite().all()


@pytest.mark.parametrize("role", CASES)
@pytest.mark.wide
def test_a_damaged_folder_is_refused(sound: dict[str, Path], role: str, tmp_path: Path):
    """Any exception but a ValueError fails here with its own traceback."""
    use(role, sound[role], sound["policy"])
    for i, (damage, wanted) in enumerate(CASES[role]):
        shutil.copytree(sound[role], folder := tmp_path / str(i))
        damage(folder)
        with pytest.raises(ValueError, match=wanted) as caught:
            use(role, folder, sound["policy"])
        assert len(str(caught.value).splitlines()) < 4, wanted


# ---- what a stranger's config.json, template and tokenizer may do ----


@pytest.mark.parametrize(
    "changes",
    [
        {"_attn_implementation": "owner/repo"},
        {"attn_implementation": "owner/repo@v1:kernel"},
        {"attn_implementation": {"text_config": "owner/repo"}},
        {"_experts_implementation": "owner/repo"},
        {"text_config": {"attn_implementation": "owner/repo"}},
    ],
)
def test_an_implementation_of_another_repository_is_refused(
    changes: dict[str, Any], tiny: TinyModels, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    in_json("config.json", **changes)(folder)
    with pytest.raises(ValueError, match=r"_implementation.*owner/repo"):
        read_config(str(folder))


def test_an_implementation_of_the_library_is_read(tiny: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    in_json("config.json", _attn_implementation="eager")(folder)
    assert read_config(str(folder)).model_type == "llama"


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"])
def test_a_size_far_beyond_the_weights_is_refused_before_it_is_made(
    name: str, tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    in_json("config.json", **{name: 1_000_000})(folder)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *given, **named: pytest.fail("it is made"))
    with pytest.raises(ValueError, match=f"{name} is 1000000"):
        load_causal_lm(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_a_size_below_one_is_refused(name: str, tiny: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    in_json("config.json", **{name: 0})(folder)
    with pytest.raises(ValueError, match=f"{name} is 0"):
        load_causal_lm(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("value", [[1], 3, "x", True, {"hidden_size": 8}, {"text_config": {"text_config": {}}}])
def test_a_text_config_that_is_no_configuration_is_refused(value: Any, tiny: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    in_json("config.json", text_config=value)(folder)
    with pytest.raises(ValueError, match="text_config is"):
        read_config(str(folder))


INDEX = "model.safetensors.index.json"
FIRST = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def sharded(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, beside which are weights that are none of its own."""
    root = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(tiny("llama")).save_pretrained(root / "model", max_shard_size="40KB")
    shutil.copy(tiny("llama") / WEIGHTS, root / "outside.safetensors")
    return root / "model"


def in_index(**changes: Any) -> Damage:
    """Change in which file the index has weights."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] |= changes
        (folder / INDEX).write_text(json.dumps(index))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        in_json(INDEX, weight_map=[1, 2]),
        in_json(INDEX, weight_map=None),
        in_json(INDEX, weight_map={}),
        in_json(INDEX, metadata=None),
        written(INDEX, "[]"),
        written(INDEX, "{"),
        written(INDEX, b"\xff\xfe"),
        written(INDEX, '{"weight_map":' * 100_000),
        in_index(**{FIRST: 3}),
        in_index(**{FIRST: ["a"]}),
        in_index(**{FIRST: "."}),
        in_index(**{FIRST: "../outside.safetensors"}),
        in_index(**{FIRST: "/dev/zero"}),
        in_index(**{FIRST: "pytorch_model.bin"}),
        lambda folder: in_index(**{FIRST: str(folder.parent / "outside.safetensors")})(folder),
    ],
)
def test_a_faulty_index_is_named(damage: Damage, sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    damage(folder)
    with pytest.raises(ValueError, match=rf"{INDEX}(:| is not JSON)"):
        load_causal_lm(str(folder), dtype=torch.float32)


def test_a_file_that_an_index_names_and_that_is_not_there_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    gone = json.loads((folder / INDEX).read_text())["weight_map"][FIRST]
    (folder / gone).unlink()
    with pytest.raises(ValueError, match=f"{gone} is missing"):
        load_causal_lm(str(folder), dtype=torch.float32)


def test_a_file_of_the_index_that_is_missing_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sharded, tmp_path / "model")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=lost.name):
        load_causal_lm(str(folder), dtype=torch.float32)


def test_a_model_in_several_files_is_loaded(sharded: Path, tiny: TinyModels) -> None:
    ours = load_causal_lm(str(sharded), dtype=torch.float32).state_dict()
    assert all(ours[name].equal(weight) for name, weight in load_file(tiny("llama") / WEIGHTS).items())


def test_a_size_far_beyond_the_weights_of_a_hub_model_is_refused(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the hub's cache, whose files are named by their commit."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "models--owner--name" / "snapshots" / "1f0c")
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("1f0c")
    in_json("config.json", num_hidden_layers=1_000_000)(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *given, **named: pytest.fail("it is made"))
    with pytest.raises(ValueError, match="num_hidden_layers is 1000000"):
        load_causal_lm("owner/name", dtype=torch.float32)


def test_a_template_of_a_hub_model_is_tried(tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "models--owner--name" / "snapshots" / "1f0c")
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("1f0c")
    (folder / "chat_template.jinja").write_text("{{ 'a' * 10**9 }}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"chat_template\.jinja takes"):
        load_tokenizer("owner/name")


def test_a_template_that_renders_half_a_surrogate_pair_is_refused(tiny: TinyModels) -> None:
    tokenizer = load_tokenizer(str(tiny("llama")))
    tokenizer.chat_template = "{{ '\\ud800' }}{{ messages[0].content }}"
    with pytest.raises(ValueError, match="surrogate"):
        template_text(tokenizer, [{"role": "user", "content": "hi"}], variables={})


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}},
    ],
)
def test_a_tokenizer_that_panics_is_refused(changes: dict[str, Any], tiny: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    in_json("tokenizer.json", **changes)(folder)
    with pytest.raises(ValueError, match="cannot load a tokenizer"):
        load_tokenizer(str(folder))


def test_a_text_on_which_a_tokenizer_panics_is_a_sentence(tiny: TinyModels) -> None:
    tokenizer: Any = load_tokenizer(str(tiny("llama")))
    tokenizer.backend_tokenizer.pre_tokenizer = FixedLength(0)
    with pytest.raises(ValueError, match="cannot encode"):
        token_ids(tokenizer, "hello")
