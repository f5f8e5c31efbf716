"""Finish reasons: EOS (one or several), stop strings, the limit; the tokens that ended a completion are kept."""

import json
import shutil
from pathlib import Path

import pytest

from tests.generation.sampling import make_engine, sample, script
from tests.tiny_models import TinyModels
from tinyrl.generation.engine import Completion
from tinyrl.models.batches import make_batch
from tinyrl.models.loading import load_tokenizer

EOS = 1


def ends(groups: list[list[Completion]]) -> list[tuple[list[int], str]]:
    return [(c.tokens, c.finish_reason) for group in groups for c in group]


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
            said.append(sample(engine, 1, prompts=[[3, 4, i] for i in range(len(texts))]))
            assert ends(said[-1]) == ends(said[0])
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


def test_each_of_several_eos_tokens_ends(tiny: TinyModels, tmp_path: Path):
    """As in chat models: the generation configuration lists more than the tokenizer's one."""
    shutil.copytree(tiny("llama", pad_is_eos=True), folder := tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [100, 9999, 120]}))
    engine = make_engine(folder, max_new_tokens=150)
    assert engine.eos == {0, 100, 120}  # 9999 is outside the vocabulary
    completions = [c for group in sample(engine, 8) for c in group]
    ends = {c.tokens[-1] for c in completions if c.finish_reason == "eos"}
    assert ends == engine.eos
    assert not any(set(c.tokens[:-1]) & ends for c in completions)


@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [
        ("answer: 4\nQuestion", ["\n"], "answer: 4\n"),
        ("one two three four", ["two", "four"], "one two"),
        ("aaab", ["aab"], "aaab"),
        ("Ende。。。。。。weiter", ["。。。。。。"], "Ende。。。。。。"),  # six characters, eighteen tokens
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
    (completion,) = sample(engine, 1, prompts=[[*tokenizer("ST").input_ids, 0]])[0]
    assert completion.finish_reason == "eos"
