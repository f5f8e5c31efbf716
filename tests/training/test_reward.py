"""Reward models from pairs and labels: the loss beside TRL's, what PPO reads, checkpoints, rows that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import processors
from transformers import AutoModelForSequenceClassification

from tests import running
from tests.tiny_models import TinyModels, tiny_model, tiny_tokenizer
from tests.training.rows import Row, loaded, on_all, row_config, talk, trained, write_rows
from tinyrl.config.schema import Config
from tinyrl.models import reward_model as reward_models
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.packing import common_length
from tinyrl.models.policy import Policy
from tinyrl.models.reward_model import load_reward_model
from tinyrl.models.tokens import token_ids
from tinyrl.process.launched import Options
from tinyrl.rollout.load import load_collector
from tinyrl.rollout.prepared import prepare
from tinyrl.tasks.prompts import NO_LIMIT, prepare_prompts
from tinyrl.training.rows import Example

CHOSEN = [[10, 11, 12, 13, 14], [20, 21, 22], [10, 11, 40, 41, 42, 43, 44], [30, 31, 50, 51]]
REJECTED = [[10, 11, 60, 61], [20, 70, 71, 72, 73, 74], [10, 11, 40, 45], [30, 31, 50, 52]]


# What RewardTrainer.compute_loss of TRL 1.16 gave for LlamaForSequenceClassification with the weights of the test on
# these tokens (through its collator, padded with 0): the loss, the first four entries of the gradient of `score`, and
# the norm of the gradient of the weights in NORMS_OF.
TRL: dict[str, tuple[float, list[float], list[float]]] = {
    "no margin": (
        2.388162851333618,
        [-0.4723338484764099, -0.14151078462600708, 0.4610222280025482, -0.6770097017288208],
        [17.14557647705078, 9.614706993103027, 4.111164569854736, 1.6339962482452393],
    ),
    "margin": (
        2.830225944519043,
        [-0.4720838665962219, -0.2503355145454407, 0.48979994654655457, -0.7163258194923401],
        [19.205154418945312, 10.355107307434082, 4.701805591583252, 1.754459023475647],
    ),
}
NORMS_OF = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "norm")


PAIRS = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(20)]
PROMPTS = [f"{a}{b}:" for a in "abcdefghijklmnopqrstuvwxyz" for b in "abc"]
# Rows in which y is good and n is bad.
MARGINS = [{"prompt": p, "chosen": "yy" + p, "rejected": "nn" + p, "margin": i % 3} for i, p in enumerate(PROMPTS)]
LABELS = [{"prompt": p, "completion": text + p, "label": text == "yy"} for p in PROMPTS for text in ("yy", "nn")]


def settings(model: Path, folder: Path, rows: list[Row], **sections: Any) -> Config:
    return row_config("reward", model, write_rows(folder / "rows.jsonl", rows), **sections)


def flat(split: list[list[Example]]) -> list[Example]:
    return [one for row in split for one in row]


@pytest.fixture(scope="module")
def model(tiny: TinyModels) -> Path:
    return tiny("llama", pad_is_eos=True)


@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_are_those_of_trl(name: str, tiny: TinyModels, tmp_path: Path) -> None:
    """On the tiny llama of seed 0, the head's weights 32 numbers from -1 to 1."""
    method = loaded(settings(tiny("llama"), tmp_path, PAIRS, lora=False))
    head = method.policy.score_head
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 32).unsqueeze(0))
    margins, examples = [0.0, 0.5, 1.5, 0.25] if name == "margin" else [0.0] * 4, []
    for chosen, rejected, margin in zip(CHOSEN, REJECTED, margins, strict=True):
        at = common_length([chosen, rejected])
        examples.append(Example(chosen[:at], (chosen[at:], rejected[at:]), value=margin))
    with method.policy.acting("policy"):
        loss, _ = method.loss(method.policy.batch_of(examples, last_tokens=True), count=len(examples))
        loss.backward()
    wanted, of_head, norms = TRL[name]
    found = method.policy.parameters["policy"]
    assert loss.item() == pytest.approx(wanted, abs=1e-4)
    gradients = [found[n].grad for n in ("score_head.weight", *(f"model.{name}.weight" for name in NORMS_OF))]
    assert gradients[0] is not None
    assert gradients[0][0, :4].tolist() == pytest.approx(of_head, abs=1e-4)
    assert [float(g.norm()) for g in gradients[1:] if g is not None] == pytest.approx(norms, rel=1e-4)


def test_a_fully_trained_model_is_a_plain_classifier_with_centred_scores(model: Path, tmp_path: Path) -> None:
    run = trained(settings(model, tmp_path, MARGINS, lora=False), tmp_path)
    assert running.metrics(run)[-1]["eval/accuracy"] > 0.9
    folder = run.checkpoints / "step-000030"
    reward = load_reward_model(str(folder), dtype=torch.float32, label=None, device=torch.device("cpu"))
    texts = [row["prompt"] + row[side] for side in ("chosen", "rejected") for row in MARGINS]
    tokens = [reward.tokenizer.encode(text) for text in texts]
    scores = reward.reward_scores(tokens, micro_batches=MicroBatches(torch.device("cpu"), 512))
    chosen, rejected = scores[: len(MARGINS)], scores[len(MARGINS) :]
    assert sum(a > b for a, b in zip(chosen, rejected, strict=True)) > 0.9 * len(MARGINS)
    assert abs(sum(scores)) / len(scores) < 0.2  # training pairs and a few held-out ones
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1


def test_rows_in_the_order_of_their_labels_are_mixed(model: Path, tmp_path: Path) -> None:
    """Bad answers first, as IMDB's are; max_samples takes of the mixed ones."""
    ordered = sorted(LABELS, key=lambda row: row["label"])
    method = loaded(settings(model, tmp_path, ordered, task={"max_samples": 60}))
    assert 0.2 < sum(one.value for one in flat(method.train_rows[:20])) / 20 < 0.8
    text = {one.value: method.policy.tokenizer.decode(one.texts[0]) for one in flat(method.train_rows)}
    assert ("yy" in text[1.0], "nn" in text[0.0]) == (True, True)


# ---- what is learnt is what PPO reads ----

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a template that writes a BOS, which its tokenizer adds to plain text too."""
    folder = tiny_model(tmp_path_factory.mktemp("chat"), "llama")
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = "<pad>", CHAT
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", tokenizer.pad_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


# A row about prompt p with the answers y and n, and the (prompt, completion) of a policy that it judges.
Form = Callable[[str], tuple[Row, list[tuple[Any, str]]]]
FORMS: dict[str, Form] = {
    "apart before the last turn": lambda p: (
        {"prompt": talk(p), "chosen": talk(p, "one", "go on", "y" + p)[1:],
         "rejected": talk(p, "two", "go on", "n" + p)[1:]},
        [(talk(p, "one", "go on"), "y" + p), (talk(p, "two", "go on"), "n" + p)],
    ),
    "texts with the prompt inside": lambda p: (
        {"chosen": f"{p} yes{p}", "rejected": f"{p} no{p}"},
        [(p, f" yes{p}"), (p, f" no{p}")],
    ),
    "labelled messages": lambda p: ({"messages": talk(p, "y" + p), "label": p < "n"}, [(talk(p), "y" + p)]),
}  # fmt: skip


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
    lora: bool, form: str, task: dict[str, Any], chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by a PPO run without the system prompt: the same tokens, so held-out numbers that scoring gives again."""
    made = [FORMS[form](p) for p in PROMPTS]
    short = {"num_steps": 2, "eval_every": 0}
    config = settings(chatty, tmp_path, [row for row, _ in made], lora=lora, run=short, task=task)
    run = trained(config, tmp_path, name="reward")
    method = loaded(config)
    judged = [one for _, each in made for one in each]
    by_tokens = scores_in_ppo(chatty, run.checkpoints / "step-000002", judged, tmp_path, monkeypatch)
    learnt = {tuple(text) for one in flat(method.train_rows + method.held_out) for text in one.texts}
    assert by_tokens.keys() == learnt

    held_out = [[by_tokens[tuple(text)] for text in one.texts] for one in flat(method.held_out)]
    if len(held_out[0]) == 2:
        margin = sum(chosen - rejected for chosen, rejected in held_out) / len(held_out)
        assert margin == pytest.approx(running.metrics(run)[-1]["eval/margin"], abs=1e-5)
    both = [by_tokens[tuple(text)] for one in flat(method.train_rows) for text in one.texts]
    assert sum(both) / len(both) == pytest.approx(0, abs=1e-5)


def scores_in_ppo(
    model: Path, reward: Path, judged: list[tuple[Any, str]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, ...], float]:
    """The score that a PPO run with this reward model gives to each completion, by the tokens that the model reads."""
    data = str(write_rows(folder / "prompts.jsonl", ({"prompt": p} for p in PROMPTS)))
    rows = {"name": "rows", "data": data, "max_samples": None}
    ppo = running.config("ppo", model, task=rows, reward={"functions": [], "model": str(reward)})
    collector = load_collector(prepare(ppo), options=Options(device="cpu"))
    read: list[list[int]] = []
    for owner, name in ((reward_models, "batch_of"), (Policy, "batch_of")):
        plain = getattr(owner, name)

        def noted(*args: Any, plain: Any = plain, **options: Any) -> Any:
            read.extend(text for item in args[-1] for text in item.texts)
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, noted)
    tokenizer, found = collector.policy.tokenizer, dict[tuple[int, ...], float]()
    for prompt, text in judged:  # one by one, as micro-batches are sorted by length
        (prepared,) = prepare_prompts(
            collector.task, [{"prompt": prompt}], tokenizer=tokenizer, chat="auto", system_prompt=None, variables={},
            limit=NO_LIMIT, on_overlong_prompt="error",
        )  # fmt: skip
        read.clear()
        scores = collector.scorer([prepared], [[*token_ids(tokenizer, text), tokenizer.eos_token_id]]).scores  # pyright: ignore[reportArgumentType]
        (tokens,) = read
        found[tuple(tokens)] = float(scores[0, 0])
    return found


# ---- what rows cannot teach ----


def test_a_pair_with_a_longer_side_than_the_setting_is_refused_or_left_out(model: Path, tmp_path: Path) -> None:
    """p1 and abc are 5 tokens; either side may be the longer one."""
    sides = [("abc", "b"), ("a", "b"), ("a", "abc"), ("ab", "b")]
    rows = [{"prompt": "p1", "chosen": chosen, "rejected": rejected} for chosen, rejected in sides]
    assert len(on_all("reward", model, tmp_path, rows, reward_model={"max_tokens": 5}).train_rows) == 4
    short: dict[str, Any] = {"reward_model": {"max_tokens": 4}}
    with pytest.raises(ValueError, match=r"2 of 4 examples.*reward_model\.max_tokens=4.*row 1: 5 tokens"):
        on_all("reward", model, tmp_path, rows, **short)
    method = on_all("reward", model, tmp_path, rows, **short, task={"on_overlong_prompt": "drop"})
    assert [one.length for one in flat(method.train_rows)] == [3, 4]


ONE_CLASS = [{"prompt": f"p{i}", "completion": "a", "label": 1} for i in range(20)]
CALLS = [{"function": {"name": "f"}}]
CALL = {"prompt": talk("p"), "chosen": [{**talk("p", "a")[1], "tool_calls": CALLS}], "rejected": talk("p", "b")[1:]}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (ONE_CLASS, "labels? .?1"),
        ([*PAIRS, ONE_CLASS[0]], "no column 'chosen'"),
        ([CALL] * 20, "tool_calls"),
        ([{**row, "rejected": "a"} for row in PAIRS], "20 of 20 rows"),
    ],
    ids=["one class", "pairs and labels", "a call in place of an answer", "equal sides"],
)
def test_bad_rows_are_refused_before_training(rows: list[Row], problem: str, chatty: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        running.train(settings(chatty, tmp_path, rows), tmp_path, name="refused")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(("rows", "moves"), [(MARGINS, False), (LABELS, True)], ids=["pairs", "labels"])
def test_the_heads_bias_learns_only_where_it_has_a_gradient(
    rows: list[Row], moves: bool, tiny: TinyModels, tmp_path: Path
) -> None:
    """Of a pair only the difference of two scores counts, and rounding would move it."""
    short = {"num_steps": 3, "save_every": 1, "eval_prompts": 0}
    run = trained(settings(tiny("llama"), tmp_path, rows, run=short), tmp_path)
    bias = load_file(run.checkpoints / "step-000003" / "score_bias.safetensors")["bias"]
    assert (bias.abs().max().item() > 0) == moves
