"""Play episodes by handing prompts to agents, which call the policy at an endpoint of this machine.

What an agent's calls become is in agent_episode.py.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from tinyrl.config.schema import Config
from tinyrl.data.image_rows import with_data_urls
from tinyrl.data.readers import Row
from tinyrl.endpoint.agent_episode import AgentEpisode, SideConversations
from tinyrl.endpoint.request_tools import left_out_note
from tinyrl.environments.agent import Agents
from tinyrl.environments.environment import Episode
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.live import LiveScheduler
from tinyrl.generation.request import Request
from tinyrl.generation.sample import Sample, SampleBuilder
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import PreparedPrompt

if TYPE_CHECKING:  # it needs the extra `serve`
    from tinyrl.endpoint.server import Listening

MODEL = "policy"  # its name at the endpoint
AT_ONCE = 256  # completions decoded together where generation.max_rows is not set


class AgentRunner:
    """Plays episodes by handing them to agents. The endpoint and its thread start with the first call."""

    def __init__(self, config: Config, *, positions: int) -> None:
        self.config = config
        self.positions = positions
        self.variables = config.task.chat_template_kwargs
        self.call_tokens = config.environment.call_tokens(config.generation.max_new_tokens)
        self.environment = Agents(config.environment, call_tokens=self.call_tokens)
        self.environment.start()
        self._listening: Listening | None = None
        self._noted = set[str]()  # fields and tools of requests that were ignored, as a note has said

    @property
    def max_episode_tokens(self) -> int:
        """Return the most that a row may sample; the text between an agent's calls is limited by the model alone."""
        return self.config.generation.max_new_tokens

    def openings(self, task: Task, rows: list[Row]) -> list[str | None]:
        return [None] * len(rows)

    def longest_prompt(self, prompts: list[PreparedPrompt]) -> int:
        """Return the most tokens of a prompt: agents write their own."""
        return self.config.generation.max_prompt_tokens

    def longest_text(self, prompts: list[PreparedPrompt]) -> int:
        """Return the most tokens of a prompt with its response: an agent's calls may fill the model's positions."""
        return self.positions

    def play(self, prompts: list[PreparedPrompt], requests: list[Request], *, engine: SamplingEngine) -> list[Sample]:
        """Play an episode for each request, whose prompt is in `prompts`, in order; return the first conversation of
        each, with the episode's record (`played`) and its other conversations (`further`). An episode that asked
        nothing has one token that is not chosen. One that ran out of calls is out of turns, one that ran out of tokens
        or positions counts as truncated, also where its agent failed over that.
        """
        if self._listening is None:
            self._listening = self._listen(engine)
        listening = self._listening
        endpoint = listening.endpoint
        episodes = [self._begin(request, tokenizer=endpoint.tokenizer) for request in requests]
        named = {f"episode-{secrets.token_urlsafe(24)}": episode for episode in episodes}
        jobs = [
            {"row": row_of(p), "base_url": listening.url, "api_key": key, "model": MODEL}
            for p, key in zip(prompts, named, strict=True)
        ]
        with endpoint.serving(named):
            played = self.environment.play(jobs, ended=lambda place: episodes[place].end())
        failures = {failure.row: failure.reason for failure in played.failures}
        return [
            self._sample_of(episode, text=text or "", failure=failures.get(place))
            for place, (episode, text) in enumerate(zip(episodes, played.values, strict=True))
        ]

    def _sample_of(self, episode: AgentEpisode, *, text: str, failure: str | None) -> Sample:
        """Return the first conversation of an episode that has ended, with its record and its other conversations.
        text: what the agent returned; failure: why it failed.
        """
        has_failed_for_room = failure is not None and episode.has_overflowed
        cut_by = episode.denied or ("length" if has_failed_for_room else None)
        conversations = episode.samples(cut_by=cut_by)
        if not conversations:
            but = " but side conversations (environment.side_prompts, environment.min_tools)" if episode.calls else ""
            failure = failure or f"`{self.environment.name}` asked the policy nothing{but}"
            nothing = SampleBuilder(episode.request)
            nothing.read([0])
            conversations = [nothing.sample(finish="length")]
        elif cut_by is not None or episode.was_cut:
            failure = None
        first, *further = conversations
        return replace(first, played=record_of(first, episode, text=text, failure=failure), further=further)

    def notes(self) -> list[str]:
        """Return notes on what agents asked for and did not get, and on tools that were left out of prompts, unless
        earlier notes have named these.
        """
        if self._listening is None:
            return []
        endpoint = self._listening.endpoint
        wishes = self._new(endpoint.wishes)
        tools = self._new(endpoint.left_out)
        notes = list[str]()
        if wishes:
            asked = ", ".join(wishes.values())
            notes.append(f"`{self.environment.name}` asks for {asked}: ignored, for the policy to learn")
        if tools:
            notes.append(f"`{self.environment.name}`: {left_out_note(tools)}")
        return notes

    def _new(self, found: dict[str, str]) -> dict[str, str]:
        """Return what no note has named; it counts as named now."""
        new = {name: words for name, words in found.items() if name not in self._noted}
        self._noted.update(new)
        return new

    def _listen(self, engine: SamplingEngine) -> Listening:
        """Start the endpoint that agents call, over a scheduler of the engine."""
        from tinyrl.endpoint.endpoint import Endpoint  # with the extra `serve`
        from tinyrl.endpoint.server import LOCAL, Listening

        endpoint = Endpoint(
            LiveScheduler(engine, max_rows=self.config.generation.max_rows or AT_ONCE),
            {MODEL: "policy"},
            defaults=self.config.generation,
            hosts=LOCAL,
            episodes={},
            positions=self.positions,
            variables=self.variables,
            expander=engine.policy.image_expander,
        )
        return Listening(endpoint)

    def _begin(self, request: Request, *, tokenizer: PreTrainedTokenizerBase) -> AgentEpisode:
        """Begin the episode of a request, whose tokens are drawn as it says; greedy ones at temperature 1."""
        settings = self.config.environment
        return AgentEpisode(
            request=replace(request, temperature=1.0) if request.greedy else request,
            left=self.config.generation.max_new_tokens,
            call_tokens=self.call_tokens,
            calls_left=settings.max_turns,
            tokenizer=tokenizer,
            positions=self.positions,
            side=SideConversations(prompts=settings.side_prompts, min_tools=settings.min_tools),
        )

    def close(self) -> None:
        self.environment.close()
        if self._listening is not None:
            self._listening.stop()
            self._listening.endpoint.scheduler.close()


def row_of(prompt: PreparedPrompt) -> Row:
    """Return the row that an agent gets, with its prompt, whose images an OpenAI client can send as they are."""
    row = {"prompt": prompt.prompt, **prompt.row}
    return {**row, "prompt": with_data_urls(row["prompt"])}


def record_of(first: Sample, episode: AgentEpisode, *, text: str, failure: str | None) -> Episode:
    """Make the record of an episode that has ended, by its first conversation; text: what the agent returned."""
    calls = max(1, episode.calls)
    ends = [place for place, chosen in enumerate(first.mask) if chosen][-1:] or [0]
    return Episode(
        transcript=[{"role": "assistant", "content": text}],
        turn_ends=ends * calls,
        turn_rewards=[None] * calls,
        num_tokens=len(first.response),
        num_actions=first.num_actions,
        finish_reason=first.finish,
        over=True,
        failure=failure,
        dialogues=episode.dialogues(),
    )
