"""Runs on a real model: every method with LoRA, GRPO with every weight; tools, and what comes after training."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tinyrl.cli.commands import app
from tinyrl.config.schema import Config
from tinyrl.runs.resolve import config_of
from tinyrl.runs.run_dir import RunDir
from tinyrl.tasks.sums import write

pytestmark = pytest.mark.real

RUN = {"num_steps": 1, "eval_every": 0, "eval_prompts": 1, "save_every": 0, "keep_checkpoints": 1, "threads": 1}
SECTIONS: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {"num_prompts": 2, "group_size": 2, "kl_coef": 0.05}},
    "ppo": {"ppo": {"num_prompts": 4, "num_epochs": 1, "minibatch_size": 4, "kl_coef": 0.05}},
    "sft": {"sft": {"batch_size": 2}},
    "reward": {"reward_model": {"batch_size": 2}},
    "dpo": {"dpo": {"batch_size": 2}},
}
SAMPLES = ("grpo", "ppo")
NO_MORE_THAN_NOISE = 1e-3  # nats a response between a policy and its reference that are the same
ENVIRONMENT = """
def respond(prompts, transcripts, **columns):
    return ["And doubled?"] * len(transcripts)


def length(completions, **columns):
    return [float(len(str(c)) % 7) for c in completions]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def finished(real: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A GRPO run with LoRA, as it ships but for its size."""
    folder = tmp_path_factory.mktemp("finished")
    code, run, _ = running.train(settings("grpo", real), folder)
    assert code == 0
    return run


def settings(method: str, real: Path, data: Path | None = None, **sections: Any) -> Config:
    """A run of `method` of one very small step."""
    values: dict[str, Any] = {"method": method, "model": {"path": str(real)}, "run": RUN, **SECTIONS[method]}
    if method in SAMPLES:
        values["task"] = {"name": "sums", "max_samples": 16}
        values["generation"] = {"max_new_tokens": 8, "max_prompt_tokens": 128}
        values["reward"] = running.SMALL["reward"]
    else:
        assert data is not None
        file = "answers" if method == "sft" else "pairs"
        held_out = str(data / f"{file}.eval.jsonl")
        values["task"] = {"data": str(data / f"{file}.jsonl"), "eval_data": held_out, "max_samples": 16}
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return config_of(values)


def last_line(run: RunDir) -> dict[str, Any]:
    line = running.metrics(run)[-1]
    assert line["step"] > 0
    assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    return line


@pytest.mark.parametrize(
    ("method", "lora", "dtype"), [*((m, True, "bfloat16") for m in SECTIONS), ("grpo", False, "float32")]
)
def test_every_method_trains(method: str, lora: bool, dtype: str, real: Path, data: Path, tmp_path: Path):
    """One step: it moves, nothing is infinite, and before it policy and reference were the same."""
    config = settings(method, real, data, model={"dtype": dtype}, lora={"enabled": lora})
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    line = last_line(run)
    assert max(line.get("optim/grad_norm", 0.0), line.get("value/grad_norm", 0.0)) > 0
    if method in SAMPLES:
        assert abs(line["objective/kl"]) < NO_MORE_THAN_NOISE


def test_an_environment_answers_by_the_models_own_template(real: Path, tmp_path: Path):
    """A template that shows no tools refuses those by name (environment.tools); what a function answers, it shows."""
    (tmp_path / "doubled.py").write_text(ENVIRONMENT)
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + {n}?"}]} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "generation": {"max_new_tokens": 24},  # sampled answers seldom end within it, the greedy one does
        "task": {"name": "rows", "data": str(tmp_path / "rows.jsonl")},
        "reward": {"functions": [{"use": f"{tmp_path / 'doubled.py'}:length"}]},
    }
    with_tools = settings("grpo", real, **sections, environment={"tools": [f"{tmp_path / 'doubled.py'}:length"]})
    with pytest.raises(ValueError, match=r"environment\.tools"):
        running.train(with_tools, tmp_path, name="refused")
    answered = {"name": f"{tmp_path / 'doubled.py'}:respond", "max_turns": 2}
    code, run, _ = running.train(settings("grpo", real, **sections, environment=answered), tmp_path)
    assert code == 0
    last_line(run)
    greedy = [line for line in map(json.loads, run.samples.open()) if line["kind"] == "eval-greedy"]
    roles = [[said["role"] for said in line["episode"]] for line in greedy]
    assert ["assistant", "tool", "assistant", "tool"] in roles


# ---- after training ----


def command(*words: str) -> int:
    """A `tinyrl` command in this process; its exit code."""
    return app(list(words), standalone_mode=False) or 0


def test_it_is_diagnosed_and_exported(finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command("doctor", str(finished.path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == []  # nothing is wrong
    assert command("export", str(finished.path), "--output", str(tmp_path / "adapter")) == 0
    assert command("export", str(finished.path), "--merge", "--output", str(tmp_path / "merged")) == 0
    assert (tmp_path / "merged" / "config.json").is_file()
