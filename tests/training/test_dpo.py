"""Preference optimization: losses by hand, the reference is the start, pairs are learnt."""

import math
import shutil
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
from tests.tiny_models import POSITIONS
from tests.training.rows import Row, assistant, chat_model, loaded, on_all, row_config, talk, trained, write_rows
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.runs.resolve import changed_config, config_of
from tinyrl.tasks.answers import render_answer
from tinyrl.training import dpo, load
from tinyrl.training.dpo import logprobs_of
from tinyrl.training.rows import Example, spans
from tinyrl.training.step import Updater, role_optimizers

SIX = [
    {"prompt": "one:", "chosen": " yes", "rejected": " no"},
    {"prompt": "two:", "chosen": " yes yes", "rejected": " n"},
    {"prompt": "a longer prompt:", "chosen": " y", "rejected": " not at all"},
    {"prompt": "four", "chosen": " 4", "rejected": " five"},
    {"prompt": "two:", "chosen": " yes!", "rejected": " yes."},
    {"prompt": "6", "chosen": " the same beginning, a", "rejected": " the same beginning, b and more"},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """104 prompts; the chosen answer says yes and the rejected one no, at other lengths."""
    names = [f"{a}{b}" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcd"]
    lines = ({"prompt": f"{n}:", "chosen": "yes yes" + n[0], "rejected": "no no no" + n[1]} for n in names)
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", lines)


# ---- the numbers ----


def pairs_of(method: dpo.Dpo) -> list[Example]:
    return [pair for row in method.train_rows for pair in row]


def plain_logprobs(model: Any, pair: Example, answer: list[int]) -> Tensor:
    """Log-probability of an answer by the library's own logits."""
    tokens = torch.tensor([pair.prompt + answer])
    log_p = model(tokens).logits[0].log_softmax(-1)
    start = len(pair.prompt)
    return sum((log_p[start + i - 1, token] for i, token in enumerate(answer)), start=torch.tensor(0.0))


def gradients(method: dpo.Dpo, *, tokens: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradient of a step on all pairs, in micro-batches of so many tokens."""
    run: Any = SimpleNamespace(timed=nullcontext)
    one_pass, _ = method.make_pass(pairs_of(method), [*range(len(method.train_rows))], run)
    method.policy.micro_batches = MicroBatches(torch.device("cpu"), tokens)
    updater = Updater(method.policy, role_optimizers(method.config.optim, method.policy.parameters), max_grad_norm=1e9)
    metrics = updater._accumulate([one_pass])
    found = {name: p.grad.clone() for name, p in method.policy.parameters["policy"].items() if p.grad is not None}
    updater.zero_grad()
    return metrics, found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"label_smoothing": 0.1}, 0.618139),  # -0.9 log sigmoid(0.2) - 0.1 log sigmoid(-0.2)
        ({"loss": "ipo", "beta": 0.5}, 0.0625),  # (1 / 2 + 1 / 4 - 1)^2
        ({"loss": "ipo_sum", "beta": 0.5}, 1.0),  # (1 + 1 - 1)^2
        ({"loss": "kto"}, 0.475036),  # (2 - sigmoid(0.1 (1 - 0.5)) - sigmoid(0.1 (0.5 + 1))) / 2
        ({"loss": "orpo"}, 1.069315),  # 1 + 0.1 log 2
        ({"loss": "simpo"}, 1.313262),  # -log sigmoid(-1)
    ],
)
def test_the_loss_of_a_pair_by_hand(settings: dict[str, Any], expected: float) -> None:
    """Answers of two and four tokens, each of -1 nat; -3 both under the reference."""
    config, pair = config_of({"method": "dpo", "dpo": settings}).dpo, Example([1], ([2, 3], [4, 5, 6, 7]))
    reference = torch.tensor([[-3.0, -3.0]]) if config.loss not in ("orpo", "simpo") else None
    loss, _ = dpo.preference_loss(config, torch.tensor([[-2.0, -4.0]]), reference, [pair], kl=0.5)
    assert loss.item() == pytest.approx(expected, abs=1e-5)


def test_the_reference_point_of_kto_is_of_answers_behind_the_next_pairs_prompt(model: Path, tmp_path: Path) -> None:
    """The library's own logits, one answer at a time. A pair that is too long behind that prompt is left out."""
    method = on_all("dpo", model, tmp_path, SIX, dpo={"loss": "kto"})
    plain, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    stir(method.policy.parameters["policy"], seed=6)  # with this seed answers behind others' prompts are likelier
    stir(dict(plain.named_parameters()), seed=6)
    pairs, drifts, lengths = pairs_of(method), list[float](), list[int]()
    for pair, following in zip(pairs, pairs[1:] + pairs[:1], strict=True):
        for answer in following.responses:
            ours, theirs = (plain_logprobs(one, pair, answer).item() for one in (plain, reference))
            drifts.append(ours - theirs)
            lengths.append(len(pair.prompt) + max(map(len, following.responses)))
    found = dpo.reference_point(method, pairs)
    assert found == pytest.approx(sum(drifts) / len(drifts), rel=1e-3)
    assert found > 0.1
    method.config = method.config.with_setting("dpo.max_tokens", max(lengths) - 1)
    short = [drift for drift, length in zip(drifts, lengths, strict=True) if length < max(lengths)]
    assert len(short) == len(drifts) - 2
    assert dpo.reference_point(method, pairs) == pytest.approx(sum(short) / len(short), rel=1e-3)


def test_a_reference_that_is_another_model_stops_the_run(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = row_config("dpo", model, rows)
    method = loaded(config)
    assert method.check()
    stir(method.policy.parameters["policy"])
    monkeypatch.setitem(load.FROM_ROWS, "dpo", lambda *_: method)
    with pytest.raises(ValueError, match="policy and reference differ"):
        running.train(config, tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_start_adapter_is_the_reference(model: Path, rows: Path, tmp_path: Path) -> None:
    """And not the base: the loss is log 2 with it, and another one with the adapters off. ORPO holds none."""
    before = trained(row_config("dpo", model, rows, run={"num_steps": 1}), tmp_path, name="before")
    start: dict[str, Any] = {"model": {"adapter": str(before.checkpoints / "step-000001")}}
    run = trained(row_config("dpo", model, rows, **start, run={"num_steps": 3}), tmp_path)
    assert running.metrics(run)[1]["preference/loss"] == pytest.approx(math.log(2), abs=1e-5)
    folders = (run.checkpoints / step / "reference" for step in ("step-000000", "step-000003"))
    first, last = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert all(torch.equal(first[key], last[key]) for key in first)
    assert any(bool(tensor.any()) for key, tensor in first.items() if "lora_B" in key)
    orpo = row_config("dpo", model, rows, **start, dpo={"loss": "orpo"}, run={"num_steps": 1})
    assert not list(trained(orpo, tmp_path, name="orpo").path.rglob("*reference*"))


def test_the_reference_reads_a_row_at_its_first_use_and_never_again(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are in the checkpoint."""
    counts, compute = list[int](), dpo.logprobs_of
    monkeypatch.setattr(dpo, "logprobs_of", lambda *args: counts.append(len(args[2])) or compute(*args))
    method = loaded(row_config("dpo", model, rows))
    first = method.reference_logprobs("training", range(40))
    method.reference_logprobs("training", [*range(30, 60), 30])
    method.reference_logprobs("held-out", range(10))
    assert counts == [40, 20, 10]
    method.save(tmp_path)
    again = loaded(row_config("dpo", model, rows))
    again.load(tmp_path)
    found = again.reference_logprobs("training", range(40))
    assert torch.equal(found, first)
    assert counts == [40, 20, 10]


def test_reference_logprobs_are_computed_anew_when_the_rows_change(model: Path, rows: Path, tmp_path: Path) -> None:
    """The numbers of a row are found by its place, where another one is now."""
    data = Path(shutil.copy(rows, tmp_path / "rows.jsonl"))
    run = trained(row_config("dpo", model, data, run={"num_steps": 1, "eval_every": 0}), tmp_path)
    data.write_text("".join(reversed(rows.read_text().splitlines(keepends=True))))
    changed = changed_config(run, ["run.num_steps=2"])
    assert running.go_on(run, config=changed, allow_config_change=True) == 0
    reference = load_file(run.checkpoints / "step-000002" / dpo.REFERENCE_LOGPROBS)["training"]
    assert 0 < int(reference[:, 2].sum()) <= 32  # of one step


def test_pairs_are_learnt(model: Path, rows: Path, tmp_path: Path) -> None:
    run = trained(row_config("dpo", model, rows), tmp_path)
    first, *_, last = [line for line in running.metrics(run) if "eval/loss" in line]
    assert last["eval/accuracy"] > 0.9
    assert last["eval/margin"] > first["eval/margin"]
    assert last["eval/loss"] < 0.9 * first["eval/loss"]
    assert last["rewards/margin"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-4)
    assert last["eval/margin"] == pytest.approx(last["eval/rewards/chosen"] - last["eval/rewards/rejected"], abs=1e-4)


def refused(model: Path, folder: Path, lines: list[Row], problem: str, **sections: Any) -> None:
    with pytest.raises(ValueError, match=problem):
        on_all("dpo", model, folder, lines, **sections)


def test_pairs_without_two_answers_are_left_out(model: Path, tmp_path: Path) -> None:
    """The rest is what it is without them."""
    bad: list[Row] = [{"prompt": "x", "chosen": "a", "rejected": empty} for empty in ("", " \n", None, [])]
    bad += [{"prompt": "x", "chosen": " ", "rejected": "a"}, {"chosen": "a b", "rejected": "a b"}]
    good = on_all("dpo", model, tmp_path, SIX)
    mixed = on_all("dpo", model, tmp_path, [bad[0], *SIX[:3], *bad[1:], *SIX[3:]])
    assert (mixed.train_rows, mixed.held_out) == (good.train_rows, good.held_out)
    assert [len([note for note in one.notes if "left out" in note]) for one in (good, mixed)] == [0, 2]
    refused(model, tmp_path, bad, r"6 of 6 rows \(5 with an empty answer, 1 with two equal answers\)")


CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("packs", [True, False])
def test_every_turn_of_the_assistant_behind_the_common_beginning_is_learnt(packs: bool, tmp_path: Path) -> None:
    """The log-probability of each behind the messages before it, by the library's own logits."""
    model = chat_model(tmp_path / "chat", CHAT)
    lines = [
        {"chosen": talk("a", "b", "c", "dd"), "rejected": talk("a", "e", "c", "f")},
        {"prompt": talk("a"), "chosen": talk("a", "b", "c", "dd")[1:], "rejected": [assistant("g")]},
        {"chosen": talk("a", "b", "c", "d", "e", "ff"), "rejected": talk("a", "b", "c", "g", "h", "i")},
        {"chosen": talk("a", "b", "c", "d"), "rejected": talk("a", "b", "c", "e")},
    ]
    learnt = [([1, 3], [1, 3]), ([1, 3], [1]), ([3, 5], [3, 5]), ([3], [3])]  # places of turns
    method = on_all("dpo", model, tmp_path, lines)
    method.policy.packs = packs
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    how: dict[str, Any] = {"chat": "auto", "system_prompt": None, "variables": {}}
    wanted, lengths = [], []
    for line, places in zip(lines, learnt, strict=True):
        sums, counts = [], []
        for name, turns in zip(("chosen", "rejected"), places, strict=True):
            side = line.get("prompt", []) + line[name]
            answers = [render_answer(method.policy.tokenizer, side[:i], [side[i]], **how) for i in turns]
            sums.append(sum(plain_logprobs(plain, Example(prompt, ()), answer).item() for prompt, answer in answers))
            counts.append(sum(len(answer) for _, answer in answers))
        wanted.append(sums)
        lengths.append(counts)
    found = logprobs_of(method.policy, "policy", pairs_of(method))
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-4, atol=1e-4)
    assert [pair.learnt for pair in pairs_of(method)] == lengths


def test_turns_that_the_template_writes_otherwise_later_are_read(tmp_path: Path) -> None:
    """A template that strips the thoughts of earlier turns: the first turn is learnt, and a note says so. The other
    side may have one turn: both are answers to the same prompt.
    """
    strips = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('/')[-1] }}")
    turns = talk("a", "b/c", "d", "e/f")
    lines = [{"chosen": turns, "rejected": talk("a", "g/h")}]
    method = on_all("dpo", chat_model(tmp_path / "chat", strips), tmp_path, lines)
    (pair,) = pairs_of(method)
    assert pair.learnt == [len("b/c") + 1, len("g/h") + 1]
    assert method.policy.tokenizer.decode(pair.prompt) == "user:a<eos>assistant:"
    assert dpo.REWRITTEN in method.notes
    whole = on_all("dpo", chat_model(tmp_path / "whole", CHAT), tmp_path, lines)
    assert dpo.REWRITTEN not in whole.notes


def test_turns_that_only_the_next_marker_ends_are_all_learnt(tmp_path: Path) -> None:
    """As GLM's: the EOS behind a turn is not the template's own, and is learnt where nothing follows."""
    glm = (
        CHAT.replace("{{ eos_token }}", "")
        .replace("{{ m.role }}", "|{{ m.role }}")
        .replace("assistant:{", "|assistant:{")
    )
    lines = [{"chosen": talk("a", "b", "c", "dd"), "rejected": talk("a", "g")}]
    method = on_all("dpo", chat_model(tmp_path / "chat", glm), tmp_path, lines)
    (pair,) = pairs_of(method)
    pieces = [(name, str(method.policy.tokenizer.decode(tokens))) for name, tokens in spans(pair)]
    assert pieces == [
        ("read", "|user:a|assistant:"), ("chosen", "b"), ("read", "|user:c|assistant:"), ("chosen", "dd<eos>"),
        ("rejected", "g<eos>"),
    ]  # fmt: skip
    assert dpo.REWRITTEN not in method.notes


def test_pairs_go_on_with_the_message_that_their_prompt_begins(tmp_path: Path) -> None:
    """Of the answer only what is behind its beginning is learnt; a turn with a weight of 0 is read."""
    begun = [*talk("a"), assistant("I ")]
    unlearnt = [{**assistant("no"), "weight": 0}, *talk("why"), assistant("not")]
    lines = [{"prompt": begun, "chosen": [assistant("do")], "rejected": unlearnt}]
    method = on_all("dpo", chat_model(tmp_path / "chat", CHAT), tmp_path, lines)
    (pair,) = pairs_of(method)
    pieces = [(name, str(method.policy.tokenizer.decode(tokens))) for name, tokens in spans(pair)]
    assert pieces == [
        ("read", "user:a<eos>assistant:I "), ("chosen", "do<eos>"),
        ("read", "no<eos>user:why<eos>assistant:"), ("rejected", "not<eos>"),
    ]  # fmt: skip


def test_a_prompt_that_its_chats_do_not_begin_with_is_refused_by_its_line(model: Path, tmp_path: Path) -> None:
    good = {"prompt": "a", "chosen": talk("a", "b"), "rejected": talk("a", "c")}
    refused(model, tmp_path, [good, {**good, "prompt": "aa"}], r"rows\.jsonl.*2: `prompt` has 'aa'")


def test_pairs_that_are_too_long_are_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    """Whole pairs, and never one without a learnt token, whose mean would be 0 / 0."""
    long = {"prompt": "a longer", "chosen": "x" * POSITIONS, "rejected": "y"}
    refused(model, tmp_path, [*SIX, long], f"context length of {POSITIONS}")
    drop: dict[str, Any] = {"task": {"on_overlong_prompt": "drop"}}
    refused(model, tmp_path, SIX, "6 of 6 examples .* dpo.max_tokens=3", **drop, dpo={"max_tokens": 3})
    # "a longer prompt:" alone has 17 tokens
    method = on_all("dpo", model, tmp_path, [*SIX, long], **drop, dpo={"loss": "simpo", "max_tokens": 17})
    assert len(method.train_rows) == 4
    metrics, grads = gradients(method, tokens=1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(bool(grad.isfinite().all()) for grad in grads.values())
