"""The rollout: round trip through safetensors, masks from lengths and finish reasons, truncation, duplicate prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import running
from tests.tiny_models import tiny_model
from tinyrl.config.sections import RewardConfig
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.collector import apply_length_rules, sample_and_score
from tinyrl.rollout.components import Options, SamplingParts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory):
    model = tiny_model(tmp_path_factory.mktemp("model"), "qwen2", pad_is_eos=True)
    loaded = SamplingParts(running.config("grpo", model), options=Options(device="cpu"))
    yield loaded
    loaded.close()


def collect(parts: SamplingParts, **reward: Any) -> Rollout:
    rollout = sample_and_score(parts.train_prompts[:3], parts, group_size=2, step=0)
    apply_length_rules(rollout, RewardConfig(**reward), max_new_tokens=10)
    return rollout


def test_a_rollout_is_written_whole(parts: SamplingParts, tmp_path: Path) -> None:
    """As a step without a finite gradient is: each field, whatever memory it shares."""
    rollout = collect(parts)
    rollout.old_logprobs = rollout.sampling_logprobs  # the same memory, as when sampling is exact
    save_file(rollout.to_tensors(), tmp_path / "rollout.safetensors")
    back = load_file(tmp_path / "rollout.safetensors")
    assert back["prompt_tokens"].tolist() == [token for prompt in rollout.prompt_tokens for token in prompt]
    torch.testing.assert_close(back["old_logprobs"], rollout.sampling_logprobs, rtol=0, atol=0)
    assert "ref_logprobs" not in back


def test_mask_and_lengths_agree_when_pad_is_eos(parts: SamplingParts) -> None:
    rollout = collect(parts)
    assert rollout.response_mask.sum(1).tolist() == rollout.response_lengths.tolist()
    assert rollout.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]


def test_truncated_responses_can_be_masked_or_penalised(parts: SamplingParts) -> None:
    kept = collect(parts)
    assert kept.truncated.any(), "a random model should run into max_new_tokens"
    masked = collect(parts, truncated="mask")
    assert not masked.loss_mask[masked.truncated].any()
    assert torch.equal(masked.kept, ~masked.truncated)
    assert torch.equal(masked.response_mask, kept.response_mask)  # what the policy chose is another matter
    torch.testing.assert_close(masked.rewards, kept.rewards)  # still in the group's statistics
    penalised = collect(parts, truncated="penalize")
    torch.testing.assert_close(penalised.rewards, kept.rewards - 1.0 * kept.truncated)


def test_soft_overlong_penalty(parts: SamplingParts) -> None:
    """DAPO Eq. 13 with 10 tokens at most and a buffer of 4: nothing up to 6, then down by a quarter a token to -1."""
    rollout = collect(parts)
    rollout.rewards, lengths = torch.zeros(5), torch.tensor([3, 6, 7, 9, 10])
    rollout.response_mask = torch.arange(10) < lengths.unsqueeze(1)
    rollout.finish_reasons = rollout.kept = torch.zeros(5, dtype=torch.bool)
    apply_length_rules(rollout, RewardConfig(overlong_tokens=4), max_new_tokens=10)
    assert rollout.rewards.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0]


def test_a_prompt_twice_in_a_step_gets_other_samples(parts: SamplingParts) -> None:
    prompt = parts.train_prompts[0]
    rollout = sample_and_score([prompt, prompt], parts, group_size=2, step=0)
    responses = [tuple(rollout.response(i)) for i in range(4)]
    assert len(set(responses)) == 4


def test_tokens_that_were_read_are_no_part_of_the_loss(parts: SamplingParts) -> None:
    """A tool's answer inside a response: the head lists only the other tokens, and token counts include only those."""
    rollout = collect(parts)
    rollout.response_mask[0, 1:3] = False
    rollout.kept[1] = False
    batch = rollout.batch([1, 0, 2], parts.roles)
    listed = [(row, column) for row, column in zip(batch.row.tolist(), batch.column.tolist(), strict=True)]
    lengths = rollout.response_lengths.tolist()
    assert listed == [(1, 0), *((1, t) for t in range(3, lengths[0])), *((2, t) for t in range(lengths[2]))]
    assert rollout.num_actions.tolist() == [lengths[0] - 2, *lengths[1:]]


def test_with_groups_replaces_whole_groups(parts: SamplingParts) -> None:
    rollout = collect(parts)
    other = sample_and_score(parts.train_prompts[5:7], parts, group_size=2, step=1)
    mixed = rollout.with_groups(other, [1], places=[2], group_size=2)
    assert [mixed.response(i) for i in range(4)] == [rollout.response(i) for i in range(4)]
    assert [mixed.response(i) for i in (4, 5)] == [other.response(i) for i in (2, 3)]
    assert mixed.prompt_rows.tolist() == [0, 1, 6]
    assert mixed.prompt_tokens[2] == other.prompt_tokens[1]
    torch.testing.assert_close(mixed.rewards[4:], other.rewards[2:])
