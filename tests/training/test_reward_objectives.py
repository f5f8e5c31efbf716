"""Reward models from pairs with a margin and labels: they learn, resume exactly, and are read by PPO as they
learnt; what their rows cannot teach is said before the first step.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import processors
from transformers import PreTrainedModel

from tests import running
from tests.tiny_models import TinyModels, tiny_model, tiny_tokenizer
from tinyrl.config.schema import Config
from tinyrl.config.sections import RewardConfig
from tinyrl.evaluation.statistics import roc_auc
from tinyrl.models import reward_model as reward_models
from tinyrl.models.policy import Policy
from tinyrl.models.states import backbone_of
from tinyrl.rollout.load import load_collector, load_method
from tinyrl.runs.launched import Options
from tinyrl.tasks.prompts import prepare_prompts, token_ids
from tinyrl.training.rows import Example

Row = dict[str, Any]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = [f"{a}{b}:" for a in LETTERS for b in LETTERS[:3]]


def rows_of(kind: str) -> list[Row]:
    """Rows in which y is good and n is bad."""
    if kind == "margin":
        return [{"prompt": p, "chosen": "yy" + p, "rejected": "nn" + p, "margin": i % 3} for i, p in enumerate(PROMPTS)]
    said = (("yy", True), ("nn", False))
    return [{"prompt": p, "completion": text + p, "label": good} for p in PROMPTS for text, good in said]


def flat(split: list[list[Example]]) -> list[Example]:
    return [one for row in split for one in row]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(model: Path, data: Path, *, lora: bool = True, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "method": "reward",
        "model": {"path": str(model)},
        "lora": {"enabled": lora},
        "task": {"data": str(data)},
        "optim": {"learning_rate": 1e-2 if lora else 3e-3},
        "run": {"num_steps": 30, "eval_every": 10, "save_every": 10, "threads": 1},
    }
    for name, fields in sections.items():
        values[name] = {**values.get(name, {}), **fields}
    return Config.model_validate(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama", pad_is_eos=True)


@pytest.mark.parametrize(("kind", "lora"), [("margin", True), ("labels", False)])
@pytest.mark.wide
def test_stopped_and_resumed_is_bit_equal(kind: str, lora: bool, model: Path, tmp_path: Path) -> None:
    """With micro-batches smaller than a step."""
    config = settings(model, write(tmp_path / "rows.jsonl", rows_of(kind)), lora=lora, run={"micro_batch_tokens": 100})
    config.run.num_steps, config.run.eval_every, config.run.save_every = 4, 2, 3
    _, whole, looks = running.train(config, tmp_path, name="whole")
    for number, share in enumerate((0.3, 0.7)):
        code, stopped, _ = running.train(config, tmp_path, name=f"stopped-{number}", stop_at=int(looks * share))
        assert code == 75
        assert running.go_on(stopped) == 0
        assert running.lasting(whole) == running.lasting(stopped)
        ours, theirs = running.weights(whole, 4), running.weights(stopped, 4)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_held_out_prompt_keeps_all_its_answers(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows_of("labels"))
    parts = load_method(settings(model, data), options=Options(device="cpu"))
    assert sorted(one.value for one in flat(parts.held_out)) == [0.0] * 7 + [1.0] * 7  # of 78 prompts
    assert len(parts.train_rows) == 2 * 71
    text = {one.value: parts.policy.tokenizer.decode(one.texts[0]) for one in flat(parts.train_rows[:40])}
    assert ("yy" in text[1.0], "nn" in text[0.0]) == (True, True)
    pairs = write(tmp_path / "pairs.jsonl", rows_of("margin") * 2)
    parts = load_method(settings(model, pairs), options=Options(device="cpu"))
    assert len(parts.held_out) == 7


def test_rows_in_the_order_of_their_labels_are_shuffled(model: Path, tmp_path: Path) -> None:
    """All bad ones first, as IMDB's reviews stand: what is evaluated, centred on and kept by max_samples is mixed."""
    rows = sorted(rows_of("labels"), key=lambda row: row["label"])
    task = {"data": str(write(tmp_path / "rows.jsonl", rows)), "max_samples": 60}
    first, again = (load_method(settings(model, tmp_path, task=task), options=Options(device="cpu")) for _ in range(2))
    assert (first.train_rows, first.held_out, first.notes) == (again.train_rows, again.held_out, again.notes)
    assert len(first.train_rows) == 60
    for part in (first.train_rows[:20], first.train_rows, first.held_out[:20]):
        assert 0.2 < sum(one.value for one in flat(part)) / len(part) < 0.8


def test_a_checkpoint_of_every_weight_copies_none(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The classification model that is written consists of the trained tensors; nothing is drawn for it."""
    data = write(tmp_path / "rows.jsonl", rows_of("labels"))
    parts = load_method(settings(tiny("gpt2"), data, lora=False), options=Options(device="cpu"))
    written: list[Any] = []
    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda *a, **k: (written.append(a[0]), save(*a, **k)))
    before = torch.get_rng_state()
    parts.save(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    own = {p.data_ptr() for p in parts.policy.parameters["policy"].values()}
    assert {p.data_ptr() for p in written[0].parameters()} <= own
    assert all(p.requires_grad for p in parts.policy.parameters["policy"].values())
    read = reward_models.load_classifier(str(tmp_path), dtype=torch.float32)
    states = backbone_of(parts.policy.causal).state_dict()
    assert all(torch.equal(tensor, states[name]) for name, tensor in backbone_of(read).state_dict().items())
    parts.close()


# ---- what is learnt is what PPO reads ----

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template that writes a BOS, which its tokenizer adds to plain text too."""
    folder = tiny_model(tmp_path_factory.mktemp("chat"), "llama")
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = "<pad>", CHAT
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.pad_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


# A row about prompt p with the answers y and n, and the (prompt, completion) of a policy that it judges.
Form = Callable[[str], tuple[Row, list[tuple[Any, str]]]]
FORMS: dict[str, Form] = {
    "apart before the last turn": lambda p: (
        {
            "prompt": [user(p)],
            "chosen": [assistant("one"), user("go on"), assistant("y" + p)],
            "rejected": [assistant("two"), user("go on"), assistant("n" + p)],
        },
        [
            ([user(p), assistant("one"), user("go on")], "y" + p),
            ([user(p), assistant("two"), user("go on")], "n" + p),
        ],
    ),
    "texts with the prompt inside": lambda p: (
        {"chosen": f"{p} yes{p}", "rejected": f"{p} no{p}"},
        [(p, f" yes{p}"), (p, f" no{p}")],
    ),
    "labelled messages": lambda p: (
        {"messages": [user(p), assistant("y" + p)], "label": p < "n"},
        [([user(p)], "y" + p)],
    ),
}


@pytest.mark.parametrize(
    ("form", "lora", "task"),
    [
        ("apart before the last turn", True, {}),
        ("texts with the prompt inside", True, {"chat": False, "system_prompt": "Answer like a crowd."}),
        ("labelled messages", False, {"system_prompt": "Answer like a crowd."}),
    ],
)
@pytest.mark.wide
def test_what_is_learnt_is_what_ppo_reads(
    lora: bool, form: str, task: dict[str, Any], chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by a PPO run without the system prompt: the same tokens, so held-out numbers that scoring gives again."""
    made = [FORMS[form](p) for p in PROMPTS]
    data = write(tmp_path / "rows.jsonl", [row for row, _ in made])
    config = settings(chat_model, data, lora=lora, run={"num_steps": 2, "eval_every": 0}, task=task)
    code, run, _ = running.train(config, tmp_path, name="reward")
    assert code == 0
    trained = load_method(config, options=Options(device="cpu"))
    read, scored = scorer_of(chat_model, data, run.checkpoints / "step-000002", tmp_path, monkeypatch)

    judged = [one for _, each in made for one in each]
    scores = scored(judged)
    learnt = [text for one in flat(trained.train_rows + trained.held_out) for text in one.texts]
    assert sorted(read) == sorted(learnt)

    by_tokens = {
        tuple(tokens): score for tokens, score in zip(read_in_order(scored, judged, read), scores, strict=True)
    }
    held_out = [[by_tokens[tuple(text)] for text in one.texts] for one in flat(trained.held_out)]
    line = running.metrics(run)[-1]
    if len(held_out[0]) == 2:
        won = [(chosen > rejected) + (chosen == rejected) / 2 for chosen, rejected in held_out]
        assert sum(won) / len(won) == pytest.approx(line["eval/accuracy"])
        assert sum(c - r for c, r in held_out) / len(held_out) == pytest.approx(line["eval/margin"], abs=1e-5)
    else:
        by_label = [
            [s for (s,), one in zip(held_out, flat(trained.held_out), strict=True) if one.value == y] for y in (1, 0)
        ]
        assert roc_auc(*by_label) == pytest.approx(line["eval/auc"])
    both = [by_tokens[tuple(text)] for one in flat(trained.train_rows) for text in one.texts]
    assert sum(both) / len(both) == pytest.approx(0, abs=1e-5)


def scorer_of(model: Path, data: Path, reward: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """(tokens read since the last call, the scores that a PPO run with this reward model gives to completions)."""
    prompts = write(folder / "prompts.jsonl", [{"prompt": p} for p in PROMPTS])
    ppo = running.config("ppo", model, task={"name": "rows", "data": str(prompts), "max_samples": None})
    ppo.reward = RewardConfig(model=str(reward))
    parts = load_collector(ppo, options=Options(device="cpu"))
    read: list[list[int]] = []
    batch_of, make = Policy.batch, reward_models.make_batch

    def noted(prompts: list[list[int]], responses: list[list[int]], **options: Any):
        read.extend(p + r for p, r in zip(prompts, responses, strict=True))
        return make(prompts, responses, **options)

    def noted_batch(roles: Policy, prompts: list[list[int]], responses: list[list[int]], *rest: Any, **options: Any):
        read.extend(p + r for p, r in zip(prompts, responses, strict=True))
        return batch_of(roles, prompts, responses, *rest, **options)

    monkeypatch.setattr(reward_models, "make_batch", noted)
    monkeypatch.setattr(Policy, "batch", noted_batch)

    def scored(pairs: list[tuple[Any, str]]) -> list[float]:
        read.clear()
        prompts = prepare_prompts(
            parts.task, [{"prompt": prompt} for prompt, _ in pairs], tokenizer=parts.policy.tokenizer, chat="auto",
            system_prompt=None, variables={}, max_prompt_tokens=500, on_overlong_prompt="error",
        )  # fmt: skip
        eos = parts.policy.tokenizer.eos_token_id
        completions = [[*token_ids(parts.policy.tokenizer, text), eos] for _, text in pairs]
        return parts.scorer(prompts, completions).scores[:, 0].tolist()  # pyright: ignore[reportArgumentType]

    return read, scored


def read_in_order(
    scored: Callable[[list[tuple[Any, str]]], list[float]], judged: list[tuple[Any, str]], read: list[list[int]]
) -> list[list[int]]:
    """The tokens of each completion: micro-batches are sorted by length, so they are scored one by one."""
    tokens = []
    for one in judged:
        scored([one])
        tokens += read
    return tokens


# ---- what rows cannot teach ----


def pairs(*more: Row, count: int = 20) -> list[Row]:
    return [*({"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(count)), *more]


def labels(values: list[Any]) -> list[Row]:
    return [{"prompt": f"p{i}", "completion": "a", "label": value} for i, value in enumerate(values)]


BAD: dict[str, tuple[list[Row], str]] = {
    "one class": (labels([1] * 20), "labels? .?1"),
    "three classes": (labels([0, 1, 2] * 7), "3 different labels"),
    "labels that are text": (labels(["good", "bad"] * 10), "'label' must be true, false or a number"),
    "equal and empty sides": (
        [{"prompt": f"p{i}", "chosen": "a", "rejected": "a" if i % 2 else " "} for i in range(20)],
        "20 of 20 rows",
    ),
    "pairs and labels": (pairs({"prompt": "q", "completion": "a", "label": 1}), "no column 'chosen'"),
    "a call in place of an answer": (
        [
            {"prompt": [user("p")], "chosen": [{**assistant("a"), "tool_calls": [{}]}], "rejected": [assistant("b")]}
            for _ in range(20)
        ],
        "tool_calls",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused_before_training(name: str, chat_model: Path, tmp_path: Path) -> None:
    rows, sentence = BAD[name]
    config = settings(chat_model, write(tmp_path / "rows.jsonl", rows))
    with pytest.raises(ValueError, match=sentence):
        running.train(config, tmp_path, name="refused")
    assert not (tmp_path / "refused").exists()


def test_texts_without_a_prompt_need_a_model_without_a_template(chat_model: Path, tmp_path: Path) -> None:
    rows = [{"text": ("yy" if i % 2 else "nn") + str(i), "label": i % 2} for i in range(40)]
    data = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=r"texts without a prompt, .*task\.chat=false"):
        running.train(settings(chat_model, data), tmp_path, name="refused")
    for lora in (True, False):
        config = settings(chat_model, data, lora=lora, task={"chat": False})
        parts = load_method(config, options=Options(device="cpu"))
        bos, eos = parts.policy.tokenizer.bos_token_id, parts.policy.tokenizer.eos_token_id
        inside = token_ids(parts.policy.tokenizer, rows[0]["text"])
        texts = [text for one in flat(parts.train_rows + parts.held_out) for text in one.texts]
        assert [bos, *inside, *([eos] if lora else [])] in texts


def test_pairs_that_are_equal_once_they_are_cut_are_left_out(model: Path, tmp_path: Path) -> None:
    equal = {"prompt": "p", "chosen": "a" + "x" * 600, "rejected": "b" + "x" * 600}
    data = write(tmp_path / "rows.jsonl", pairs(equal))
    parts = load_method(settings(model, data, task={"eval_data": str(data)}), options=Options(device="cpu"))
    assert (len(parts.train_rows), len(parts.held_out)) == (20, 20)
    assert all(one.texts[0] != one.texts[1] for one in flat(parts.train_rows))
    assert len([note for note in parts.notes if "1 of 21 rows" in note]) == 2
    only = write(tmp_path / "only.jsonl", [equal])
    with pytest.raises(ValueError, match="1 of 1 rows"):
        load_method(settings(model, only, task={"eval_data": str(data)}), options=Options(device="cpu"))


@pytest.mark.parametrize(("kind", "moves"), [("margin", False), ("labels", True)])
def test_the_heads_bias_learns_only_where_it_has_a_gradient(kind: str, moves: bool, tmp_path: Path) -> None:
    """Of a pair only the difference of two scores counts, and rounding would move it."""
    model = tiny_model(tmp_path / "model", "llama")
    short = {"num_steps": 3, "save_every": 1, "eval_prompts": 0}
    chosen = settings(model, write(tmp_path / "rows.jsonl", rows_of(kind)), run=short)
    code, run, _ = running.train(chosen, tmp_path)
    assert code == 0
    bias = load_file(run.checkpoints / "step-000003" / "score_bias.safetensors")["bias"]
    assert (bias.abs().max().item() > 0) == moves
