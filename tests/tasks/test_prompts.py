"""render_prompt: with a real chat template, and with small tokenizers that add a BOS or an EOS."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import shared_data
from tinyrl.tasks import load_task
from tinyrl.tasks.prompts import (
    NO_LIMIT,
    PreparedPrompt,
    PromptLimit,
    Rendered,
    most_characters,
    prepare_prompts,
    render_prompt,
    unread_key_notes,
)

VOCABULARY = {"[UNK]": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 4, "<think>": 5, "</think>": 6, "user": 7, ":": 8}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s> {{ m.role }} : {{ m.content }} </s> {% endfor %}{% if add_generation_prompt %}<s> assistant : {% endif %}"
)
THINKING = TEMPLATE + (
    "{% if add_generation_prompt %}<think> {% if enable_thinking is defined and not enable_thinking %}</think> "
    "{% endif %}{% endif %}"
)


def small_tokenizer(*, pattern: str | None = None, template: str | None = None) -> PreTrainedTokenizerFast:
    """Words at spaces; `pattern` is what it adds around a text, such as "<s> $A" or "$A </s>"."""
    tokenizer, ends = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]")), [("<s>", 1), ("</s>", 2)]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pattern:
        tokenizer.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=ends)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "[UNK]", "pad_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def test_a_bos_stays_and_an_appended_eos_goes():
    for pattern, text, tokens in (
        (None, "hello world", [3, 4]),
        ("<s> $A", "hello world", [1, 3, 4]),
        ("<s> $A", "<s> hello", [1, 3]),  # a BOS that the text brings is not doubled
        ("$A </s>", "hello world", [3, 4]),  # nothing follows an EOS
        ("<s> $A </s>", "hello </s>", [1, 3, 2]),  # an EOS of the text is the person's own
    ):
        rendered = render_prompt(small_tokenizer(pattern=pattern), text)
        assert (rendered.text, rendered.tokens, rendered.opened) == (text, tokens, "")


HOW = {"chat": "auto", "system_prompt": None, "variables": {}}


def limit(tokens: int) -> PromptLimit:
    return PromptLimit(tokens, words=f"a limit of {tokens}", advice=lambda longest: f"take {longest}")


OLD, HELLO = {"role": "system", "content": "old"}, {"role": "user", "content": "hello"}
ASKED = "<s> user : hello </s> <s> assistant : "


@pytest.mark.parametrize(
    ("template", "prompt", "how", "text", "opened"),
    [
        (None, "world", {"system_prompt": "hello"}, "hello\n\nworld", ""),
        (TEMPLATE, "hello", {"chat": False}, "hello", ""),
        (TEMPLATE, "hello", {}, ASKED, ""),
        (TEMPLATE, "hello", {"system_prompt": "new"}, f"<s> system : new </s> {ASKED}", ""),
        (TEMPLATE, [OLD, HELLO], {"system_prompt": "new"}, f"<s> system : new </s> {ASKED}", ""),
        (TEMPLATE, [OLD, HELLO], {"system_prompt": ""}, f"<s> system :  </s> {ASKED}", ""),
        # messages that end with the assistant are continued
        (TEMPLATE, [HELLO, {"role": "assistant", "content": "<think> a"}], {}, f"{ASKED}<think> a", "<think> a"),
        # a <think> that the template opens is handed over, one in the person's own text is not
        *[(TEMPLATE.replace("assistant : ", f"assistant : {end}"), "hello", {}, f"{ASKED}{end}", opened)
          for end, opened in (("<think>\n", "<think>\n"), ("<think> </think>", ""), ("</think> <think>a", "<think>a"))],
        (TEMPLATE, "use <think> please", {}, ASKED.replace("hello", "use <think> please"), ""),
        (None, "Assistant: <think>\n", {}, "Assistant: <think>\n", "<think>\n"),
        # variables reach the template
        (THINKING, "hello", {"variables": {"enable_thinking": True}}, f"{ASKED}<think> ", "<think> "),
        (THINKING, "hello", {"variables": {"enable_thinking": False}}, f"{ASKED}<think> </think> ", ""),
    ],
)  # fmt: skip
def test_a_prompt_as_text(template, prompt, how, text, opened):
    rendered = render_prompt(small_tokenizer(template=template), prompt, **how)
    assert (rendered.text, rendered.opened) == (text, opened)


def test_messages_in_parts_are_the_same_prompt_behind_the_bos_of_the_template():
    tokenizer = small_tokenizer(pattern="<s> $A </s>", template=TEMPLATE)
    assert render_prompt(tokenizer, "hello").tokens == [1, 7, 8, 3, 2, 1, 0, 8]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}]
    whole = [{"role": "user", "content": "hello world"}]
    assert render_prompt(tokenizer, parts).tokens == render_prompt(tokenizer, whole).tokens
    task = replace(load_task("rows"), prompt=lambda row: row["asked"])  # of a person's own task
    how = {"tokenizer": tokenizer, **HOW, "limit": limit(20), "on_overlong_prompt": "error"}
    (prepared,) = prepare_prompts(task, [{"asked": parts}], **how, openings=[" hello"])
    assert prepared.prompt == whole
    assert prepared.text == "<s> user : hello world hello </s> <s> assistant : "


def test_wrong_prompts_and_settings_are_refused():
    cases: list[tuple[str | None, Any, dict[str, Any], str]] = [
        (THINKING, "hello", {"variables": {"enable_thinkin": 0}}, "`enable_thinkin`.*mean `enable_thinking`"),
        (None, "hello", {"variables": {"enable_thinking": False}}, "task.chat_template_kwargs"),
        (TEMPLATE, [HELLO], {"chat": False}, "task.chat=false"),
        (None, "hello", {"chat": True}, "task.chat=true"),
        (TEMPLATE, [{"role": "tool", "content": "hello"}], {}, "no tools here"),
        (None, " ", {}, "empty"),
    ]
    for template, prompt, how, setting in cases:
        with pytest.raises(ValueError, match=setting):
            render_prompt(small_tokenizer(template=template), prompt, **how)


def messages_with(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}, HELLO]


# As Qwen's: other roles are skipped.
SKIPS = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}<s> {{ m.role }} : {{ m.content }} </s> "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<s> assistant : {% endif %}"
)
NO_SYSTEM = SKIPS.replace("'system', ", "")


@pytest.mark.parametrize(
    ("template", "prompt", "system_prompt"),
    [
        *[(SKIPS, messages_with(role, "secret"), None) for role in ("human", "User", "Assistant", "function")],
        (NO_SYSTEM, messages_with("system", "secret"), None),
        (NO_SYSTEM, "hello", "secret"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(template, prompt, system_prompt):
    tokenizer = small_tokenizer(template=template)
    with pytest.raises(ValueError, match="secret"):
        render_prompt(tokenizer, prompt, system_prompt=system_prompt)


def test_the_row_of_a_message_that_is_left_out_is_named():
    rows = [{"prompt": "hello"}, {"prompt": messages_with("human", "world"), "id": "b7"}]
    how = {**HOW, "limit": limit(20), "on_overlong_prompt": "error"}
    with pytest.raises(ValueError, match=r"row 2.*world.*b7"):
        prepare_prompts(load_task("rows"), rows, tokenizer=small_tokenizer(template=SKIPS), **how)


@pytest.mark.parametrize(
    ("template", "role", "content"),
    [
        (SKIPS, "developer", "hello"),  # read as the system's
        (SKIPS, "system", "<s> hello </s>"),  # markers are text
        (SKIPS.replace("m.content", "m.content | trim"), "user", " hello "),
        (SKIPS.replace("m.content", "m.content | tojson"), "user", 'hello "world"'),
        (SKIPS.replace("m.content", "m.content.replace('/no_think', '')"), "system", "hello /no_think"),  # as SmolLM3's
        (SKIPS.replace("m.content", "m.content.replace('/no_think', '')"), "system", "/no_think"),
        (SKIPS, "tool", "world"),
        (SKIPS.replace("m.content", "m.content.split('</think>')[-1]"), "assistant", "<think> world </think> hello"),
    ],
)
def test_a_message_that_the_template_rewrites_is_not(template, role, content):
    assert "hello" in render_prompt(small_tokenizer(template=template), messages_with(role, content)).text


def prepared(texts: list, on_overlong_prompt: str = "error"):
    how = {**HOW, "limit": limit(4), "on_overlong_prompt": on_overlong_prompt, "tokenizer": small_tokenizer()}
    return prepare_prompts(load_task("rows"), [{"prompt": text} for text in texts], **how)


def test_long_prompts_are_refused_naming_the_first_or_dropped():
    with pytest.raises(ValueError, match=r"row 2 with 5[\s\S]*take 5"):
        prepared(["hello", "hello " * 5])
    assert [p.index for p in prepared(["hello " * 5, "hello world"], on_overlong_prompt="drop")] == [1]


def test_a_text_of_more_characters_than_any_tokens_have_is_long_whatever_its_tokens_are():
    """It is one unknown word; limits below 100,000 characters are those of a tokenizer that merges some."""
    texts = ["hello", "x" * 100_001, "x" * 100_000]
    assert [p.index for p in prepared(texts, on_overlong_prompt="drop")] == [0, 2]
    with pytest.raises(ValueError, match=r"1 of 3.*row 2"):
        prepared(texts)
    words = small_tokenizer()
    words.add_tokens(["y" * 1000])
    assert most_characters(words, 200) == 200_000


@pytest.mark.parametrize("template", [None, THINKING, TEMPLATE.replace("assistant : ", "assistant : <think> ")])
def test_prompts_that_are_rendered_together_are_as_one_by_one(template, monkeypatch):
    """With markers in contents, messages to continue, and a thought that is left open; the last batch is not full."""
    monkeypatch.setattr("tinyrl.tasks.prompts.BATCH", 3)
    prompts: list[Any] = ["hello", "use <think> please", "world", "a </s> b", "<think>\n", "hello world"]
    if template is not None:
        begun = {"role": "assistant", "content": "<think> a"}
        prompts[3:3] = [[OLD, HELLO], [HELLO, begun], [HELLO, {"role": "assistant", "content": "a"}]]
    tokenizer = small_tokenizer(pattern="<s> $A", template=template)
    together = prepare_prompts(
        load_task("rows"),
        [{"prompt": prompt} for prompt in prompts],
        tokenizer=tokenizer,
        limit=limit(1000),
        on_overlong_prompt="error",
        **HOW,
    )
    alone = [render_prompt(tokenizer, prompt) for prompt in prompts]
    assert [Rendered(p.text, p.tokens, p.opened) for p in together] == alone
    assert len({one.opened for one in alone}) > 1


@pytest.mark.skipif(shared_data() is None, reason="needs ../shared/data")
def test_a_real_chat_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(f"{shared_data()}/chat-tokenizer")
    for said, thoughts in (("Say hi", 1), ("Say <think> hi", 1)):  # a marker in what a person says is text
        rendered = render_prompt(tokenizer, said, system_prompt="Be kind")
        messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": said}]
        its_own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert (rendered.tokens == its_own["input_ids"]) == (said == "Say hi")
        assert rendered.tokens.count(tokenizer.convert_tokens_to_ids("<think>")) == thoughts
        assert (tokenizer.decode(rendered.tokens), rendered.opened) == (rendered.text, "")


def test_the_date_of_a_run_is_the_clock_of_the_template():
    macro = "{% macro f(now) %}{% set form = '%Y-%m-%d' %}{{ now(form) }}{% endmacro %}"
    shown = '{{ f(strftime_now) }} {{ strftime_now("%-m/%d/%y, %A %H:%M") }}'
    tokenizer = small_tokenizer(template=f"{macro}hello {shown}")
    rendered = render_prompt(tokenizer, "hello", variables={"strftime_now": "2024-02-29"})
    assert rendered.text == "hello 2024-02-29 2/29/24, Thursday 00:00"
    assert render_prompt(tokenizer, "hello").text != rendered.text
    with pytest.raises(ValueError, match="strftime_now"):
        render_prompt(tokenizer, "hello", variables={"strftime_now": "yesterday"})


# ---- a beginning of the answer ----


def begun(content: str) -> list[dict[str, str]]:
    return [HELLO, {"role": "assistant", "content": content}]


@pytest.mark.parametrize(
    ("template", "content", "opened"),
    [
        (TEMPLATE, "The answer is", "The answer is"),
        (TEMPLATE, "hello", "hello"),  # as the user's
        (TEMPLATE, "<answer>\n", "<answer>\n"),
        (TEMPLATE, "I </s> think", "I </s> think"),  # a marker is text
        (TEMPLATE.replace(" : {{ m.content }} ", ":{{ m.content | trim }}"), " The answer is ", "The answer is"),
        (TEMPLATE.replace("m.content", "'<think> ' + m.content if m.role == 'assistant' else m.content"),
         "so", "<think> so"),
        (TEMPLATE, "so <think> I", "so <think> I"),
        (TEMPLATE, "", ""),
    ],
)  # fmt: skip
def test_the_beginning_of_an_answer_is_what_the_prompt_ends_with(template: str, content: str, opened: str) -> None:
    rendered = render_prompt(small_tokenizer(template=template), begun(content))
    assert rendered.opened == opened
    assert rendered.text.endswith(opened)


def test_a_begun_answer_is_no_part_of_the_question() -> None:
    prompt = begun("The answer is ")
    (prepared,) = prepare_prompts(
        load_task("rows"), [{"prompt": prompt}], tokenizer=small_tokenizer(template=TEMPLATE), **HOW,
        limit=NO_LIMIT, on_overlong_prompt="error", openings=[" world"],
    )  # fmt: skip
    assert prepared.text == "<s> user : hello world </s> <s> assistant : The answer is "
    assert (prepared.prompt, prepared.question, prepared.opened) == (prompt, [HELLO], "The answer is ")
    assert [prepared.rest_of(answer) for answer in ("The answer is 4", "4")] == ["4", "4"]
    assert PreparedPrompt(0, {}, [HELLO], "", [], "").question == [HELLO]
    assert PreparedPrompt(0, {}, "hello", "", [], "").question == "hello"


# ---- keys of messages ----


def test_a_key_that_changes_no_rendering_is_counted_and_named_once() -> None:
    tokenizer = small_tokenizer(template=TEMPLATE)
    thought = {"role": "assistant", "content": "world", "reasoning_content": "hm", "weight": 1}
    named = {**HELLO, "name": "Ann", "empty": ""}
    chats = [[named, thought], [named, {**thought, "reasoning_content": "no"}], [HELLO, thought]]
    notes = unread_key_notes(tokenizer, chats, chat="auto", variables={})
    assert len(notes) == 2
    assert "`name` of 2 messages of the role user" in notes[0]
    assert notes[1].startswith("warning: `reasoning_content` of 3 messages of the role assistant")
    assert unread_key_notes(tokenizer, chats, chat=False, variables={}) == []
    reads = TEMPLATE.replace("m.content", "m.reasoning_content ~ m.name ~ m.content")
    assert unread_key_notes(small_tokenizer(template=reads), chats, chat="auto", variables={}) == []
    # thoughts are read where their turn is learnt, whatever becomes of earlier ones
    last = TEMPLATE.replace("m.content", "(m.reasoning_content if loop.last else '') ~ m.content")
    twice = [[HELLO, thought, HELLO, thought]]
    assert unread_key_notes(small_tokenizer(template=last), twice, chat="auto", variables={}) == []
