"""Learning from a teacher: its log-probabilities of sampled tokens, and the distance of the policy to it.

A teacher scores each response behind its prompt, or behind a prompt with more text (teacher.hint), as in
self-distillation (OPSD, 2601.18734; SDPO, 2601.20802). The outputs of a local teacher are its hidden states, which give
the whole distribution; those of a server, and with teacher.top_k, the likeliest tokens. An environment's tokens are no
response of the policy, and not learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from tinyrl.algorithms.distillation import with_tail
from tinyrl.algorithms.losses import Metrics
from tinyrl.algorithms.masking import masked_mean
from tinyrl.data.images import is_image_id
from tinyrl.data.rows import solved_from
from tinyrl.generation.sample import Sample, loss_mask, sampled_logprobs, sampled_rows
from tinyrl.generation.server import ROUNDED, AnswerPart, Models, ServerClient, ServerError, check_tokenizer, read_as
from tinyrl.models.batch import Batch, Example
from tinyrl.models.device import to_device
from tinyrl.models.loading import check_ids, embedding_rows
from tinyrl.models.logprobs import Head, TeacherStates, TeacherTopK, Teaching, distances, token_logprobs, top_k_of
from tinyrl.models.micro_batches import Work
from tinyrl.models.policy import Policy, Role
from tinyrl.models.reward_model import positions_of
from tinyrl.process.errors import Interrupted
from tinyrl.rollout.collect import Collector, prepare_rows
from tinyrl.tasks.rewarded import CORRECT, WHY, hint_names
from tinyrl.training.policy_loss import Counts, TeacherOutputs

if TYPE_CHECKING:
    from tinyrl.config.schema import Config

SERVER_TOP_K = 20  # what vLLM allows where nobody has set its --max-logprobs
REQUESTS = 64  # to a server, under way at a time
QUARTERS = ("teacher/kl_1", "teacher/kl_2", "teacher/kl_3", "teacher/kl_4")  # of a response
LOCAL: dict[str, Role] = {"self": "policy", "start": "reference", "adapter": "teacher", "model": "teacher"}


class TokenLogprob(AnswerPart):
    logprob: Annotated[float, Field(le=ROUNDED)]


class ReadPrompt(AnswerPart):
    """Log-probabilities of each prompt token and of its likeliest alternatives, by id; None for the first token."""

    prompt_logprobs: list[dict[str, TokenLogprob] | None]


class PromptLogprobs(AnswerPart):
    """The answer of /v1/completions with prompt_logprobs."""

    choices: Annotated[list[ReadPrompt], Field(min_length=1, max_length=1)]


class Teacher:
    """Scores the tokens of samples: the log-probability of each in the loss, and its distribution there. config: that
    of the run, with its number of steps.
    """

    def __init__(self, policy: Policy, collector: Collector, config: Config) -> None:
        self.policy = policy
        self.config = config.teacher
        self.world = policy.world
        self.temperature = config.generation.temperature
        self.positions = policy.positions  # most tokens of a prompt with its response; a subclass lowers it
        self.longest_text = collector.longest_text
        self.longest_response = collector.longest_response
        self.hint = PrivilegedPrompt(self.config.hint, collector, config) if self.config.hint else None

    def check_room(self) -> None:
        """Raise ValueError where a sampled text of the run may have more tokens than the teacher has positions."""
        if self.longest_text > self.positions:
            raise ValueError(
                f"teacher.path={self.config.path} has a context length of {self.positions}, and a prompt with its "
                f"response may have {self.longest_text} tokens here: lower generation.max_new_tokens or "
                "generation.max_prompt_tokens"
            )

    def prompts(self, samples: list[Sample]) -> Sequence[list[int] | None]:
        """Return the teacher's prompt for each sample; None where the hint has nothing for it (no other response was
        right). Distillation leaves such samples out; a policy loss beside the distance keeps them.
        """
        if self.hint is None:
            return [sample.prompt for sample in samples]
        return self.hint.prompts(samples, most_tokens=self.positions - self.longest_response)

    def score(self, samples: list[Sample], prompts: Sequence[list[int] | None]) -> TeacherOutputs:
        """Score the tokens of samples that are in the loss, behind the teacher's `prompts`, or their own."""
        read = [sample.prompt if prompt is None else prompt for sample, prompt in zip(samples, prompts, strict=True)]
        mask = loss_mask(samples)
        masks = [row[: len(sample.response)] for row, sample in zip(mask.tolist(), samples, strict=True)]
        of_tokens, teaching = self.outputs(read, [sample.response for sample in samples], masks)
        logprobs = torch.zeros(mask.shape)
        logprobs[mask] = of_tokens
        distributions = list[Teaching]()
        start = 0
        for count in mask.sum(1).tolist():
            distributions.append(teaching[start : start + count])
            start += count
        return TeacherOutputs(logprobs, distributions, taught=[prompt is not None for prompt in prompts])

    def metrics(self, samples: list[Sample], outputs: TeacherOutputs) -> dict[str, float]:
        """Return teacher/logprob, the mean log-probability of a chosen token, and teacher/kl, how much larger the
        policy's is (k1, the reverse KL in nats), also by quarters of a response. Given answers have no KL.
        """
        mask = loss_mask(samples) & torch.tensor(outputs.taught).unsqueeze(1)
        out = {"teacher/logprob": float(masked_mean(outputs.logprobs, mask))}
        mask = mask & sampled_rows(samples)
        if mask.any():
            apart = sampled_logprobs(samples) - outputs.logprobs
            out["teacher/kl"] = float(masked_mean(apart, mask))
            quarter = (mask.cumsum(1) - 1) * 4 // mask.sum(1, keepdim=True).clamp(min=1)
            for i, key in enumerate(QUARTERS):
                if (there := mask & (quarter == i)).any():
                    out[key] = float(masked_mean(apart, there))
        return out

    def outputs(
        self, prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]
    ) -> tuple[Tensor, Teaching]:
        """Return (log-probability of each of the M tokens under the masks (M,), the distributions there)."""
        raise NotImplementedError

    def distance(self, batch: Batch, states: Tensor, outputs: TeacherOutputs, counts: Counts) -> tuple[Tensor, Metrics]:
        """Compute the distance of the policy to the teacher on a micro-batch, from the policy's states (N, H); outputs:
        those for its minibatch.

        It is divided by the tokens of the minibatch that the teacher has scored, so that it adds up to their mean.
        Metrics: teacher/loss (the same), policy/entropy (nats per token in the loss).
        """
        ours = self.policy.head("policy")
        theirs = together([outputs.distributions[row] for row in batch.rows], states.device)
        if isinstance(theirs, TeacherStates):
            ours = first_tokens(ours, len(theirs.head.weight))
        found = distances(states, ours, theirs, temperature=self.temperature, beta=self.config.divergence)
        taught = to_device(torch.tensor([outputs.taught[row] for row in batch.rows]), states.device)[batch.row]
        distance = torch.where(taught, found.divergence, 0.0).sum() / max(1, counts.taught)
        entropy = found.entropy.sum().detach() / counts.tokens
        return distance, {"teacher/loss": distance.detach(), "policy/entropy": entropy}


def together(parts: Sequence[Teaching], device: torch.device) -> Teaching:
    """Concatenate a teacher's distributions for some samples' tokens, on a device."""
    if isinstance(parts[0], TeacherStates):
        states = torch.cat([part.states for part in parts if isinstance(part, TeacherStates)])
        return TeacherStates(to_device(states, device), parts[0].head)
    of_k = [part for part in parts if isinstance(part, TeacherTopK)]
    ids = torch.cat([part.ids for part in of_k])
    logprobs = torch.cat([part.logprobs for part in of_k])
    return TeacherTopK(to_device(ids, device), to_device(logprobs, device))


class LocalTeacher(Teacher):
    """A teacher on this machine, one of the policy's roles: it returns hidden states, or the top-k tokens."""

    def __init__(self, policy: Policy, collector: Collector, config: Config) -> None:
        super().__init__(policy, collector, config)
        self.role: Role = LOCAL[self.config.kind]
        self.separate = policy.teacher_model if self.config.kind == "model" else None  # None: one of our roles
        if self.separate is not None:
            self.positions = min(self.positions, positions_of(self.separate.config.get_text_config()))
            check_ids((prompt.tokens for prompt in collector.train_prompts), policy.tokenizer, self.separate)
        self.check_room()

    @property
    def head(self) -> Head:
        """Return the head's rows of tokens that the policy has too: beyond them is padding, of no text."""
        return first_tokens(self.policy.head(self.role), len(self.policy.head("policy").weight))

    def outputs(
        self, prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]
    ) -> tuple[Tensor, Teaching]:
        policy = self.policy
        role = self.role
        top_k = self.config.top_k
        if self.separate is not None:
            last = min(embedding_rows(self.separate), len(self.head.weight)) - 1
            prompts, responses = (known_there(rows, last) for rows in (prompts, responses))
        items = [Example(p, (r,), (m,)) for p, r, m in zip(prompts, responses, masks, strict=True)]
        ends = list(accumulate(map(sum, masks), initial=0))
        count = ends[-1]
        device = policy.device
        of_tokens = torch.zeros(count, device=device)
        if top_k is None:
            found = [torch.zeros(count, policy.hidden_size(role), dtype=policy.dtype, device=device)]
        else:
            shapes = (top_k, torch.int32), (top_k + 1, torch.float32)
            found = [torch.zeros(count, width, dtype=dtype, device=device) for width, dtype in shapes]

        def run(rows: list[int]) -> None:
            batch = policy.batch_of([items[i] for i in rows], role=role)
            states = policy.states(role, batch)
            where = to_device(torch.cat([torch.arange(ends[i], ends[i + 1]) for i in rows]), device)
            of_tokens[where] = token_logprobs(states, self.head, targets=batch.targets, temperature=self.temperature)[0]
            if top_k is None:
                found[0][where] = states.to(found[0].dtype)
            else:
                likeliest = top_k_of(states, self.head, top_k=top_k, temperature=self.temperature)
                found[0][where] = likeliest.ids
                found[1][where] = likeliest.logprobs

        with torch.no_grad(), policy.acting(role), policy.run_device.autocast():
            policy.micro_batches.run(Work(policy.lengths(items), run), world=self.world)
        self.world.sum(of_tokens, *found)
        if top_k is not None:
            return of_tokens.cpu(), TeacherTopK(found[0].cpu(), found[1].cpu())
        head = self.head
        if head.weight.requires_grad:  # of the policy itself, which the update changes
            bias = None if head.bias is None else head.bias.detach().clone()
            head = replace(head, weight=head.weight.detach().clone(), bias=bias)
        return of_tokens.cpu(), TeacherStates(found[0].cpu(), head)


def known_there(rows: list[list[int]], last: int) -> list[list[int]]:
    """Put a model's last token in the place of those without a row in it, which are of no text; images stay."""
    return [[token if is_image_id(token) else min(token, last) for token in row] for row in rows]


def first_tokens(head: Head, count: int) -> Head:
    """Cut a head to its first `count` tokens; a smaller one stays as it is."""
    if len(head.weight) <= count:
        return head
    return replace(head, weight=head.weight[:count], bias=None if head.bias is None else head.bias[:count])


class ServerTeacher(Teacher):
    """vLLM at an address: it returns the top-k tokens (`prompt_logprobs`), at temperature 1."""

    def __init__(self, policy: Policy, collector: Collector, config: Config) -> None:
        super().__init__(policy, collector, config)
        self.vocabulary = len(policy.head("policy").weight)
        self.client = ServerClient(str(self.config.path), setting="teacher.path")
        try:
            models = read_as(Models, self.client.get("/v1/models"), server=self.client, path="/v1/models")
            self.model = models.data[0].id
            served = models.data[0].max_model_len
            if served is not None:
                self.positions = min(self.positions, served - 1)  # a request asks for one token behind the text
            check_tokenizer(self.client, self.model, policy.tokenizer)
        except ServerError as error:
            raise ValueError(f"teacher.path: {error}") from None
        self.check_room()

    def outputs(
        self, prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]
    ) -> tuple[Tensor, Teaching]:
        top_k = self.config.top_k or SERVER_TOP_K
        world = self.world
        own = world.own(range(len(prompts)))
        asked = [{"model": self.model, "prompt": prompts[i] + responses[i], "max_tokens": 1, "temperature": 0.0,
                  "prompt_logprobs": top_k} for i in own]  # fmt: skip
        try:
            answers = zip(self.client.ask("POST", "/v1/completions", asked, most=REQUESTS), own, strict=True)
            read = [self._read(answer, prompts[i], responses[i], masks[i], top_k) for answer, i in answers]
        except ServerError as error:  # the run can be resumed where it answers again
            raise Interrupted(f"teacher.path: {error}") from error
        merged = world.merge(read)
        ids = torch.tensor([ids for row in merged for ids, _, _ in row], dtype=torch.int32)
        likeliest = torch.tensor([logprobs for row in merged for _, logprobs, _ in row]).reshape(-1, top_k)
        of_tokens = torch.tensor([of_token for row in merged for _, _, of_token in row])
        return of_tokens, TeacherTopK(ids.reshape(-1, top_k), with_tail(likeliest))

    def _read(
        self, answer: Any, prompt: list[int], response: list[int], mask: list[bool], top_k: int
    ) -> list[tuple[list[int], list[float], float]]:
        """Return (top-k ids, their log-probabilities, the token's own) for each token of the mask, likeliest first."""
        found = read_as(PromptLogprobs, answer, server=self.client, path="/v1/completions").choices[0].prompt_logprobs
        scored = []
        for place, (token, counts) in enumerate(zip(response, mask, strict=True), len(prompt)):
            if not counts:
                continue
            of_place = (found[place] if place < len(found) else None) or {}
            likeliest = sorted(((one.logprob, int(i)) for i, one in of_place.items()), reverse=True)[:top_k]
            whole = str(token) in of_place and len(likeliest) == top_k
            if not whole or not all(0 <= i < self.vocabulary for _, i in likeliest):
                raise ServerError(f"{self.client.name} gave no {top_k} log-probabilities in place of token {token}")
            scored.append(([i for _, i in likeliest], [p for p, _ in likeliest], of_place[str(token)].logprob))
        return scored


class PrivilegedPrompt:
    """Privileged text behind a prompt, for the teacher only, with {columns} of a row. {correct}: another right response
    of the group; {why}: a reward's text beside its score, or the environment's last words. Raises ValueError where
    nothing can ever fill in {correct} or {why}.
    """

    def __init__(self, text: str, collector: Collector, config: Config) -> None:
        self.text = text
        self.collector = collector
        self.by_index = {prompt.index: prompt for prompt in collector.train_prompts}
        self.solved_reward = config.task.solved_reward
        self.names = hint_names(text)
        scorer = collector.scorer
        sampled = config.method != "distill" or config.distill.on_policy_fraction > 0
        may_be = {CORRECT: scorer.names and config.on_policy.group_size > 1, WHY: scorer.functions or collector.runner}
        if any(name in self.names and not (sampled and there) for name, there in may_be.items()):
            raise ValueError(
                "teacher.hint: {correct} needs a reward and several sampled responses a prompt (group_size), {why} a "
                "reward function or judge that gives a text beside its score, or an environment"
            )

    def prompts(self, samples: list[Sample], *, most_tokens: int) -> list[list[int] | None]:
        """Return the teacher's prompt for each sample; None where a value of the hint is missing, and where a long hint
        makes it more than `most_tokens`.
        """
        rows = [self.by_index[sample.row].row for sample in samples]
        found: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in self.names}
        if CORRECT in found:
            found[CORRECT] = self._correct(samples)
        if WHY in found:
            found[WHY] = [sample.comment or last_reply(sample) for sample in samples]
        values = [{name: column[place] for name, column in found.items()} for place in range(len(samples))]
        hinted = [place for place, of_row in enumerate(values) if all(value is not None for value in of_row.values())]
        openings: list[str | None] = ["\n\n" + self.text.format(**values[place]) for place in hinted]
        prepared = prepare_rows(
            [rows[place] for place in hinted],
            policy=self.collector.policy,
            task=self.collector.task,
            runner=self.collector.runner,
            openings=openings,
        )
        by_place = {hinted[prompt.index]: prompt.tokens for prompt in prepared if len(prompt.tokens) <= most_tokens}
        return [by_place.get(place) for place in range(len(samples))]

    def _correct(self, samples: list[Sample]) -> list[str | None]:
        """Return another right response of the group for each sample: with task.solved_reward by the task's verifier,
        or else by the sum of rewards without length penalties.
        """
        collector = self.collector
        scorer = collector.scorer
        scores = torch.tensor([sample.scores for sample in samples])
        if scorer.uses_verifier:  # the first reward, as no function and no model is named then
            scores = scores[:, 0]
        elif collector.task.has_verifier:
            transcripts = [sample.played.transcript for sample in samples if sample.played is not None]
            prompts = [self.by_index[sample.row] for sample in samples]
            responses = [sample.response for sample in samples]
            call = scorer.verify(prompts, responses, transcripts=transcripts or None, world=collector.world)
            scores = torch.tensor(call.values)
        else:
            scores = torch.where(scores.isnan(), 0.0, scores * scorer.weights).sum(-1)
        least = solved_from(self.solved_reward)
        right = [one for one, score in zip(samples, scores.tolist(), strict=True) if score >= least and one.rewarded]
        first = [
            next((one for one in right if one.row == sample.row and one is not sample), None) for sample in samples
        ]
        return [None if one is None else scorer.text(one.response) for one in first]


def last_reply(sample: Sample) -> str | None:
    """Return what the environment said last in a sample's episode; None if it said nothing."""
    if sample.played is None:
        return None
    for message in reversed(sample.played.transcript):
        if message["role"] != "assistant":
            return message["content"]
    return None
