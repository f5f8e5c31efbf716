"""Whether a tokenizer and a model's embedding go together: a token without a row would be an error of indices later.

A few models (Gemma-3 1B) have special tokens without a row, which ordinary text never holds: they may stay, and only
rows that do hold one are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tinyrl.text import shortened


def embedding_rows(model: PreTrainedModel | PeftModel) -> int:
    """How many token ids a model can read."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, *, path: str) -> None:
    """Raise ValueError when EOS, or a token of ordinary text, has no row in the model's embedding."""
    rows, eos = embedding_rows(model), tokenizer.eos_token_id
    without = {str(tokenizer.eos_token): eos} if isinstance(eos, int) and eos >= rows else {}
    if len(tokenizer) > rows:
        added = tokenizer.added_tokens_decoder
        without |= {token: i for token, i in tokenizer.get_vocab().items() if i >= rows and i not in added}
    for token, number in without.items():
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens and the embedding of {path!r} {rows} rows: "
            f"there is none for {shortened(token)!r} (token {number})"
        )


def check_ids(sequences: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise ValueError for the first token of some rows that has no row in the model's embedding."""
    rows = embedding_rows(model)
    for number, ids in enumerate(sequences, start=1):
        highest = max(ids, default=0)
        if highest >= rows:
            raise ValueError(
                f"row {number} holds {shortened(str(tokenizer.convert_ids_to_tokens(highest)))!r} (token "
                f"{highest}), for which the model has no embedding: it has {rows} rows"
            )
