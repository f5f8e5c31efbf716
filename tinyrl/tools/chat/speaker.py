"""A policy that is talked to: its conversation, its answers token by token, the start's beside them, their reward.

Answers are sampled by the `hf` engine, which is the plain one, and played as episodes where the run had an environment:
what the policy says and what answers it are those of training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from tinyrl.data.messages import Message, Prompt
from tinyrl.data.readers import Row
from tinyrl.environments.environment import Episode
from tinyrl.evaluation.targets import Target
from tinyrl.generation.engine import Completion, Request, SampledRole, SamplingSettings
from tinyrl.generation.hf import HfEngine
from tinyrl.generation.live import IncrementalDetokenizer
from tinyrl.generation.turns import EpisodeRunner, load_episode_runner, play
from tinyrl.models.loading import check_ids
from tinyrl.models.roles import load_policy
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.components import Options, Parts, load_scorer
from tinyrl.tasks import Task, load_split, load_task
from tinyrl.tasks.prompts import PreparedPrompt, in_chat, prepare_prompts, render_prompt

CHAT_STEP = 1 << 41  # the step in the key of a chat's samples: no training step or evaluation reaches it
Who = Literal["policy", "environment"]
Hear = Callable[[Who, str], None]


def _nobody(who: Who, text: str) -> None:
    pass


@dataclass(frozen=True)
class ChatAnswer:
    """What was said to a prompt, as an episode where the run had an environment; `turn`: its number in the chat."""

    turn: int
    prompt: PreparedPrompt
    completion: Completion
    text: str
    episode: Episode | None


class _Heard(HfEngine):
    """The plain engine for one row, whose tokens are handed out as they are drawn, and what it reads in between."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.look_every = 1  # each token is said as it comes
        self.hear: Hear = _nobody
        self._known = list[int]()

    def begin(self, prompt_tokens: list[int], hear: Hear) -> None:
        self.hear, self._known = hear, list(prompt_tokens)

    def sample(self, requests: list[Request], samples_per_request: int, **key: Any) -> list[list[Completion]]:
        [request] = requests
        if read := request.prompt_tokens[len(self._known) :]:  # an environment has answered
            self.hear("environment", str(self.tokenizer.decode(read, skip_special_tokens=True)))
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        self.on_tokens = lambda tokens: self._say(detokenizer.add(tokens))
        [[completion]] = super().sample(requests, samples_per_request, **key)
        self._say(detokenizer.end())
        self._known = [*request.prompt_tokens, *completion.tokens]
        return [[completion]]

    def _say(self, text: str) -> None:
        if text:
            self.hear("policy", text)


class Speaker(ExitStack):
    """A policy with its conversation; `close` ends the processes of rewards and of the environment. `answers`: the last
    ones, by role; `messages`: the conversation so far, where the model has a chat template (without one each prompt
    stands alone).
    """

    def __init__(
        self, target: Target, parts: Parts, task: Task, runner: EpisodeRunner | None, options: Options
    ) -> None:
        super().__init__()
        self.target, self.parts, self.task, self.runner, self.options = target, parts, task, runner, options
        generation, config = target.config.generation, target.config
        self.settings = SamplingSettings(
            temperature=generation.temperature,
            max_new_tokens=generation.max_new_tokens,
            stop=[*generation.stop, *(runner.environment.stop if runner else ())],
            top_p=generation.top_p,
            top_k=generation.top_k,
        )
        self.greedy = False
        self.engine = _Heard(parts.roles, parts.tokenizer, self.settings)
        self.chats = in_chat(parts.tokenizer, config.task.chat)
        self.variables = config.task.chat_template if runner is None else runner.variables
        if runner is not None:
            self.callback(runner.environment.close)
        self.role: SampledRole = "base" if target.checkpoint is None else "policy"
        self._scorer: Scorer | None = None
        self.turn = 0
        self.reset()

    def __call__(self, prompt: Prompt, *, greedy: bool = False) -> str:
        """The answer to one prompt (text, or messages) that is no part of the conversation."""
        prepared, greedy = self._prepared(prompt), greedy or self.greedy
        return self._answer(prepared, self.role, self.turn, greedy=greedy, hear=_nobody).text

    # ---- the conversation ----

    def reset(self) -> None:
        self.messages: list[Message] = []
        self.answers: dict[str, ChatAnswer] = {}

    def set_temperature(self, temperature: float) -> None:
        """Set the sampling temperature; 0: greedy. Raises ValueError below 0 and above 100."""
        if not 0 <= temperature <= 100:
            raise ValueError(f"a temperature is 0 (greedy) to 100, and not {temperature:g}")
        self.greedy = temperature == 0
        if temperature > 0:
            self.settings = self.engine.settings = replace(self.settings, temperature=max(temperature, 0.01))

    def say(self, text: str, hear: Hear) -> ChatAnswer:
        """Answer a message in the conversation; `hear` gets the pieces as they come. A stop raises Interrupted."""
        prompt = self._prepared([*self.messages, {"role": "user", "content": text}] if self.chats else text)
        return self._said(prompt, hear)

    def say_row(self, index: int, hear: Hear) -> ChatAnswer:
        """Answer the prompt of a held-out row, with its columns. Raises ValueError where there is no such row."""
        rows = load_split(self.target.config, "eval")
        if not 0 <= index < len(rows):
            raise ValueError(f"held-out rows are 0 to {len(rows) - 1}, and not {index}")
        self.messages = []
        return self._said(self._prepared_row(rows[index], index), hear)

    def _prepared_row(self, row: Row, index: int) -> PreparedPrompt:
        where, runner = self.target.config.task, self.runner
        [prompt] = prepare_prompts(
            self.task,
            [row],
            tokenizer=self.parts.tokenizer,
            chat=where.chat,
            system_prompt=where.system_prompt,
            variables=self.variables,
            max_prompt_tokens=self.target.config.generation.max_prompt_tokens,
            long_prompts="error",
            openings=None if runner is None else runner.openings(self.task, [row]),
        )
        return replace(prompt, index=index)

    def compare(self, hear: Hear) -> ChatAnswer:
        """Answer the last prompt as the start would, with the same random numbers. Raises ValueError without either."""
        if self.target.checkpoint is None or not self.target.config.has_reference:
            raise ValueError(f"{self.target.name} has no start to compare with: it is a model, or keeps no reference")
        if self.role not in self.answers:
            raise ValueError("nothing has been asked yet")
        last = self.answers[self.role]
        self.answers["reference"] = self._answer(last.prompt, "reference", last.turn, greedy=self.greedy, hear=hear)
        return self.answers["reference"]

    def rewards(self) -> list[tuple[str, dict[str, float], str | None]]:
        """(role, each reward and their sum, why there is none) of the last answers. ValueError without an answer."""
        if not self.answers:
            raise ValueError("nothing has been asked yet")
        if self._scorer is None:
            given: dict[str, Any] = {"parts": self.parts, "options": self.options, "runner": self.runner}
            self._scorer = load_scorer(self.target.config, self.task, **given)
            self.callback(self._scorer.close)
            self._scorer.start()
        found = []
        for role, answer in self.answers.items():
            episodes = None if answer.episode is None else [answer.episode]
            sheet = self._scorer([answer.prompt], [answer.completion.tokens], episodes=episodes)
            named = dict(zip(self._scorer.names, sheet.scores[0].tolist(), strict=True))
            why = sheet.failures[0].reason if sheet.failures else None
            found.append((role, {"reward": float(sheet.rewards[0]), **named}, why))
        return found

    # ---- one answer ----

    def _said(self, prompt: PreparedPrompt, hear: Hear) -> ChatAnswer:
        answer = self._answer(prompt, self.role, self.turn, greedy=self.greedy, hear=hear)
        self.answers = {self.role: answer}
        if self.chats and not isinstance(prompt.prompt, str):
            role = self.runner.observations.role if self.runner else "tool"
            said: list[Message] = [{"role": "assistant", "content": prompt.opened + answer.text}]
            if answer.episode is not None:
                said = [{**m, "role": role} if m["role"] == "tool" else m for m in answer.episode.transcript]
            self.messages = [*prompt.prompt, *said]
        self.turn += 1
        return answer

    def _prepared(self, prompt: Prompt) -> PreparedPrompt:
        """A prompt ready for the model. Where an environment reads columns, they are those of the held-out row that has
        this prompt; raises ValueError, naming them, where none has.
        """
        where, runner = self.target.config.task, self.runner
        if runner is not None and runner.environment.needed_columns:
            asked = prompt if isinstance(prompt, str) or len(prompt) > 1 else prompt[0]["content"]
            for index, row in enumerate(load_split(self.target.config, "eval")):
                if self.task.prompt(row) in (prompt, asked):
                    return self._prepared_row(row, index)
            needed = ", ".join(f"`{name}`" for name in runner.environment.needed_columns)
            raise ValueError(
                f"{runner.environment.name} answers by the columns {needed} of a row, and no held-out row has this "
                "prompt: /prompt I asks the one of row I"
            )
        given: dict[str, Any] = {"chat": where.chat, "system_prompt": where.system_prompt, "variables": self.variables}
        rendered = render_prompt(self.parts.tokenizer, prompt, **given)
        check_ids([rendered.tokens], self.parts.tokenizer, self.parts.roles.causal)
        return PreparedPrompt(self.turn, {"prompt": prompt}, prompt, rendered.text, rendered.tokens, rendered.opened)

    def _answer(self, prompt: PreparedPrompt, role: SampledRole, turn: int, *, greedy: bool, hear: Hear) -> ChatAnswer:
        room = self.parts.positions - len(prompt.tokens)
        if room < 1:
            raise ValueError(f"that is {len(prompt.tokens)} tokens, and the model has {self.parts.positions} positions")
        most = min(self.settings.max_new_tokens, room)
        request = Request(prompt.tokens, prompt_row=prompt.index, max_new_tokens=most)
        key: dict[str, Any] = {"seed": self.target.config.run.seed, "step": CHAT_STEP + turn}
        key |= {"greedy": greedy, "role": role}
        self.engine.begin(prompt.tokens, hear)
        if self.runner is None:
            [[completion]] = self.engine.sample([request], 1, **key)
            text = str(self.parts.tokenizer.decode(completion.tokens, skip_special_tokens=True))
            return ChatAnswer(turn, prompt, completion, text, None)
        [completion], [episode] = play([prompt], [request], 1, engine=self.engine, runner=self.runner, **key)
        text = "".join(message["content"] for message in episode.transcript if message["role"] == "assistant")
        return ChatAnswer(turn, prompt, completion, text, episode)


def load_speaker(target: Target, *, options: Options) -> Speaker:
    """Load the model, the policy's weights, and what answers it. Raises ValueError for what a user can fix."""
    config = target.config
    parts = Parts(config, options=options)
    task = load_task(config.task.name or "rows", grading=config.task.grading)
    runner = load_episode_runner(config, tokenizer=parts.tokenizer, roles=parts.roles)
    if target.checkpoint is not None:
        load_policy(parts.roles, target.checkpoint)
    return Speaker(target, parts, task, runner, options)
