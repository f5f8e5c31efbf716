"""Episodes of several turns: the policy writes, an environment answers, the policy goes on.

    until every episode is over:
        1. a turn for each: tokens up to EOS, a stop string or the episode's limit
        2. the environment answers the turns that have ended, a batch at a time
        3. what it says is appended to the tokens, read by the policy and never trained on

Two ways lead to the same episodes. The plain one, for every engine, reads an episode from its beginning at each turn.
An engine with a `play` of its own keeps the rows that wait, and reads the answers only. Both ask one `Episodes`.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.environments import Reply, Transcript
from tinyrl.environments.environment import Environment, Episode
from tinyrl.generation.engine import Completion, FinishReason, Request, SampledRole, SamplingEngine, eos_token_ids
from tinyrl.generation.token_sampling import sample_keys
from tinyrl.models.roles import Roles
from tinyrl.runs.signals import check_stop
from tinyrl.tasks import Task
from tinyrl.tasks.observations import ObservationTokens
from tinyrl.tasks.prompts import PreparedPrompt, columns_of, in_chat, token_ids

# ---- What an episode is played with ----


@dataclass(frozen=True)
class Game:
    """max_new_tokens: of the policy's own, over all turns; variables: what the chat template is asked with."""

    environment: Environment
    observations: ObservationTokens
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    variables: dict[str, Any]

    @property
    def columns(self) -> int:
        """The most tokens of an episode, chosen and read."""
        return self.max_new_tokens + (self.environment.max_turns - 1) * self.observations.most

    def text(self, tokens: list[int]) -> str:
        """What tokens say, special ones left out."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def openings(self, task: Task, rows: list[Row]) -> list[str | None]:
        """What the environment says at the end of each row's prompt."""
        names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
        columns = {name: [row.get(name) for row in rows] for name in names}
        return self.environment.openings([task.prompt(row) for row in rows], columns)


def load_game(config: Config, task: Task, *, tokenizer: PreTrainedTokenizerBase, roles: Roles) -> Game | None:
    """Start the configuration's environment, or the task's, and find out how its answers become tokens; None where
    nothing answers. Raises ValueError where that cannot be done.
    """
    environment = _environment(config, task, tokenizer)
    if environment is None:
        return None
    environment.start()
    schemas = environment.schemas
    chat = in_chat(tokenizer, config.task.chat)
    if schemas and (not chat or "tools" not in str(tokenizer.chat_template)):
        raise ValueError(
            "environment.tools are shown to the model by its chat template, and this model "
            f"{'has none that shows them' if chat else 'is prompted without one'}; describe them in the prompt and "
            "answer with environment.use=FILE.py:FUNCTION"
        )
    variables = {**config.task.chat_template, **({"tools": schemas} if schemas else {})}
    observations = ObservationTokens(
        tokenizer,
        chat=chat,
        variables=variables,
        eos=eos_token_ids(roles, tokenizer),
        max_tokens=environment.max_observation_tokens,
    )
    return Game(environment, observations, tokenizer, config.generation.max_new_tokens, variables)


def plays(config: Config, task: Task) -> bool:
    """Whether an environment answers, the configuration's or the task's."""
    named = config.environment.use is not None or bool(config.environment.tools)
    return named or task.respond is not None or task.environment is not None


def _environment(config: Config, task: Task, tokenizer: PreTrainedTokenizerBase) -> Environment | None:
    if not plays(config, task):
        return None

    def length(text: str) -> int:
        return len(token_ids(tokenizer, text))

    return Environment(
        config.environment, task=task.name, respond=task.respond, use=task.environment, stop=task.stop, length=length
    )


# ---- Episodes of several turns ----


Asked = tuple[list[int], list[Reply | None]]  # episodes that were asked about, and the replies
POLL_S = 0.1
SEED_BITS = 53  # of an episode's `seed`, which JSON's readers keep as they are


@runtime_checkable
class PlaysEpisodes(Protocol):
    """An engine that goes on with rows where they are, instead of reading them again."""

    def play(
        self,
        requests: list[Request],
        samples_per_request: int,
        *,
        answer: Episodes,
        seed: int,
        step: int,
        greedy: bool = False,
        role: SampledRole = "policy",
    ) -> list[list[Completion]]:
        """Whole episodes, for every request in order; each turn's end is told to `answer`, which says what is next."""
        ...


def play(
    prompts: list[PreparedPrompt],
    requests: list[Request],
    group_size: int,
    *,
    engine: SamplingEngine,
    game: Game,
    seed: int,
    step: int,
    greedy: bool = False,
    role: SampledRole = "policy",
) -> tuple[list[Completion], list[Episode]]:
    """`group_size` episodes for each request, in order, as completions (what was read is not `chosen`) and as episodes.

    Raises Interrupted once a stop was asked for, and what `engine.sample` raises.
    """
    with Episodes(prompts, requests, group_size, game=game, seed=seed, step=step) as episodes:
        options: dict[str, Any] = {"seed": seed, "step": step, "greedy": greedy, "role": role}
        if isinstance(engine, PlaysEpisodes):
            groups = engine.play(requests, group_size, answer=episodes, **options)
            completions = [completion for group in groups for completion in group]
        else:
            completions = _play_plainly(requests, group_size, engine=engine, episodes=episodes, options=options)
        return episodes.settled(completions), episodes.episodes


def _play_plainly(
    requests: list[Request], group_size: int, *, engine: SamplingEngine, episodes: Episodes, options: dict[str, Any]
) -> list[Completion]:
    """Turn by turn: each episode that goes on is a request of its own, with all that was said so far as its prompt."""
    episodes.restart()
    said: list[Completion] = [Completion([], [], "length", []) for _ in episodes.episodes]
    turns = [completion for group in engine.sample(requests, group_size, **options) for completion in group]
    going = list(range(len(said)))
    while going:
        for sample, turn in zip(going, turns, strict=True):
            said[sample] = _longer(said[sample], turn.tokens, turn.logprobs, chosen=True, reason=turn.finish_reason)
            episodes.ended(sample, turn.tokens, turn.finish_reason)
        answered: dict[int, list[int] | None] = {}
        while len(answered) < len(going):
            answered.update(episodes.answers(wait=True))
        going = [sample for sample in going if answered[sample] is not None]
        following = []
        for sample in going:
            read = answered[sample] or []
            so_far = said[sample] = _longer(said[sample], read, [0.0] * len(read), chosen=False)
            first = requests[sample // group_size]
            following.append(
                Request(
                    prompt_tokens=first.prompt_tokens + so_far.tokens,
                    prompt_row=first.prompt_row,
                    first_sample=first.first_sample + sample % group_size,
                    first_token=first.first_token + len(so_far.tokens),
                    max_new_tokens=episodes.limit(sample),
                )
            )
        turns = [group[0] for group in engine.sample(following, 1, **options)] if following else []
    return said


def _awaited(call: Future[Asked]) -> Asked:
    """What a call gives; while it takes its time, a stop is looked for."""
    while not call.done():
        check_stop()
        wait_for([call], timeout=POLL_S)
    return call.result()


def _longer(
    said: Completion, tokens: list[int], logprobs: list[float], *, chosen: bool, reason: FinishReason | None = None
) -> Completion:
    assert said.chosen is not None
    return Completion(
        said.tokens + tokens,
        said.logprobs + logprobs,
        reason or said.finish_reason,
        said.chosen + [chosen] * len(tokens),
    )


class Episodes:
    """The episodes of one call while they are played: told of each turn's end, it says what is read next.

    Answers are worked out on a thread, a batch of waiting episodes at a time, so that an engine may go on meanwhile. An
    episode's answers are a function of its transcript, so which episodes share a batch changes nothing.
    """

    def __init__(
        self,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        group_size: int,
        *,
        game: Game,
        seed: int,
        step: int,
    ) -> None:
        self.prompts = [prompt for prompt in prompts for _ in range(group_size)]
        self.game, self.columns = game, game.columns
        samples = np.concatenate([np.arange(group_size) + r.first_sample for r in requests])
        rows = np.repeat(np.array([r.prompt_row for r in requests]), group_size)
        keys = sample_keys(seed, step, prompts=rows, samples=samples)
        by_prompt = game.environment.has_openings
        self.seeds = [
            int(row) if by_prompt else int(key) >> (64 - SEED_BITS) for row, key in zip(rows, keys, strict=True)
        ]
        self._thread = ThreadPoolExecutor(1)
        self._call: Future[Asked] | None = None
        self.restart()

    def __enter__(self) -> Episodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def restart(self) -> None:
        """Begin again: memory ran out, and the same episodes are played with fewer rows at a time."""
        if self._call is not None:
            wait_for([self._call])
            self._call = None
        self.episodes = [Episode() for _ in self.prompts]
        self._waiting: list[int] = []
        self._ready: list[tuple[int, list[int] | None]] = []

    def limit(self, sample: int) -> int:
        """How many tokens the next turn of an episode may have, at least one."""
        return self.game.max_new_tokens - self.episodes[sample].num_chosen

    def ended(self, sample: int, tokens: list[int], finish_reason: FinishReason) -> None:
        """A turn of an episode has ended, with these tokens of its own."""
        episode, game = self.episodes[sample], self.game
        opened = self.prompts[sample].opened
        if episode.transcript:  # after a turn's own end the template opened another; after a stop string this goes on
            opened = game.observations.opened if episode.ended_at is not None else ""
        episode.transcript.append({"role": "assistant", "content": opened + game.text(tokens)})
        episode.num_tokens += len(tokens)
        episode.num_chosen += len(tokens)
        episode.turn_ends.append(episode.num_tokens - 1)
        episode.turn_rewards.append(0.0)
        episode.finish_reason = finish_reason
        episode.ended_at = tokens[-1] if finish_reason == "eos" else None
        if finish_reason == "length":
            self._end(sample)
        else:
            self._waiting.append(sample)

    def answers(self, *, wait: bool) -> list[tuple[int, list[int] | None]]:
        """The episodes whose answers have come since: the tokens to be read next, or None for one that is over.

        wait: for one at least, where any is asked for.
        """
        while True:
            if self._call is not None and (self._call.done() or (wait and not self._ready)):
                call, self._call = self._call, None
                asked, replies = _awaited(call)
                for sample, reply in zip(asked, replies, strict=True):
                    self._answered(sample, reply)
            if self._call is None and self._waiting:
                asked, self._waiting = self._waiting, []
                self._call = self._thread.submit(self._ask, asked)
                if wait and not self._ready:
                    continue
            ready, self._ready = self._ready, []
            return ready

    def settled(self, completions: list[Completion]) -> list[Completion]:
        """The completions with what their episodes came to: why they ended, and the rewards of those cut off."""
        cut_off = [i for i, e in enumerate(self.episodes) if e.failure is None and not e.over]
        if cut_off:
            rows = self.game.environment.final_rewards(*self._given(cut_off))
            for failure in rows.failures:
                self.episodes[cut_off[failure.row]].failure = failure.reason
            for sample, reward in zip(cut_off, rows.values, strict=True):
                self.episodes[sample].turn_rewards[-1] += reward or 0.0
        return [
            Completion(c.tokens, c.logprobs, e.finish_reason, c.chosen)
            for c, e in zip(completions, self.episodes, strict=True)
        ]

    def _ask(self, asked: list[int]) -> Asked:
        answers = self.game.environment.respond(*self._given(asked))
        for failure in answers.failures:
            self.episodes[asked[failure.row]].failure = failure.reason
        return asked, answers.replies

    def _given(self, samples: list[int]) -> tuple[list[Any], list[Transcript], dict[str, list[Any]]]:
        prompts = [self.prompts[i] for i in samples]
        columns = {"seed": [self.seeds[i] for i in samples], **columns_of(prompts)}
        return [p.prompt for p in prompts], [self.episodes[i].transcript for i in samples], columns

    def _answered(self, sample: int, reply: Reply | None) -> None:
        """Take an answer: the episode goes on with its tokens, or is over."""
        episode, game = self.episodes[sample], self.game
        if reply is None:  # the environment has nothing more to say, or has failed
            episode.over = True
            self._end(sample)
            return
        episode.turn_rewards[-1] += reply.reward
        episode.invalid += reply.invalid
        last = len(episode.turn_ends) == game.environment.max_turns
        if reply.done or last or episode.num_chosen >= game.max_new_tokens:
            if reply.text:
                episode.transcript.append({"role": "tool", "content": game.observations.cut(reply.text)})
            episode.over = reply.done
            if not reply.done:
                episode.finish_reason = "turns" if last else "length"
            self._end(sample)
            return
        observed = game.observations(reply.text, ended_at=episode.ended_at)
        episode.transcript.append({"role": "tool", "content": observed.text})
        episode.num_tokens += len(observed.tokens)
        self._ready.append((sample, observed.tokens))

    def _end(self, sample: int) -> None:
        self._ready.append((sample, None))
