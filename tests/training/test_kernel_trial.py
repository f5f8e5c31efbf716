"""The trial of faster paths on a GPU, on a CPU: facts of the device and timings are handed in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import flash
from tests import running
from tests.models.building import stir
from tests.policies import CPU, policy_of
from tests.tiny_models import tiny_model
from tests.training.rows import trained
from tinyrl.models.batch import Example
from tinyrl.models.checks import ordinary_ids
from tinyrl.models.device import Device
from tinyrl.models.kernels import KernelName, Kernels
from tinyrl.models.loading import load_causal_lm
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.varlen import VarlenRows
from tinyrl.process.errors import Interrupted
from tinyrl.training import kernel_trial
from tinyrl.training.kernel_trial import (
    Cost,
    KernelChoice,
    KernelTrial,
    PathComparison,
    PathMeasures,
    choose,
    may_choose,
    refusal,
)
from tinyrl.training.method import Pass
from tinyrl.training.run_state import CheckpointState
from tinyrl.training.step import Updater, role_optimizers

VARLEN_ATTN = "torch.nn.attention.varlen.varlen_attn"
NONE = Kernels()
VARLEN = Kernels(varlen_attention=True)
ONE_PASS = Kernels(one_pass_logits=True)
BOTH = Kernels(varlen_attention=True, one_pass_logits=True)
TODAY = PathMeasures({"nats": 0.01, "gradient": 0.02}, [1.0, 1.0, 1.0, 1.0, 1.0], 1000)


# ---- the decision ----


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, None),
        ({"gaps": {"nats": 0.012, "gradient": 0.025}, "seconds": [0.9] * 5, "peak": 900}, None),
        ({"seconds": [0.9, 0.9, 0.9, 5.0, 5.0]}, None),
        ({"seconds": [0.5, 0.5, 1.1, 1.1, 1.1]}, "time"),
        ({"peak": 1001}, "memory"),
        ({"gaps": {"nats": 0.05, "gradient": 0.02}, "seconds": [0.1] * 5}, "nats"),
        ({"gaps": {"nats": 0.01, "gradient": 0.05}, "seconds": [0.1] * 5}, "gradient"),
        ({"gaps": {"nats": float("nan"), "gradient": 0.02}}, "nats"),
    ],
)
def test_a_path_is_taken_if_it_is_as_exact_as_fast_and_as_small(change: dict[str, Any], word: str | None):
    """The median of five; a mean distance from float32 of up to 1.5 times that of today's path."""
    found = refusal(PathComparison(TODAY, replace(TODAY, **change)))
    assert found is None if word is None else word in (found or "")


def table(seconds: dict[Kernels, float]) -> Callable[[Kernels, Kernels], PathComparison]:
    """Measure paths by their seconds alone."""

    def compare(today: Kernels, new: Kernels) -> PathComparison:
        return PathComparison(*(replace(TODAY, seconds=[seconds[kernels]]) for kernels in (today, new)))

    return compare


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ({NONE: 4.0, VARLEN: 3.0, BOTH: 2.0}, BOTH),
        ({NONE: 4.0, VARLEN: 3.0, BOTH: 3.5}, VARLEN),
        ({NONE: 4.0, VARLEN: 5.0, ONE_PASS: 3.0}, ONE_PASS),
        ({NONE: 4.0, VARLEN: 5.0, ONE_PASS: 5.0}, NONE),
    ],
)
def test_each_path_is_tried_beside_what_has_been_taken(seconds: dict[Kernels, float], taken: Kernels):
    choice = choose(table(seconds), lacks=lambda name: None)
    assert choice.kernels == taken
    assert len(choice.notes) == 2


def test_a_path_that_cannot_run_here_is_not_tried():
    lacking: Callable[[KernelName], str | None] = lambda name: "no triton" if name == "one_pass_logits" else None  # noqa: E731
    choice = choose(table({NONE: 4.0, VARLEN: 3.0}), lacks=lacking)
    assert choice.kernels == VARLEN
    assert "no triton" in choice.notes[1]


class NotOfRuntime(Exception):
    """An error like triton's, which have no known base."""


@pytest.mark.parametrize("error", [NotOfRuntime("no such instruction"), torch.OutOfMemoryError("no room")])
def test_a_path_that_raises_is_not_taken_and_the_next_is_tried(error: Exception):
    def compare(today: Kernels, new: Kernels) -> PathComparison:
        if new.varlen_attention:
            raise error
        return PathComparison(TODAY, TODAY)

    choice = choose(compare, lacks=lambda name: None)
    assert choice.kernels == ONE_PASS
    assert str(error) in choice.notes[0]


def test_a_stop_ends_the_trial():
    def compare(today: Kernels, new: Kernels) -> PathComparison:
        raise Interrupted("SIGTERM")

    with pytest.raises(Interrupted):
        choose(compare, lacks=lambda name: None)


@pytest.mark.parametrize(
    ("device", "dtype", "deterministic", "may"),
    [
        ("cuda", torch.bfloat16, False, True),
        ("cuda", torch.float16, False, True),
        ("cuda", torch.bfloat16, True, False),
        ("cuda", torch.float32, False, False),
        ("cpu", torch.bfloat16, False, False),
    ],
)
def test_there_is_a_choice_on_a_gpu_in_half_precision_unless_runs_give_the_same_bits(
    device: str, dtype: torch.dtype, may: bool, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool
):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert may_choose(Device(torch.device(device), dtype)) == may


# ---- the trial ----

# Two groups of four: of fewer tokens rounding alone may be 1.5 times that of another path.
ITEMS = [Example([5 + i // 4, 6, 7], [ordinary_ids(60, 24, start=31 * i)]) for i in range(8)]


@pytest.fixture(params=[True, False], ids=["LoRA", "full"])
def trial(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelTrial:
    """A policy in bfloat16 that says it may choose; one call of attention is computed by its formula."""
    monkeypatch.setattr(kernel_trial, "may_choose", lambda device: True)
    monkeypatch.setattr(VARLEN_ATTN, flash.varlen_attn)
    return trial_of(tiny_model(tmp_path, "llama"), torch.bfloat16, lora=request.param)


def trial_of(
    folder: Path, dtype: torch.dtype, *, lora: bool, setting: Any = "auto", device: torch.device = CPU
) -> KernelTrial:
    model: Any = load_causal_lm(str(folder), dtype=dtype)
    if lora:
        torch.manual_seed(0)
        model = wrap_in_lora(model, lora_config(r=2, alpha=4, dropout=0.0, target_modules="all-linear"))
    policy = policy_of(model, device=device, lora={"enabled": lora})
    stir(policy.parameters["policy"])
    policy.run_device = Device(policy.device, dtype)
    optimizers = role_optimizers(policy.config.optim, policy.parameters)
    return KernelTrial(Updater(policy, optimizers, 1.0), setting=setting)


def costs(trial: KernelTrial, monkeypatch: pytest.MonkeyPatch, seconds: dict[Kernels, float]) -> list[Kernels]:
    """Hand in what a micro-batch costs, by kernels; return the kernels that were measured."""
    found: list[Kernels] = []

    def cost(kernels: Kernels, widest: object) -> Cost:
        found.append(kernels)
        return Cost(seconds[kernels], peak=1000)

    monkeypatch.setattr(trial, "_cost", cost)
    return found


def passes(trial: KernelTrial) -> list[Pass]:
    policy = trial.policy
    loss = lambda batch: (policy.logprobs("policy", batch, temperature=1.0)[0].sum(), {})  # noqa: E731
    return [Pass("policy", ITEMS, loss)]


def test_a_faster_path_is_taken_and_leaves_no_other_trace(trial: KernelTrial, monkeypatch: pytest.MonkeyPatch):
    """Five times in turns, after a first one each. Triton is not there."""
    monkeypatch.setattr(kernel_trial, "missing", lambda name: "not here" if name == "one_pass_logits" else None)
    measured = costs(trial, monkeypatch, {NONE: 2.0, VARLEN: 1.0})
    before = torch.get_rng_state()
    assert trial.chosen is None
    assert len(trial.decide(passes(trial))) == 2
    assert trial.chosen == trial.policy.kernels == VARLEN
    assert measured == [NONE, VARLEN] * 6
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in trial.policy.parameters["policy"].values())
    assert trial.decide(passes(trial)) == []  # once


def test_a_step_of_few_tokens_leaves_the_choice_open(trial: KernelTrial, monkeypatch: pytest.MonkeyPatch):
    """120 tokens of five rows, of 128; all rows have 192."""
    monkeypatch.setattr(kernel_trial, "missing", lambda name: "not here" if name == "one_pass_logits" else None)
    measured = costs(trial, monkeypatch, {NONE: 2.0, VARLEN: 1.0})
    [whole] = passes(trial)
    assert trial.decide([Pass(whole.role, ITEMS[:5], whole.loss)]) == []
    assert (trial.chosen, measured) == (None, [])
    trial.decide([whole])
    assert trial.chosen == VARLEN


def test_a_path_with_wrong_numbers_is_not_taken(trial: KernelTrial, monkeypatch: pytest.MonkeyPatch):
    """Each row reads the key before its last one twice."""
    of = VarlenRows.of

    def shifted(*args: Any, **options: Any) -> VarlenRows:
        rows = of(*args, **options)
        assert rows.keys is not None
        ends = rows.starts_k[1:].long() - 1
        rows.keys[ends] = rows.keys[ends - 1]
        return rows

    monkeypatch.setattr(VarlenRows, "of", shifted)
    costs(trial, monkeypatch, {NONE: 2.0, VARLEN: 1.0, ONE_PASS: 3.0})
    notes = trial.decide(passes(trial))
    assert trial.chosen == NONE
    assert "float32" in notes[0]


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["llama", pytest.param("qwen3-moe", marks=pytest.mark.wide), pytest.param("gpt-oss", marks=pytest.mark.wide)],
)
def test_exact_numbers_are_those_of_the_model_in_float32(kind: str, lora: bool, tmp_path: Path):
    """Of weights in bfloat16, widened a layer at a time, matrices of experts too: in float32 what they are when loaded
    so, and nearer than the run's own.
    """
    folder = tiny_model(tmp_path, kind)
    half = trial_of(folder, torch.bfloat16, lora=lora)
    wide = trial_of(folder, torch.float32, lora=lora)
    with torch.no_grad():
        for name, weight in wide.policy.causal.named_parameters():
            weight.copy_(dict(half.policy.causal.named_parameters())[name])
    expected = wide.numbers(ITEMS, exact=False)
    assert max(half.numbers(ITEMS, exact=True).gaps(expected).values()) < 1e-5
    assert min(half.numbers(ITEMS, exact=False).gaps(expected).values()) > 1e-4


@pytest.mark.parametrize("trial", [True], indirect=True, ids=["LoRA"])
def test_a_micro_batch_costs_its_seconds_and_what_it_takes_beside_what_is_there(
    trial: KernelTrial, monkeypatch: pytest.MonkeyPatch
):
    """Once without a gradient, as before an update, and once with it: 3 seconds, and 1,700 bytes above 500."""
    gradients: list[bool] = []
    seconds = iter([10.0, 13.0])

    def gradient(one: Pass, rows: list[int]) -> None:
        assert rows == [*range(8)]
        gradients.append(torch.is_grad_enabled())

    monkeypatch.setattr(trial.updater, "gradient", gradient)
    monkeypatch.setattr(kernel_trial.time, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(kernel_trial, "reset_peak_memory", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2200)
    assert trial._cost(VARLEN, passes(trial)) == Cost(3.0, 1700)
    assert gradients == [False, True]
    assert trial.policy.kernels == VARLEN


# ---- runs and checkpoints ----


def test_a_run_tries_in_its_first_step_and_its_checkpoint_has_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(kernel_trial, "may_choose", lambda device: True)
    monkeypatch.setattr(VARLEN_ATTN, flash.varlen_attn)
    monkeypatch.setattr(kernel_trial, "choose", lambda compare, *, lacks: KernelChoice(VARLEN, ["chosen here"]))
    model = {"dtype": "bfloat16"}
    run = {"num_steps": 2, "eval_prompts": 0, "save_every": 1}
    enough = {"max_new_tokens": 16}  # tokens of 16 completions: 128 are compared
    settings = running.config("grpo", tiny_model(tmp_path, "llama"), model=model, run=run, generation=enough)
    folder = trained(settings, tmp_path)
    assert capsys.readouterr().err.count("chosen here") == 1
    kept = [CheckpointState.read(checkpoint).kernels for checkpoint in sorted(folder.checkpoints.iterdir())]
    assert kept == [None, VARLEN, VARLEN]


@pytest.mark.parametrize(
    ("setting", "kept", "elsewhere", "lacking", "chosen", "warns"),
    [
        ("auto", VARLEN, False, False, VARLEN, False),
        ("auto", NONE, False, False, NONE, False),
        ("auto", VARLEN, False, True, None, False),
        ("auto", VARLEN, True, False, None, False),
        ("auto", None, False, False, None, False),
        ("plain", VARLEN, False, False, NONE, True),
        ("plain", NONE, False, False, NONE, False),
    ],
)
def test_a_choice_is_kept_where_it_was_made_and_a_resume_says_if_it_differs(
    setting: str,
    kept: Kernels | None,
    chosen: Kernels | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    elsewhere: bool,
    lacking: bool,
    warns: bool,
):
    """Where it is open again (None), the first step tries."""
    monkeypatch.setattr(kernel_trial, "may_choose", lambda device: True)
    monkeypatch.setattr(kernel_trial, "missing", lambda name: "not here" if lacking else None)
    found = trial_of(tiny_model(tmp_path, "llama"), torch.bfloat16, lora=True, setting=setting)
    notes = found.restore(kept, place="another card" if elsewhere else found.place)
    assert found.chosen == chosen
    assert bool(notes) == warns


@pytest.mark.parametrize(("seconds", "differs"), [(1.0, False), (3.0, True)])
def test_a_choice_that_is_made_anew_is_compared_with_the_checkpoints(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, differs: bool
):
    monkeypatch.setattr(kernel_trial, "may_choose", lambda device: True)
    monkeypatch.setattr(VARLEN_ATTN, flash.varlen_attn)
    monkeypatch.setattr(kernel_trial, "missing", lambda name: "not here" if name == "one_pass_logits" else None)
    found = trial_of(tiny_model(tmp_path, "llama"), torch.bfloat16, lora=True)
    found.restore(VARLEN, place="another card")
    costs(found, monkeypatch, {NONE: 2.0, VARLEN: seconds})
    notes = found.decide(passes(found))
    assert any(note.startswith("warning") for note in notes) == differs
