"""Lines of samples.jsonl and tokens.jsonl: samples as people read them.

Of an agent's episode a line has `conversations`, each what the agent sent and the policy answered: `messages` in order
and `tools`, where they are not those of the conversation before. One that begins with messages of an earlier
conversation has their number and its number, from 1, in `same_as`, instead of the messages. Long texts are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tinyrl.data.images import images_of, is_image_id
from tinyrl.generation.sample import Sample, num_episodes
from tinyrl.models.detokenizer import IncrementalDetokenizer
from tinyrl.text import excerpt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tinyrl.environments import Message
    from tinyrl.environments.environment import Dialogue, Episode
    from tinyrl.rewards.scorer import Scorer
    from tinyrl.tasks.prompts import PreparedPrompt

SAMPLES_BYTES = 90e6  # of samples.jsonl, but for the last step
EPISODE_CHARACTERS = 100_000  # of an agent's conversations in a line, about: each of their texts has an equal share
LEAST_SHARE = 200  # of a text
MOST_DEPTH = 12  # of the arguments of a call, and of the schema of a tool
TOKEN_BY_TOKEN = 8  # completions of an evaluation step in tokens.jsonl


def room_for_samples(step: int, num_steps: int) -> float:
    """Return the bytes that samples.jsonl may have after a step: a tenth at first, then in proportion."""
    return SAMPLES_BYTES * (0.1 + 0.9 * step / num_steps) if step < num_steps else float("inf")


def completion_text(sample: Sample, scorer: Scorer) -> str:
    """Return the policy's text, without what an environment replied."""
    if sample.played is None:
        return scorer.text(sample.response)
    return "\n".join(turn["content"] for turn in sample.played.transcript if turn["role"] == "assistant")


def sample_key(sample: Sample, *, prompts: Mapping[int, PreparedPrompt], group_size: int) -> dict[str, Any]:
    """Return the prompt of a sample, of prompts by their index, and its number in the group. Images are named by file
    and hash.
    """
    prompt = prompts[sample.row]
    key = {"prompt_index": sample.row, "sample": sample.episode % group_size, "prompt": prompt.text}
    images = [image.entry for image in images_of(prompt.prompt)]
    return {**key, "images": images} if images else key


def is_penalised(sample: Sample) -> bool:
    """Return whether a length penalty has changed the reward by more than the rounding of float32."""
    return sample.score - sample.reward > 1e-4


def sample_lines(
    samples: Sequence[Sample],
    texts: list[str],
    *,
    kind: str,
    prompts: Mapping[int, PreparedPrompt],
    group_size: int,
    names: list[str],
    advantages: Tensor | None = None,
    by_turn: bool = False,
    of_tokens: Tensor | None = None,
) -> list[dict[str, Any]]:
    """Make lines of samples.jsonl, without their step, of the samples whose texts are given; advantages (B,). by_turn:
    with reward and advantage of each turn (grpo.credit=turn); of_tokens (B, T): the advantages of tokens, of which a
    turn's all have the same.
    """
    return [
        {
            "kind": kind,
            **sample_key(sample, prompts=prompts, group_size=group_size),
            "completion": text,
            **({} if sample.played is None else _episode_fields(sample.played)),
            "rewards": dict(zip(names, sample.scores, strict=True)),
            "reward": sample.reward,
            **({"score": sample.score} if is_penalised(sample) else {}),
            "advantage": None if advantages is None else float(advantages[row]),
            **(_turn_fields(sample.played, of_tokens, row) if by_turn and sample.played is not None else {}),
            "finish_reason": sample.finish,
        }
        for row, (sample, text) in enumerate(zip(samples, texts, strict=False))
    ]


# ---- lines of tokens.jsonl: completions token by token, as the update saw them ----


def _episode_fields(episode: Episode) -> dict[str, Any]:
    """Return the transcript that rewards judge, and an agent's conversations."""
    if episode.dialogues is None:
        return {"episode": episode.transcript}
    return {"episode": episode.transcript, "conversations": conversation_lines(episode.dialogues)}


def _turn_fields(episode: Episode, of_tokens: Tensor | None, row: int) -> dict[str, Any]:
    """Return each turn's reward from the environment, and its advantage if there are some; of_tokens (B, T)."""
    turns = list[dict[str, Any]]()
    for end, reward in zip(episode.turn_ends, episode.turn_rewards, strict=True):
        advantage = None if of_tokens is None else float(of_tokens[row, end])
        turns.append({"reward": reward, "advantage": advantage})
    return {"turns": turns}


def conversation_lines(dialogues: Sequence[Dialogue]) -> list[dict[str, Any]]:
    """Return the conversations of an agent's episode for a line of samples.jsonl. A harness that edits its history
    begins a conversation with each call, so messages that an earlier one begins with are not written again.
    """
    lines = list[dict[str, Any]]()
    tools = list[Any]()
    for number, dialogue in enumerate(dialogues):
        line = dict[str, Any]()
        if dialogue.tools != tools:
            tools = dialogue.tools
            line["tools"] = tools
        shared = [_common_start(earlier.messages, dialogue.messages) for earlier in dialogues[:number]]
        most = max(shared, default=0)
        if most:
            line["same_as"] = {"conversation": 1 + shared.index(most), "messages": most}
        lines.append({**line, "messages": dialogue.messages[most:]})
    count = sum(len(line["messages"]) for line in lines)
    share = max(LEAST_SHARE, EPISODE_CHARACTERS // max(1, count))
    return [_cut(line, share) for line in lines]


def _common_start(first: list[Message], second: list[Message]) -> int:
    """Count the messages that both begin with."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _cut(value: Any, most: int, *, depth: int = 0) -> Any:
    """Cut the texts in a JSON value in the middle, to about `most` characters each, and what is too deep."""
    if isinstance(value, str):
        text = excerpt(value, most, lines=most)
        note = f"\n... {text.omitted:,} characters left out ...\n"
        return f"{text.head}{note}{text.tail}" if text.omitted else value
    if not isinstance(value, dict | list):
        return value
    if depth > MOST_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {key: _cut(inner, most, depth=depth + 1) for key, inner in value.items()}
    return [_cut(inner, most, depth=depth + 1) for inner in value]


def shown_samples(samples: list[Sample], *, group_size: int) -> list[int]:
    """Choose those for tokens.jsonl: of each prompt those with highest and lowest reward, then others in the loss.
    Return their places.
    """
    first = dict[int, None]()
    for start in range(0, num_episodes(samples), group_size):
        places = range(start, min(start + group_size, len(samples)))
        group = [place for place in places if samples[place].in_loss]
        if group:
            first[max(group, key=lambda place: samples[place].reward)] = None
            first[min(group, key=lambda place: samples[place].reward)] = None
    others = [place for place, sample in enumerate(samples) if sample.in_loss and place not in first]
    return [*first, *others][:TOKEN_BY_TOKEN]


@dataclass(frozen=True)
class TokenColumns:
    """Numbers of each token (B, T), under the names that tokens.jsonl has for them: its advantage, its log-probability
    before the update (`old`), under the reference, under the teacher and after the update (`new`), its value and
    reward. None: this run has no such.
    """

    advantage: Tensor
    old: Tensor
    ref: Tensor | None
    value: Tensor | None
    teacher: Tensor | None
    reward: Tensor
    new: Tensor


def token_lines(
    samples: list[Sample],
    columns: TokenColumns,
    *,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Mapping[int, PreparedPrompt],
    group_size: int,
) -> Iterator[dict[str, Any]]:
    """Make lines of tokens.jsonl: each token with its numbers. Tokens that were only read have none of these."""
    by_name: dict[str, Tensor | None] = {**vars(columns)}
    for row, sample in enumerate(samples):
        tokens = sample.response
        before = [token for token in sample.prompt[-1:] if not is_image_id(token)]
        numbers = {name: None if x is None else x[row].tolist() for name, x in by_name.items()}
        yield {
            "kind": "train",
            **sample_key(sample, prompts=prompts, group_size=group_size),
            "reward": sample.reward,
            "tokens": [
                {"piece": piece, "chosen": sample.mask[t]}
                | {name: round(column[t], 3) if column and sample.mask[t] else None for name, column in numbers.items()}
                for t, piece in enumerate(pieces(tokenizer, tokens, before=before))
            ],
        }


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int], *, before: list[int]) -> list[str]:
    """Return the text that each token adds behind `before`; a character of several tokens is the last one's."""
    text = IncrementalDetokenizer(tokenizer, before=before, clean_up_tokenization_spaces=False)
    return [text.add([token], at_end=count == len(tokens)) for count, token in enumerate(tokens, 1)]
