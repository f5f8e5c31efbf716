"""Supervised fine-tuning: which tokens are learnt, the loss and gradient beside TRL's, rows that are left out."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_models import POSITIONS, TinyModels, tiny_model
from tests.training.rows import Row, chat_model, on_all, talk
from tinyrl.models.tokens import token_ids
from tinyrl.training.ppo import text_examples
from tinyrl.training.rows import Example, RowMethod, join_turns, spans
from tinyrl.training.sft import Sft, negative_log_likelihood, turns_of

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
TALKS = [
    {"messages": talk("2+2?", "4", "3+3?", "six", "sure?", "yes")},
    {"messages": talk("hi", "hello")},
    {"messages": talk("2+2?", "<think>2</think>4", "so?", "4")},
]


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("model"), PLAIN)


def shown(method: Sft, example: Example) -> list[str]:
    """The pieces of an example as text, those that are learnt between stars."""
    pieces = [(name, str(method.policy.tokenizer.decode(tokens))) for name, tokens in spans(example)]
    return [f"*{text}*" if name == "learnt" else text for name, text in pieces]


# ---- what is learnt ----


def test_turns_of_one_growing_text_are_read_once(chatty: Path, tmp_path: Path) -> None:
    method = on_all("sft", chatty, tmp_path, TALKS[:1])
    (row,) = method.train_rows
    (example,) = row
    assert shown(method, example) == [
        "[user]2+2?<eos>\n[assistant]", "*4<eos>*",
        "\n[user]3+3?<eos>\n[assistant]", "*six<eos>*",
        "\n[user]sure?<eos>\n[assistant]", "*yes<eos>*",
    ]  # fmt: skip
    assert sum(example.learnt) == 2 + 4 + 4
    briefly = on_all("sft", chatty, tmp_path, TALKS[:1], task={"system_prompt": "be brief"})
    assert "be brief" in shown(briefly, briefly.train_rows[0][0])[0]
    assert text_examples(TALKS[0], briefly.policy, place="") == row  # text beside PPO has none


def test_tools_that_the_template_does_not_write_are_named(chatty: Path, tmp_path: Path) -> None:
    rows = [{**TALKS[0], "tools": [{"type": "function", "function": {"name": "add"}}]}]
    shows = chat_model(tmp_path / "model", "{% if tools %}{{ tools }}{% endif %}" + PLAIN)
    for model, count in ((shows, 0), (chatty, 1)):
        notes = on_all("sft", model, tmp_path, rows).notes
        assert len([note for note in notes if "warning" in note and "tools" in note]) == count


def test_turns_whose_thinking_is_stripped_later_are_read_apart(tmp_path: Path) -> None:
    method = on_all("sft", chat_model(tmp_path / "model", STRIPS), tmp_path, TALKS[2:])
    (row,) = method.train_rows
    assert [shown(method, example) for example in row] == [
        ["[user]2+2?<eos>\n[assistant]", "*<think>2</think>4<eos>*"],
        ["[user]2+2?<eos>\n[assistant]4<eos>\n[user]so?<eos>\n[assistant]", "*4<eos>*"],
    ]


# As Qwen3.5's small models: without a switch the prompt closes the thoughts that a turn may have.
SWITCHES = PLAIN.replace("[assistant]{% endif %}", "[assistant]<t>{% if not open_thinking %}</t>{% endif %}{% endif %}")
SWITCHES = SWITCHES.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<t>{{ m.thinking }}</t>{% endif %}{{ m.content }}"
)


def test_rows_with_and_without_thoughts_are_learnt_behind_the_prompts_of_their_kind(tmp_path: Path) -> None:
    thoughtful = {"messages": [*talk("2+2?"), {"role": "assistant", "content": "4", "thinking": "hm"}]}
    plain = {"messages": talk("hi", "hello")}
    model = chat_model(tmp_path / "model", SWITCHES)
    method = on_all("sft", model, tmp_path, [thoughtful, plain])
    assert [shown(method, example) for row in method.train_rows for example in row] == [
        ["[user]2+2?<eos>\n[assistant]<t>", "*hm</t>4<eos>*"], ["[user]hi<eos>\n[assistant]<t></t>", "*hello<eos>*"],
    ]  # fmt: skip
    assert len([note for note in method.notes if "2 of 4 rows" in note and "open_thinking=true" in note]) == 1
    open_in_all = {"chat_template_kwargs": {"open_thinking": True}}
    both = on_all("sft", model, tmp_path, [thoughtful, plain], task=open_in_all)
    assert [shown(both, row[0])[1] for row in both.train_rows] == ["*hm</t>4<eos>*", "*</t>hello<eos>*"]
    with pytest.raises(ValueError, match="does not continue its own prompt"):  # what was set is not changed
        on_all("sft", model, tmp_path, [thoughtful], task={"chat_template_kwargs": {"open_thinking": False}})


def test_a_bos_inside_an_answer_is_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<pad>"
    tokenizer.save_pretrained(folder)
    good = {"prompt": "<pad>a", "completion": "<pad>b"}  # one that its prompt has is left out
    for row, count in ((good, 0), ({**good, "completion": "b<pad>c"}, 1), ({**good, "prompt": "a"}, 1)):
        method = on_all("sft", folder, tmp_path, [good, row])
        assert len([note for note in method.notes if "2 of 4 rows hold <pad>" in note]) == count


def test_loss_on_all_counts_every_token_of_a_conversation_once(chatty: Path, tmp_path: Path) -> None:
    row = {"messages": [*TALKS[0]["messages"], {"role": "user", "content": "unanswered"}]}
    method = on_all("sft", chatty, tmp_path, [row], sft={"loss_on": "all"})
    ((example,),) = method.train_rows
    first, last = "[user]2+2?<eos>\n[assistant]4<eos>\n[user]3+3?<eos>\n", "[user]sure?<eos>\n[assistant]yes<eos>"
    assert shown(method, example) == ["<eos>", f"*{first}[assistant]six<eos>\n{last}*"]


def test_loss_on_all_keeps_separators_inside_a_text(tiny: TinyModels, tmp_path: Path) -> None:
    """Where bos is eos, only the token in front is the sequence's start; the others end turns."""
    method = on_all("sft", tiny("llama", pad_is_eos=True), tmp_path, [{"text": "a"}], sft={"loss_on": "all"})
    tokenizer = method.policy.tokenizer
    eos = tokenizer.eos_token_id
    tokenizer.bos_token = tokenizer.eos_token
    row = {"prompt": f"{tokenizer.eos_token}ab{tokenizer.eos_token}cd", "completion": "ef"}
    [(start, (target,), *_)] = turns_of(row, method.policy, system_prompt=None, variables={})
    ab, cd, ef = (tokenizer(c, add_special_tokens=False)["input_ids"] for c in ("ab", "cd", "ef"))
    assert (start, target) == ([eos], [*ab, eos, *cd, *ef, eos])


def test_joined_by_hand() -> None:
    one, two, apart = Example([1], ([2, 3],)), Example([1, 2, 3, 4], ([5],)), Example([9, 2, 3, 4, 5], ([6],))
    three = Example([1, 2, 3, 4, 5], ([6],))
    assert join_turns([one, two, three]) == [Example([1], ([2, 3, 4, 5, 6],), ([True, True, False, True, True],))]
    assert join_turns([one, apart]) == [one, apart]
    assert join_turns([one]) == [one]


EQUATIONS = [
    {"prompt": "Ann has 3 apples and buys 4. How many?", "completion": " 3 + 4 = 7\n#### 7"},
    {"prompt": "Half of 10?", "completion": " 10 / 2 = 5\n#### 5"},
    {"prompt": "9 - 2?", "completion": " #### 7"},
]
NAMES = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")
# Tokens that are learnt, the loss, and of the gradient of each of NAMES its norm and the element [3, 5].
OF_TRL: dict[str, tuple[int, float, list[tuple[float, float]]]] = {
    "completion": (
        45,
        6.395014,
        [(2.643007, 0.0), (0.04948337, 0.001541818), (1.119634, -0.001510517), (1.674552, -0.0002429374)],
    ),
    "talks": (
        36,
        6.020006,
        [(1.57241, 0.0), (0.02902032, 0.0009076436), (0.2980002, -0.0009925919), (1.031475, -0.001047069)],
    ),
}


def formula_model(folder: Path, template: str | None) -> Path:
    """Weights that no random numbers decide: parameter k holds 0.3 sin(0.7 (k + 1) (i + 1)), norms 1 more than that."""
    chat_model(folder, template) if template else tiny_model(folder, "llama")
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
    folder = formula_model(tmp_path / "model", PLAIN if form == "talks" else None)
    method = on_all("sft", folder, tmp_path, rows, run={"micro_batch_tokens": 40})
    examples = [example for row in method.train_rows for example in row]
    count, wanted, gradients = OF_TRL[form]
    assert sum(sum(example.learnt) for example in examples) == count
    with method.policy.acting("policy"):
        loss = negative_log_likelihood(method.policy, method.policy.batch_of(examples)) / count
        loss.backward()
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-5)
    metrics = method.evaluate().metrics  # on the same rows
    assert metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    assert (metrics["perplexity"], metrics["num_rows"]) == (pytest.approx(math.exp(wanted), rel=1e-4), 3)
    parameters = dict(method.policy.causal.named_parameters())
    for name, (norm, element) in zip(NAMES, gradients, strict=True):
        gradient = parameters[f"{name}.weight"].grad
        assert gradient is not None
        assert float(gradient.norm()) == pytest.approx(norm, rel=1e-4), name
        assert float(gradient[3, 5]) == pytest.approx(element, rel=1e-4, abs=1e-7), name


# ---- what is refused or left out ----


def test_a_row_longer_than_the_models_positions_is_refused_or_cut(chatty: Path, tmp_path: Path) -> None:
    """Its first turn fits and is kept; with the second it is too long."""
    rows: list[Row] = [TALKS[1], {"messages": talk("hi", "hello", "more", "x" * POSITIONS)}]
    with pytest.raises(
        ValueError, match=rf"(?s)model's context length of {POSITIONS}.*row 2.*task\.on_overlong_prompt=drop"
    ):
        on_all("sft", chatty, tmp_path, rows)
    method = on_all("sft", chatty, tmp_path, rows, task={"on_overlong_prompt": "drop"})
    assert [len(row) for row in method.train_rows] == [1, 1]
    assert sum(method.train_rows[1][0].learnt) == len("hello") + 1
    with pytest.raises(ValueError, match="1 of 1 examples have more tokens"):
        on_all("sft", chatty, tmp_path, [{"text": "x" * POSITIONS}], task={"on_overlong_prompt": "drop"})


def test_a_row_of_as_many_tokens_as_the_setting_is_learnt_and_a_longer_one_is_refused_or_left_out(
    chatty: Path, tmp_path: Path
) -> None:
    """[user]hi<eos>, a line break and [assistant] are 21 tokens, hello<eos> 6 and ho<eos> 3."""
    rows: list[Row] = [{"messages": talk("hi", "hello")}, {"messages": talk("hi", "ho")}]
    assert len(on_all("sft", chatty, tmp_path, rows, sft={"max_tokens": 27}).train_rows) == 2
    with pytest.raises(ValueError, match=r"1 of 2 examples.*sft\.max_tokens=26.*row 1: 27 tokens"):
        on_all("sft", chatty, tmp_path, rows, sft={"max_tokens": 26})
    drop = {"on_overlong_prompt": "drop"}
    method = on_all("sft", chatty, tmp_path, rows, task=drop, sft={"max_tokens": 26})
    assert [sum(one.learnt) for (one,) in method.train_rows] == [3]
    long: list[Row] = [{"text": "x" * POSITIONS}]
    with pytest.raises(ValueError, match=f"context length of {POSITIONS}"):  # which a larger number does not change
        on_all("sft", chatty, tmp_path, long, sft={"max_tokens": 2 * POSITIONS})


def test_a_text_that_no_model_could_read_is_not_tokenised(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_short(tokenizer: Any, text: str) -> list[int]:
        assert len(text) < 10_000
        return token_ids(tokenizer, text)

    monkeypatch.setattr("tinyrl.tasks.answers.token_ids", of_short)
    rows: list[Row] = [{"prompt": "hi", "completion": "ho"}, {"prompt": "hi", "completion": "x" * 100_000}]
    method = on_all("sft", chatty, tmp_path, rows, task={"on_overlong_prompt": "drop"})
    assert len(method.train_rows) == 1
    with pytest.raises(ValueError, match=r"1 of 2 examples.*row 2"):
        on_all("sft", chatty, tmp_path, rows)


def test_a_trial_of_the_largest_step_takes_the_longest_rows() -> None:
    """As many as a step has; a row's length is that of all its examples."""
    lengths = ([3], [9], [4, 4], [5])
    rows = [[Example([1], [[2] * (length - 1)]) for length in each] for each in lengths]
    method: Any = SimpleNamespace(train_rows=rows, batch_size=2, forget=lambda: None)
    assert RowMethod.keep_longest(method) == (2, 9)
    assert method.train_rows == [rows[1], rows[2]]
