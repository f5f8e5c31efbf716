"""Learning from a teacher: what it says of a rollout's tokens, and the distance of the policy to it.

A teacher reads each response behind its prompt, or behind a prompt that says more (teacher.hint), as the student of
self-distillation has it (OPSD, 2601.18734; SDPO, 2601.20802): the same model then knows what it is to learn. Of a
teacher on this machine its hidden states are kept, which give the whole distribution; of others, and with
teacher.top_k, the likeliest tokens. Tokens that an environment said are no response of the policy, and not learnt.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.masking import masked_mean
from tinyrl.data.readers import Row
from tinyrl.data.rows import batch_indices
from tinyrl.errors import Interrupted
from tinyrl.generation.server_client import (
    ROUNDED,
    AnswerPart,
    Models,
    ServerClient,
    ServerError,
    check_tokenizer,
    read_as,
)
from tinyrl.models.batches import SequenceBatch, response_states
from tinyrl.models.device import to_device
from tinyrl.models.distances import distances, top_k_of
from tinyrl.models.logprobs import Head, token_logprobs
from tinyrl.models.micro_batches import RowSizes, Work, own_rows
from tinyrl.models.roles import Role, Roles
from tinyrl.rollout.buffer import Rollout
from tinyrl.rollout.stored import StoredRows, vocabulary_digest
from tinyrl.tasks import FULL_MARKS
from tinyrl.tasks.prompts import PreparedPrompt
from tinyrl.text import did_you_mean, listed

if TYPE_CHECKING:
    from tinyrl.trainers.on_policy import OnPolicyTrainer

SERVER_TOP_K = 20  # what vLLM allows where nobody has set its --max-logprobs
REQUESTS = 64  # to a server, under way at a time
QUARTERS = ("teacher/kl_1", "teacher/kl_2", "teacher/kl_3", "teacher/kl_4")  # of a response
CORRECT, WHY = "correct", "why"  # in a hint: another right response of the group; what reward or environment said


class TokenLogprob(AnswerPart):
    logprob: Annotated[float, Field(le=ROUNDED)]


class ReadPrompt(AnswerPart):
    """Of each token that a server read its likeliest places there, by id, and its own; None: of the first."""

    prompt_logprobs: list[dict[str, TokenLogprob] | None]


class PromptLogprobs(AnswerPart):
    """The answer of /v1/completions with prompt_logprobs."""

    choices: Annotated[list[ReadPrompt], Field(min_length=1, max_length=1)]


class Teacher:
    """What reads a rollout: a subclass says of each token that counts how likely it was, and what else was likely."""

    role: Role | None = None  # whose models are on this machine

    def __init__(self, trainer: OnPolicyTrainer) -> None:
        self.trainer, self.config = trainer, trainer.config.teacher
        self.temperature = trainer.config.generation.temperature
        self.hint = Hint(self.config.hint, trainer.train_prompts) if self.config.hint else None

    @property
    def head(self) -> Head | None:
        """The head of a teacher that says its hidden states."""
        return None

    def start(self) -> None:
        """Check what can only be checked now, before step 1. Raises ValueError."""

    def read(self, rollout: Rollout) -> None:
        """Fill in what the teacher says of the tokens that count, by the processes of the trainer's world.

        With a hint that some rows have nothing for (no other response was right), these rows are left out of the loss.
        """
        prompts = [rollout.prompt_tokens[p] for p in rollout.prompt_index.tolist()]
        if self.hint is not None:
            hinted = self.hint.prompts(rollout, self.trainer)
            rollout.kept = rollout.kept & torch.tensor([tokens is not None for tokens in hinted])
            prompts = [tokens or plain for tokens, plain in zip(hinted, prompts, strict=True)]
        responses = [rollout.response(row) for row in range(len(rollout))]
        masks = [m[: len(r)] for m, r in zip(rollout.loss_mask.tolist(), responses, strict=True)]
        rollout.teacher_logprobs = torch.zeros_like(rollout.sampling_logprobs)
        rollout.teacher_logprobs[rollout.loss_mask] = self.say(rollout, prompts, responses, masks)

    def say(
        self, rollout: Rollout, prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]
    ) -> Tensor:
        """(M,) its log-probability of each of the M tokens under the masks; fills in the rollout's other fields."""
        raise NotImplementedError


class LocalTeacher(Teacher):
    """A teacher on this machine, one of the policy's roles: it says its hidden states, or its likeliest tokens."""

    def __init__(self, trainer: OnPolicyTrainer) -> None:
        super().__init__(trainer)
        self.role = LOCAL[self.config.kind]
        words, top_k = len(self.head.weight), self.config.top_k
        if top_k is not None and top_k > words:
            raise ValueError(f"teacher.top_k={top_k} is more than the vocabulary of {words:,} tokens")

    @property
    def head(self) -> Head:
        assert self.role is not None
        return shared_head(self.trainer.roles, self.role)

    def say(
        self, rollout: Rollout, prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]
    ) -> Tensor:
        trainer, roles, role, top_k = self.trainer, self.trainer.roles, self.role, self.config.top_k
        assert role is not None
        count, device = int(rollout.loss_mask.sum()), roles.device
        of_tokens = torch.zeros(count, device=device)
        if top_k is None:
            said = [torch.zeros(count, roles.hidden_size(role), dtype=roles.dtype, device=device)]
        else:
            said = [torch.zeros(count, top_k, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32)]

        def run(rows: list[int]) -> None:
            batch = roles.batch([prompts[i] for i in rows], [responses[i] for i in rows], [masks[i] for i in rows])
            states, where = response_states(roles.backbone(role), batch), to_device(rollout.places(rows), device)
            of_tokens[where] = token_logprobs(states, self.head, targets=batch.targets, temperature=self.temperature)[0]
            if top_k is None:
                said[0][where] = states.to(said[0].dtype)
            else:
                likeliest = top_k_of(states, self.head, top_k=top_k, temperature=self.temperature)
                said[0][where], said[1][where] = likeliest.ids, likeliest.logprobs

        sizes = RowSizes.of(prompts, rollout.response_lengths.tolist(), packed=roles.packs)
        with torch.no_grad(), roles.acting(role), trainer.accelerator.autocast():
            trainer.micro_batches.run(Work(sizes, run, own_rows(sizes, None, trainer.world)))
        trainer.world.sum(of_tokens, *said)
        if top_k is None:
            rollout.teacher_states = said[0].cpu()
        else:
            rollout.teacher_top_ids, rollout.teacher_top_logprobs = said[0].cpu(), said[1].cpu()
        return of_tokens.cpu()


def shared_head(roles: Roles, role: Role) -> Head:
    """A role's head, of as many tokens as the policy's: what a larger vocabulary has beyond is padding of no text.
    Raises ValueError for a smaller one.
    """
    ours, theirs = len(roles.head("policy").weight), roles.head(role)
    if len(theirs.weight) < ours:
        raise ValueError(f"the teacher's head has {len(theirs.weight):,} tokens, and the policy's {ours:,}")
    if len(theirs.weight) == ours:
        return theirs
    return replace(theirs, weight=theirs.weight[:ours], bias=None if theirs.bias is None else theirs.bias[:ours])


class ServerTeacher(Teacher):
    """vLLM at an address: it says the likeliest tokens (`prompt_logprobs`), at temperature 1."""

    def start(self) -> None:
        self.vocabulary = len(self.trainer.roles.head("policy").weight)
        self.client = ServerClient(str(self.config.path), timeout_s=self.config.timeout_s)
        try:
            models = read_as(Models, self.client.get("/v1/models"), server=self.client, path="/v1/models")
            self.model = models.data[0].id
            check_tokenizer(self.client, self.model, self.trainer.tokenizer)
        except ServerError as error:
            raise ValueError(f"teacher.path: {error}") from None

    def say(
        self, rollout: Rollout, prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]
    ) -> Tensor:
        top_k, world = self.config.top_k or SERVER_TOP_K, self.trainer.world
        own = world.own(range(len(prompts)))
        asked = [{"model": self.model, "prompt": prompts[i] + responses[i], "max_tokens": 1, "temperature": 0.0,
                  "prompt_logprobs": top_k} for i in own]  # fmt: skip
        try:
            answers = zip(self.client.ask("POST", "/v1/completions", asked, most=REQUESTS), own, strict=True)
            read = [self._read(answer, prompts[i], responses[i], masks[i], top_k) for answer, i in answers]
        except ServerError as error:  # the run can be resumed where it answers again
            raise Interrupted(f"teacher.path: {error}") from error
        merged = world.merge(read)
        rollout.teacher_top_ids = torch.tensor([ids for row in merged for ids, _, _ in row], dtype=torch.int32)
        rollout.teacher_top_logprobs = torch.tensor([logprobs for row in merged for _, logprobs, _ in row])
        return torch.tensor([of_token for row in merged for _, _, of_token in row])

    def _read(
        self, answer: Any, prompt: list[int], response: list[int], mask: list[bool], top_k: int
    ) -> list[tuple[list[int], list[float], float]]:
        """Of each token that counts (ids, their log-probabilities, its own), likeliest first."""
        said = read_as(PromptLogprobs, answer, server=self.client, path="/v1/completions").choices[0].prompt_logprobs
        if len(said) != len(prompt) + len(response):
            raise ServerError(f"{self.client.name} said {len(said)} of {len(prompt) + len(response)} tokens")
        found = []
        for token, counts, of_place in zip(response, mask, said[len(prompt) :], strict=True):
            if not counts:
                continue
            of_place = of_place or {}
            likeliest = sorted(((one.logprob, int(i)) for i, one in of_place.items()), reverse=True)[:top_k]
            if str(token) not in of_place or len(likeliest) < top_k:
                raise ServerError(f"{self.client.name} left out log-probabilities of token {token}")
            if not all(0 <= i < self.vocabulary for _, i in likeliest):
                raise ServerError(f"{self.client.name} names tokens beyond the vocabulary of {self.vocabulary:,}")
            found.append(([i for _, i in likeliest], [p for p, _ in likeliest], of_place[str(token)].logprob))
        return found


class StoredTeacher(Teacher):
    """What a teacher said of given responses, in a folder (rollout/stored.py): nothing is sampled."""

    def __init__(self, trainer: OnPolicyTrainer) -> None:
        super().__init__(trainer)
        self.stored = StoredRows(Path(str(self.config.path)).expanduser())
        about = self.stored.manifest
        if about.vocabulary != vocabulary_digest(trainer.tokenizer.get_vocab()):
            raise ValueError(f"teacher.path={self.config.path} was written for another tokenizer, by {about.teacher}")
        if about.temperature != self.temperature:
            raise ValueError(
                f"teacher.path={self.config.path} holds probabilities at a temperature of {about.temperature:g}; "
                f"generation.temperature is {self.temperature:g}"
            )

    def rows(self, step: int) -> Rollout:
        """The responses of a step, read already: a function of (seed, step)."""
        config, count = self.trainer.config, len(self.stored)
        size = min(config.on_policy.num_prompts, count)
        return self.stored.take(
            batch_indices(config.run.seed, step, num_prompts=size, num_rows=count),
            num_rewards=len(self.trainer.scorer.names),
        )

    def read(self, rollout: Rollout) -> None:
        assert rollout.teacher_logprobs is not None


LOCAL: dict[str, Role] = {"self": "policy", "start": "reference", "adapter": "teacher", "model": "teacher"}


TEACHERS: dict[str, type[Teacher]] = {
    **dict.fromkeys(LOCAL, LocalTeacher),
    "server": ServerTeacher,
    "stored": StoredTeacher,
}


def teacher_of(trainer: OnPolicyTrainer) -> Teacher:
    return TEACHERS[trainer.config.teacher.kind](trainer)


class Hint:
    """A text with {columns} of a row, behind its prompt, that only the teacher reads. {correct} is another response of
    the group with full marks, {why} what rewards said beside their scores, or the environment's last words. Raises
    ValueError for a column that no row has.
    """

    def __init__(self, text: str, prompts: Sequence[PreparedPrompt]) -> None:
        self.text = text
        self.names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        for name in self.names:
            if name not in (CORRECT, WHY) and not any(name in p.row for p in prompts):
                there = list(prompts[0].row)
                raise ValueError(
                    f"teacher.hint has {{{name}}}, and no row has such a column.{did_you_mean(name, there)} "
                    f"Columns: {listed([*there, CORRECT, WHY])}"
                )

    def prompts(self, rollout: Rollout, trainer: OnPolicyTrainer) -> list[list[int] | None]:
        """Of each row the prompt that the teacher reads; None where the hint has nothing to say."""
        by_index = {prompt.index: prompt.row for prompt in trainer.train_prompts}
        rows = [by_index[int(rollout.prompt_rows[p])] for p in rollout.prompt_index.tolist()]
        said = [self._said(rollout, place, row, trainer) for place, row in enumerate(rows)]
        hinted = [place for place, text in enumerate(said) if text is not None]
        prepared = trainer.prepared([rows[place] for place in hinted], openings=[said[place] for place in hinted])
        room = trainer.positions - trainer.longest_response  # a prompt that a long hint leaves no room is not read
        by_place = {hinted[prompt.index]: prompt.tokens for prompt in prepared if len(prompt.tokens) <= room}
        return [by_place.get(place) for place in range(len(rollout))]

    def _said(self, rollout: Rollout, place: int, row: Row, trainer: OnPolicyTrainer) -> str | None:
        values: dict[str, Any] = {name: row.get(name) for name in self.names}
        if CORRECT in self.names:
            others = (rollout.prompt_index == rollout.prompt_index[place]) & (rollout.rewards >= FULL_MARKS)
            right = next((i for i in others.nonzero().flatten().tolist() if i != place), None)
            if right is not None:
                values[CORRECT] = trainer.tokenizer.decode(rollout.response(right), skip_special_tokens=True)
        if WHY in self.names:
            values[WHY] = _why(rollout, place)
        if any(value is None for value in values.values()):
            return None
        return "\n\n" + self.text.format(**values)


def _why(rollout: Rollout, row: int) -> str | None:
    if rollout.whys is not None and rollout.whys[row]:
        return rollout.whys[row]
    said = [] if rollout.transcripts is None else rollout.transcripts[row]
    return next((str(one["content"]) for one in reversed(said) if one["role"] != "assistant"), None)


class DistanceLoss:
    """The mean distance to the teacher over the tokens of a minibatch, micro-batch by micro-batch; the policy acts."""

    def __init__(
        self, rollout: Rollout, minibatch: Sequence[int], *, roles: Roles, teacher: Teacher, temperature: float
    ) -> None:
        self.rollout, self.roles, self.teacher, self.temperature = rollout, roles, teacher, temperature
        self.tokens = max(1, int(rollout.loss_mask[list(minibatch)].sum()))

    def __call__(self, rows: list[int]) -> tuple[Tensor, Metrics]:
        batch = self.rollout.batch(rows, self.roles)
        return self.from_states(rows, batch, self.roles.policy_states(batch))

    def from_states(self, rows: list[int], batch: SequenceBatch, states: Tensor) -> tuple[Tensor, Metrics]:
        taught = self.rollout.taught(rows, self.teacher.head, device=states.device)
        found = distances(
            states,
            self.roles.head("policy"),
            taught,
            targets=batch.targets,
            temperature=self.temperature,
            beta=self.teacher.config.divergence,
        )
        loss = found.divergence.sum() / self.tokens
        metrics = {
            "teacher/loss": loss,
            "policy/entropy": found.entropy.sum() / self.tokens,
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


def teacher_metrics(rollout: Rollout) -> dict[str, float]:
    """teacher/logprob, its mean log-probability of a token that the policy chose, and teacher/kl, how much larger the
    policy's own is: the reverse KL per token, in nats, as the samples show it (k1), also by quarters of a response.
    Given answers, which the policy did not choose, have no KL.
    """
    mask, said = rollout.loss_mask, rollout.teacher_logprobs
    assert said is not None
    out = {"teacher/logprob": float(masked_mean(said, mask))}
    mask = mask & ~rollout.rewards.isnan().unsqueeze(1)
    if mask.any():
        apart = rollout.sampling_logprobs - said
        out["teacher/kl"] = float(masked_mean(apart, mask))
        quarter = (mask.cumsum(1) - 1) * 4 // mask.sum(1, keepdim=True).clamp(min=1)
        for i, key in enumerate(QUARTERS):
            if (there := mask & (quarter == i)).any():
                out[key] = float(masked_mean(apart, there))
    return out
