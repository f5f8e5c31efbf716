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
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from tinyrl.algorithms.distillation import with_tail
from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.masking import masked_mean
from tinyrl.errors import GuardStop, Interrupted
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
from tinyrl.models.distances import TeacherStates, distances, top_k_of
from tinyrl.models.loading import check_ids, embedding_rows
from tinyrl.models.logprobs import Head, token_logprobs
from tinyrl.models.micro_batches import RowSizes, Work, own_rows
from tinyrl.models.reward_model import positions_of
from tinyrl.models.roles import Role, Roles
from tinyrl.rollout.buffer import Rollout
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
        self.temperature, self.positions = trainer.config.generation.temperature, trainer.positions
        self.hint = Hint(self.config.hint, trainer) if self.config.hint else None

    @property
    def head(self) -> Head | None:
        """The head of a teacher that says its hidden states."""
        return None

    def start(self) -> list[str]:
        """Check what can only be checked now, before step 1; returns lines worth showing. Raises ValueError."""
        return []

    def read(self, rollout: Rollout) -> None:
        """Fill in what the teacher says of the tokens that count, by the processes of the trainer's world.

        Rows that the hint has nothing for (no other response was right) are left out of the distance, and so out of
        distillation; a policy loss beside the distance keeps them.
        """
        prompts = [rollout.prompt_tokens[p] for p in rollout.prompt_index.tolist()]
        if self.hint is not None:
            hinted = self.hint.prompts(rollout, self.trainer)
            rollout.hinted = torch.tensor([tokens is not None for tokens in hinted])
            if self.trainer.config.method == "distill":
                rollout.kept = rollout.kept & rollout.hinted
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
        self.own = trainer.roles.teacher_model if self.config.kind == "model" else None
        if self.own is not None:
            self.positions = min(self.positions, positions_of(self.own.config.get_text_config()))
        words, top_k = len(self.head.weight), self.config.top_k
        if top_k is not None and top_k > words:
            raise ValueError(f"teacher.top_k={top_k} is more than the vocabulary of {words:,} tokens")

    @property
    def head(self) -> Head:
        """The head of the tokens that the policy has too: beyond them is padding, of no text."""
        assert self.role is not None
        return first_tokens(self.trainer.roles.head(self.role), len(self.trainer.roles.head("policy").weight))

    def start(self) -> list[str]:
        if self.own is None:
            return []
        trainer, ours, theirs = self.trainer, len(self.trainer.roles.head("policy").weight), len(self.head.weight)
        check_ids((prompt.tokens for prompt in trainer.train_prompts), trainer.tokenizer, self.own)
        longest = max(len(prompt.tokens) for prompt in trainer.train_prompts) + trainer.longest_response
        if longest > self.positions:
            raise ValueError(
                f"teacher.path={self.config.path} has {self.positions} positions, and prompt and response may have "
                f"{longest} tokens"
            )
        if theirs == ours:
            return []
        return [f"the teacher has {theirs:,} tokens and the policy {ours:,}: they are compared over what both have"]

    def say(
        self, rollout: Rollout, prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]
    ) -> Tensor:
        trainer, roles, role, top_k = self.trainer, self.trainer.roles, self.role, self.config.top_k
        assert role is not None
        if self.own is not None:  # a token without a row there, of no text, is read as the last one
            last = min(embedding_rows(self.own), len(self.head.weight)) - 1
            prompts, responses = ([[min(i, last) for i in row] for row in rows] for rows in (prompts, responses))
        count, device = int(rollout.loss_mask.sum()), roles.device
        of_tokens = torch.zeros(count, device=device)
        if top_k is None:
            said = [torch.zeros(count, roles.hidden_size(role), dtype=roles.dtype, device=device)]
        else:
            shapes = (top_k, torch.int32), (top_k + 1, torch.float32)
            said = [torch.zeros(count, width, dtype=dtype, device=device) for width, dtype in shapes]

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
            if (head := self.head).weight.requires_grad:  # of the policy itself, which the update changes
                rollout.teacher_head = head.weight.detach().clone()
                rollout.teacher_head_bias = None if head.bias is None else head.bias.detach().clone()
        else:
            rollout.teacher_top_ids, rollout.teacher_top_logprobs = said[0].cpu(), said[1].cpu()
        return of_tokens.cpu()


def first_tokens(head: Head, count: int) -> Head:
    """A head of at most so many tokens."""
    if len(head.weight) <= count:
        return head
    return replace(head, weight=head.weight[:count], bias=None if head.bias is None else head.bias[:count])


class ServerTeacher(Teacher):
    """vLLM at an address: it says the likeliest tokens (`prompt_logprobs`), at temperature 1."""

    def start(self) -> list[str]:
        self.vocabulary = len(self.trainer.roles.head("policy").weight)
        self.client = ServerClient(str(self.config.path))
        try:
            models = read_as(Models, self.client.get("/v1/models"), server=self.client, path="/v1/models")
            self.model = models.data[0].id
            check_tokenizer(self.client, self.model, self.trainer.tokenizer)
        except ServerError as error:
            raise ValueError(f"teacher.path: {error}") from None
        return []

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
        likeliest = torch.tensor([logprobs for row in merged for _, logprobs, _ in row]).reshape(-1, top_k)
        rollout.teacher_top_logprobs = with_tail(likeliest)
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


LOCAL: dict[str, Role] = {"self": "policy", "start": "reference", "adapter": "teacher", "model": "teacher"}


TEACHERS: dict[str, type[Teacher]] = {
    **dict.fromkeys(LOCAL, LocalTeacher),
    "server": ServerTeacher,
}


def teacher_of(trainer: OnPolicyTrainer) -> Teacher:
    return TEACHERS[trainer.config.teacher.kind](trainer)


class Hint:
    """A text with {columns} of a row, behind its prompt, that only the teacher reads. {correct} is another response of
    the group that is right, {why} what rewards said beside their scores, or the environment's last words. Raises
    ValueError for a column that no row has, and where nothing can ever fill in {correct} or {why}.
    """

    def __init__(self, text: str, trainer: OnPolicyTrainer) -> None:
        self.text, prompts, config, scorer = text, trainer.train_prompts, trainer.config, trainer.scorer
        self.names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        for name in self.names:
            if name not in (CORRECT, WHY) and not any(name in p.row for p in prompts):
                there = list(prompts[0].row)
                raise ValueError(
                    f"teacher.hint has {{{name}}}, and no row has such a column.{did_you_mean(name, there)} "
                    f"Columns: {listed([*there, CORRECT, WHY])}"
                )
        sampled = config.method != "distill" or config.distill.on_policy > 0
        if CORRECT in self.names and not (sampled and scorer.names and config.on_policy.group_size > 1):
            raise ValueError(
                "teacher.hint has {correct}, another right response to the same prompt: it needs several sampled "
                f"responses a prompt (group_size; {config.method} samples {config.on_policy.group_size}) and a reward"
            )
        if WHY in self.names and not (sampled and (scorer.functions or trainer.runner)):
            raise ValueError(
                "teacher.hint has {why}: it needs sampled responses, and a reward function or judge that gives a text "
                "beside its score, or an environment"
            )

    def prompts(self, rollout: Rollout, trainer: OnPolicyTrainer) -> list[list[int] | None]:
        """Of each row the prompt that the teacher reads; None where the hint has nothing to say."""
        by_index = {prompt.index: prompt for prompt in trainer.train_prompts}
        asked = [by_index[int(rollout.prompt_rows[p])] for p in rollout.prompt_index.tolist()]
        rows = [prompt.row for prompt in asked]
        found: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in self.names}
        if CORRECT in found:
            found[CORRECT] = _correct(rollout, asked, trainer)
        if WHY in found:
            found[WHY] = [_why(rollout, row) for row in range(len(rollout))]
            if trainer.state.step == 0 and not any(found[WHY]):
                raise GuardStop(
                    "teacher.hint has {why}, and no reward gave a text beside a score, as in (0.0, 'line 3: "
                    "NameError'), so there is nothing to learn from"
                )
        values = [{name: column[place] for name, column in found.items()} for place in range(len(rollout))]
        hinted = [place for place, of_row in enumerate(values) if all(value is not None for value in of_row.values())]
        openings: list[str | None] = ["\n\n" + self.text.format(**values[place]) for place in hinted]
        prepared = trainer.prepared([rows[place] for place in hinted], openings=openings)
        assert trainer.teacher is not None
        # A prompt that a long hint leaves no room is not read.
        room = trainer.teacher.positions - trainer.longest_response
        by_place = {hinted[prompt.index]: prompt.tokens for prompt in prepared if len(prompt.tokens) <= room}
        return [by_place.get(place) for place in range(len(rollout))]


def _correct(rollout: Rollout, prompts: list[PreparedPrompt], trainer: OnPolicyTrainer) -> list[str | None]:
    """Of each row another response to its prompt that is right, task.solved_reward to the task's verifier; where it has
    none, to the sum of rewards without length penalties.
    """
    scorer, responses = trainer.scorer, [rollout.response(row) for row in range(len(rollout))]
    if scorer.uses_verifier:  # it stands last, or before the environment's
        scores = rollout.scores[:, -1 - scorer.environment_rewards]
    elif trainer.task.verify is not None:
        call = scorer.verify(prompts, responses, transcripts=rollout.transcripts, world=trainer.world)
        scores = torch.tensor(call.scores)
    else:
        scores = torch.where(rollout.scores.isnan(), 0.0, rollout.scores * scorer.weights).sum(-1)
    least = trainer.config.task.solved_reward - 1e-6  # sums of float32 miss it by rounding
    right = (scores >= least) & ~rollout.rewards.isnan()
    others = [((rollout.prompt_index == group) & right).nonzero().flatten() for group in rollout.prompt_index]
    first = [next((i for i in of_row.tolist() if i != row), None) for row, of_row in enumerate(others)]
    return [None if i is None else trainer.scorer.text(responses[i]) for i in first]


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
        masks = rollout.loss_mask, rollout.taught_mask
        self.tokens, self.taught_tokens = (max(1, int(mask[list(minibatch)].sum())) for mask in masks)

    def __call__(self, rows: list[int]) -> tuple[Tensor, Metrics]:
        batch = self.rollout.batch(rows, self.roles)
        return self.from_states(rows, batch, self.roles.policy_states(batch))

    def from_states(self, rows: list[int], batch: SequenceBatch, states: Tensor) -> tuple[Tensor, Metrics]:
        counts = self.rollout.take(self.rollout.taught_mask, rows, batch=batch)[batch.row, batch.column]
        ours, theirs = self.roles.head("policy"), self.teacher.head
        taught = self.rollout.taught(rows, theirs, device=states.device)
        if isinstance(taught, TeacherStates):
            ours = first_tokens(ours, len(taught.head.weight))
        found = distances(states, ours, taught, temperature=self.temperature, beta=self.teacher.config.divergence)
        loss = torch.where(counts, found.divergence, 0.0).sum() / self.taught_tokens
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
    mask, said = rollout.taught_mask, rollout.teacher_logprobs
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
