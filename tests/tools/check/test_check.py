"""`tinyrl check` as a command: sections in order, exit codes, memory, and the largest step of every kind of method."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests import running
from tests.tiny_models import TinyModels
from tests.training.rows import loaded
from tinyrl.cli.commands import app
from tinyrl.config.recipe import load_config
from tinyrl.data.rows import PASS_RATE
from tinyrl.data.sources import read_rows
from tinyrl.data.writers import write_rows
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.prepared import prepare
from tinyrl.tools.check.largest_step import worst_step
from tinyrl.tools.check.offline import (
    KNOWN_SHAPES,
    ReadRows,
    Shapes,
    allowed_rows,
    bytes_of,
    check_memory,
    estimate,
    longest_text,
    read_shapes,
)
from tinyrl.tools.check.sampled import Pace
from tinyrl.training.load import load_method
from tinyrl.training.on_policy import OnPolicy
from tinyrl.training.rows import RowMethod

# Of the model cards and the papers (2412.15115, 2505.09388), in billions.
PUBLISHED = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616, "1.7B": 1.721, "4B": 4.022, "1B": 1.236}
GB = 10**9
FEW = ["--device", "cpu", "--prompts", "4", "run.threads=1", "grpo.num_prompts=4", "grpo.minibatch_size=32"]
ORDER = ["settings", "rows", "reward", "model", "policy", "rates", "worst step", "findings"]


def checked(*words: str, code: int = 0) -> dict:
    done = CliRunner().invoke(app, ["check", *words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_the_default_run_is_sound_and_its_rates_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = checked("grpo", *FEW, "--write", "rated.jsonl")
    assert list(page) == ORDER
    assert page["findings"] == []
    assert page["reward"]["gold"] == 1.0
    assert page["policy"]["prompts"] == 4
    assert page["worst step"]["seconds"]["update"] > 0
    assert sum(row[PASS_RATE] is not None for row in read_rows("rated.jsonl")) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"rated.jsonl"}


@pytest.mark.slow  # Fast: cli/test_cli.py for the pointer, test_planted.py for the findings.
def test_a_run_points_to_it_where_it_explains_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tinyrl.tools.report.write_report", lambda folder: ())  # takes longer than the run
    Path("mine.py").write_text(
        "def bad(completions, **_): return [1 / 0 for c in completions]\n"
        "def fine(completions, answer, **_):\n"
        "    return [float(a in c.replace(' ', '')) for a, c in zip(answer, completions)]\n"
    )
    words = "grpo model.path=starter task.name=sort grpo.num_prompts=2 grpo.group_size=2 run.num_steps=1 run.threads=1"
    given = [*words.split(), "run.eval_prompts=0", "generation.max_new_tokens=4", "--device", "cpu"]
    for function, code in (("bad", 2), ("fine", 0)):
        done = CliRunner().invoke(app, ["train", *given, f"reward.functions=[{{use: mine.py:{function}}}]"])
        assert done.exit_code == code, done.output
        assert ("tinyrl check" in done.output) == (function == "bad")
    found = checked(*given, "reward.functions=[{use: mine.py:bad}]", code=3)["findings"]
    assert {"rewards fail", "the run is refused"} <= {one["finding"] for one in found}


def test_a_largest_step_that_would_take_too_long_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Pace, "step_seconds", 3600.0)
    page = checked("grpo", *FEW)
    assert list(page) == [name for name in ORDER if name != "rates"]
    assert page["worst step"]["seconds_estimated"] == 3600.0
    cache = page["worst step"]["parts"]["sampling"]["cache"]
    width = 12 + 16  # of prompts as they were read, not of max_prompt_tokens, and completions as they may be
    shapes = read_shapes("starter")
    assert cache == 512 * width * 2 * shapes.layers * shapes.keys * 4


def test_quick_imports_no_library_of_models() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom tinyrl.cli.commands import app\n"
        "assert CliRunner().invoke(app, ['check', 'lookup', '--quick']).exit_code == 0\n"
        "print(*{'torch', 'transformers', 'peft', 'bitsandbytes'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.wide
@pytest.mark.parametrize("method", ["grpo", "ppo", "sft", "reward"])
def test_the_largest_step_has_the_longest_rows(method: str, tiny: TinyModels, tmp_path: Path) -> None:
    rows = [{"prompt": "a " * (1 + i % 7), "chosen": "b " * (1 + i % 5), "rejected": "c"} for i in range(24)]
    if method == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    write_rows(file := tmp_path / "rows.jsonl", rows)
    section = {"sft": "sft", "reward": "reward_model"}.get(method)
    sections = {section: {"batch_size": 4}} if section else {}
    config = running.config(method, tiny("llama"), task={"name": "rows", "data": str(file)}, **sections)
    trainer = load_method(prepare(config), options=running.Options(device="cpu"))
    collector = trainer.collector if isinstance(trainer, OnPolicy) else None
    if isinstance(trainer, RowMethod):
        longest = max(sum(len(text) for one in row for text in one.texts) for row in trainer.train_rows)
    else:
        longest = max(len(prompt.tokens) for prompt in trainer.collector.train_prompts)
    given = collector and (collector.scorer, collector.engine, collector.train_prompts)
    ends = collector and (set(collector.engine.eos), len(collector.train_prompts))
    weights = {role: {n: p.detach().clone() for n, p in of.items()} for role, of in trainer.policy.parameters.items()}
    try:
        step = worst_step(trainer, text=[]).facts
    finally:
        trainer.close()
    assert step["seconds"]["update"] > 0
    assert step["seconds"]["evaluation"] > 0
    assert step["peak_gb"] > 0
    for role, of in trainer.policy.parameters.items():  # its optimizer has stepped, so its state is part of the peak
        assert any(not p.equal(weights[role][name]) for name, p in of.items())
    if collector is not None:  # what the run samples and scores with is as it was
        assert given == (collector.scorer, collector.engine, collector.train_prompts)
        assert ends == (collector.engine.eos, len(collector.train_prompts))
        assert type(collector.scorer) is Scorer
    most = f"4 rows of up to {longest} tokens" if section else f"of 6 tokens to prompts of up to {longest}"
    assert step["size"].endswith(most)


# ---- arithmetic ----


def test_every_known_model_has_as_many_weights_as_published() -> None:
    for name, shapes in KNOWN_SHAPES.items():
        size = next(part for part in name.split("-") if part in PUBLISHED)
        assert (shapes.linear + shapes.embeddings) / 1e9 == pytest.approx(PUBLISHED[size], abs=6e-3)


def test_experts_and_their_adapters_are_counted_as_they_are_made(tiny: TinyModels) -> None:
    """Gates of experts, and of a shared one, are not counted."""
    for architecture in ("qwen3-moe", "gpt-oss"):
        settings = running.config("grpo", tiny(architecture), lora={"target_parameters": "experts"})
        method = loaded(settings)
        policy = method.policy
        method.close()
        shapes = read_shapes(str(tiny(architecture)))
        base = [p for n, p in policy.causal.named_parameters() if p.ndim > 1 and "lora_" not in n]
        uncounted = sum(
            p.numel()
            for n, p in policy.causal.named_parameters()
            if n.endswith((".gate.weight", ".router.weight", "_bias")) and p.ndim > 1
        )
        assert shapes.all == sum(p.numel() for p in base) - uncounted
        parts = estimate(settings, device="cpu", room=8 * GB)
        assert parts["always"]["adapter"] == 4 * policy.num_trained
        assert parts["sampling"]["copy"] == 4 * (shapes.linear + shapes.of_experts)


def test_weights_are_counted_as_the_library_has_them(tiny: TinyModels) -> None:
    for architecture in ("llama", "gpt2"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny(architecture)))
        shapes = read_shapes(str(tiny(architecture)))
        matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "wpe" not in n)
        gate = shapes.layers * shapes.width * shapes.inner if architecture == "gpt2" else 0  # which GPT-2 does without
        assert shapes.linear + shapes.embeddings - gate == matrices


@pytest.mark.parametrize(
    "damaged",
    ["[1]", "null", "[" * 100_000, '{"text_config": [1]}', '{"hidden_size": "64"}', "{}", "{"],
)
def test_a_damaged_config_json_is_a_sentence(damaged: str, tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(damaged)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_shapes(str(tmp_path))


@pytest.mark.parametrize("change", [{"num_hidden_layers": "two"}, {"vocab_size": -1}, {"hidden_size": 0.5}])
def test_sizes_in_config_json_that_are_no_numbers_are_named(
    change: dict[str, Any], tiny: TinyModels, tmp_path: Path
) -> None:
    facts = json.loads((tiny("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | change))
    with pytest.raises(ValueError, match=next(iter(change))):
        read_shapes(str(tmp_path))


def test_bytes_of_a_token_by_hand() -> None:
    """SmolLM2-135M: saved 2 x 576 + 2 x 576 + 2 x 192 + 3 x 1536 = 7,296 numbers a layer, or 36 x 576 and 4 x 768. In a
    tile of the MLP 6 x 1536.
    """
    shapes = Shapes(576, 1536, 30, 576, 192, 49_152, tied=True)
    assert shapes.activations(4, recomputed=False) == 4 * 218_880
    assert shapes.activations(4, recomputed=True) == 4 * 23_808
    assert shapes.activations(2, recomputed=True) == 2 * 23_808 + 8 * 576
    assert shapes.tile(4) == 4 * 9216


def test_layers_that_are_recomputed_count_a_tile_of_their_mlp_once(tiny: TinyModels) -> None:
    def activations(tokens: int) -> float:
        sections = {"model": {"gradient_checkpointing": True}, "run": {"micro_batch_tokens": tokens}}
        config = running.config("sft", tiny("llama"), **sections)
        return estimate(config, device="cpu", room=8 * GB)["updating"]["activations"]

    shapes = read_shapes(str(tiny("llama")))
    assert activations(1024) == 1024 * (shapes.activations(4, recomputed=True) + shapes.tile(4))
    assert activations(5000) - activations(1024) == (5000 - 1024) * shapes.activations(4, recomputed=True)


def test_a_completion_longer_than_a_micro_batch_counts_whole(tiny: TinyModels) -> None:
    def activations(new: int) -> float:
        generation = {"max_prompt_tokens": 100, "max_new_tokens": new}
        config = running.config("grpo", tiny("llama"), generation=generation, run={"micro_batch_tokens": 1000})
        return estimate(config, device="cpu", room=8 * GB)["updating"]["activations"]

    assert activations(800) == activations(900)
    assert activations(1900) == 2 * activations(900)


def test_memory_is_of_the_rows_that_were_read(tiny: TinyModels) -> None:
    """Prompts of 8 tokens and 5 rows of evaluation, of 64 and 512 that settings allow."""
    generation = {"max_prompt_tokens": 64, "max_new_tokens": 16}
    config = running.config("grpo", tiny("llama"), generation=generation, run={"eval_prompts": 512})

    def cache(read: ReadRows | None) -> float:
        return estimate(config, device="cpu", room=8 * GB, read=read)["sampling"]["cache"]

    rows = config.on_policy.batch_size
    assert cache(None) / cache(ReadRows(prompt_tokens=8, eval_rows=5)) == (512 * 80) / (rows * 24)


def test_parts_of_a_run_by_hand(tiny: TinyModels) -> None:
    shapes = read_shapes(str(tiny("llama")))
    weights = 4 * (shapes.linear + shapes.embeddings)
    parts = estimate(running.config("grpo", tiny("llama")), device="cpu", room=8 * GB)
    assert parts["always"]["base"] == weights
    assert parts["always"]["Adam"] == 2 * parts["always"]["adapter"] == 8 * shapes.lora(16, None)
    assert parts["updating"]["gradients"] == parts["always"]["adapter"]
    whole = estimate(running.config("grpo", tiny("llama"), lora={"enabled": False}), device="cpu", room=8 * GB)
    assert whole["always"]["Adam"] == 2 * weights
    half = estimate(running.config("grpo", tiny("llama"), model={"dtype": "bfloat16"}), device="cpu", room=8 * GB)
    assert half["always"]["base"] == weights / 2
    known = KNOWN_SHAPES["Qwen/Qwen2.5-0.5B"]
    teacher = {"path": "Qwen/Qwen2.5-0.5B", "quantization": "8bit"}
    settings = running.config("distill", tiny("llama"), reward={"model": str(tiny("llama"))}, teacher=teacher)
    beside = estimate(settings, device="cpu", room=8 * GB)["always"]
    assert beside["reward model"] == weights
    assert beside["teacher"] == known.linear + 4 * known.embeddings  # of which 8 bits are of linear layers alone


def test_what_does_not_fit_is_found() -> None:
    config = load_config("grpo", "starter-grpo", overrides=[])
    assert check_memory(config, device="cpu", memory="8GB").findings == []
    [finding] = check_memory(config, device="cpu", memory="0.1GB").findings
    assert "run.micro_batch_tokens" in finding.change
    assert [bytes_of(text) for text in ("24GB", "1.5 T", "80gib", "512M", "24")] == [24e9, 1.5e12, 80e9, 512e6, 24e9]
    for text in ("24XB", "", "0GB", "GB", "24B"):
        with pytest.raises(ValueError, match="--memory"):
            bytes_of(text)


@pytest.mark.parametrize(
    ("recipe", "tokens"),
    [
        ("starter-grpo", None),  # a prompt and its answer
        ("gsm8k-python-1.5b", 512 + 768 + 3 * 200),  # max_new_tokens are of the whole episode
        ("lookup", 32 + 24 + 3 * 8),  # replies of the task itself
    ],
)
def test_the_longest_text_of_an_episode_has_its_replies(recipe: str, tokens: int | None) -> None:
    config = load_config("grpo", recipe, overrides=[])
    generation = config.generation
    alone = generation.max_prompt_tokens + generation.max_new_tokens
    assert longest_text(config, allowed_rows(config)) == (tokens or alone)


DOUBLE = """
from tinyrl.tasks import Task


def rows(split):
    start = {{"train": 0, "eval": {start}}}[split]
    return [{{"prompt": f"{{n}} and {{n}} =", "answer": str(2 * n)}} for n in range(start, 200, 2)]


def verify(prompts, completions, answer, **_):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


TASK = Task(name="double", summary="twice", rows=rows, verify=verify, columns=("prompt", "answer"))
"""


@pytest.mark.parametrize(("start", "found"), [(0, ["held-out rows are trained on"]), (1, [])])
def test_rows_that_a_task_gives_for_both_splits_are_found(
    start: int, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even numbers to train on: held out are the even ones, or the odd ones."""
    monkeypatch.chdir(tmp_path)
    Path("double.py").write_text(DOUBLE.format(start=start))
    page = checked("grpo", "task.name=double.py:TASK", "model.path=starter", "--quick")
    names = [one["finding"] for one in page["findings"]]
    assert [name for name in names if name.startswith("held-out")] == found


@pytest.mark.parametrize(("recipe", "shown"), [("starter-grpo", False), ("lookup", True)])
def test_settings_of_an_environment_are_shown_where_there_is_one(recipe: str, shown: bool) -> None:
    settings = checked("grpo", recipe, "--quick")["settings"]["settings"]
    assert any(name.startswith("environment.") for name in settings) is shown
