"""Finish reasons: EOS (one or several), stop strings, the limit; the tokens that ended a completion are kept."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig as LibraryConfig

from tests.generation.sampling import assert_same, make_engine, sample, script
from tests.tiny_models import TinyModels
from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.engine import Completion, eos_token_ids, unused_defaults
from tinyrl.models.batches import make_batch
from tinyrl.models.loading import load_tokenizer

EOS = 1


def spoken(
    tiny: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    *,
    stop: list[str] | None = None,
    max_new_tokens: int = 64,
    folder: Path | None = None,
    engines: tuple[str, ...] = ("hf", "fused"),
    look_every: tuple[int, ...] = (1, 4),
) -> list[Completion]:
    """One completion for each text, as if the model had produced it (and EOS after that).

    It is the same from every engine, and however often the fused one looks for finished rows.
    """
    folder = folder or tiny("llama")
    tokenizer = load_tokenizer(str(folder))
    said = []
    for name in engines:
        for every in look_every if name == "fused" else (1,):
            script(monkeypatch, [[*tokenizer(text).input_ids, EOS] for text in texts])
            engine = make_engine(folder, name, max_new_tokens=max_new_tokens, stop=stop or [])
            engine.look_every = every
            said.append(sample(engine, 1, prompts=[[3, 4]] * len(texts)))
            assert_same(said[-1], said[0])
    return [c for group in said[0] for c in group]


def test_eos_ends_a_completion_and_stays_in_it(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    short, long = spoken(tiny, monkeypatch, ["ab", "abcdef"])
    tokens = load_tokenizer(str(tiny("llama")))("abcdef").input_ids
    assert short.tokens == [*tokens[:2], EOS]
    assert long.tokens == [*tokens, EOS]
    assert short.finish_reason == long.finish_reason == "eos"
    assert len(short.logprobs) == 3
    assert short.logprobs[-1] < 0  # and is learned from: the EOS has a log-probability, and a place in the batch
    assert make_batch([[3, 4]], [short.tokens]).targets.tolist() == short.tokens


def test_a_completion_ends_at_max_new_tokens(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    cut, just = spoken(tiny, monkeypatch, ["abcdef", "abc"], max_new_tokens=4)
    assert (len(cut.tokens), cut.finish_reason) == (4, "length")
    assert (len(just.tokens), just.finish_reason) == (4, "eos")  # EOS as the last token there is room for
    (one,) = spoken(tiny, monkeypatch, ["abc"], max_new_tokens=1)
    assert (len(one.tokens), len(one.logprobs), one.finish_reason) == (1, 1, "length")


@pytest.mark.parametrize("pad_is_eos", [False, True], ids=["pad", "pad=eos"])
@pytest.mark.wide
def test_each_of_several_eos_tokens_ends(tiny: TinyModels, tmp_path: Path, pad_is_eos: bool):
    """As in chat models: the generation configuration lists more than the tokenizer's one."""
    shutil.copytree(tiny("llama", pad_is_eos=pad_is_eos), folder := tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [100, 9999, 120]}))
    engine = make_engine(folder, max_new_tokens=150)
    assert engine.eos.tolist() == [0 if pad_is_eos else 1, 100, 120]  # 9999 is outside the vocabulary
    completions = [c for group in sample(engine, 8) for c in group]
    ends = {c.tokens[-1] for c in completions if c.finish_reason == "eos"}
    assert ends == set(engine.eos.tolist())
    assert not any(set(c.tokens[:-1]) & ends for c in completions)


def test_a_model_without_a_generation_configuration_ends_at_the_tokenizers_eos(tiny: TinyModels):
    engine = make_engine(tiny("llama"))
    engine.roles.causal.generation_config = None  # pyright: ignore[reportAttributeAccessIssue]
    assert eos_token_ids(engine.roles, engine.tokenizer) == {EOS}


@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [
        ("answer: 4\nQuestion", ["\n"], "answer: 4\n"),
        ("one two three four", ["two", "four"], "one two"),
        ("one two three four", ["four", "three"], "one two three"),
        ("aaab", ["aab"], "aaab"),
        ("Ende。。。。。。weiter", ["。。。。。。"], "Ende。。。。。。"),  # six characters, eighteen tokens
        ("naïve café", ["é"], "naïve café"),
        ("x" * 40 + "STOP" + "y", ["STOP"], "x" * 40 + "STOP"),
    ],
)
@pytest.mark.wide
def test_stop_strings(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, said: str, stop: list[str], kept: str):
    """The stop string stays: the sampled tokens are those that are scored and trained."""
    (completion,) = spoken(tiny, monkeypatch, [said], stop=stop)
    assert completion.finish_reason == "stop"
    assert load_tokenizer(str(tiny("llama"))).decode(completion.tokens) == kept
    assert len(completion.logprobs) == len(completion.tokens)


def test_stop_strings_are_looked_for_in_the_completion_only(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    tokenizer = load_tokenizer(str(tiny("llama")))
    script(monkeypatch, [[*tokenizer("op and on").input_ids, EOS]])
    engine = make_engine(tiny("llama"), stop=["STOP"])
    (completion,) = sample(engine, 1, prompts=[tokenizer("ST").input_ids])[0]
    assert completion.finish_reason == "eos"


def test_stop_strings_end_only_the_row_that_says_them(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    first, second, third = spoken(tiny, monkeypatch, ["a.b", "abc", "abcd."], stop=["."], max_new_tokens=5)
    assert [c.finish_reason for c in (first, second, third)] == ["stop", "eos", "stop"]
    assert [len(c.tokens) for c in (first, second, third)] == [2, 4, 5]


def test_a_special_token_can_be_a_stop_string(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    (completion,) = spoken(tiny, monkeypatch, ["ab<pad>cd"], stop=["<pad>"])
    assert completion.finish_reason == "stop"
    assert completion.tokens[-1] == 0


def test_words_with_spaces_between_them(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """A tokenizer that joins words with spaces: the stop string spans two of its tokens."""
    folder = tiny("llama", vocabulary=("a", "b", "c", "d"))
    (completion,) = spoken(tiny, monkeypatch, ["a b c d"], folder=folder, stop=["b c"])
    assert (completion.tokens, completion.finish_reason) == ([3, 4, 5], "stop")
    assert torch.tensor(completion.logprobs).isfinite().all()


def test_what_a_generation_configuration_sets_and_sampling_ignores_is_named(tiny: TinyModels):
    model = make_engine(tiny("llama")).roles.causal
    assert unused_defaults(model, GenerationConfig()) is None
    own = {"top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "temperature": 0.7, "min_p": 0.0}
    model.generation_config = LibraryConfig(**own)
    line = unused_defaults(model, GenerationConfig(top_k=20, temperature=0.7))
    assert line is not None
    assert "top_p=0.8, repetition_penalty=1.05" in line
    assert not any(name in line for name in ("top_k", "temperature", "min_p"))
