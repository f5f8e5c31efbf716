"""render_answer: the turn that is learnt as the difference of two renderings, for small templates and a real one."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import shared_data
from tests.tasks.test_prompts import small_tokenizer
from tests.tiny_models import tiny_tokenizer
from tinyrl.data.formats import preference, text_examples
from tinyrl.rewards.model_text import TextFormat, reward_tokens
from tinyrl.tasks.answers import answer_tokens, render_answer
from tinyrl.tasks.prompts import render_prompt

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
HEAD = "{% for m in messages %}[{{ m.role }}]"
TAIL = "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = HEAD + "{{ m.content }}" + TAIL
# As Qwen3: the thinking of a turn is left out once the user has spoken again.
STRIPS = (
    HEAD
    + "{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}"
    + "{% if m.role == 'assistant' and loop.index0 < messages.index(last) %}{{ m.content.split('</think>')[-1] }}"
    + "{% else %}{{ m.content }}{% endif %}"
    + TAIL
)
# As some reasoning models: the prompt opens a <think> that the finished turn does not have.
OPENS = PLAIN.replace("[assistant]", "[assistant]<think>")
TOOLS = (
    "{% if tools %}({% for t in tools %}{{ t.function.name }}{% endfor %}){% endif %}"
    + HEAD
    + "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments | tojson }})"
    + "{% endfor %}"
    + TAIL
)


def tokenizer_with(template: str | None):
    """Reads bytes, so that tokens are as easy to read as text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def parts_of(tokenizer: Any, prompt: Any, answer: Any, **more: Any) -> tuple[str, str]:
    """(prompt, target) as text."""
    how = {"chat": "auto", "system_prompt": None, "variables": {}, **more}
    tokens, target = render_answer(tokenizer, prompt, answer, **how)
    return str(tokenizer.decode(tokens)), str(tokenizer.decode(target))


def turns_of(tokenizer: Any, row: dict[str, Any], **more: Any) -> list[tuple[str, str]]:
    return [parts_of(tokenizer, e.prompt, e.answer, tools=e.tools, **more) for e in text_examples(row)]


# ---- text ----


@pytest.mark.parametrize(
    ("prompt", "answer", "wanted"),
    [
        ("hello", "world", ([3], [4, 2])),
        ("hello", "", ([3], [2])),
        *[(None, text, ([1], [3, 2])) for text in ("hello", "<s> hello", "hello </s>", "<s> hello </s>")],
        ("hello", "<s> world </s>", ([3], [4, 2])),
        ("<s> hello", "<s> world", ([1, 3], [4, 2])),
    ],
)
def test_a_text_has_one_start_and_one_end(prompt: str | None, answer: str, wanted: tuple[list[int], list[int]]):
    how: Any = {"chat": "auto", "system_prompt": None, "variables": {}}
    assert render_answer(small_tokenizer(), prompt, answer, **how) == wanted
    around = small_tokenizer(pattern="<s> $A </s>")
    with_bos = [1, *(token for token in wanted[0] if token != 1)]
    assert render_answer(around, prompt, answer, **how) == (with_bos, wanted[1])


def test_without_a_bos_a_text_begins_with_eos():
    tokenizer = small_tokenizer(pattern="<s> $A </s>")
    tokenizer.bos_token = None
    how: Any = {"chat": "auto", "system_prompt": None, "variables": {}}
    for text in ("hello", "</s> hello"):
        assert render_answer(tokenizer, None, text, **how) == ([2], [3, 2])
    assert parts_of(tokenizer_with(None), None, "a<eos>\n") == ("<eos>", "a<eos>")


def test_a_text_that_begins_as_its_prompt_ends_does_not_repeat_it():
    prompt = "[user]2+2?<eos>\n[assistant]"
    for answer in ("4", "4<eos>\n", "<eos>\n[assistant]4<eos>", f"{prompt}4<eos>\n"):
        assert parts_of(tokenizer_with(PLAIN), [USER], answer) == (prompt, "4<eos>")


@pytest.mark.parametrize(
    ("opens", "answer", "learnt"),
    [
        ("<think>\n", "<think>\nI\n</think>4", "I\n</think>4<eos>"),
        ("<think>\n", "\n<think>\n  I</think>4", "  I</think>4<eos>"),
        ("<think>", "<think>\nI</think>4", "\nI</think>4<eos>"),
        ("<think>\n\n</think>\n\n", "<think>I</think>4", "<think>I</think>4<eos>"),
    ],
)
def test_a_think_that_the_template_opens_is_not_learnt_twice(opens: str, answer: str, learnt: str):
    tokenizer = tokenizer_with(PLAIN.replace("[assistant]", "[assistant]" + opens.replace("\n", "{{ '\\n' }}")))
    prompt = f"[user]2+2?<eos>\n[assistant]{opens}"
    assert parts_of(tokenizer, [USER], answer) == (prompt, learnt)
    rendered = render_prompt(tokenizer, [USER])
    whole = reward_tokens(tokenizer, [USER], answer, text_format=TextFormat(), max_tokens=999, adapter=True)
    assert tokenizer.decode(whole) == prompt + learnt
    assert answer_tokens(tokenizer, rendered, answer, chat="auto", variables={}) == whole[len(rendered.tokens) :]


RENDERED = "[system]add<eos>\n[user]2+2?<eos>\n[assistant]"


@pytest.mark.parametrize(
    ("template", "chosen", "rejected", "prompt"),
    [
        (PLAIN, f"{RENDERED}It is 4<eos>\n", f"{RENDERED}It is 5<eos>\n", RENDERED),
        (PLAIN, f"{RENDERED}<think>\nI see a</think>4", f"{RENDERED}<think>\nI see b</think>4", RENDERED),
        (OPENS, f"{RENDERED}<think>\nI see a</think>4", f"{RENDERED}<think>\nI see b</think>4", RENDERED),
        (None, "2+2? <think>a b</think> It is 4", "2+2? <think>a b</think> It is 5", "2+2? <think>a b</think> It is"),
    ],
)
def test_pairs_that_hold_their_prompt_are_read_as_they_are(
    template: str | None, chosen: str, rejected: str, prompt: str
):
    """What both begin with is no message to be rendered once more, and does not end within a thought."""
    tokenizer, pair = tokenizer_with(template), preference({"chosen": chosen, "rejected": rejected})
    for side, text in zip(pair.answers, (chosen, rejected), strict=True):
        read, learnt = parts_of(tokenizer, pair.prompt, side)
        assert read == prompt
        assert read + learnt == f"{text.removesuffix(chr(10)).removesuffix('<eos>')}<eos>"


END = PLAIN.replace("{{ eos_token }}", "<end>")


@pytest.mark.parametrize(
    ("template", "prompt", "answer", "more", "wanted"),
    [
        (PLAIN, [USER], "4", {}, ("[user]2+2?<eos>\n[assistant]", "4<eos>")),
        (PLAIN, "2+2?", "4", {"system_prompt": "add"}, ("[system]add<eos>\n[user]2+2?<eos>\n[assistant]", "4<eos>")),
        # the line break behind the end of the turn is the template's, and comes with the next turn
        (PLAIN, [USER], [ANSWER], {}, ("[user]2+2?<eos>\n[assistant]", "4<eos>")),
        # a task's prompt that ends with the assistant is continued; a message is another turn
        (PLAIN, [USER, ANSWER], [{"role": "assistant", "content": "sure"}], {},
         ("[user]2+2?<eos>\n[assistant]4<eos>\n[assistant]", "sure<eos>")),
        (PLAIN.replace("{{ eos_token }}", ""), [USER], [ANSWER], {}, ("[user]2+2?\n[assistant]", "4\n<eos>")),
        (END, [USER], [ANSWER], {}, ("[user]2+2?<end>\n[assistant]", "4<end>")),
        # a special token inside a turn does not end it
        (PLAIN, [USER], [{"role": "assistant", "content": "4<end> or 5"}], {},
         ("[user]2+2?<eos>\n[assistant]", "4<end> or 5<eos>")),
    ],
)  # fmt: skip
def test_a_turn_is_what_the_template_adds_to_its_prompt_through_the_end_of_turn(
    template: str, prompt: Any, answer: Any, more: dict[str, Any], wanted: tuple[str, str]
):
    tokenizer = tokenizer_with(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    assert parts_of(tokenizer, prompt, answer, **more) == wanted
    assert str(tokenizer.decode(render_prompt(tokenizer, prompt, **more).tokens)) == wanted[0] or prompt[-1] == ANSWER


def test_each_turn_of_a_template_that_strips_earlier_thinking_is_exact():
    first, second = "<think>easy</think>4", "<think>hm</think>6"
    row = {"messages": [USER, {"role": "assistant", "content": first}, {"role": "user", "content": "3+3?"},
                        {"role": "assistant", "content": second}]}  # fmt: skip
    assert turns_of(tokenizer_with(STRIPS), row) == [
        ("[user]2+2?<eos>\n[assistant]", "<think>easy</think>4<eos>"),
        ("[user]2+2?<eos>\n[assistant]4<eos>\n[user]3+3?<eos>\n[assistant]", "<think>hm</think>6<eos>"),
    ]


def test_a_template_that_does_not_continue_its_prompt_is_refused_with_its_own_words():
    with pytest.raises(ValueError, match="does not continue its own prompt"):
        parts_of(tokenizer_with(OPENS), [USER], [ANSWER])
    thinking = {"role": "assistant", "content": "<think>easy</think>4"}
    assert parts_of(tokenizer_with(OPENS), [USER], [thinking])[1] == "easy</think>4<eos>"


def test_tool_turns_are_context_and_definitions_are_shown():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    row = {
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "four"},
        ],
    }
    start = "(add)[user]2+2?<eos>\n[assistant]"
    called = '<call>add({"a": 2})<eos>'
    assert turns_of(tokenizer_with(TOOLS), row) == [
        (start, called),
        (f"{start}{called}\n[tool]4<eos>\n[assistant]", "four<eos>"),
    ]


def test_a_turn_without_a_token_is_refused():
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match=r"writes nothing for the assistant's turn: '2\+2\?'"):
        parts_of(tokenizer_with(silent), [USER], [ANSWER])


def test_a_token_across_the_border_leaves_the_prompt_as_it_is_sampled_from():
    """Words at spaces: the turn would grow the prompt's last word, which the policy never sees."""
    turn = "{% if m.role == 'assistant' %}{{ m.content }} </s>{% endif %}"
    tokenizer = small_tokenizer(template=f"hello{{% for m in messages %}}{turn}{{% endfor %}}")
    how: Any = {"chat": "auto", "system_prompt": None, "variables": {}}
    answer = [{"role": "assistant", "content": "world"}]
    assert render_answer(tokenizer, [USER], answer, **how) == ([3], [4, 2])  # not [UNK] for "helloworld"


@pytest.mark.parametrize(
    ("template", "chat", "answer", "wanted"),
    [
        (None, "auto", [ANSWER], "no chat template"),
        (PLAIN, False, [ANSWER], "task.chat=false"),
        (PLAIN, "auto", [ANSWER, USER], "one message of the assistant"),
    ],
)
def test_what_cannot_be_a_turn_is_refused(template: str | None, chat: Any, answer: Any, wanted: str):
    with pytest.raises(ValueError, match=wanted):
        parts_of(tokenizer_with(template), [USER], answer, chat=chat)


# ---- a real chat model's template ----

needs_data = pytest.mark.skipif(shared_data() is None, reason="needs the folder of real data")
REAL = [USER, {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"}, {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "6"}]  # fmt: skip


@pytest.fixture(scope="module")
def real():
    data = shared_data()
    assert data is not None
    return AutoTokenizer.from_pretrained(data / "chat-tokenizer")


@needs_data
def test_turns_of_a_real_template(real: Any):
    """It opens a <think> as the variable says, and keeps that of earlier turns."""
    question = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    (first, second) = turns_of(real, {"messages": REAL}, variables={"open_thinking": True})
    assert first == (question, "easy\n</think>\n\n4<|im_end|>")
    after = "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert second == (f"{question}easy\n</think>\n\n4<|im_end|>\n{after}", "\n</think>\n\n6<|im_end|>")
    with pytest.raises(ValueError, match="does not continue its own prompt"):  # thoughts behind a closed think block
        turns_of(real, {"messages": REAL})
