"""Tokens without a row in the embedding: refused where text holds them."""

import pytest
import torch

from tests.tiny_models import TinyModels
from tinyrl.models.loading import check_ids, check_vocabulary, load_causal_lm, load_tokenizer


def test_a_special_token_without_a_row_is_refused_where_a_row_holds_it(tiny: TinyModels):
    """Gemma-3 1B has such a token, for images; a text model's rows do not hold it."""
    model = load_causal_lm(str(tiny("llama")), dtype=torch.float32)
    tokenizer = load_tokenizer(str(tiny("llama")))
    assert len(tokenizer) == 258
    check_ids([[0, 257], []], tokenizer, model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_vocabulary(tokenizer, model, path="a")
    with pytest.raises(ValueError, match=r"row 2 holds '<image>' \(token 258\), .* no embedding: it has 258 rows"):
        check_ids([[0, 257], [5, 258]], tokenizer, model)


def test_an_end_without_a_row_is_refused(tiny: TinyModels):
    tokenizer = load_tokenizer(str(tiny("llama")))
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ValueError, match=r"259 tokens and the embedding of 'a' 258 rows: .* '<end>' \(token 258\)"):
        check_vocabulary(tokenizer, load_causal_lm(str(tiny("llama")), dtype=torch.float32), path="a")
