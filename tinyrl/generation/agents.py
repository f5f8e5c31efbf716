"""Episodes of agents that speak to the policy by URL: every call is recorded token by token, as it was sampled.

    an agent asks     1. its key says which episode it belongs to
                      2. where what it sends continues an earlier answer of the episode, that answer's own tokens are
                         kept, and only what follows is tokenised: what is trained is what was sampled
                      3. otherwise it begins a conversation of its own: edited history, another system prompt, a
                         sub-agent
    it returns        4. its text is what rewards judge; each conversation is a row with the episode's reward

How tokens are drawn is the run's: temperature, top_p and top_k of a request are left aside, since log-probabilities
must be those of the trained distribution. generation.max_new_tokens is for an episode's calls together.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.environments.agent import Agents, Job, Played
from tinyrl.environments.environment import Episode
from tinyrl.generation.engine import Completion, Request, SampleOptions, SamplingEngine, SamplingSettings
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import PreparedPrompt

if TYPE_CHECKING:  # they need the extra `serve`
    from tinyrl.generation.agent_endpoint import AgentEndpoint, Session
    from tinyrl.generation.endpoint import Server

MODEL = "policy"  # its name at the endpoint
AT_ONCE = 256  # completions decoded together where generation.max_rows says nothing else


@dataclass(frozen=True)
class Other:
    """A further conversation of an episode: whose (a row of the rollout), its prompt, and what was sampled there."""

    episode: int
    prompt: list[int]
    completion: Completion


class AgentRunner:
    """Plays episodes by handing them to agents. State: the endpoint and its thread, from the first call on."""

    def __init__(self, config: Config, *, positions: int) -> None:
        self.config, self.positions = config, positions
        self.variables = config.task.chat_template
        self.environment = Agents(config.environment)
        self.environment.start()
        self._endpoint: AgentEndpoint | None = None
        self._server: Server | None = None
        self._url = ""

    @property
    def max_episode_tokens(self) -> int:
        """The most that a row may sample; what an agent writes between its calls is limited by the model alone."""
        return self.config.generation.max_new_tokens

    def openings(self, task: Task, rows: list[Row]) -> list[str | None]:
        return [None] * len(rows)

    def play(
        self,
        prompts: list[PreparedPrompt],
        requests: list[Request],
        group_size: int,
        *,
        engine: SamplingEngine,
        options: SampleOptions,
    ) -> tuple[list[Completion], list[list[int]], list[Episode], list[Other]]:
        """`group_size` episodes for each request, in order: the first conversation of each, the prompt it had, the
        episode, and further conversations. An episode that failed, or asked nothing, has one token that is not chosen.
        """
        from tinyrl.generation.agent_endpoint import Session
        from tinyrl.generation.live import Draw

        endpoint = self._listening(engine)
        config, role = self.config, options.get("role", "policy")
        settings = config.generation
        temperature = 0.0 if options.get("greedy", False) else settings.temperature
        draw = Draw(role, temperature, settings.top_p, settings.top_k)
        sessions: dict[str, Session] = {}
        jobs, each = [], [(p, r, i) for p, r in zip(prompts, requests, strict=True) for i in range(group_size)]
        for prompt, request, sample in each:
            key = f"episode-{secrets.token_urlsafe(24)}"
            own = request.further(sample, [], settings.max_new_tokens)
            sessions[key] = Session(
                own,
                draw,
                options["seed"],
                options["step"],
                left=settings.max_new_tokens,
                calls_left=config.environment.max_turns,
            )
            row = {"prompt": prompt.prompt, **prompt.row}
            jobs.append(Job(row, self._url, key, MODEL))
        kept: SamplingSettings = engine.settings  # pyright: ignore[reportAttributeAccessIssue]
        endpoint.sessions.update(sessions)
        endpoint.sampler.renew()
        order = list(sessions.values())
        try:
            played = self.environment.play(jobs, ended=lambda place: order[place].end())
        finally:
            for session in order:
                session.end()
            for key in sessions:
                del endpoint.sessions[key]
            endpoint.sampler.release()
            engine.settings = kept  # pyright: ignore[reportAttributeAccessIssue]
        return self._gathered([p for p, _, _ in each], order, played)

    def _gathered(
        self, prompts: list[PreparedPrompt], sessions: list[Session], played: list[Played]
    ) -> tuple[list[Completion], list[list[int]], list[Episode], list[Other]]:
        completions, first_prompts, episodes, others = [], [], [], []
        for place, (prompt, session, result) in enumerate(zip(prompts, sessions, played, strict=True)):
            rows = session.rows()
            failure = result.failure or (None if rows else f"`{self.environment.name}` asked the policy nothing")
            if rows and failure is None:
                first, *further = rows
                completion = first.as_completion()
                others += [Other(place, row.prompt, row.as_completion()) for row in further]
                tokens = first.prompt
            else:
                completion, tokens = Completion([0], [0.0], "length", [False]), prompt.tokens
            text = result.text or ""
            ends = [i for i, chosen in enumerate(completion.action_mask or []) if chosen][-1:] or [0]
            episodes.append(
                Episode(
                    transcript=[{"role": "assistant", "content": text}],
                    turn_ends=ends * max(1, session.calls),
                    turn_rewards=[0.0] * max(1, session.calls),
                    num_tokens=len(completion.tokens),
                    num_actions=sum(completion.action_mask or []),
                    finish_reason=completion.finish_reason,
                    over=True,
                    failure=failure,
                )
            )
            completions.append(completion)
            first_prompts.append(tokens)
        return completions, first_prompts, episodes, others

    def _listening(self, engine: SamplingEngine) -> AgentEndpoint:
        if self._endpoint is None:
            import uvicorn

            from tinyrl.generation.agent_endpoint import AgentEndpoint
            from tinyrl.generation.endpoint import Server
            from tinyrl.generation.fused import FusedEngine
            from tinyrl.generation.hf import HfEngine
            from tinyrl.generation.live import LiveSampler

            assert isinstance(engine, FusedEngine | HfEngine), "the configuration has checked it"
            sampler = LiveSampler(engine, max_rows=self.config.generation.max_rows or AT_ONCE)
            new = self.config.generation.max_new_tokens
            self._endpoint = AgentEndpoint(
                sampler, positions=self.positions, max_new_tokens=new, variables=self.variables
            )
            bound = socket.socket()
            bound.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
            settings = uvicorn.Config(self._endpoint.app, log_level="error", timeout_graceful_shutdown=1)
            self._server = Server(settings)
            threading.Thread(target=self._server.run, args=([bound],), name="endpoint", daemon=True).start()
            while not self._server.started:
                time.sleep(0.01)
        return self._endpoint

    def close(self) -> None:
        self.environment.close()
        if self._server is not None and self._endpoint is not None:
            self._server.should_exit = True
            self._endpoint.sampler.close()
