"""The text of a turn: thoughts by whatever markers the model has, and other special tokens as text."""

from typing import Any

import pytest
from tokenizers import AddedToken

from tests.tiny_models import EOS, tiny_tokenizer
from tinyrl.models.tokens import thought_markers, token_ids
from tinyrl.tasks import rows
from tinyrl.tasks.answers import answer_tokens
from tinyrl.tasks.grading import answer_text
from tinyrl.tasks.prompts import render_prompt
from tinyrl.tasks.turn_text import TurnDetokenizer, turn_text

TEMPLATE = "{% for m in messages %}[{{ m.role }}]THOUGHT{{ m.content }}{{ eos_token }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}[assistant]OPENED{% endif %}"
WRITES = "{% if m.reasoning_content %}◁think▷{{ m.reasoning_content }}◁/think▷{% endif %}"
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"


def tokenizer_with(*special: str, template: str | None = None) -> Any:
    tokenizer = tiny_tokenizer()
    added: Any = [AddedToken(text, special=True) for text in special]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def read(tokenizer: Any, written: str) -> str:
    """Return the text of a turn whose markers are single tokens; the same as they come one by one."""
    tokens = token_ids(tokenizer, written)
    coming = TurnDetokenizer(tokenizer)
    text = turn_text(tokenizer, tokens)
    assert "".join(coming.add([token]) for token in tokens) + coming.end() == text
    return text


@pytest.mark.parametrize(
    ("special", "written", "text"),
    [
        (("<answer>", "</answer>"), f"So <answer>7</answer>{EOS}", "So <answer>7</answer>"),
        (("<answer>", "</answer>"), "<answer>7</answer>", "<answer>7</answer>"),  # ended at a stop string
        (("<|im_end|>", "<|eot_id|>"), "7<|im_end|>", "7"),
        (("<end_of_turn>", "<|eom_id|>"), "7<end_of_turn><|eom_id|>", "7"),
        (("<|begin_of_box|>", "<|end_of_box|>"), "<|begin_of_box|>7<|end_of_box|>", "<|begin_of_box|>7<|end_of_box|>"),
        (("[TOOL_CALLS]",), "[TOOL_CALLS][1]", "[TOOL_CALLS][1]"),
        (("<think>", "</think>"), f"<think>42</think>7{EOS}", "<think>42</think>7"),
        (("[THINK]", "[/THINK]"), f"[THINK]42[/THINK]7{EOS}", "<think>42</think>7"),
        (("[THINK]", "[/THINK]"), "[THINK]é42", "<think>é42"),
        (("<|START_THINKING|>", "<|END_THINKING|>"), "<|START_THINKING|>42<|END_THINKING|>7", "<think>42</think>7"),
        (("<seed:think>", "</seed:think>"), "<seed:think>42</seed:think>7", "<think>42</think>7"),
        ((), "[THINK]42[/THINK]7", "[THINK]42[/THINK]7"),  # no marker of this model
        (("[THINK]",), "[THINK]7", "[THINK]7"),  # nothing closes it
        (HARMONY, f"{ANALYSIS}42<|end|>{FINAL}7<|return|>", "<think>42</think>7"),
        (HARMONY, f"{ANALYSIS}42", "<think>42"),
        (HARMONY, "<|channel|>final<|message|>7<|return|>", "7"),
        (HARMONY, f"{ANALYSIS}1<|end|><|start|>assistant{ANALYSIS}2<|end|>{FINAL}7",
         "<think>1</think>\n<think>2</think>7"),
        (HARMONY, "<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>",
         "<|channel|>commentary to=f <|constrain|>json<|message|>{}"),
        (HARMONY, "<|start|>user<|message|>7", "<|start|>user<|message|>7"),  # no turn of the policy
        (HARMONY, "7<|channel|>fin", "7<|channel|>fin"),
    ],
)  # fmt: skip
def test_the_text_of_a_turn_has_its_markers_but_the_ends_and_thoughts_in_one_form(
    special: tuple[str, ...], written: str, text: str
) -> None:
    assert read(tokenizer_with(*special), written) == text


@pytest.mark.parametrize(
    ("special", "written"),
    [
        (("[THINK]", "[/THINK]"), "[THINK]THOUGHT[/THINK]ANSWER"),
        (HARMONY, f"{ANALYSIS}THOUGHT<|end|>{FINAL}ANSWER<|return|>"),
        (("<think>", "</think>"), "<think>THOUGHT</think>ANSWER"),
    ],
)
def test_what_is_thought_is_no_answer(special: tuple[str, ...], written: str) -> None:
    tokenizer = tokenizer_with(*special)
    scores = list[float | None]()
    for thought, answer in ((r"\boxed{42}", "I do not know"), ("7", "42"), ("no", r"\boxed{42}")):
        text = read(tokenizer, written.replace("THOUGHT", thought).replace("ANSWER", answer))
        scores.append(rows.score(answer_text(text), {"answer": "42"}))
    assert scores == [0.0, 1.0, 1.0]


def test_markers_are_those_that_the_template_writes_around_a_thought() -> None:
    marks = ("◁think▷", "◁/think▷")
    thinks = tokenizer_with(*marks, template=TEMPLATE.replace("THOUGHT", WRITES))
    assert thought_markers(thinks).texts == (marks,)
    assert read(thinks, "◁think▷42◁/think▷7") == "<think>42</think>7"
    silent = tokenizer_with(*marks, template=TEMPLATE.replace("THOUGHT", ""))
    assert read(silent, "◁think▷42◁/think▷7") == "◁think▷42◁/think▷7"
    around = TEMPLATE.replace("THOUGHT", "{{ m.reasoning_content or '' }}")  # between marks that are the turn's own
    assert thought_markers(tokenizer_with(*marks, template=around)).texts == ()


def test_the_token_with_which_the_template_ends_a_turn_has_no_text() -> None:
    template = TEMPLATE.replace("THOUGHT", "").replace("{{ eos_token }}", "<|done|>")
    assert read(tokenizer_with("<|done|>", template=template), "7<|done|>") == "7"
    assert read(tokenizer_with("<|done|>"), "7<|done|>") == "7<|done|>"


@pytest.mark.parametrize(("opened", "found"), [("[THINK]", "<think>"), ("[THINK]no[/THINK]", ""), ("", "")])
def test_a_thought_that_a_prompt_opens_by_the_models_marker_is_handed_over(opened: str, found: str) -> None:
    template = TEMPLATE.replace("THOUGHT", "") + ASKS.replace("OPENED", opened)
    tokenizer = tokenizer_with("[THINK]", "[/THINK]", template=template)
    assert render_prompt(tokenizer, "hi").opened == found


def test_an_answer_to_learn_has_the_models_markers_of_thoughts_as_tokens() -> None:
    template = TEMPLATE.replace("THOUGHT", "") + ASKS.replace("OPENED", "[THINK]")
    tokenizer = tokenizer_with("[THINK]", "[/THINK]", template=template)
    prompt = render_prompt(tokenizer, "hi")
    tokens = answer_tokens(tokenizer, prompt, "[THINK]4[/THINK]7", chat="auto", variables={})
    assert tokens == token_ids(tokenizer, f"4[/THINK]7{EOS}")
