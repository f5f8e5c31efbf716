"""Preference optimization: the losses are those of plain loops, pairs are learnt, resumes are exact."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests import running
from tests.models.building import stir
from tests.tiny_models import POSITIONS, tiny_model, tiny_tokenizer
from tinyrl.config.schema import Config
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.policy import Policy
from tinyrl.rollout.load import load_method
from tinyrl.runs.launched import Options
from tinyrl.tasks.answers import render_answer
from tinyrl.training import dpo
from tinyrl.training.dpo import logprobs_of, pair_logprobs
from tinyrl.training.rows import Example
from tinyrl.training.step import Updater, role_optimizers

RUN = {"num_steps": 30, "eval_every": 10, "save_every": 10, "threads": 1}
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "sigmoid, smoothed": {"label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.5},
    "ipo_sum": {"loss": "ipo_sum", "beta": 0.25},
    "kto": {"loss": "kto"},
    "orpo": {"loss": "orpo"},
    "simpo": {"loss": "simpo"},
}
SIX = [
    {"prompt": "one:", "chosen": " yes", "rejected": " no"},
    {"prompt": "two:", "chosen": " yes yes", "rejected": " n"},
    {"prompt": "a longer prompt:", "chosen": " y", "rejected": " not at all"},
    {"prompt": "four", "chosen": " 4", "rejected": " five"},
    {"prompt": "two:", "chosen": " yes!", "rejected": " yes."},
    {"prompt": "6", "chosen": " the same beginning, a", "rejected": " the same beginning, b and more"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """104 prompts; the chosen answer says yes and the rejected one no, at other lengths."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = [
        {"prompt": f"{a}{b}:", "chosen": "yes yes" + a, "rejected": "no no no" + b}
        for a in letters
        for b in letters[:4]
    ]
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", lines)


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(model: Path, rows: Path, *, lora: bool = True, dropout: float = 0.0, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "method": "dpo",
        "model": {"path": str(model)},
        "lora": {"enabled": lora, "dropout": dropout if lora else 0.0},
        "task": {"data": str(rows)},
        "optim": {"learning_rate": 1e-2 if lora else 3e-3},
        "run": {**RUN, **sections.pop("run", {})},
    }
    return Config.model_validate({**values, **sections})


def loaded(config: Config) -> dpo.Dpo:
    return load_method(config, options=Options(device="cpu"))


def six(model: Path, folder: Path, **sections: Any) -> Config:
    """All six pairs in each step, full fine-tuning; the held-out ones are the same."""
    data = str(write(folder / "six.jsonl", SIX))
    return settings(model, Path(data), lora=False, task={"data": data, "eval_data": data}, **sections)


# ---- the numbers ----


def pairs_of(parts: dpo.Dpo) -> list[Example]:
    return [pair for row in parts.train_rows for pair in row]


def plain_logprobs(model: Any, pair: Example, answer: list[int]) -> Tensor:
    """Log-probability of an answer by the library's own logits."""
    tokens = torch.tensor([pair.prompt + answer])
    log_p = model(tokens).logits[0].log_softmax(-1)
    start = len(pair.prompt)
    return sum((log_p[start + i - 1, token] for i, token in enumerate(answer)), start=torch.tensor(0.0))


def plain_loss(name: str, model: Any, reference: Any, pairs: list[Example]) -> Tensor:
    """The losses as their papers write them, pair by pair."""
    total = torch.tensor(0.0)
    shifted = [Example(a.prompt, b.responses) for a, b in zip(pairs, pairs[1:] + pairs[:1], strict=True)]
    with torch.no_grad():
        drifts = [
            float(plain_logprobs(model, p, answer) - plain_logprobs(reference, p, answer))
            for p in shifted
            for answer in p.responses
        ]
    z = max(0.0, sum(drifts) / len(drifts))
    for pair in pairs:
        w, v = (plain_logprobs(model, pair, answer) for answer in pair.responses)
        with torch.no_grad():
            rw, rl = (plain_logprobs(reference, pair, answer) for answer in pair.responses)
        n, m = map(len, pair.responses)
        h = (w - rw) - (v - rl)
        if name == "sigmoid":
            total = total - torch.log(torch.sigmoid(0.1 * h))
        elif name == "sigmoid, smoothed":
            total = total - 0.9 * torch.log(torch.sigmoid(0.1 * h)) - 0.1 * torch.log(torch.sigmoid(-0.1 * h))
        elif name == "ipo":
            total = total + ((w - rw) / n - (v - rl) / m - 1 / (2 * 0.5)) ** 2
        elif name == "ipo_sum":
            total = total + (h - 1 / (2 * 0.25)) ** 2
        elif name == "kto":
            gain, loss = torch.sigmoid(0.1 * (w - rw - z)), torch.sigmoid(0.1 * (z - (v - rl)))
            total = total + (1 - gain) / 2 + (1 - loss) / 2
        elif name == "orpo":
            p, q = torch.exp(w / n), torch.exp(v / m)
            ratio = (p / (1 - p)) / (q / (1 - q))
            total = total - w / n - 0.1 * torch.log(torch.sigmoid(torch.log(ratio)))
        else:
            total = total - torch.log(torch.sigmoid(2.0 * w / n - 2.0 * v / m - 1.0))
    return total / len(pairs)


AWAY = 6  # a seed that makes answers behind others' prompts likelier, so that KTO's reference point is not 0


def apart(config: Config, model: Path) -> tuple[dpo.Dpo, Any, Any]:
    """The parts, a plain policy and a plain reference of the same weights, all moved from where training starts."""
    parts = loaded(config)
    plain, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    stir(parts.policy.parameters["policy"], seed=AWAY)
    stir(dict(plain.named_parameters()), seed=AWAY)
    return parts, plain, reference


def gradients(parts: dpo.Dpo, *, tokens: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradient of a step on all pairs, in micro-batches of so many tokens."""
    run: Any = SimpleNamespace(timed=nullcontext)
    one_pass, _ = parts.batch([*range(len(parts.train_rows))], run)
    parts.policy.micro_batches = MicroBatches(torch.device("cpu"), tokens)
    updater = Updater(parts.policy, role_optimizers(parts.config.optim, parts.policy.parameters), max_grad_norm=1e9)
    metrics = updater._accumulate([one_pass])
    found = {name: p.grad.clone() for name, p in parts.policy.parameters["policy"].items() if p.grad is not None}
    updater._zero_grad()
    return metrics, found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.wide
def test_losses_and_gradients_are_those_of_a_plain_loop(name: str, model: Path, tmp_path: Path) -> None:
    """The library's own logits, one answer at a time, and the formula of the paper; away from the start."""
    parts, plain, reference = apart(six(model, tmp_path, dpo=LOSSES[name]), model)
    assert name != "kto" or dpo.reference_point(parts, pairs_of(parts)) > 0.1
    metrics, ours = gradients(parts, tokens=10_000)
    loss = plain_loss(name, plain, reference, pairs_of(parts))
    loss.backward()
    assert metrics["preference/loss"] == pytest.approx(loss.item(), rel=1e-5)
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert ours.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for parameter, grad in wanted.items():
        torch.testing.assert_close(ours[parameter], grad, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["kto", "simpo"])
def test_micro_batches_change_neither_metrics_nor_gradient(name: str, packs: bool, model: Path, tmp_path: Path) -> None:
    parts, _, _ = apart(six(model, tmp_path, dpo=LOSSES[name]), model)
    parts.policy.packs = packs
    (metrics, ours), (same, theirs) = (gradients(parts, tokens=tokens) for tokens in (10_000, 1))
    assert metrics == pytest.approx(same, rel=1e-5, abs=1e-6)
    for parameter in ours:
        scale = float(ours[parameter].abs().max())
        torch.testing.assert_close(theirs[parameter], ours[parameter], rtol=1e-4, atol=1e-5 * scale)


def test_a_prompt_is_read_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answers, and those of another pair with the same prompt, stand behind one copy of it."""
    parts = loaded(six(model, tmp_path))
    read: list[int] = []
    batch_of = Policy.batch_of

    def noted(roles: Policy, *rest: Any, **options: Any) -> Any:
        batch = batch_of(roles, *rest, **options)
        read.append(batch.input_ids.numel())
        return batch

    monkeypatch.setattr(Policy, "batch_of", noted)
    logprobs_of(parts.policy, "policy", pairs_of(parts))
    prompts = {tuple(pair.prompt) for pair in pairs_of(parts)}
    answers = sum(len(answer) - 1 for pair in pairs_of(parts) for answer in pair.responses)
    assert sum(read) == sum(map(len, prompts)) + answers


# ---- the reference ----


@pytest.mark.parametrize(("loss", "lora", "start"), [("sigmoid", True, math.log(2)), ("ipo", False, 1.0)])
def test_the_loss_at_the_start_is_known(
    loss: str, lora: bool, start: float, model: Path, rows: Path, tmp_path: Path
) -> None:
    """log 2 of DPO, for held-out pairs and in the first step of training, with LoRA's dropout off."""
    config = settings(model, rows, lora=lora, dpo=LOSSES[loss], run={"num_steps": 1})
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    before, first = running.metrics(run)
    assert before["eval/loss"] == pytest.approx(start, rel=1e-5, abs=1e-5)
    assert first["preference/loss"] == pytest.approx(start, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("lora", [True, False])
def test_a_reference_that_is_another_model_stops_the_run(
    lora: bool, model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(model, rows, lora=lora)
    parts = loaded(config)
    assert parts.check()
    stir(parts.policy.parameters["policy"])
    monkeypatch.setattr(dpo, "Dpo", lambda *_: parts)
    with pytest.raises(ValueError, match="policy and reference differ"):
        running.train(config, tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("dtype", "allowed"), [("bfloat16", True), ("float32", False)])
def test_policy_and_reference_may_differ_at_the_start_by_what_the_precision_rounds(
    dtype: str, allowed: bool, model: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By 0.01 nats a token, as in GRPO and PPO."""
    config = settings(model, rows)
    config.model.dtype = dtype  # pyright: ignore[reportAttributeAccessIssue]
    parts, logprobs = loaded(config), Policy.logprobs

    def rounded(self: Policy, role: Any, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        found, entropy = logprobs(self, role, *args, **options)
        return found - 0.01 * (role == "policy") * (found != 0), entropy

    monkeypatch.setattr(Policy, "logprobs", rounded)
    if allowed:
        assert parts.check()
    else:
        with pytest.raises(ValueError, match="policy and reference differ"):
            parts.check()


def start_adapter(model: Path, rows: Path, folder: Path) -> Path:
    """An adapter that one step has made."""
    _, run, _ = running.train(settings(model, rows, run={"num_steps": 1}), folder, name="before")
    return run.checkpoints / "step-000001"


def test_a_start_adapter_is_the_reference(model: Path, rows: Path, tmp_path: Path) -> None:
    """And not the base: the loss is log 2 with it, and another one with the adapters off."""
    config = settings(model, rows)
    config.model.adapter = str(start_adapter(model, rows, tmp_path))
    parts = loaded(config)
    pairs = pairs_of(parts)[:8]
    policy, reference = logprobs_of(parts.policy, "policy", pairs), logprobs_of(parts.policy, "reference", pairs)
    assert torch.equal(policy, reference)
    with torch.no_grad(), parts.policy.acting("base"):
        base = pair_logprobs(parts.policy, "policy", parts.policy.batch_of(pairs))
    assert float((base - policy).abs().max()) > 1e-2
    config.run.num_steps = 3
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    assert running.metrics(run)[1]["preference/loss"] == pytest.approx(math.log(2), abs=1e-5)
    before, after = (load_file(run.checkpoints / s / "reference/adapter_model.safetensors") for s in STEPS_0_AND_3)
    assert all(torch.equal(before[key], after[key]) for key in before)


STEPS_0_AND_3 = ("step-000000", "step-000003")


def test_losses_without_a_reference_hold_none(model: Path, rows: Path, tmp_path: Path) -> None:
    config = settings(model, rows, dpo={"loss": "orpo"}, run={"num_steps": 1})
    config.model.adapter = str(start_adapter(model, rows, tmp_path))
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    assert not loaded(config).policy.has_reference
    assert not list(run.path.rglob("*reference*"))
    assert "time/reference" not in running.metrics(run)[1]


def test_the_reference_reads_a_row_at_its_first_use_and_never_again(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """94 pairs by 40 and ten held out: what steps and evaluations ask for, each once, over two epochs and a resume."""
    asked: list[tuple[str, int]] = []
    plain = dpo.logprobs_of

    def noted(parts: Any, role: Any, pairs: list[Example]) -> Tensor:
        asked.append((role, len(pairs)))
        return plain(parts, role, pairs)

    config = settings(model, rows, dpo={"batch_size": 40}, run={"num_steps": 5, "eval_every": 1, "save_every": 1})
    monkeypatch.setattr(dpo, "logprobs_of", noted)
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    assert [count for role, count in asked if role == "reference"] == [10, 40, 40, 14]  # 14 that are left of 94
    for step, known in enumerate([0, 40, 80, 94, 94, 94]):
        path = run.checkpoints / f"step-{step:06d}" / dpo.REFERENCE_LOGPROBS
        if path.exists():  # three are kept
            kept = load_file(path)
            assert (int(kept["training"][:, 2].sum()), int(kept["held-out"][:, 2].sum())) == (known, 10)
    asked.clear()
    longer = run.read_config(["run.num_steps=7"])
    assert running.go_on(run, config=longer, allow_config_change=True) == 0
    assert not [count for role, count in asked if role == "reference"]


@pytest.mark.parametrize("what", ["rows", "model.dtype"])
@pytest.mark.wide
def test_what_is_known_of_a_reference_is_let_go_when_rows_or_models_change(
    what: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    """The numbers of a row are found by its place, where another one stands now."""
    data = tmp_path / "rows.jsonl"
    data.write_text(rows.read_text())
    config = settings(model, data, run={"num_steps": 3, "save_every": 1})
    code, run, _ = running.train(config, tmp_path)
    assert code == 0
    overrides = ["run.num_steps=4"]
    if what == "rows":
        data.write_text("".join(reversed(rows.read_text().splitlines(keepends=True))))
    else:
        overrides.append("model.dtype=bfloat16")
    changed = run.read_config(overrides)
    assert running.go_on(run, config=changed, allow_config_change=True) == 0
    kept = load_file(run.checkpoints / "step-000004" / dpo.REFERENCE_LOGPROBS)
    parts = loaded(changed)
    known = kept["training"][:, 2].bool()
    assert 0 < int(known.sum()) <= 32
    wanted = logprobs_of(parts.policy, "reference", pairs_of(parts))
    torch.testing.assert_close(
        kept["training"][known, :2], wanted[known], rtol=1e-2 if what != "rows" else 1e-4, atol=0.1
    )


# ---- runs ----


@pytest.mark.parametrize(("loss", "lora"), [("sigmoid", True), ("kto", False)])
@pytest.mark.wide
def test_pairs_are_learnt(loss: str, lora: bool, model: Path, rows: Path, tmp_path: Path) -> None:
    code, run, _ = running.train(settings(model, rows, lora=lora, dpo=LOSSES[loss]), tmp_path)
    assert code == 0
    held_out = [line for line in running.metrics(run) if "eval/loss" in line]
    assert held_out[-1]["eval/accuracy"] > 0.9
    assert held_out[-1]["eval/margin"] > held_out[0]["eval/margin"]
    assert held_out[-1]["eval/loss"] < 0.9 * held_out[0]["eval/loss"]
    line = running.metrics(run)[-1]
    assert line["rewards/margin"] == pytest.approx(line["rewards/chosen"] - line["rewards/rejected"], abs=1e-4)
    assert line["eval/margin"] == pytest.approx(line["eval/rewards/chosen"] - line["eval/rewards/rejected"], abs=1e-4)
    assert ("preference/kl" in line) == (loss == "kto")


@pytest.mark.parametrize("loss", ["kto", "ipo"])
@pytest.mark.slow
def test_stopped_anywhere_and_resumed_is_bit_equal(loss: str, model: Path, rows: Path, tmp_path: Path) -> None:
    """Across an epoch of the data: KTO in micro-batches with LoRA's dropout behind an adapter; IPO, full."""
    run = {"num_steps": 5, "eval_every": 2, "save_every": 2, "micro_batch_tokens": 100}
    config = settings(model, rows, run=run, dropout=0.1, lora=loss == "kto", dpo={"loss": loss, "batch_size": 40})
    if loss == "kto":
        config.model.adapter = str(start_adapter(model, rows, tmp_path))
    flag = running.SignalAt(None)
    with flag:
        loaded(config).check()
    begun = flag.looks  # a stop before this is one before there is a run
    code, whole, looks = running.train(config, tmp_path, name="whole")
    assert code == 0
    for share in (0.03, 0.4, 0.75):
        stop_at = begun + max(1, int((looks - begun) * share))
        code, stopped, _ = running.train(config, tmp_path, name=f"at-{share}", stop_at=stop_at)
        assert code == 75
        assert running.go_on(stopped) == 0
        assert running.lasting(whole) == running.lasting(stopped)
        ours, theirs = running.weights(whole, 5), running.weights(stopped, 5)
        assert ours.keys() == theirs.keys()
        assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


# ---- rows ----


def refused(model: Path, folder: Path, lines: list[dict[str, Any]], **sections: Any) -> str:
    path = write(folder / "rows.jsonl", lines)
    task = {"data": str(path), "eval_data": str(path), **sections.pop("task", {})}
    with pytest.raises(ValueError, match=r"\S") as caught:
        loaded(settings(model, path, task=task, **sections))
    assert type(caught.value) is ValueError
    return str(caught.value)


EMPTY: list[Any] = ["", " \n", None, []]


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_pairs_without_an_answer_are_left_out_by_one_rule(method: str, model: Path, tmp_path: Path) -> None:
    """The rest is what it is without them."""
    bad = [{"prompt": "x", "chosen": "a", "rejected": empty} for empty in EMPTY]
    bad += [{"prompt": "x", "chosen": empty, "rejected": "a"} for empty in EMPTY]
    bad += [{"chosen": "a b", "rejected": "a b"}, {"chosen": "", "rejected": "a"}]
    found = []
    for name, lines in (("good", SIX), ("mixed", [bad[0], *SIX[:3], *bad[1:], *SIX[3:]]), ("bad", bad)):
        data = str(write(tmp_path / f"{name}.jsonl", lines))
        values = {"method": method, "model": {"path": str(model)}, "task": {"data": data, "eval_data": data}}
        if name == "bad":
            with pytest.raises(ValueError, match=r"10 of 10 rows \(9 with an empty answer, 1 with two equal answers\)"):
                load_method(Config.model_validate(values), options=Options(device="cpu"))
            continue
        parts = load_method(Config.model_validate(values), options=Options(device="cpu"))
        found.append((parts.train_rows, parts.held_out))
        assert len([note for note in parts.notes if "left out" in note]) == (0 if name == "good" else 2)
    assert found[0] == found[1]


CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def chat_model(folder: Path, template: str) -> Path:
    tiny_model(folder, "llama")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_answers_of_several_messages_count_the_turns_of_the_assistant(tmp_path: Path) -> None:
    """Each turn's log-probability behind the messages before it, one at a time, by the library's own logits."""
    model = chat_model(tmp_path / "chat", CHAT)
    conversations = [
        ([user("a"), said("b"), user("c"), said("dd")], [user("a"), said("e"), user("c"), said("f")]),
        ([user("a"), said("b"), user("c"), said("d")], [user("a"), said("b"), user("ee"), said("ff")]),
    ]
    lines: list[dict[str, Any]] = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in conversations]
    lines.append({"prompt": [user("a")], "chosen": [said("b"), user("c"), said("dd")], "rejected": [said("g")]})
    conversations.append(([user("a"), said("b"), user("c"), said("dd")], [user("a"), said("g")]))
    data = str(write(tmp_path / "rows.jsonl", lines))
    for packs in (True, False):
        parts = loaded(settings(model, Path(data), lora=False, task={"data": data, "eval_data": data}))
        parts.policy.packs = packs
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        wanted, lengths = [], []
        for pair, starts in zip(conversations, (1, 3, 1), strict=True):
            sides, counts = [], []
            for side in pair:
                turns = [
                    render_answer(
                        parts.policy.tokenizer, side[:at], [side[at]], chat="auto", system_prompt=None, variables={}
                    )
                    for at in range(starts, len(side), 2)
                ]
                sides.append(sum(plain_logprobs(plain, Example(p, ()), t).item() for p, t in turns))
                counts.append(sum(len(t) for _, t in turns))
            wanted.append(sides)
            lengths.append(counts)
        found = logprobs_of(parts.policy, "policy", pairs_of(parts))
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-4)
        assert [pair.learnt for pair in pairs_of(parts)] == lengths


def test_an_answer_whose_earlier_turns_are_written_otherwise_later_is_refused(tmp_path: Path) -> None:
    """The first turn is another text once a second one follows."""
    marks = CHAT.replace("{{ m.content }}", "{{ '!' if m.role == 'assistant' and not loop.last else m.content }}")
    model = chat_model(tmp_path / "chat", marks)
    line = {"prompt": [user("a")], "chosen": [said("b"), user("c"), said("d")], "rejected": [said("e")]}
    assert "writes a turn of the answer differently" in refused(model, tmp_path, [line])


def test_a_limit_that_leaves_no_room_for_an_answer_leaves_the_pair_out(model: Path, tmp_path: Path) -> None:
    """Whole pairs, and never a pair without a learnt token, whose mean would be 0 / 0."""
    data = str(write(tmp_path / "rows.jsonl", SIX))  # "a longer prompt:" alone has 17 tokens
    task = {"data": data, "eval_data": data, "on_overlong_prompt": "drop"}
    parts = loaded(settings(model, Path(data), task=task, dpo={"loss": "simpo", "max_tokens": 17}))
    assert len(parts.train_rows) == 4
    metrics, grads = gradients(parts, tokens=1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(bool(grad.isfinite().all()) for grad in grads.values())
    assert "6 of 6 examples" in refused(
        model, tmp_path, SIX, task={"on_overlong_prompt": "drop"}, dpo={"max_tokens": 3}
    )


def test_pairs_that_are_too_long_are_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    long = {"prompt": "a longer", "chosen": "x" * POSITIONS, "rejected": "y"}
    assert f"model's {POSITIONS} positions" in refused(model, tmp_path, [*SIX, long])
    assert "dpo.max_tokens=20" in refused(model, tmp_path, SIX, dpo={"max_tokens": 20})
    data = str(write(tmp_path / "rows.jsonl", [*SIX, long]))
    task = {"data": data, "eval_data": data, "on_overlong_prompt": "drop"}
    assert len(loaded(settings(model, Path(data), task=task, dpo={"max_tokens": 30})).train_rows) == 5


def test_rows_that_are_no_pairs_are_refused(model: Path, tmp_path: Path) -> None:
    """Rows with one labelled answer too, which KTO could learn from in principle."""
    labelled = {"prompt": "a", "completion": "b", "label": True}
    assert "no column" in refused(model, tmp_path, [labelled] * 3, dpo={"loss": "kto"})
    assert "'rejected'" in refused(model, tmp_path, [*SIX, {"prompt": "a", "chosen": "b"}])
    chat = {"chosen": [user("?"), said("y")], "rejected": [user("?"), said("n")]}
    assert "no chat template" in refused(model, tmp_path, [chat])
