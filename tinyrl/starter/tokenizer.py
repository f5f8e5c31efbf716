"""The starter's tokenizer: byte-level BPE learnt from the language model's corpus, so any text round-trips.

A space and a letter are one token, as a test checks: the sorting task needs that.
"""

from typing import TYPE_CHECKING

from tinyrl.starter.text import language_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 768
PAD, EOS = "<pad>", "<eos>"
MAX_LENGTH = 256
_CORPUS_ROWS = 20_000


def build_tokenizer(seed: int = 0) -> "PreTrainedTokenizerFast":
    """Learn the starter's tokenizer; the same seed gives the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (row["prompt"] + row["completion"] for row in language_rows(_CORPUS_ROWS, seed))
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
