"""What a checkpoint writes is written once before step 1; what gives way where a disk takes no more."""

import errno
import json
import os
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests import running
from tests.training.rows import chat_model, loaded
from tinyrl.config.schema import Config
from tinyrl.models.parallel import ALONE
from tinyrl.process.errors import Interrupted
from tinyrl.process.launched import Options
from tinyrl.process.signals import StopFlag, check_stop
from tinyrl.runs.checkpoint import list_checkpoints, write_checkpoint
from tinyrl.tools.check import check
from tinyrl.tools.export import export
from tinyrl.training.run_state import RunState
from tinyrl.training.saver import Saver, check_saves

TURN_END = "<|im_end|>"
WORDS = ("<|im_start|>", TURN_END, "user", "assistant", *"abcdefgh")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLES = {"temperature": 0.6, "top_p": 0.9}  # as Llama 2 was published: without do_sample


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose turns end in a token that its generation configuration does not list."""
    folder = chat_model(tmp_path_factory.mktemp("base"), TEMPLATE, vocabulary=WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", TURN_END]})
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **SAMPLES}))
    return folder


def settings(base: Path, *, lora: bool) -> Config:
    steps = {"num_steps": 1, "eval_every": 0}
    return running.config("grpo", base, lora={"enabled": lora}, run=steps, optim={"learning_rate": 1e-3})


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.wide
def test_sampling_settings_without_do_sample_are_saved(base: Path, lora: bool, tmp_path: Path) -> None:
    """Beside the end of a turn, which is added: by a full checkpoint, by a merged export."""
    code, run, _ = running.train(settings(base, lora=lora), tmp_path)
    assert code == 0
    saved = run.checkpoints / "step-000001"
    if lora:
        saved = export(str(run.path), merge=True, output=str(tmp_path / "merged")).folder
    written = json.loads((saved / "generation_config.json").read_text())
    end = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids(TURN_END)
    assert written["eos_token_id"] == [1, end]
    assert {name: written.get(name) for name in ("do_sample", *SAMPLES)} == {"do_sample": True, **SAMPLES}


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("a setting that is not allowed")


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.wide
def test_what_the_library_refuses_to_save_is_refused_before_there_is_a_run(
    base: Path, lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(loaded(settings(base, lora=lora))) as method:
        check_saves(method)
        monkeypatch.setattr(GenerationConfig, "save_pretrained", refuse)
        with pytest.raises(ValueError, match="not allowed"):
            check_saves(method)
    with pytest.raises(ValueError, match="not allowed"):
        running.train(settings(base, lora=lora), tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="not allowed"):
        list(check(settings(base, lora=lora), options=Options(device="cpu"), minutes=0.01))


def test_the_trial_writes_no_weight(base: Path, tmp_path: Path) -> None:
    with closing(loaded(settings(base, lora=False))) as method:
        method.save_without_weights(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith(".safetensors")]


@pytest.mark.parametrize(("number", "left"), [(errno.EROFS, [1, 2, 3]), (errno.ENOSPC, [2, 3]), (errno.EDQUOT, [2, 3])])
def test_only_on_a_full_disk_the_oldest_checkpoint_gives_way(number: int, left: list[int], tmp_path: Path) -> None:
    """The fourth one cannot be written: the disk is read-only, or full whatever is deleted."""

    def fails(state: RunState, folder: Path) -> None:
        raise OSError(number, "no")

    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, write=lambda folder: (folder / "file").touch())
    saver: Any = SimpleNamespace(_write_files=fails, note=lambda text: None)
    with pytest.raises(OSError, match="no"):
        Saver._write_checkpoint(saver, tmp_path, RunState(step=4), best=tmp_path / "step-000003")
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [f"step-{step:06d}" for step in left]


def test_a_stop_waits_for_the_end_of_a_save(tmp_path: Path) -> None:
    def write(*given: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        check_stop()

    folder = SimpleNamespace(checkpoints=tmp_path, lock=SimpleNamespace(check=lambda: None))
    run = SimpleNamespace(keep_checkpoints=1)
    saver: Any = SimpleNamespace(
        world=ALONE, folder=folder, config=SimpleNamespace(run=run), _write_checkpoint=write, _resumed_step=-1
    )
    with StopFlag():
        Saver.save(saver, RunState(step=3))
        assert (saver.saved, saver.saved_step) == (True, 3)
        with pytest.raises(Interrupted):
            check_stop()
