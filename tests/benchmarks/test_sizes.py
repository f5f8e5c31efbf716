"""The benchmarks' models, prompts and rewards: anyone can make them, and they are what the results say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.rewards import even_words, sorted_letters
from benchmarks.work import EOS, SIZES, build, prompt_texts
from tinyrl.models.loading import load_tokenizer


def test_a_built_model_ends_completions_and_reads_its_prompts(tmp_path: Path):
    """After the lessons EOS is much likelier than one of 512 words (1/60 where they were learnt to the end)."""
    build(SIZES["xs"], tmp_path / "xs")
    build(replace(SIZES["xs"], early_ends=False), tmp_path / "full")
    sizes = {name: shape.layers * sum(a * b for a, b in shape.matrices) for name, shape in SIZES.items()}
    heads = {name: shape.vocabulary * shape.hidden for name, shape in SIZES.items()}
    assert [sizes[name] + heads[name] for name in ("s", "m")] == [6_946_816, 32_505_856]
    tokenizer, texts = load_tokenizer(str(tmp_path / "xs")), prompt_texts(SIZES["xs"], 3)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    assert [len(tokens) for tokens in ids] == [len(text.split()) for text in texts]  # pyright: ignore[reportArgumentType]
    assert [tokenizer.decode(tokens) for tokens in ids] == texts
    chances = {}
    for name in ("xs", "full"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            chances[name] = model(input_ids=torch.tensor(ids[:1])).logits.softmax(-1)[0, :, EOS].mean().item()
    assert chances["xs"] > 3 / 512
    assert chances["full"] == pytest.approx(1 / 512, rel=0.5)


def test_rewards_by_hand():
    completions = ["w4 w5 w6", "", "w7", "w10 <eos> w8 w2"]
    assert even_words([""] * 4, completions) == [2 / 3, 0.0, 0.0, 0.75]
    assert sorted_letters([""] * 3, [" a b d", " b a d", ""], answer=["abd"] * 3) == [1.0, 0.0, 0.0]
