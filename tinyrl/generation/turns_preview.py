"""A preview of episodes: one played with a scripted policy, and its tokens with what counts of them.

It is played as training plays one, by play(), but for the engine: this one says what it was told to.
"""

from __future__ import annotations

import time
from itertools import groupby

from tinyrl.environments.trial import NONSENSE, asking_turn
from tinyrl.generation.engine import Completion, Request, SampledRole, SamplingEngine
from tinyrl.generation.turns import Game, play
from tinyrl.tasks.observations import ObservationTokens
from tinyrl.tasks.prompts import PreparedPrompt, token_ids
from tinyrl.tasks.task import Task
from tinyrl.text import visible

SHOWN_TOKENS = 64  # of each side, each time


def episode_notes(game: Game) -> list[str]:
    """What a person should know of the episodes of a run before step 1."""
    notes, observations = [f"environment {game.environment.describe()}"], game.observations
    if observations.chat and observations.role != "tool":
        role = observations.role
        notes.append(f"the chat template has no role tool: what the environment answers is a message of role {role}")
    if observations.strips_thinking:
        notes.append("the chat template leaves out what earlier turns thought; here it stays, as it was sampled")
    return notes


def show_episode(game: Game, prompt: PreparedPrompt, task: Task, *, stop: list[str]) -> list[str]:
    """Play an episode of this prompt with scripted turns, and show it as lines. `stop`: what ends a turn beside EOS."""
    turns, tokenizer = scripted_turns(game, prompt, task), game.tokenizer
    script = Script([_turn(text, game.observations, stop) for text in turns], most=game.max_new_tokens)
    request, begun = Request(prompt_tokens=prompt.tokens, prompt_row=prompt.index), time.perf_counter()
    [completion], [episode] = play([prompt], [request], 1, engine=script, game=game, seed=0, step=0)
    seconds = time.perf_counter() - begun
    asked = len(episode.turn_ends) - (completion.finish_reason == "length")
    assert completion.chosen is not None
    lines = ["episode of scripted turns (what the policy only reads is in brackets):"]
    at = 0
    for chosen, run in groupby(completion.chosen):
        tokens = completion.tokens[at : (at := at + len(list(run)))]
        shown = " ".join(f"{visible(str(tokenizer.decode([t])))!r}:{t}" for t in tokens[:SHOWN_TOKENS])
        shown += " ..." if len(tokens) > SHOWN_TOKENS else ""
        lines.append(f"  policy       {shown}" if chosen else f"  environment  [{shown}]")
    each = f", {seconds * 1e3 / asked:.1f} ms a call" if asked else ""
    lines.append(
        f"  {sum(completion.chosen)} of {len(completion.tokens)} tokens count; the environment was asked "
        f"{asked} time{'s' * (asked != 1)}{each}; the episode ended: {completion.finish_reason}"
    )
    if episode.reward:
        lines.append(f"  the environment gave a reward of {episode.reward:.4g}")
    if episode.failure is not None:
        lines.append(f"warning: the environment gave no answer: {visible(episode.failure)}")
    elif episode.invalid:
        lines.append("warning: the environment calls a scripted turn invalid")
    return lines


def scripted_turns(game: Game, prompt: PreparedPrompt, task: Task) -> list[str]:
    """A turn that asks (nonsense, where none is known), and one that answers: the gold answer, or nonsense again."""
    question = prompt.row.get("question")
    if not isinstance(question, str):
        question = prompt.prompt if isinstance(prompt.prompt, str) else prompt.prompt[-1]["content"]
    environment = game.environment
    asks = asking_turn(environment.built_in, environment.schemas, question)
    if task.asking_turn is not None and environment.built_in is None and not environment.workers:  # the task's own
        asks = task.asking_turn(prompt.row)
    return [asks or NONSENSE.split()[0], task.gold(prompt.row) or NONSENSE]


class Script(SamplingEngine):
    """A sampling engine that says what it was told to, turn after turn, the last one again and again."""

    name, exact = "script", True

    def __init__(self, turns: list[Completion], *, most: int) -> None:
        self._turns, self._most, self._said = turns, most, 0

    def sample(
        self,
        requests: list[Request],
        samples_per_request: int,
        *,
        seed: int,
        step: int,
        greedy: bool = False,
        role: SampledRole = "policy",
    ) -> list[list[Completion]]:
        """The next turn, cut where the request says so, for the one sample of the one request."""
        [request] = requests
        assert samples_per_request == 1
        turn, most = self._turns[min(self._said, len(self._turns) - 1)], request.max_new_tokens or self._most
        self._said += 1
        cut = len(turn.tokens) > most
        return [[Completion(turn.tokens[:most], turn.logprobs[:most], "length" if cut else turn.finish_reason)]]


def _turn(text: str, observations: ObservationTokens, stop: list[str]) -> Completion:
    """A turn as sampling would have ended it: at a stop string, or with EOS."""
    tokens, ends = token_ids(observations.tokenizer, text), sorted(observations.eos)
    if ends and not text.endswith(tuple(stop)):
        tokens.append(observations.end if observations.end in ends else ends[0])
        return Completion(tokens, [0.0] * len(tokens), "eos")
    return Completion(tokens, [0.0] * len(tokens), "stop")
