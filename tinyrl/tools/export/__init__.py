"""`tinyrl export`: write the policy of a checkpoint as a folder that other programs read, checked before it is kept.

An adapter is copied, in the names of the class that config.json of its base names (served.py); PEFT must have a place
on that class for each of its weights. A merged policy is computed in float32 on a freshly loaded base, saved as that
class and loaded back; beside it is a Modelfile (modelfile.py). Both are compared with the policy. The folder appears
whole or not at all.
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from httpx2 import HTTPError
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import tinyrl
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.generation.engine import end_at_turn_end
from tinyrl.models.build import load_base
from tinyrl.models.loading import (
    embedding_rows,
    load_causal_lm,
    load_image_text_model,
    load_model_config,
    load_tokenizer,
    save_tokenizer,
)
from tinyrl.models.lora import load_start_adapter
from tinyrl.models.memory import weight_bytes
from tinyrl.models.processors import PROCESSOR_FILES, save_processor
from tinyrl.models.reading import ADAPTER_FILES, TOKENIZER_FILES
from tinyrl.models.tokens import DATE, token_ids
from tinyrl.runs.checkpoint import check_room, checkpoint_step
from tinyrl.runs.folders import LOCK, written_whole
from tinyrl.runs.places import checkpoint_of, run_of
from tinyrl.runs.records import read_steps, reward_changes, samples_of
from tinyrl.runs.run_dir import RunDir, open_run
from tinyrl.text import one_line
from tinyrl.tools.export.modelfile import MODELFILE, Modelfile, modelfile, with_older_names
from tinyrl.tools.export.served import (
    HEADROOM,
    ExportedClass,
    check_adapter_keys,
    put_into,
    served_model,
    write_adapter,
)
from tinyrl.training.model_card import PICTURE, model_card

MAX_SEQUENCES = 32
MAX_TOKENS = 256  # compared; tokens of a prompt, and of a completion
MAX_LOGPROB_DIFF = 5e-4  # nats per token on average, merged and not, both in float32
MAX_CHANGED = 0.1  # share of greedy tokens that may change when the merged weights are rounded
FACTS = "export.json"  # marks a folder as a tinyrl export
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as --max-lora-rank
OWN_FILES = (*ADAPTER_FILES, *TOKENIZER_FILES, "merges.txt", "tokenizer.model")  # and nothing that only a resume needs


class Bundle(NamedTuple):
    """An exported folder, notes on it, and commands that use it, by purpose."""

    folder: Path
    notes: list[str]
    commands: dict[str, str]

    def render(self) -> str:
        lines = [one_line(line, 4096) for line in (str(self.folder), *self.notes)]
        return "\n".join([*lines, "", *(f"{what:9}  {one_line(line, 4096)}" for what, line in self.commands.items())])


def export(
    target: str,
    *,
    merge: bool = False,
    dtype: str = "auto",
    output: str | None = None,
    trust_remote_code: bool = False,
) -> Bundle:
    """Write the folder. Raises ValueError for what cannot be exported so, without reading weights; and, with nothing
    left behind, where the saved model is not the policy: by its log-probabilities in float32, by its greedy tokens in
    another dtype.
    """
    run = open_run(run_of(target) or target)
    config = run.read_config()
    folder = _folder(target, run, config, merge=merge, dtype=dtype, output=output)
    checkpoint = checkpoint_of(target)
    if config.lora.enabled:
        config = _as_trained(config, checkpoint)
    name = run.path.resolve().name
    ollama: Modelfile | None = None
    with written_whole(folder) as writing:
        saved = None
        served = _served(config, trust_remote_code=trust_remote_code)
        how: dict[str, Any] = {"run": run, "served": served, "trust_remote_code": trust_remote_code}
        if merge or not config.lora.enabled:
            saved, notes = write_merged(config, checkpoint, writing, dtype=dtype, **how)
            ollama = write_modelfile(config, writing, name=name, trust_remote_code=trust_remote_code)
        else:
            for file in (file for file in (*OWN_FILES, *PROCESSOR_FILES) if (checkpoint / file).is_file()):
                shutil.copyfile(checkpoint / file, writing / file)
            if not served.is_as_trained:
                write_adapter(checkpoint, writing, served=served)
            check_adapter_keys(writing, served=served)
            notes = [*compare_adapter(config, checkpoint, writing, **how), *_notes_on_experts(writing)]
        if day := config.task.chat_template_kwargs.get(DATE):
            notes.append(f"the chat template shows today's date, which was {day} in training")
        if config.model.with_images:
            most = f"{config.task.max_pixels:,} pixels (task.max_pixels)"
            notes.append(f"images above {most} were scaled down in training; other programs go by the processor")
        reader = None if served.is_as_trained else served.class_name
        about: dict[str, Any] = {"name": name, "dtype": saved, "notes": notes, "reader": reader}
        _describe(writing, run, config, step=checkpoint_step(checkpoint), **about)
    commands = commands_for(folder, config, name=name, is_adapter=saved is None)
    if ollama is not None:
        notes += ollama.notes
        commands |= ollama.commands(folder)
    elif saved is not None:
        notes.append("no Modelfile: Ollama reads few models with a vision tower, each by files of its own")
    return Bundle(folder, notes, {what: shlex.join(words) for what, words in commands.items()})


def _served(config: Config, *, trust_remote_code: bool) -> ExportedClass:
    """Find how the base of a run is read by other programs."""
    where: dict[str, Any] = {"revision": config.model.revision, "trust_remote_code": trust_remote_code}
    auto = AutoModelForImageTextToText if config.model.with_images else AutoModelForCausalLM
    return served_model(load_model_config(config.model.path, **where), path=config.model.path, auto=auto, **where)


def _as_trained(config: Config, checkpoint: Path) -> Config:
    """Return the configuration with the rank and alpha of a checkpoint's adapter, whatever it says itself. The rank is
    the largest of its layers: the one that programs make room for.
    """
    adapter = json.loads((checkpoint / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
    rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
    own = {"r": rank, "alpha": adapter["lora_alpha"]}
    return config.model_copy(update={"lora": config.lora.model_copy(update=own)})


def _describe(
    folder: Path,
    run: RunDir,
    config: Config,
    *,
    name: str,
    step: int,
    dtype: str | None,
    notes: list[str],
    reader: str | None,
) -> None:
    """Write the card of a model with the picture of its run, and the facts by which a folder is known as exported. A
    picture that is a link is left out: the folder may be published, and a run from somebody else may link any file.
    """
    drawn = run.path / PICTURE
    has_picture = drawn.is_file() and not drawn.is_symlink()
    if has_picture:
        shutil.copyfile(drawn, folder / PICTURE)
    steps = read_steps(run.metrics, [])
    about: dict[str, Any] = {"name": name, "step": step, "dtype": dtype, "notes": notes, "reader": reader}
    since = max(reward_changes(run.read_environment()), default=-1)
    card = model_card(config, steps, picture=has_picture, since=since, **about)
    (folder / "README.md").write_text(card, encoding="utf-8")
    facts = {"tinyrl": tinyrl.__version__, "run": name, "step": step, "dtype": dtype, "notes": notes}
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def commands_for(folder: Path, config: Config, *, name: str, is_adapter: bool) -> dict[str, list[str]]:
    """Return the commands, as words, that serve, convert and upload an exported folder."""
    path = str(folder)
    serve = ["vllm", "serve", path]
    beside = str(folder / f"{name}.gguf")  # where the Modelfile has it
    convert = ["python", "llama.cpp/convert_hf_to_gguf.py", path, "--outfile", beside]
    if is_adapter:
        base = str(starter_path(config.model.path) or config.model.path)
        rank = next((each for each in RANKS if each >= config.lora.r), config.lora.r)
        options = ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{name}={path}"]
        serve = ["vllm", "serve", base, *options]
        of = ["--base" if Path(base).is_dir() else "--base-model-id", base]
        convert = ["python", "llama.cpp/convert_lora_to_gguf.py", path, *of, "--outfile", f"{name}.gguf"]
    return {"serve": serve, "llama.cpp": convert, "upload": ["hf", "upload", f"OWNER/{name}", path]}


def push(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload an exported folder, with its card, to a repository of the hub, made where there is none; return its
    address. Raises ValueError where the hub refuses, and for a public repository under `private`.
    """
    check_repository(repository)
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise ValueError(f"--push {repository}: this repository is public, and --private was asked for")
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name} by tinyrl")
    except (HfHubHTTPError, HTTPError, OSError) as error:
        what = one_line(str(error), 300)
        where = f"(the folder is in {folder}; log in with `hf auth login`)"
        raise ValueError(f"--push {repository}: {what} {where}") from error
    return f"{api.endpoint}/{repository}"


def check_repository(repository: str) -> None:
    """Raise ValueError for a name that is not USER/NAME."""
    try:
        validate_repo_id(repository)
        is_whole = repository.count("/") == 1
    except HFValidationError:
        is_whole = False
    if not is_whole:
        raise ValueError(f"--push {repository}: a repository of the hub is USER/NAME")


def check_token() -> None:
    """Raise ValueError where there is no token for the hub."""
    if get_token() is None:
        raise ValueError("--push: the hub needs a token; log in with `hf auth login`, or set HF_TOKEN")


def _folder(target: str, run: RunDir, config: Config, *, merge: bool, dtype: str, output: str | None) -> Path:
    """Return the folder to write, in place of an earlier export. Raises ValueError for what cannot be exported so, and
    for any other folder.
    """
    lora = config.lora.enabled
    if not config.trains.policy:
        raise ValueError(f"{target} is a reward model; it is used as it is: reward.model={target}")
    if lora and not merge and dtype != "auto":
        raise ValueError(f"--dtype {dtype} is for a whole model; the adapter stays as it is (or say --merge)")
    kind = "model" if not lora else "merged" if merge else "adapter"
    folder = Path(output) if output else run.path / "export" / (kind if dtype == "auto" else f"{kind}-{dtype}")
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link to {folder.readlink()}; give the folder itself: --output")
    there = {file.name for file in folder.iterdir()} if folder.exists() else set[str]()
    if there - {LOCK} and FACTS not in there:
        raise ValueError(f"{folder} exists and is not an exported folder (it has no {FACTS}); choose another --output")
    return folder


# ---- an adapter ----


def compare_adapter(
    config: Config, checkpoint: Path, folder: Path, *, run: RunDir, served: ExportedClass, **trust: Any
) -> list[str]:
    """Compare an exported adapter, read by PEFT on the served class, with the policy, in float32; return a note. Raises
    ValueError where they differ. A model that memory does not hold is not compared.
    """
    if not served.fits:
        gigabytes = HEADROOM * served.bytes_in_float32 / 1e9
        return [
            f"its names were checked on a {served.class_name}, its numbers were not: that takes {gigabytes:,.1f} GB"
        ]
    path = config.model.path
    tokenizer = load_tokenizer(path, revision=config.model.revision, **trust)
    policy: Any = _with_adapter(_plain_base(config, **trust), checkpoint, config)
    sequences = sequences_of(run, tokenizer, vocabulary=embedding_rows(policy))
    wanted = predictions(policy, sequences)
    del policy
    base = served.load(path, dtype=torch.float32, **trust)
    found = compared(wanted, predictions(PeftModel.from_pretrained(base, str(folder)).eval(), sequences))
    if not found.gap <= MAX_LOGPROB_DIFF:
        raise ValueError(f"the exported adapter is not the policy, so it is not kept: on a {served.class_name} {found}")
    return [] if served.is_as_trained else [f"read on a {served.class_name}: {found}"]


def _notes_on_experts(folder: Path) -> list[str]:
    """Return a note where an adapter is on more than linear layers, which few programs read."""
    written = json.loads((folder / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
    parameters = written.get("target_parameters")
    if not parameters:
        return []
    return [
        f"it has adapters on experts ({', '.join(sorted(parameters))}), which PEFT reads from version 0.19.1 on; for "
        "programs that read adapters of linear layers alone: --merge"
    ]


def _plain_base(config: Config, **trust: Any) -> PreTrainedModel:
    """Load the base in float32, not quantised."""
    plain = config.model_copy(update={"model": config.model.model_copy(update={"quantization": None})})
    return load_base(plain, config.model.path, dtype=torch.float32, **trust)


def _with_adapter(base: PreTrainedModel, checkpoint: Path, config: Config) -> PeftModel:
    """Put the adapter of a checkpoint on its base."""
    return load_start_adapter(base, str(checkpoint), with_images=bool(config.model.with_images)).eval()


# ---- a whole model ----


def write_merged(
    config: Config, checkpoint: Path, folder: Path, *, dtype: str, run: RunDir, served: ExportedClass, **trust: Any
) -> tuple[str, list[str]]:
    """Save the policy of a checkpoint as one model of the served class and load it back. dtype: auto is that of the
    base's own files. Returns the dtype's name, and notes on the difference; raises ValueError where that is too large.
    """
    path = config.model.path
    own = {"revision": config.model.revision, **trust}
    saved = None if dtype == "auto" else getattr(torch, dtype)
    if saved is None:
        of_base = load_model_config(path, **own)
        saved = getattr(of_base.get_text_config(), "dtype", None) or getattr(of_base, "dtype", None) or torch.float32
    tokenizer = load_tokenizer(path, **own)
    if config.lora.enabled:
        policy: Any = _with_adapter(_plain_base(config, **trust), checkpoint, config)
    else:
        load = load_image_text_model if config.model.with_images else load_causal_lm
        policy = load(str(checkpoint), dtype=torch.float32)
    sequences = sequences_of(run, tokenizer, vocabulary=embedding_rows(policy))
    wanted = predictions(policy, sequences)
    merged: Any = policy.merge_and_unload() if isinstance(policy, PeftModel) else policy
    if not served.is_as_trained:
        whole = served.load(path, dtype=torch.float32, **trust)
        put_into(whole, merged, names=served)
        merged = whole
    merged.to(saved)
    end_at_turn_end(merged, tokenizer, config.task)
    check_room(folder, needed=weight_bytes(merged.parameters()))
    merged.save_pretrained(folder)
    with_older_names(folder)
    save_tokenizer(tokenizer, folder, revision=config.model.revision)
    if config.model.with_images:
        save_processor(path, folder, revision=config.model.revision)
    del policy, merged
    exported = predictions(served.load(str(folder), dtype=saved, **trust), sequences)
    found = compared(wanted, exported)
    name = str(saved).removeprefix("torch.")
    if (name == "float32" and not found.gap <= MAX_LOGPROB_DIFF) or found.changed > MAX_CHANGED:
        raise ValueError(f"the saved model is not the policy, so it is not kept: in {name} {found}")
    notes = [f"{name}: {found}"]
    if config.model.quantization is not None:
        notes = [_beside_quantised(config, checkpoint, sequences, exported, **trust)]
    return name, notes


def write_modelfile(config: Config, folder: Path, *, name: str, **trust: Any) -> Modelfile | None:
    """Write the Modelfile of a merged model; return it, or None for a model with a vision tower."""
    if config.model.with_images:
        return None
    tokenizer = load_tokenizer(config.model.path, revision=config.model.revision, **trust)
    written = modelfile(folder, config, tokenizer, name=name)
    (folder / MODELFILE).write_text(written.text, encoding="utf-8")
    return written


def _beside_quantised(
    config: Config,
    checkpoint: Path,
    sequences: list[tuple[list[int], int]],
    exported: list[tuple[Tensor, Tensor]],
    **trust: Any,
) -> str:
    """Return a note on how a merged model differs from the policy as it was trained, on a quantised base."""
    quantization = config.model.quantization
    merged = f"trained on a {quantization} base and merged into the unquantised one"
    if find_spec("bitsandbytes") is None:
        return f"warning: {merged}: how far outputs differ was not measured, since bitsandbytes is not installed"
    base = load_base(config, config.model.path, dtype=torch.float32, **trust)
    trained = _with_adapter(base, checkpoint, config)
    found = compared(predictions(trained, sequences), exported)
    is_far = found.changed > MAX_CHANGED
    advice = "; the adapter on the quantised base is the policy that was trained" if is_far else ""
    return f"{'warning: ' if is_far else ''}{merged}: against the policy as it was trained, {found}{advice}"


def sequences_of(run: RunDir, tokenizer: Any, *, vocabulary: int) -> list[tuple[list[int], int]]:
    """Return tokens, and the place of the first that the policy wrote: held-out prompts and completions of the last
    evaluation; made-up tokens where the run has no samples.
    """
    rows = list(samples_of(run.samples, [], kind="eval"))
    sequences = []
    for row in (row for row in rows if row["step"] == rows[-1]["step"]):
        before = token_ids(tokenizer, str(row.get("prompt", "")))[-MAX_TOKENS:] or [0]
        if after := token_ids(tokenizer, str(row.get("completion", "")))[:MAX_TOKENS]:
            sequences.append((before + after, len(before)))
    sequences = sequences or [([(7 * i + 13 * j + 1) % vocabulary for i in range(32)], 1) for j in range(16)]
    return sequences[:MAX_SEQUENCES]


@torch.inference_mode()
def predictions(model: Any, sequences: list[tuple[list[int], int]]) -> list[tuple[Tensor, Tensor]]:
    """Return the log-probabilities (n,) in float32 of the n written tokens, and the likeliest tokens (n,) there."""
    found = []
    for tokens, first in sequences:
        ids = torch.tensor([tokens])
        logprobs = model(input_ids=ids).logits[0, first - 1 : -1].float().log_softmax(-1)
        found.append((logprobs.gather(-1, ids[0, first:, None]).squeeze(-1), logprobs.argmax(-1)))
    return found


@dataclass(frozen=True)
class Difference:
    """How an export differs from the policy. gap: mean difference of log-probabilities, in nats per token; changed:
    share of positions with another likeliest token.
    """

    gap: float
    changed: float
    positions: int

    def __str__(self) -> str:
        change = f"{self.changed:.2%} of {self.positions} greedy tokens change"
        return f"log-probabilities differ by {self.gap:.2g} a token on average, {change}"


def compared(wanted: list[tuple[Tensor, Tensor]], saved: list[tuple[Tensor, Tensor]]) -> Difference:
    """Compare predictions of the same sequences."""
    (a, likeliest), (b, other) = (map(torch.cat, zip(*of, strict=True)) for of in (wanted, saved))
    changed = float((likeliest != other).float().mean())
    return Difference(gap=float((a - b).abs().mean()), changed=changed, positions=len(likeliest))
