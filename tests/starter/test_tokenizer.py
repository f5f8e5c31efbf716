"""The starter's tokenizer: what the tasks need of it, and that it is the same every time."""

import string

import pytest
from transformers import PreTrainedTokenizerFast

from examples.embedded_models.build import VOCABULARY_SIZE, build_tokenizer
from tinyrl.starter.text import language_rows


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


def test_every_letter_behind_a_space_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    for letter in string.ascii_lowercase:
        assert len(tokenizer(f" {letter}").input_ids) == 1, letter


def test_it_is_fast_small_and_tells_pad_from_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.is_fast
    assert len(tokenizer) == VOCABULARY_SIZE
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_any_text_survives_encoding_and_decoding(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in ("letters: d b a sorted: a b d", "Größe, 東京 🎬\n\ttabs  and   spaces .", "", " ,."):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_no_special_token_is_added(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer("letters: d b a sorted:").input_ids
    assert tokenizer.pad_token_id not in tokens
    assert tokenizer.eos_token_id not in tokens


def test_a_prompt_and_its_completion_are_the_tokens_of_the_whole_text(tokenizer: PreTrainedTokenizerFast) -> None:
    for row in language_rows(300, seed=5):
        parts = tokenizer(row["prompt"]).input_ids + tokenizer(row["completion"]).input_ids
        assert parts == tokenizer(row["prompt"] + row["completion"]).input_ids


def test_building_it_again_gives_the_same_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()
    assert build_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
