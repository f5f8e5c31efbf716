"""What a reward model reads: templates with their closing tokens, one BOS, system prompts, the end of long texts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerFast

from tests import running
from tests.faults.lookup_runs import lookup, samples
from tests.tasks.test_prompts import TEMPLATE, small_tokenizer
from tests.tiny_models import tiny_reward_model
from tinyrl.models.loading import load_tokenizer
from tinyrl.models.reward_model import SCORE_HEAD
from tinyrl.rewards.model_text import TextFormat, reward_tokens, within

AUTO, PLAIN, KIND = TextFormat(), TextFormat(chat=False), TextFormat(system_prompt="world")
THINKS = TEMPLATE.replace("assistant : {% endif %}", "assistant : <think> {% endif %}")


def read(tokenizer, prompt, completion, text_format=AUTO, room=100):
    return reward_tokens(tokenizer, prompt, completion, text_format=text_format, max_tokens=room)


HELLO = [1, 7, 8, 3, 2, 1, 0, 8]  # <s> user : hello </s> <s> assistant :
BEGUN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello "}]
OTHER = [{"role": "system", "content": "hello"}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("prompt", "answer", "text_format", "tokens"),
    [
        ("hello", "world", AUTO, [*HELLO, 4, 2]),  # the turn is closed, without the tokenizer's own <s> and </s>
        (OTHER, "hello", AUTO, [1, 0, 8, 3, 2, *HELLO, 3, 2]),
        (OTHER, "hello", KIND, [1, 0, 8, 4, 2, *HELLO, 3, 2]),  # the format's system prompt replaces the data's
        ("hello", "hello", KIND, [1, 0, 8, 4, 2, *HELLO, 3, 2]),
        (BEGUN, "world", AUTO, [*HELLO, 3, 4, 2]),  # a turn that the prompt began is one turn
    ],
)
def test_a_chat_template_closes_the_turn_and_brings_its_own_special_tokens(prompt, answer, text_format, tokens):
    for pattern in (None, "<s> $A </s>"):
        assert read(small_tokenizer(pattern=pattern, template=TEMPLATE), prompt, answer, text_format) == tokens


def test_without_a_template_the_tokenizer_s_special_tokens_stand_around_the_text_once():
    for tokenizer, text_format in (
        (small_tokenizer(pattern="<s> $A </s>"), AUTO),
        (small_tokenizer(pattern="<s> $A </s>", template=TEMPLATE), PLAIN),
    ):
        assert read(tokenizer, "hello ", "world", text_format) == [1, 3, 4, 2]
        assert read(tokenizer, "<s> hello ", "world", text_format) == [1, 3, 4, 2]
    messages = [{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}]
    assert read(small_tokenizer(), messages, "hello") == [4, 3, 3]
    assert read(small_tokenizer(), "hello ", "hello", KIND) == [4, 3, 3]
    assert read(small_tokenizer(), "", "") == [2]  # nothing at all is read as EOS


def test_a_prompt_without_room_loses_its_beginning_but_not_its_bos():
    tokenizer = small_tokenizer()
    assert within(tokenizer, [1, 3, 4], [4, 8], 5) == ([1, 3, 4], [4, 8])
    assert within(tokenizer, [1, 3, 4], [4, 8], 4) == ([1, 4], [4, 8])
    assert within(tokenizer, [3, 3, 4], [4, 8], 4) == ([3, 4], [4, 8])
    assert within(tokenizer, [1, 3, 4], [4, 8], 2) == ([1], [8])
    assert within(tokenizer, [3, 4], [4, 5, 8], 3) == ([4], [5, 8])  # some prompt there must be


def test_a_text_that_is_too_long_loses_its_beginning_but_not_its_bos():
    """The library's own truncation from the left is the second opinion for plain text."""
    tokenizer, words = small_tokenizer(pattern="<s> $A </s>"), "hello world hello hello world world"
    chat = small_tokenizer(template=TEMPLATE)
    tokenizer.truncation_side = "left"
    for room, plain, templated in (
        (4, [1, 4, 4, 2], [1, 3, 4, 2]),
        (6, [1, 3, 3, 4, 4, 2], [1, 0, 8, 3, 4, 2]),
    ):
        assert read(tokenizer, words, "", room=room) == plain
        assert tokenizer(words, truncation=True, max_length=room)["input_ids"] == plain
        assert read(chat, words, "hello world", room=room) == templated


def test_an_adapter_reads_what_the_policy_would_have_sampled():
    """Also where the prompt opened a <think> that the answer opens again."""

    def adapter(answer: str, text_format=AUTO, room=100, template=TEMPLATE) -> list[int]:
        how = {"text_format": text_format, "max_tokens": room, "adapter": True}
        return reward_tokens(small_tokenizer(template=template), "hello", answer, **how)

    prompt = HELLO
    assert AUTO.render(small_tokenizer(template=TEMPLATE), "hello").tokens == prompt
    assert adapter("world") == [*prompt, 4, 2]
    assert adapter("world", PLAIN) == [3, 4, 2]
    assert adapter("world", room=4) == [1, 8, 4, 2]
    assert adapter("<think> hello </think> world", template=THINKS) == [*prompt, 5, 3, 6, 4, 2]


def test_a_template_that_refuses_a_role_is_a_sentence():
    with pytest.raises(ValueError, match="refuses messages with the roles tool, assistant: no tools here"):
        read(small_tokenizer(template=TEMPLATE), [{"role": "tool", "content": "hello"}], "world")
    with pytest.raises(ValueError, match=r"task\.chat=true"):
        read(small_tokenizer(), "hello", "world", TextFormat(chat=True))


def test_the_format_is_kept_with_the_weights(tmp_path: Path):
    tensors, kind = {"weight": torch.zeros(1, 2)}, TextFormat(False, "Be kind.")
    for metadata, wanted in ((None, TextFormat()), (kind.metadata(), kind)):
        save_file(tensors, tmp_path / SCORE_HEAD, metadata=metadata)
        assert TextFormat.of_adapter(str(tmp_path)) == wanted
    stored = {"chat": False, "system_prompt": "Be kind."}
    config: Any = PreTrainedConfig()
    assert TextFormat.of_config(config) == TextFormat()
    config.tinyrl_text_format = stored
    assert TextFormat.of_config(config) == kind
    config.tinyrl_text_format = {"system_prompt": 3}
    with pytest.raises(ValueError, match="system_prompt"):
        TextFormat.of_config(config)


def test_a_reward_model_scores_the_whole_episode(tmp_path: Path) -> None:
    judge = tiny_reward_model(tmp_path / "judge")
    code, run, _ = running.train(lookup(reward={"model": str(judge)}, run={"num_steps": 1}), tmp_path)
    assert code == 0
    model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(judge)
    eos = load_tokenizer("lookup").eos_token
    searched = 0
    for line in (line for line in samples(run) if line["kind"] == "train"):
        episode = "".join(turn["content"] for turn in line["episode"])
        searched += any(turn["role"] == "tool" for turn in line["episode"])
        text = line["prompt"] + episode.removesuffix(str(eos))
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            score = float(model(ids).logits)
        assert line["rewards"]["model"] == line["reward"] == pytest.approx(score, abs=1e-4)
    assert searched  # some were episodes of several turns
