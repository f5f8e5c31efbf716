"""Supervised fine-tuning on conversations: what is learnt of each turn, how it is read, and what is said of rows."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import running
from tests.tiny_models import POSITIONS, tiny_model
from tinyrl.config.schema import Config
from tinyrl.rollout.load import load_method
from tinyrl.runs.launched import Options
from tinyrl.training.ppo import text_of
from tinyrl.training.rows import Example, joined, spans
from tinyrl.training.sft import Sft, negative_log_likelihood

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# As Qwen3: the thinking of a turn is left out once the user has spoken again.
STRIPS = PLAIN.replace(
    "{{ m.content }}",
    "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    "{% set earlier = loop.index0 < messages.index(last) %}"
    "{{ m.content.split('</think>')[-1] if earlier else m.content }}",
)


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": said} for i, said in enumerate(turns)]}


TALKS = [
    talk("2+2?", "4", "3+3?", "six", "sure?", "yes"),
    talk("hi", "hello"),
    talk("2+2?", "<think>2</think>4", "so?", "4"),
]


def chat_model(folder: Path, template: str = PLAIN, kind: str = "llama") -> Path:
    tiny_model(folder, kind)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"))


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def settings(model: Path, data: str, *, lora: bool = False, **sections: Any) -> Config:
    rate = {"learning_rate": 1e-2 if lora else 3e-3}
    values: dict[str, Any] = {
        "method": "sft",
        "model": {"path": str(model)},
        "lora": {"enabled": lora},
        "optim": rate,
        "run": {"num_steps": 20, "eval_every": 10, "save_every": 10, "threads": 1},
        "task": {"data": data, "eval_data": data},
    }
    return Config.model_validate({**values, **{k: {**values.get(k, {}), **v} for k, v in sections.items()}})


def loaded(model: Path, folder: Path, rows: list[dict[str, Any]], **sections: Any) -> Sft:
    return load_method(settings(model, written(folder, rows), **sections), options=Options(device="cpu"))


def shown(parts: Sft, example: Example) -> list[str]:
    """The pieces of an example as text, those that are learnt between stars."""
    pieces = [(name, str(parts.policy.tokenizer.decode(tokens))) for name, tokens in spans(example)]
    return [f"*{text}*" if name == "learnt" else text for name, text in pieces]


# ---- what is learnt ----


def test_turns_of_one_growing_text_are_read_once(model: Path, tmp_path: Path) -> None:
    parts = loaded(model, tmp_path, TALKS[:1])
    (row,) = parts.train_rows
    (example,) = row
    assert shown(parts, example) == [
        "[user]2+2?<eos>\n[assistant]", "*4<eos>*",
        "\n[user]3+3?<eos>\n[assistant]", "*six<eos>*",
        "\n[user]sure?<eos>\n[assistant]", "*yes<eos>*",
    ]  # fmt: skip
    assert sum(example.learnt) == 2 + 4 + 4


def test_text_beside_ppo_is_read_in_the_same_way_and_without_the_system_prompt(model: Path, tmp_path: Path) -> None:
    parts = loaded(model, tmp_path, TALKS[:1])
    assert text_of(TALKS[0], parts.policy, place="") == parts.train_rows[0]
    briefly = loaded(model, tmp_path, TALKS[:1], task={"system_prompt": "be brief"})
    assert "be brief" in shown(briefly, briefly.train_rows[0][0])[0]
    assert text_of(TALKS[0], briefly.policy, place="") == parts.train_rows[0]


def test_turns_whose_thinking_is_stripped_later_are_read_apart(tmp_path: Path) -> None:
    parts = loaded(chat_model(tmp_path, STRIPS), tmp_path, TALKS[2:])
    (row,) = parts.train_rows
    assert [shown(parts, example) for example in row] == [
        ["[user]2+2?<eos>\n[assistant]", "*<think>2</think>4<eos>*"],
        ["[user]2+2?<eos>\n[assistant]4<eos>\n[user]so?<eos>\n[assistant]", "*4<eos>*"],
    ]


def test_loss_on_all_counts_every_token_of_a_conversation_once(model: Path, tmp_path: Path) -> None:
    row = {"messages": [*TALKS[0]["messages"], {"role": "user", "content": "unanswered"}]}
    parts = loaded(model, tmp_path, [row], sft={"loss_on": "all"})
    ((example,),) = parts.train_rows
    first, last = "[user]2+2?<eos>\n[assistant]4<eos>\n[user]3+3?<eos>\n", "[user]sure?<eos>\n[assistant]yes<eos>"
    assert shown(parts, example) == ["<eos>", f"*{first}[assistant]six<eos>\n{last}*"]


def test_joined_by_hand() -> None:
    one, two, apart = Example([1], ([2, 3],)), Example([1, 2, 3, 4], ([5],)), Example([9, 2, 3, 4, 5], ([6],))
    three = Example([1, 2, 3, 4, 5], ([6],))
    assert joined([one, two, three]) == [Example([1], ([2, 3, 4, 5, 6],), ([True, True, False, True, True],))]
    assert joined([one, apart]) == [one, apart]
    assert joined([one]) == [one]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_reading_turns_at_once_changes_no_gradient(kind: str, tmp_path: Path) -> None:
    """Against each turn alone behind its own prompt, in the library's model; whatever the layout of a batch is."""
    folder = chat_model(tmp_path / "model", kind=kind)
    parts = loaded(folder, tmp_path, TALKS)
    examples = [example for row in parts.train_rows for example in row]
    assert len(examples) == 3  # of six turns
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = torch.zeros(())
    for row in TALKS:
        for end in range(2, len(row["messages"]) + 1, 2):
            how: Any = {"tokenize": False}
            asked = parts.policy.tokenizer.apply_chat_template(
                row["messages"][: end - 1], add_generation_prompt=True, **how
            )
            whole = str(parts.policy.tokenizer.apply_chat_template(row["messages"][:end], **how)).removesuffix("\n")
            prompt, both = (parts.policy.tokenizer(text)["input_ids"] for text in (str(asked), whole))
            logprobs = causal(torch.tensor([both])).logits[0].log_softmax(-1)
            for at in range(len(prompt), len(both)):
                total = total - logprobs[at - 1, both[at]]
    total.backward()
    with parts.policy.acting("policy"):
        loss = negative_log_likelihood(parts.policy, parts.policy.batch_of(examples))
        loss.backward()
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    theirs = dict(causal.named_parameters())
    for name, parameter in parts.policy.causal.named_parameters():
        ours, wanted = parameter.grad, theirs[name].grad
        assert ours is not None
        assert wanted is not None
        assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4), name


# ---- beside TRL ----

EQUATIONS = [
    {"prompt": "Ann has 3 apples and buys 4. How many?", "completion": " 3 + 4 = 7\n#### 7"},
    {"prompt": "Half of 10?", "completion": " 10 / 2 = 5\n#### 5"},
    {"prompt": "9 - 2?", "completion": " #### 7"},
]
OF_TRL: dict[str, dict[str, Any]] = {  # of a gradient: its norm, and the element [3, 5]
    "completion": {
        "tokens": 45,
        "loss": 6.395014,
        "gradients": {
            "model.embed_tokens.weight": (2.643007, 0.0),
            "model.layers.0.self_attn.q_proj.weight": (0.04948337, 0.001541818),
            "model.layers.1.mlp.down_proj.weight": (1.119634, -0.001510517),
            "lm_head.weight": (1.674552, -0.0002429374),
        },
    },
    "talks": {
        "tokens": 36,
        "loss": 6.020006,
        "gradients": {
            "model.embed_tokens.weight": (1.57241, 0.0),
            "model.layers.0.self_attn.q_proj.weight": (0.02902032, 0.0009076436),
            "model.layers.1.mlp.down_proj.weight": (0.2980002, -0.0009925919),
            "lm_head.weight": (1.031475, -0.001047069),
        },
    },
}


def formula_model(folder: Path) -> Path:
    """Weights that no random numbers decide: parameter k holds 0.3 sin(0.7 (k + 1) (i + 1)), norms 1 more than that."""
    tiny_model(folder, "llama")
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for k, parameter in enumerate(causal.parameters()):
            count = torch.arange(1, parameter.numel() + 1, dtype=torch.float64)
            values = (0.3 * torch.sin(0.7 * (k + 1) * count)).view(parameter.shape)
            parameter.copy_(values if parameter.dim() > 1 else 1 + values)
    causal.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["completion", "talks"])
def test_loss_and_gradients_are_those_of_trl(form: str, tmp_path: Path) -> None:
    """TRL 1.16.0 (transformers 5.23, torch 2.13): SFTTrainer.compute_loss and backward of one batch of these rows, with
    completion_only_loss for `completion`, and for `talks` assistant_only_loss under PLAIN with {% generation %}
    around a turn's content and EOS.
    """
    rows = EQUATIONS if form == "completion" else TALKS
    folder = formula_model(tmp_path)
    if form == "talks":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = PLAIN
        tokenizer.save_pretrained(folder)
    parts = loaded(folder, tmp_path, rows)
    examples = [example for row in parts.train_rows for example in row]
    wanted = OF_TRL[form]
    assert sum(sum(example.learnt) for example in examples) == wanted["tokens"]
    with parts.policy.acting("policy"):
        loss = negative_log_likelihood(parts.policy, parts.policy.batch_of(examples)) / wanted["tokens"]
        loss.backward()
    assert float(loss.detach()) == pytest.approx(wanted["loss"], rel=1e-5)
    parameters = dict(parts.policy.causal.named_parameters())
    for name, (norm, element) in wanted["gradients"].items():
        gradient = parameters[name].grad
        assert gradient is not None
        assert float(gradient.norm()) == pytest.approx(norm, rel=1e-4), name
        assert float(gradient[3, 5]) == pytest.approx(element, rel=1e-4, abs=1e-7), name


# ---- what it comes to ----


def test_conversations_are_learnt(model: Path, tmp_path: Path) -> None:
    rows = [talk(f"say {c}", c * 3, "again", c * 3) for c in "abcdefghijklmnopqrst"]
    code, run, _ = running.train(settings(model, written(tmp_path, rows)), tmp_path)
    assert code == 0
    lines = [line for line in running.metrics(run) if "eval/loss" in line]
    assert lines[-1]["eval/loss"] < 0.7 * lines[0]["eval/loss"]
    assert lines[-1]["eval/perplexity"] == pytest.approx(math.exp(lines[-1]["eval/loss"]), rel=1e-5)
    assert lines[-1]["eval/num_rows"] == 20


def test_held_out_loss_is_a_mean_over_the_tokens_of_the_turns(model: Path, tmp_path: Path) -> None:
    parts = loaded(model, tmp_path, TALKS, run={"micro_batch_tokens": 40})
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for row in parts.held_out:
        for example in row:
            (tokens,), (answer,) = example.texts, example.responses
            (mask,) = example.masks or ([True] * len(answer),)
            with torch.no_grad():
                logprobs = causal(torch.tensor([tokens])).logits[0].log_softmax(-1)
            for at, counts in enumerate(mask, len(example.prompt)):
                total, count = total - float(logprobs[at - 1, tokens[at]]) * counts, count + counts
    metrics = parts.evaluate().metrics
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert metrics["num_rows"] == 3


# ---- what is said ----


def test_a_row_longer_than_the_models_positions_is_said(model: Path, tmp_path: Path) -> None:
    """Its first turn fits and is kept; with the second it is too long."""
    where = written(tmp_path, [TALKS[1], talk("hi", "hello", "more", "x" * POSITIONS)])
    with pytest.raises(ValueError, match=rf"(?s)model's {POSITIONS} positions.*row 2.*task\.on_overlong_prompt=drop"):
        load_method(settings(model, where), options=Options(device="cpu"))
    parts = load_method(settings(model, where, task={"on_overlong_prompt": "drop"}), options=Options(device="cpu"))
    assert [len(row) for row in parts.train_rows] == [1, 1]
    assert sum(parts.train_rows[1][0].learnt) == len("hello") + 1
    with pytest.raises(ValueError, match="1 of 1 examples have more tokens"):
        loaded(model, tmp_path, [{"text": "x" * POSITIONS}], task={"on_overlong_prompt": "drop"})


def test_conversations_need_a_template(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the rows are chat messages, but this model's tokenizer has no chat template"):
        loaded(tiny_model(tmp_path, "llama"), tmp_path, TALKS)
