"""The plan of a run's memory: parts counted by hand, what changes them, what fits, and the peak of real runs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.running import config, go_on, metrics, train
from tests.tiny_models import TinyModels
from tinyrl.config.schema import Config
from tinyrl.generation import select
from tinyrl.models import batches, logprobs
from tinyrl.models.batches import fuses
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.rollout.components import Options, SamplingParts, trainer_of
from tinyrl.training import planning
from tinyrl.training.launch import plan, start, time_steps
from tinyrl.training.planning import (
    MemoryPlan,
    Planner,
    beside_measured,
    largest_group,
    largest_micro_batch,
    planner_of,
    tried_meta_models,
    tried_plan,
    widest,
)
from tinyrl.training.session import Session

GB = 10**9


def planner(settings: Config, *, room: int = 1000 * GB) -> Planner:
    options = Options(device="cpu", weights=False)
    parts = trainer_of(settings.method)(settings, options=options)
    meta = tried_meta_models(settings, options=options)
    assert meta is not None
    made = planner_of(parts, meta)
    made.process, made.room = 0, room
    return made


def small(tiny: TinyModels, method: str = "grpo", **sections: Any) -> Config:
    return config(method, tiny("llama"), **sections)


def test_weights_gradients_and_moments_are_counted_by_hand(tiny: TinyModels):
    made = planner(small(tiny, lora={"r": 4})).plan()
    # rank 4 on two layers: q, o 32 -> 32; k, v 32 -> 16; gate, up 32 -> 64; down 64 -> 32
    adapter = 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert made.standing["policy"] == 4 * adapter
    assert made.standing["Adam"] == 8 * adapter
    assert made.phases["updating"]["gradients"] == 4 * adapter
    assert "loading" not in made.phases  # float32 files are mapped, and are the model's memory


def test_files_of_another_dtype_are_in_memory_beside_the_model(tiny: TinyModels, tmp_path: Path):
    model = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    weights = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "dtype": "bfloat16"}))
    made = planner(config("grpo", model)).plan()
    assert made.phases["loading"] == {"weights as read": 2 * sum(w.numel() for w in weights.values())}
    assert made.standing["base"] == 4 * sum(w.numel() for w in weights.values())


def test_the_cache_holds_every_row_to_its_last_token(tiny: TinyModels):
    made = planner(small(tiny, run={"eval_prompts": 8}))
    sampling, longest = made.sampling, max(made.steps[0][0].sizes.prompts)
    assert sampling is not None
    assert sampling.rows == 16  # 4 prompts in groups of 4
    assert sampling.parts["cache"] == 2 * 2 * 2 * 8 * 4 * 16 * (longest + 6)  # two of, layers, heads, size, float32
    assert sampling.parts["sampling copy"] > 0


def test_a_sampling_copy_in_another_dtype_has_every_weight(tiny: TinyModels):
    """The head too, which is not tied."""
    made = planner(small(tiny, generation={"dtype": "bfloat16"}, lora={"enabled": False}))
    assert made.sampling is not None
    assert made.sampling.parts["sampling copy"] == 2 * sum(p.numel() for p in made.meta.causal.parameters())


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "full": {"lora": {"enabled": False}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "bfloat16, full": {"model": {"dtype": "bfloat16"}, "lora": {"enabled": False}},
    "sampling in bfloat16": {"generation": {"dtype": "bfloat16"}},
    "hf": {"generation": {"engine": "hf"}},
    "hf-merged": {"generation": {"engine": "hf-merged"}},
    "fused": {"generation": {"engine": "fused"}},
}


@pytest.mark.parametrize("free", [None, 1], ids=["", "no room"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral"])
@pytest.mark.wide
def test_the_plan_and_the_run_choose_one_engine(
    kind: str, name: str, free: int | None, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
):
    """Also where no copy of the weights fits: a sentence of one is a sentence of the other."""
    settings = config("grpo", tiny(kind), **SETTINGS[name])
    if free is not None:
        monkeypatch.setattr(select, "free_bytes", lambda device: free)

    def chosen(*, weights: bool) -> str:
        try:
            parts = trainer_of(settings.method)(settings, options=Options(device="cpu", weights=weights))
        except ValueError as error:
            return str(error)
        assert isinstance(parts, SamplingParts)
        parts.close()
        return parts.engine.name

    assert chosen(weights=False) == chosen(weights=True)


def test_states_of_a_token_that_graphs_keep_count_on_a_gpu(tiny: TinyModels):
    made = planner(small(tiny))
    sampling = made.sampling
    assert sampling is not None
    kept = sampling.kept(torch.device("cuda")) - sampling.parts["cache"] - sampling.parts["sampling copy"]
    assert (made.trainer.engine.name == "fused") == (0 < kept <= sampling.parts["states of sampling"])  # pyright: ignore


@pytest.mark.parametrize("lora", [True, False], ids=["frozen head", "trained head"])
def test_twochunks_of_of_logits_stand_for_all(lora: bool, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """A head that is trained goes through autograd, where what was left out would be missed."""
    made = planner(small(tiny, lora={"enabled": lora}))
    monkeypatch.setitem(logprobs.CHUNK_ELEMENTS, "cpu", 5 * made.meta.head("policy").weight.shape[0])
    shortened = made.plan(256).phases["updating"]
    own = logprobs.chunks_of
    monkeypatch.setattr(logprobs, "chunks_of", lambda *args, device: own(*args, device=torch.device("cpu")))
    whole = made.plan(256).phases["updating"]
    assert sum(shortened.values()) == pytest.approx(sum(whole.values()), rel=0.02)


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.wide
def test_every_kind_of_model_can_be_planned(tiny: TinyModels, method: str, kind: str, lora: bool):
    made = planner(config(method, tiny(kind), lora={"enabled": lora})).plan()
    assert made.phases["updating"]["activations"] > 0
    assert made.fits


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("method", ["sft", "dpo", "reward"])
@pytest.mark.wide
def test_methods_that_learn_from_text_can_be_planned(tiny: TinyModels, tmp_path: Path, method: str, kind: str):
    """Mistral looks through a window, so rows are padded."""
    example = (
        {"prompt": "a", "completion": "b" * 40}
        if method == "sft"
        else {"prompt": "a", "chosen": "b" * 40, "rejected": "c" * 30}
    )
    (tmp_path / "rows.jsonl").write_text((json.dumps(example) + "\n") * 8)
    rows = str(tmp_path / "rows.jsonl")
    task = {"data": rows, "eval_data": rows}
    made = planner(Config.model_validate({"method": method, "model": {"path": str(tiny(kind))}, "task": task})).plan()
    assert made.phases["updating"]["activations"] > 0


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_under_autocast_the_layers_are_planned_that_train(
    tiny: TinyModels, lora: bool, monkeypatch: pytest.MonkeyPatch
):
    """Fine-tuning of every weight keeps them in float32 and computes in bfloat16. The library's keep more."""
    sections = {"lora": {"enabled": lora}, "generation": {"max_new_tokens": 64}}
    low, exact = (planner(small(tiny, model={"dtype": dtype}, **sections)) for dtype in ("bfloat16", "float32"))
    assert low.meta.causal.dtype == (torch.bfloat16 if lora else torch.float32)
    with low.trainer.accelerator.autocast():
        assert fuses(low.meta.backbone("policy"))
    ours = low.plan(480).phases["updating"]["activations"]
    assert ours < 0.8 * exact.plan(480).phases["updating"]["activations"]
    monkeypatch.setitem(batches._fuses, low.meta.backbone("policy"), {torch.bfloat16: False})
    assert ours < 0.9 * low.plan(480).phases["updating"]["activations"]


@pytest.mark.slow
def test_larger_micro_batches_take_more_and_recomputed_layers_less(tiny: TinyModels):
    made = planner(small(tiny))
    activations = [made.plan(tokens).phases["updating"]["activations"] for tokens in (30, 120, 480)]
    assert activations == sorted(set(activations))
    recomputed = planner(small(tiny, model={"gradient_checkpointing": True})).plan(480)
    assert recomputed.phases["updating"]["activations"] < 0.7 * activations[-1]


def test_micro_batches_are_planned_full(tiny: TinyModels):
    made = planner(small(tiny, grpo={"num_prompts": 4, "group_size": 4}, generation={"max_new_tokens": 16}))
    longest = made.steps[0][0]
    prompt = longest.sizes.prompts[0]
    budget = prompt + 4 * 16 + prompt + 4  # a whole group, and too little for a second one of such length
    assert longest.sizes.cost(widest(longest, budget)[0]) == prompt + 4 * 16
    full = made.fullest(budget)[0]
    assert prompt + 4 * 16 < full.sizes.cost(widest(full, budget)[0]) <= budget


def test_what_sampling_frees_on_a_cpu_is_there_while_weights_are_updated(tiny: TinyModels):
    made = planner(small(tiny)).plan()
    sampled = sum(made.phases["sampling"].values())
    for phase in ("updating", "an optimizer step"):
        assert made.phases[phase]["kept from sampling"] == sampled


@pytest.mark.slow
def test_a_plan_leaves_nothing_behind_and_changes_no_number(tiny: TinyModels):
    made = planner(small(tiny, method="ppo"))
    before = torch.get_rng_state()
    assert made.plan() == made.plan()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in made.meta.causal.parameters())


@pytest.mark.slow
def test_the_largest_micro_batch_and_group_that_fit(tiny: TinyModels):
    roomy = planner(small(tiny))
    most = largest_micro_batch(roomy)
    assert most is not None
    assert most >= roomy.steps[0][0].sizes.cost(range(16))  # all rows in one
    tight = planner(small(tiny), room=roomy.plan(60).peak)
    less = largest_micro_batch(tight)
    assert less is not None
    assert tight.plan(less).fits
    assert less < most
    assert largest_micro_batch(planner(small(tiny), room=1)) is None
    group, tight_group = largest_group(roomy), largest_group(tight)
    assert group is not None
    assert tight_group is not None
    assert tight_group < group
    assert largest_group(planner(small(tiny, method="ppo"))) is None


@pytest.mark.parametrize(("by_memory", "tokens"), [(True, "auto"), (False, "auto"), (False, 32768)])
@pytest.mark.wide
def test_a_run_begins_with_the_micro_batches_that_fit(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, by_memory: bool, tokens: int | str
):
    """On a GPU, whose part is played here; not on a CPU, nor where the number is set."""
    settings = small(tiny, run={"micro_batch_tokens": tokens}, generation={"max_new_tokens": 64})
    made = planner(settings)
    before = made.trainer.micro_batches.tokens
    room = made.plan(before // 8).peak
    monkeypatch.setattr(planning, "memory_room", lambda device: room)
    made.trainer.micro_batches.by_memory = by_memory
    meta = tried_meta_models(settings, options=Options(device="cpu"))
    assert meta is not None
    plan = tried_plan(made.trainer, planning.MetaModels(meta.roles, None, 0))
    assert plan is not None
    assert plan.tokens == made.trainer.micro_batches.tokens
    assert plan.fits or not by_memory
    assert (plan.tokens < before) == by_memory


def test_memory_decides_on_a_gpu_only_where_no_number_is_set():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert MicroBatches(gpu, "auto").by_memory
    assert not MicroBatches(gpu, 4096).by_memory
    assert not MicroBatches(cpu, "auto").by_memory


@pytest.mark.slow
def test_a_run_that_does_not_fit_says_what_would(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    settings = small(tiny)
    monkeypatch.setattr(planning, "memory_room", lambda device: 1000 * GB)
    said = plan(settings, options=Options(device="cpu"))
    assert said.problem is None
    assert said.text.startswith("memory on cpu: ")
    for part in ("process", "base", "policy", "Adam", "gradients", "logits chunk", "activations", "cache", "disk: "):
        assert part in said.text
    assert max(map(len, said.text.splitlines())) <= 80
    assert not any(re.match(r" *.?B\b", line) for line in said.text.splitlines())  # no unit without its figure
    monkeypatch.setattr(planning, "memory_room", lambda device: 1000)
    assert "gradient_checkpointing" in (plan(settings, options=Options(device="cpu")).problem or "")


def test_a_step_is_timed_without_changing_a_weight(tiny: TinyModels):
    said = " ".join(time_steps(small(tiny, method="ppo"), options=Options(device="cpu")).split())
    assert re.search(r"a step takes about [\d.e+-]+ s \(sampling .*, passes without gradient .*, update .*\)", said)


EPOCHS: dict[str, Any] = {"num_epochs": 2}
INEXACT: dict[str, Any] = {"generation": {"dtype": "bfloat16"}}
TEACHER: dict[str, Any] = {"path": "start", "hint": "The numbers go up."}


@pytest.mark.parametrize(
    ("method", "sections", "passes"),
    [
        ("grpo", {}, 0),
        ("grpo", {"grpo": {"kl_coef": 0.1}}, 1),
        ("grpo", {"grpo": {"kl_coef": 0.1}, **INEXACT}, 2),  # the policy's for the KL
        ("grpo", {"grpo": EPOCHS}, 0),
        ("grpo", {"grpo": EPOCHS, **INEXACT}, 1),  # old_logprobs
        ("grpo", {"teacher": {**TEACHER, "coef": 0.5}}, 1),
        ("ppo", {}, 2),
        ("ppo", {"reference": {"kind": "none"}, "ppo": {"kl_coef": 0.0}, **INEXACT}, 2),
        ("ppo", {"ppo": {"bootstrap_truncated": True}, **INEXACT}, 4),
        ("distill", {"teacher": TEACHER}, 1),
        ("distill", {"teacher": TEACHER, "distill": {"objective": "sampled", **EPOCHS}, **INEXACT}, 2),
        ("dpo", {"dpo": {"batch_size": 4}}, 1),
        ("dpo", {"dpo": {"batch_size": 4, "loss": "kto"}}, 3),
        ("sft", {}, 0),
    ],
)
def test_passes_without_gradient_are_counted_as_a_step_makes_them(
    method: str,
    sections: dict[str, Any],
    passes: int,
    tiny: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if method in ("dpo", "sft"):
        rows = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": "no", "completion": "b"} for i in range(20)]
        if method == "sft":
            rows = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        sections = {**sections, "task": {"name": None, "data": str(data), "max_samples": None}}
    made = [0]
    run, end_step = MicroBatches.run, Session.end_step

    def counted(self: MicroBatches, *work: Any, restart: Any = None) -> None:
        made[-1] += restart is None  # else it is an update
        run(self, *work, **({} if restart is None else {"restart": restart}))

    def ended(self: Session, **metrics: float) -> None:
        end_step(self, **metrics)
        made.append(0)

    monkeypatch.setattr(MicroBatches, "run", counted)
    monkeypatch.setattr(Session, "end_step", ended)
    settings = small(tiny, method, **sections, run={"num_steps": 2, "eval_every": 0, "eval_prompts": 0})
    folder = {"output_dir": str(tmp_path), "name": "run", "overwrite": False}
    launch = start(settings, options=Options(device="cpu"), command=["test"], **folder)
    made[:] = [0]
    assert launch.trainer.forward_only_passes == passes
    assert launch.go(report=lambda folder: None) == 0
    assert made[1] == passes  # of the second step: in the first it is measured whether sampling is exact


@pytest.mark.whole
@pytest.mark.slow
def test_the_end_of_a_run_says_what_was_planned_and_measured(tiny: TinyModels, tmp_path: Path, capsys: Any):
    settings = small(tiny)
    code, run, _ = train(settings, tmp_path)
    assert code == 0
    assert re.search(r"memory   [\d.]+ .B planned \(while .*\), [\d.]+ .B measured", capsys.readouterr().out)
    made = MemoryPlan("cpu", {"base": 2 * GB}, {"updating": {"activations": GB}}, 4 * GB, 768)
    assert beside_measured(made, 2.9) == "memory   3.00 GB planned (while updating), 2.90 GB measured"
    assert metrics(run)[-1]["memory/peak_gb"] > 0
    assert go_on(run) == 0


@pytest.mark.whole
@pytest.mark.slow
def test_a_model_that_cannot_be_tried_is_trained_without_a_plan(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no such kernel on the meta device")

    monkeypatch.setattr(planning, "meta_roles", fail)
    assert train(small(tiny), tmp_path)[0] == 0
    assert "planned" not in capsys.readouterr().out
