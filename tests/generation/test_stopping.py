"""Finish reasons: EOS (one or several), stop strings, the limit; the tokens that ended a completion are kept."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.generation.sampling import make_engine, sample
from tests.tiny_models import TinyModels
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.models.loading import load_tokenizer

EOS = 1


@pytest.mark.parametrize("look_every", [1, 4])
@pytest.mark.parametrize(
    ("said", "stop", "limit", "kept", "reason"),
    [
        ("ab", [], 64, "ab<eos>", "eos"),
        ("abcdefghij", [], 4, "abcd", "length"),
        ("abc", [], 4, "abc<eos>", "eos"),  # as the last token there is room for
        ("one two three four", ["two", "four"], 64, "one two", "stop"),
        ("aaab", ["aab"], 64, "aaab", "stop"),
        ("aaab", ["aab"], 4, "aaab", "stop"),
        ("Ende。。。。。。weiter", ["。。。。。。"], 64, "Ende。。。。。。", "stop"),  # six characters, eighteen tokens
        ("x1234567890123456789012y", ["1234567890123456789012"], 64, "x1234567890123456789012", "stop"),
        ("OP and on", ["STOP"], 64, "OP and on<eos>", "eos"),  # of which the prompt has the first half
    ],
)
def test_a_sequence_ends_at_the_first_of_its_ends(
    tiny: TinyModels, said: str, stop: list[str], limit: int, kept: str, reason: str, look_every: int
):
    """However many tokens come at a time."""
    tokenizer, listened = load_tokenizer(str(tiny("llama"))), list[int]()
    prompt, tokens = tokenizer("ST").input_ids, [*tokenizer(said).input_ids, EOS, 3, 3]
    sequence = DecodedSequence(Request(prompt, np.uint64(0), limit, stop=stop, on_tokens=listened.extend))
    for at in range(0, len(tokens), look_every):
        part = tokens[at : at + look_every]
        if not sequence.over:
            sequence.append(part, [-float(at)] * len(part), eos={EOS}, tokenizer=tokenizer)
    sample = sequence.sample()
    assert (tokenizer.decode(sample.response), sample.finish) == (kept, reason)
    assert sample.response == listened == tokens[: len(sample.logprobs)]


def test_each_of_several_eos_tokens_ends(tiny: TinyModels, tmp_path: Path):
    """As in chat models: the generation configuration lists more than the tokenizer's one."""
    shutil.copytree(tiny("llama", pad_is_eos=True), folder := tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [100, 9999, 120]}))
    engine = make_engine(folder, "fused", max_new_tokens=150)
    assert engine.eos == {0, 100, 120}  # 9999 is outside the vocabulary
    completions = [c for group in sample(engine, 8) for c in group]
    assert {c.response[-1] for c in completions if c.finish == "eos"} == engine.eos
    assert not any(set(c.response[:-1]) & engine.eos for c in completions)
