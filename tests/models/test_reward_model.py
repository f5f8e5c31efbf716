"""Reward models of their own and on the shared base: which score, of which text, whatever else is in the batch."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaForSequenceClassification,
)

from tests import running
from tests.models.building import CPU, a_batch, every_tensor, full_roles, logprobs, lora_roles, stir
from tests.tiny_models import TinyModels, tiny_tokenizer
from tests.training.rows import loaded
from tinyrl.models.batch import batch_of, examples
from tinyrl.models.build import attach_reward_adapter
from tinyrl.models.loading import load_tokenizer
from tinyrl.models.lora import save_adapter
from tinyrl.models.micro_batches import MicroBatches
from tinyrl.models.reading import is_reward_adapter
from tinyrl.models.reward_model import SCORE_HEAD, SequenceRewardModel, load_reward_model
from tinyrl.rewards.model_text import TextFormat, reward_tokens

TEXTS = ["a", "a longer text than the others", "mid size", "", "the end<eos>", "<eos>"]


def load(folder: Path, label: int | str | None = None) -> SequenceRewardModel:
    return load_reward_model(str(folder), dtype=torch.float32, label=label, device=CPU)


def scores_of(model: SequenceRewardModel, texts: list[str], budget: int = 100) -> list[float]:
    """Scores of plain texts."""
    tokens = [reward_tokens(model.tokenizer, text, "", text_format=TextFormat(), max_tokens=512) for text in texts]
    return model.reward_scores(tokens, micro_batches=MicroBatches(CPU, budget))


def by_hand(folder: Path, text: str, label: int) -> float:
    """The score of one text by itself: the last token's state times the head's row."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), load_tokenizer(str(folder))
    ids = tokenizer(text).input_ids or [tokenizer.eos_token_id]
    with torch.no_grad():
        state = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    return (state @ model.score.weight[label]).item()


@pytest.mark.parametrize(("kind", "pad_is_eos"), [("gpt2", True), ("gemma2", False)])
def test_the_score_is_that_of_the_last_token(tiny: TinyModels, kind: str, pad_is_eos: bool):
    """Texts that end in EOS are scored there, where the library would take EOS for padding when pad == eos."""
    folder = tiny.reward(kind, pad_is_eos=pad_is_eos)
    model, expected = load(folder), [by_hand(folder, text, 0) for text in TEXTS]
    for budget in (1, 40, 10_000):  # alone, a few together, all
        assert scores_of(model, TEXTS, budget) == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) == len(TEXTS) - 1  # the empty text is read as EOS


def test_tokens_without_an_embedding_are_left_out(tiny: TinyModels):
    """As those of images. Of a row that has no others the first token of the vocabulary is scored."""
    model = load(tiny.reward("gpt2"))
    last = model.num_ids - 1
    rows = [[5, last + 1, last], [5, last], [last + 1], [0]]
    scores = model.reward_scores(rows, micro_batches=MicroBatches(CPU, 100))
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert scores[2] == pytest.approx(scores[3], abs=1e-6)


def test_an_encoder_without_eos_is_a_reward_model_too(tmp_path: Path):
    tokenizer = tiny_tokenizer(vocabulary=("good", "bad"))
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    config.num_labels = 1
    torch.manual_seed(0)
    encoder = BertForSequenceClassification(config).eval()
    nn.init.normal_(encoder.classifier.weight)
    encoder.save_pretrained(tmp_path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    scores = scores_of(load(tmp_path), ["good good bad", "bad"])
    with torch.no_grad():
        expected = [encoder(input_ids=torch.tensor([ids])).logits.item() for ids in ([3, 3, 4], [4])]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_one_label_of_several_and_a_language_model_has_none(tiny: TinyModels):
    folder = tiny.reward("llama", labels=("bad", "good", "best"))
    for label, index in ((1, 1), ("best", 2), (0, 0)):
        scores = scores_of(load(folder, label), ["some text"])
        assert scores == pytest.approx([by_hand(folder, "some text", index)], abs=1e-5)
    for wrong in (None, "Good", 3, -1):
        with pytest.raises(ValueError, match=f"reward.model_label={wrong!r} is not one of"):
            load(folder, wrong)
    with pytest.raises(ValueError, match=r"is not a reward model: its weights have no score.weight"):
        load(tiny("llama"))


def test_a_score_that_its_head_does_not_give_is_refused(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    """As a reward model and as a critic, which both take the head alone."""
    folder = str(tiny.reward("llama"))
    forward = LlamaForSequenceClassification.forward

    def threefold(self: Any, *args: Any, **named: Any) -> Any:
        output: Any = forward(self, *args, **named)
        output.logits = output.logits * 3
        return output

    settings = {
        "reward": running.config("grpo", tiny("llama"), reward={"functions": [], "model": folder}),
        "critic": running.config("ppo", tiny("llama"), critic={"path": folder, "kind": "separate"}),
    }
    for config in settings.values():
        loaded(config).close()
    monkeypatch.setattr(LlamaForSequenceClassification, "forward", threefold)
    for config in settings.values():
        with pytest.raises(ValueError, match="LlamaForSequenceClassification changes its logits"):
            loaded(config)


def test_a_padding_token_among_the_compared_ones_changes_no_score(tiny: TinyModels, tmp_path: Path):
    """The library scores a text at its last token that is no padding."""
    shutil.copytree(tiny.reward("llama"), tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "pad_token_id": 8}))
    assert load(tmp_path)


# ---- an adapter and a head on the shared base ----


def test_an_adapter_and_head_score_on_the_shared_base(tiny: TinyModels, tmp_path: Path):
    made = lora_roles(tiny("llama"))  # as `tinyrl train reward` leaves it: adapter files and a head
    made.train_score_head()
    stir(made.parameters["policy"])
    assert made.adapters.peft is not None
    assert made.score_head is not None
    save_adapter(made.adapters.peft, "default", tmp_path)
    save_file({k: v.detach() for k, v in made.score_head.state_dict().items()}, tmp_path / SCORE_HEAD)
    assert is_reward_adapter(str(tmp_path))
    roles = lora_roles(tiny("llama"), targets=["q_proj"])
    stir(roles.parameters["policy"], seed=3)
    policy, trainable = logprobs(roles, "policy"), {n for n, t in every_tensor(roles).items() if t.requires_grad}
    attach_reward_adapter(roles, str(tmp_path))
    with torch.no_grad(), made.acting("policy"):
        expected = made.reward_scores(a_batch())
    with torch.no_grad(), roles.acting("reward"):
        assert torch.equal(roles.reward_scores(a_batch()), expected)
        alone = [
            roles.reward_scores(batch_of(examples([p], [r])))[0] for p, r in (([2, 3, 4], [5, 6, 7]), ([9], [8, 10]))
        ]
    torch.testing.assert_close(torch.stack(alone), expected, atol=1e-5, rtol=0)
    assert torch.equal(logprobs(roles, "policy"), policy)
    assert {n for n, t in every_tensor(roles).items() if t.requires_grad} == trainable
    for other, message in (
        (full_roles(tiny("llama")), r"needs lora\.enabled=true"),
        (lora_roles(tiny("gpt2")), "does not fit this base model"),
    ):
        with pytest.raises(ValueError, match=message):
            attach_reward_adapter(other, str(tmp_path))
    (tmp_path / SCORE_HEAD).unlink()
    with pytest.raises(ValueError, match=r"score_head\.safetensors is missing, so this adapter is a policy"):
        attach_reward_adapter(lora_roles(tiny("llama")), str(tmp_path))
