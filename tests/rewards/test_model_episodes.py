"""A reward model on real episodes: it reads the prompt and all that was written and read after it, once."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests import running
from tests.faults.lookup_runs import lookup, samples
from tests.tiny_models import tiny_reward_model
from tinyrl.models.loading import load_tokenizer


def test_a_reward_model_scores_the_whole_episode(tmp_path: Path) -> None:
    judge = tiny_reward_model(tmp_path / "judge")
    reward = {"model": str(judge)}
    code, run, _ = running.train(lookup(reward=reward, run={"num_steps": 1}), tmp_path)
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
        assert abs(line["rewards"]["model"] - score) < 1e-4
        assert abs(line["reward"] - score) < 1e-4
    assert searched  # some were episodes of several turns
