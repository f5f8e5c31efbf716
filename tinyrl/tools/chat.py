"""`tinyrl chat`: a conversation with a policy; its answers as they are written, with their reward.

Answers are sampled by the library's modules (`hf`), and played as episodes if the run had an environment, as in
training. Text of a model or a tool is made safe to show, piece by piece.
"""

from __future__ import annotations

import importlib
import math
import shlex
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from tinyrl.data.image_files import ImageFiles
from tinyrl.data.images import IMAGE_MARK, Image, images_of, shown_text
from tinyrl.data.messages import Message, Prompt, as_messages, prompt_of
from tinyrl.environments.environment import Episode
from tinyrl.evaluation.targets import Target
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.engines import select_engine
from tinyrl.generation.request import SampledRole
from tinyrl.generation.sample import Sample
from tinyrl.generation.turns import load_episode_runner
from tinyrl.models.loading import check_ids
from tinyrl.models.policy_files import restore_policy
from tinyrl.process.errors import Interrupted
from tinyrl.process.launched import Options
from tinyrl.process.signals import StopFlag
from tinyrl.rewards.scorer import Scorer
from tinyrl.rollout.load import load_policy, load_scorer
from tinyrl.tasks import task_of
from tinyrl.tasks.prompts import NO_LIMIT, PreparedPrompt, in_chat, prepare_prompts
from tinyrl.tasks.rows import TASK as OWN_ROWS
from tinyrl.tasks.run_rows import rows_of_run
from tinyrl.tasks.turn_text import TurnDetokenizer, turn_text
from tinyrl.text import escape_control
from tinyrl.workers.foreign_code import tell_code

CHAT_STEP = 1 << 41  # the step in the key of a chat's samples: no training step or evaluation reaches it
HELP = """/temperature T   set the sampling temperature (0 = greedy)
/image FILE      show a picture in the next message
/reward          show the reward of the last answer
/prompt I        ask the prompt of held-out row I, with its columns
/reset           clear the conversation
/help, /quit
"""
ALONE = ("/help", "/quit", "/reset", "/reward")  # commands that nothing follows
ENDS = {"length": "\n(cut off: no more tokens)", "turns": "\n(no more turns)"}  # by finish reason
NO_IMAGES = (
    "this model reads no images; a run that was trained on images does, and a model with a vision tower and a chat "
    "template by model.with_images=true"
)
HOTTEST = 100  # as generation.temperature has it
Number = TypeVar("Number", int, float)
OnText = Callable[[Literal["prompt", "policy", "environment"], str], None]


@dataclass(frozen=True)
class ChatAnswer:
    """An answer to a prompt, with its episode if the run had an environment."""

    prompt: PreparedPrompt
    sample: Sample
    text: str

    @property
    def episode(self) -> Episode | None:
        return self.sample.played


class ChatSession:
    """A loaded policy and its conversation; `close` ends the processes of rewards and of the environment.

    answer: the last one; messages: the conversation so far, if the model has a chat template (without one each prompt
    stands alone); images: of the next message. Raises ValueError for what a user can fix.
    """

    def __init__(self, target: Target, *, options: Options) -> None:
        self._closing = ExitStack()
        self.target = target
        self.options = options
        config = target.config
        if target.run is not None:
            tell_code(target.run, config)
        generation = target.config.generation
        self.policy = load_policy(config, options=options)
        self.task = task_of(config)
        tokenizer = self.policy.tokenizer
        self.runner = load_episode_runner(config, task=self.task, tokenizer=tokenizer, policy=self.policy)
        if self.runner is not None:
            self._closing.callback(self.runner.environment.close)
        self.role: SampledRole = "base"
        if target.checkpoint is not None:
            restore_policy(self.policy, target.checkpoint, only="policy")
            self.role = "policy"
        stop = [*generation.stop, *(self.runner.environment.stop if self.runner else ())]
        settings = generation.model_copy(update={"engine": "hf", "stop": stop, "max_rows": None})
        positions = self.policy.positions
        with self.policy.trying_images():
            engine, _ = select_engine(settings, self.policy, self.policy.tokenizer, longest=positions)
        self.engine: SamplingEngine = engine.with_settings(settings, look_every=1)  # tokens come one by one
        self.chats = in_chat(self.policy.tokenizer, config.task.chat)
        self.greedy = False
        self.turn = 0
        self.scorer: Scorer | None = None
        self.messages: list[Message] = []
        self.images: list[Image] = []
        self.answer: ChatAnswer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.close()

    def __call__(self, prompt: Prompt | int, *, greedy: bool = False) -> str:
        """Answer one prompt (text, messages, or a held-out row's number) that does not belong to the conversation."""
        return self._answer(self._prepare(prompt), lambda who, text: None, greedy=greedy).text

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = []
        self.images = []
        self.answer = None

    def show_image(self, path: str) -> None:
        """Show an image file in the next message. Raises ValueError where it cannot be read or shown."""
        if self.policy.image_expander is None or not self.chats:
            raise ValueError(NO_IMAGES)
        image = ImageFiles(base=Path.cwd()).image_of(Path(path))
        self.policy.image_expander.tokens_of(image)  # damaged pixels are found now
        self.images.append(image)

    def set_temperature(self, temperature: float) -> None:
        """Set the sampling temperature; 0: greedy. Raises ValueError for one that is not in 0 to HOTTEST."""
        if not 0 <= temperature <= HOTTEST:
            raise ValueError(f"a temperature is 0 (greedy) to {HOTTEST}, and not {temperature:g}")
        self.greedy = temperature == 0
        if temperature > 0:
            changed = {"temperature": max(temperature, 0.01)}
            self.engine = self.engine.with_settings(self.engine.settings.model_copy(update=changed))

    def say(self, asked: str | int, on_text: OnText) -> ChatAnswer:
        """Answer a message of the conversation, or begin another with the prompt of a held-out row, by its number.
        `on_text` gets that prompt, then the pieces as they come. A stop raises Interrupted.
        """
        chats = self.chats and isinstance(asked, str)
        prompt = self._prepare([*self.messages, self._message(str(asked))] if chats else asked)
        if isinstance(asked, int):
            on_text("prompt", shown_text(as_messages(prompt.prompt)[-1]))
        self.answer = answer = self._answer(prompt, on_text)
        if self.chats and not isinstance(prompt.prompt, str):
            added: list[Message] = [{"role": "assistant", "content": prompt.opened + answer.text}]
            if self.runner is not None and answer.episode is not None:
                role = self.runner.observations.role
                added = [{**m, "role": role} if m["role"] == "tool" else m for m in answer.episode.transcript]
            self.messages = [*prompt.prompt, *added]
            self.images = [] if isinstance(asked, str) else self.images
        self.turn += 1
        return answer

    def _message(self, asked: str) -> Message:
        """Return a message of the user's with the images that wait for it in front of its text."""
        if not self.images:
            return {"role": "user", "content": asked}
        text = asked.replace(IMAGE_MARK, "")  # which would stand for an image
        entries = [image.entry for image in self.images]
        return {"role": "user", "content": IMAGE_MARK * len(entries) + text, "images": entries}

    def rewards(self) -> tuple[dict[str, float], str | None]:
        """Score the last answer: the weighted sum and each reward, and why there is none. Raises ValueError without an
        answer.
        """
        if self.answer is None:
            raise ValueError("nothing has been asked yet")
        if self.scorer is None:
            given: dict[str, Any] = {"policy": self.policy, "options": self.options, "runner": self.runner}
            self.scorer = load_scorer(self.target.config, self.task, **given)
            self._closing.callback(self.scorer.close)
            self.scorer.start()
        answer = self.answer
        episodes = None if self.answer.episode is None else [self.answer.episode]
        scored = self.scorer([answer.prompt], [answer.sample.response], episodes=episodes)
        named = dict(zip(self.scorer.names, scored.scores[0].tolist(), strict=True))
        why = scored.failures[0].reason if scored.failures else None
        return {"reward": float(scored.rewards[0]), **named}, why

    @property
    def asks_itself(self) -> bool:
        """Return whether the last prompt was typed, and has no columns of a row."""
        return self.answer is not None and [*self.answer.prompt.row] == ["prompt"]

    def _prepare(self, asked: Prompt | int) -> PreparedPrompt:
        """Prepare a prompt, or that of a held-out row by its number. Raises ValueError for a number that no row has,
        and for a prompt of one's own if the environment reads columns, which only rows have.
        """
        where = self.target.config.task
        runner = self.runner
        task = OWN_ROWS
        row = {"prompt": asked}
        index = self.turn
        openings = None
        if isinstance(asked, int):
            task = self.task
            rows = rows_of_run(self.target.config, self.task).held_out
            index = asked
            if not 0 <= index < len(rows):
                raise ValueError(f"there is no held-out row {index}: /prompt 0 to {len(rows) - 1}")
            row = rows[index]
            openings = runner.openings(task, [row]) if runner is not None else None
        elif runner is not None and (columns := runner.environment.needed_columns):
            reads = ", ".join(f"`{name}`" for name in columns)
            raise ValueError(f"the environment reads columns of a row ({reads}): ask a held-out one, /prompt I")
        expander = self.policy.image_expander
        if expander is None and images_of(prompt_of(task.prompt(row))):
            raise ValueError(NO_IMAGES)
        [prompt] = prepare_prompts(
            task,
            [row],
            tokenizer=self.policy.tokenizer,
            chat=where.chat,
            system_prompt=where.system_prompt,
            variables=where.chat_template_kwargs if runner is None else runner.variables,
            limit=NO_LIMIT,
            on_overlong_prompt="error",
            openings=openings,
            images=expander,
        )
        check_ids([prompt.tokens], self.policy.tokenizer, self.policy.causal)
        return replace(prompt, index=index)

    def _answer(self, prompt: PreparedPrompt, on_text: OnText, *, greedy: bool = False) -> ChatAnswer:
        room = self.policy.positions - len(prompt.tokens)
        if room < 1:
            raise ValueError(
                f"{len(prompt.tokens)} tokens fill the model's context length of {self.policy.positions}: /reset"
            )
        most = min(self.engine.settings.max_new_tokens, room)
        tokenizer = self.policy.tokenizer
        written = TurnDetokenizer(tokenizer)

        def reply(tokens: list[int]) -> None:
            on_text("policy", written.end())
            on_text("environment", str(tokenizer.decode(tokens, skip_special_tokens=True)))

        requests = self.engine.requests_for(
            prompt.tokens,
            1,
            row=prompt.index,
            seed=self.target.config.run.seed,
            step=CHAT_STEP + self.turn,
            limit=most,
            greedy=greedy or self.greedy,
            role=self.role,
            on_tokens=lambda tokens: on_text("policy", written.add(tokens)),
        )
        if self.runner is None:
            [sample] = self.engine.sample(requests)
            on_text("policy", written.end())
            return ChatAnswer(prompt, sample, turn_text(tokenizer, sample.response))
        [sample] = self.runner.play([prompt], requests, engine=self.engine, on_reply=reply)
        on_text("policy", written.end())
        transcript = sample.played.transcript if sample.played is not None else []
        text = "".join(message["content"] for message in transcript if message["role"] == "assistant")
        return ChatAnswer(prompt, sample, text)


def converse(session: ChatSession) -> None:
    """Answer lines until the input ends; words that begin with / are commands. Ctrl-C ends an answer."""
    with suppress(ImportError):  # where there is one, `input` edits lines by it, and knows those before
        importlib.import_module("readline")
    kind = "conversation" if session.chats else "no chat template: each line is a prompt of its own"
    print(f"{escape_control(session.target.name)} ({kind}); /help lists commands")
    with suppress(EOFError, KeyboardInterrupt):
        while (line := input("> ").strip()) != "/quit":
            try:
                with StopFlag(signals=(signal.SIGINT,), leaves=False):
                    _obey(session, line)
            except Interrupted as stop:
                print(escape_control(f"\n(stopped: {stop}; it is not part of the conversation)"))
            except ValueError as error:
                print(escape_control(str(error)))
        return
    print()


def _typed(kind: Callable[[str], Number], text: str, *, usage: str) -> Number:
    """Parse the number behind a command. Raises ValueError with the usage."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"type {usage}") from None


def _unquoted(path: str) -> str:
    """Return a path without a shell's quotes or backslashes, with which terminals type a file that is dropped on them;
    one with spaces and without these stays as it is.
    """
    with suppress(ValueError):  # a quote that is not closed is the name's own
        words = shlex.split(path)
        return words[0] if len(words) == 1 else path
    return path


def _obey(session: ChatSession, line: str) -> None:
    """Answer a line, or do what a command says. Raises ValueError for what cannot be done."""

    def show(who: str, text: str) -> None:  # what the policy only reads is in brackets
        text = escape_control(text) if who == "policy" else f"\n[{escape_control(text.strip())}]\n"
        print(text, end="", flush=True)

    command, _, rest = line.partition(" ")
    if rest and command in ALONE:
        raise ValueError(f"type {command} alone")
    if command == "/temperature":
        session.set_temperature(_typed(float, rest, usage="/temperature T, a number such as 0.7; 0 is greedy"))
    elif command == "/image":
        if not rest.strip():
            raise ValueError("type /image FILE")
        session.show_image(_unquoted(rest.strip()))
        print(f"{len(session.images)} in the next message")
    elif command == "/reset":
        session.reset()
    elif command == "/reward":
        scores, why = session.rewards()
        each = (f"{name} {'-' if math.isnan(score) else f'{score:.4g}'}" for name, score in scores.items())
        print(", ".join(each) + (f" ({escape_control(why.splitlines()[-1])})" if why else ""))
        if session.asks_itself:
            print("(a question of yours has no columns, such as a reference answer: /prompt I asks held-out row I)")
    elif line and (command == "/prompt" or not command.startswith("/")):
        asked = line
        if command == "/prompt":
            asked = _typed(int, rest, usage="/prompt I, the number of a held-out row")
        answer = session.say(asked, show)
        episode = answer.episode
        for message in episode.transcript[-1:] if episode is not None else []:
            if message["role"] == "tool":
                show("environment", message["content"])
        if episode is not None and episode.failure is not None:
            print(f"\n(the environment gave no answer: {escape_control(episode.failure)})", end="")
        print(ENDS.get(answer.sample.finish, ""))
    elif line:
        if command != "/help":
            print(f"unknown command {escape_control(command)}; there are:")
        print(HELP, end="")
