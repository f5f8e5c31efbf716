"""Play scripted turns in an environment, in the worker processes of a run, without a model.

A finding is a function of the trial, as those of a run are of its records (runs/findings.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.data.image_rows import with_parts
from tinyrl.data.messages import as_messages, asked_of
from tinyrl.data.readers import Row
from tinyrl.environments import Reply, Rewards, Transcript
from tinyrl.environments.environment import NONSENSE, NOT_JSON, UNKNOWN_TOOL, Replies, asking_turn
from tinyrl.environments.tool_calls import CALL_FAILED
from tinyrl.rewards.holes import answers_in, in_forms
from tinyrl.runs.finding import Finding, found_by
from tinyrl.runs.resolve import positions_named
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import row_columns, shows_tools
from tinyrl.tasks.rewarded import HOW_TO_REWARD, missing_reward
from tinyrl.text import escape_control, one_line
from tinyrl.tools.check.first_row import tokens_with_environment
from tinyrl.tools.check.reward import SLOW_CALL_S, has_environment, tokenizer_of
from tinyrl.tools.check.right_answers import columns_to_try
from tinyrl.tools.check.section import CheckSection, words_of_kind
from tinyrl.tools.check.tool_arguments import calls_of_tool, first_words
from tinyrl.training.failing_rewards import MAX_FAILED_SHARE

EPISODES = 16
SHOWN = 80
CHARS_A_TOKEN = 4  # of English: no tokenizer is loaded for this


@dataclass(frozen=True)
class Script:
    """Turns of one kind, one for each row, with the replies (None: it failed).

    unsteady: the same turns got other replies the second time; should_work: each turn is one that a tool should answer;
    is_invented: with arguments that nobody named.
    """

    kind: str
    turns: list[str]
    replies: list[Reply | None]
    reasons: list[str]
    seconds: float
    unsteady: bool = False
    should_work: bool = False
    is_invented: bool = False

    @property
    def given(self) -> list[Reply]:
        return [reply for reply in self.replies if reply is not None]

    @property
    def failed_replies(self) -> list[Reply]:
        """Return the replies to calls that failed, by their own fault or the tool's."""
        return [reply for reply in self.given if reply.invalid or reply.tool_error]

    @property
    def is_broken(self) -> bool:
        """Return whether calls that should work all failed: they are invalid, the tool raised, or got no answer."""
        return self.should_work and len(self.failed_replies) + len(self.reasons) == len(self.turns)

    @property
    def is_paid(self) -> bool:
        """Return whether a reply holds a reward, 0 too."""
        return any(reply.reward is not None for reply in self.given)

    @property
    def first_reason(self) -> str:
        texts = [reply.text.removeprefix(CALL_FAILED).strip() for reply in self.failed_replies]
        return one_line([*texts, *self.reasons][0], SHOWN)

    @property
    def counts(self) -> dict[str, int]:
        ended = len([reply for reply in self.given if reply.done])
        # A turn without a reply has ended its episode, unless it failed.
        ended += len(self.turns) - len(self.given) - len(self.reasons)
        return {
            "answered": len([reply for reply in self.given if reply.text]),
            "failed": len(self.reasons),
            "ended": ended,
            "invalid": len([reply for reply in self.given if reply.invalid]),
            "tool_errors": len([reply for reply in self.given if reply.tool_error]),
        }

    @property
    def may_be_invention(self) -> bool:
        """Return whether a broken tool may have failed because of invented arguments: it said so itself, and not by the
        lack of a key that no call named, such as a column of the row.
        """
        _, found, key = self.first_reason.partition("KeyError: ")
        lacks_other_key = bool(found) and not any(key.strip("'\"` ") in turn for turn in self.turns)
        return self.is_invented and not self.reasons and not lacks_other_key


@dataclass
class PlayedScripts:
    """Scripts that were played in an environment.

    hidden_tools  the model's chat template shows none
    rewards       which episodes the environment rewards
    is_alone      nothing else rewards them, and the method needs a reward
    verifier      of the task, which scores them too; "": none does
    paid_for      turns that the environment rewarded; "": none of those that were tried
    """

    scripts: list[Script] = field(default_factory=list)
    hidden_tools: bool = False
    rewards: Rewards = "none"
    is_alone: bool = False
    verifier: str = ""
    paid_for: str = ""
    max_turns: int = 1
    max_observation_tokens: int = 0
    most_observation_tokens: int = 1 << 30  # that the model has positions for

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Return the first turn of a script with each reply to it that goes on."""
        found = list[tuple[str, str]]()
        for script in self.scripts:
            found += [(script.turns[0], reply.text) for reply in script.given if reply.text and not reply.done]
        return found

    @property
    def reasons(self) -> list[str]:
        return [reason for script in self.scripts for reason in script.reasons]

    @property
    def failed(self) -> float:
        return len(self.reasons) / sum(len(script.turns) for script in self.scripts)

    @property
    def longest(self) -> int:
        """Return the characters of the longest reply."""
        return max((len(reply.text) for script in self.scripts for reply in script.given), default=0)

    @property
    def seconds(self) -> float:
        """Return the mean seconds of a call."""
        return fmean(script.seconds for script in self.scripts)


# ---- findings ----


def the_environment_fails(trial: PlayedScripts) -> Finding | None:
    if trial.failed <= MAX_FAILED_SHARE:
        return None
    return Finding(
        name="the environment fails",
        what=f"{trial.failed:.0%} of the rows failed, the first so: {escape_control(trial.reasons[0])}.",
        change="Correct it. Training stops after three such batches.",
        figures={"failed": trial.failed},
    )


def tools_are_not_shown(trial: PlayedScripts) -> Finding | None:
    if not trial.hidden_tools:
        return None
    return Finding(
        name="tools are not shown",
        what="The model's chat template shows no tools, or prompts do not go through one (task.chat).",
        change="Take a model whose template shows tools (Qwen2.5, Llama 3, Mistral), or describe them in the prompt "
        "and answer with environment.name=FILE.py:FUNCTION.",
    )


def the_environment_is_silent(trial: PlayedScripts) -> Finding | None:
    if trial.failed > MAX_FAILED_SHARE or trial.longest:
        return None
    return Finding(
        name="the environment is silent",
        what="It answers none of the turns that were tried, so no episode has a second turn.",
        change="See what it expects a turn to hold.",
    )


def every_call_fails(trial: PlayedScripts) -> Finding | None:
    """All calls of a tool failed; those with invented arguments count where that is not the arguments' fault."""
    broken = [script for script in trial.scripts if script.is_broken and not script.may_be_invention]
    if not broken:
        return None
    return Finding(
        name="every call fails",
        what=f"Each turn that should be answered ({broken[0].kind}) failed, the first so: {broken[0].first_reason}.",
        change="Correct the tool, or add the columns that it needs to the rows.",
    )


REWARD_OF_REPLY = "Return tinyrl.environments.Reply(text, reward=...), 0.0 for an episode that failed"


def no_rewards(trial: PlayedScripts) -> Finding | None:
    """The environment rewards no episode, and nothing else does."""
    if trial.rewards != "none" or not trial.is_alone:
        return None
    return Finding(
        name="no rewards",
        what="The environment rewards no episode, which a class does by get_reward, and nothing else does.",
        change=f"Write get_reward, or give {HOW_TO_REWARD}.",
    )


def no_reward_was_seen(trial: PlayedScripts) -> Finding | None:
    """None of the turns that were tried was rewarded, and nothing else rewards an episode."""
    if trial.rewards != "some" or not trial.is_alone or trial.paid_for or trial.failed > MAX_FAILED_SHARE:
        return None
    return Finding(
        name="no reward was seen",
        what="None of the turns that were tried had a reward (nonsense, and the values of the rows' columns), and "
        "nothing else rewards an episode.",
        change=f"{REWARD_OF_REPLY}. Or give {HOW_TO_REWARD}. If it rewards other turns, tinyrl check without --quick "
        "shows whether the policy reaches them.",
        is_harmless=True,
    )


def two_rewards(trial: PlayedScripts) -> Finding | None:
    """Replies hold rewards, and the task's verifier scores episodes too."""
    if not trial.verifier or not any(script.is_paid for script in trial.scripts):
        return None
    return Finding(
        name="two rewards",
        what=f"Replies hold rewards, and {trial.verifier} scores each episode too: both are added.",
        change="If only the environment's are meant, call the column otherwise, in the environment too: with "
        "task.columns.target=answer it is `target` there.",
        is_harmless=True,
    )


def answers_by_chance(trial: PlayedScripts) -> Finding | None:
    unsteady = [script.kind for script in trial.scripts if script.unsteady]
    if not unsteady:
        return None
    return Finding(
        name="answers by chance",
        what=f"The same turns ({unsteady[0]}) got other answers the second time, so a resumed run is another run.",
        change="Draw random numbers from the `seed` of an episode.",
    )


def room_for_observation(config: Config) -> int:
    """Return the most tokens that each reply of an episode may have, beside its responses and a prompt of one token."""
    positions = positions_named(config.model.path)
    if positions is None:
        return 1 << 30
    return (positions - 1 - config.generation.max_new_tokens) // max(1, config.environment.max_turns - 1)


def no_turn_to_read_a_reply(trial: PlayedScripts) -> Finding | None:
    if trial.max_turns > 1 or not trial.asked:
        return None
    return Finding(
        name="no turn to read a reply",
        what="Episodes end after one turn, so the policy reads no reply of the environment.",
        change="environment.max_turns=2, or as many as the task needs.",
    )


def replies_are_cut(trial: PlayedScripts) -> Finding | None:
    """Half of the replies are more than twice as long as the policy reads."""
    limit = trial.max_observation_tokens
    typical = median(len(text) for _, text in trial.asked) / CHARS_A_TOKEN if trial.asked else 0.0
    if typical <= 2 * limit:
        return None
    most = min(-(-trial.longest // CHARS_A_TOKEN), trial.most_observation_tokens)
    change = "Shorter replies, fewer environment.max_turns, or a model with a longer context."
    if most > limit:
        change = f"environment.max_observation_tokens={most}."
    return Finding(
        name="replies are cut",
        what=f"Half of the replies have some {typical:.0f} tokens or more, and the policy reads the first {limit}.",
        change=change,
        figures={"typical": typical, "limit": float(limit)},
    )


FINDINGS = (
    the_environment_fails,
    tools_are_not_shown,
    the_environment_is_silent,
    every_call_fails,
    no_rewards,
    no_reward_was_seen,
    two_rewards,
    answers_by_chance,
    no_turn_to_read_a_reply,
    replies_are_cut,
)


# ---- the trial ----


@dataclass
class EnvironmentSection(CheckSection):
    """The section about an environment. rewards: which episodes it rewards."""

    rewards: Rewards = "none"


def check_environment(config: Config, task: Task, rows: list[Row]) -> EnvironmentSection | None:
    """Ask the environment about reference answers, turns that it should answer, nothing, nonsense and bad calls of
    tools; None where there is none.
    """
    section = EnvironmentSection("environment")
    is_alone = missing_reward(config, task, rows) is not None
    rows = rows[:EPISODES]
    if config.uses("environment") and config.environment.agent:
        section.lines = [f"{config.environment.agent}: an agent, which is played when the model is loaded"]
        return section
    if not config.uses("environment") or not has_environment(config, task):
        return None
    prompts = [with_parts(asked_of(task.prompt(row))) for row in rows]
    environment = Replies(
        config.environment,
        task=task.name,
        respond=task.respond,
        use=task.environment,
        stop=task.stop,
        length=lambda text: len(text) // CHARS_A_TOKEN,
        worker=task.replies_worker(timeout_s=config.environment.seconds),
    )
    trial = PlayedScripts(
        max_turns=config.environment.max_turns,
        max_observation_tokens=environment.max_observation_tokens,
        most_observation_tokens=room_for_observation(config),
        is_alone=is_alone and config.trains.rewarded,
    )
    with closing(environment):
        environment.start()
        section.rewards = trial.rewards = environment.rewards
        if environment.schemas:
            trial.hidden_tools = not shows_tools(tokenizer_of(config), config.task.chat)
        columns = row_columns(rows)
        opening = environment.openings(prompts, columns)[0]
        columns = {"seed": [*range(len(rows))], **columns}
        trial.scripts = played_scripts(environment, task, rows, prompts, columns)
        if trial.rewards == "some" and config.reward.is_verifier and not is_alone:
            trial.verifier = f"the verifier of {task.name}"
            trial.verifier += f" (column `{task.compares_with}`)" if task.compares_with else ""
        if trial.rewards == "some" and trial.failed <= MAX_FAILED_SHARE:
            trial.paid_for = paid_turns(environment, trial, rows, prompts, columns)
        section.lines = [environment.describe()]
    if opening:
        section.lines.append(f"prompts end with {one_line(opening, SHOWN)!r}")
    schemas = None if trial.hidden_tools else environment.schemas
    tokens = tokens_with_environment(config, task, rows[0], schemas=schemas, opening=opening)
    if tokens is not None:
        section.facts["tokens"] = tokens
        section.lines.append(f"with what it adds, tools and opening, the first prompt has {tokens:,} tokens")
    for script in trial.scripts:
        section.lines.append(line_of(script))
        section.facts[script.kind] = script.counts
    section.lines += notes_of(trial)
    section.findings = found_by(FINDINGS, trial)
    return section


def played_scripts(
    environment: Replies, task: Task, rows: list[Row], prompts: list[Any], columns: dict[str, list[Any]]
) -> list[Script]:
    """Play turns that the environment should know, calls of its tools, then nothing, nonsense and bad calls."""
    scripts = list[Script]()
    for kind, turns in scripts_of(environment, task, rows, prompts).items():
        scripts.append(play(environment, kind, turns, prompts, columns))
    for schema in environment.schemas or []:
        scripts.append(play_tool(environment, schema, rows, prompts, columns))
    wrong = {"nothing": "", "nonsense": NONSENSE}
    if environment.schemas:
        wrong |= {"unknown tool": UNKNOWN_TOOL, "not JSON": NOT_JSON}
    for kind, turn in wrong.items():
        scripts.append(play(environment, kind, [turn] * len(rows), prompts, columns))
    return scripts


def scripts_of(environment: Replies, task: Task, rows: list[Row], prompts: list[Any]) -> dict[str, list[str]]:
    """Return turns that the environment should know, by kind, one for each row; calls of tools aside."""
    scripts: dict[str, list[str]] = {}
    golds = [task.gold(row) for row in rows]
    if None not in golds:
        scripts["gold"] = [str(gold) for gold in golds]
    if environment.built_in is not None:
        words = [first_words(question_of(row, prompt)) for row, prompt in zip(rows, prompts, strict=True)]
        scripts[environment.built_in] = [asking_turn(environment.built_in, some) for some in words]
    elif task.asking_turn is not None and environment.name == task.name:
        scripts["a call"] = [task.asking_turn(row) or "" for row in rows]
    return scripts


def question_of(row: Row, prompt: Any) -> str:
    """Return a row's question: its column of that name, or the text of the last message of its prompt, which has parts
    for content where it has images.
    """
    question = row.get("question")
    if isinstance(question, str):
        return question
    content = as_messages(prompt)[-1]["content"]
    if not isinstance(content, list):
        return str(content)
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def play(
    environment: Replies,
    kind: str,
    turns: list[str],
    prompts: list[Any],
    columns: dict[str, list[Any]],
    **how: bool,
) -> Script:
    """Play one turn of each row, and once more to see whether the replies are the same."""
    transcripts: list[Any] = [[{"role": "assistant", "content": turn}] for turn in turns]
    begun = time.perf_counter()
    answers = environment.respond(prompts, transcripts, columns)
    seconds = time.perf_counter() - begun
    unsteady = False
    if not answers.failures:
        unsteady = environment.respond(prompts, transcripts, columns).values != answers.values
    reasons = [failure.reason for failure in answers.failures]
    return Script(kind, turns, list(answers.values), reasons, seconds, unsteady, **how)


def play_tool(
    environment: Replies,
    schema: dict[str, Any],
    rows: list[Row],
    prompts: list[Any],
    columns: dict[str, list[Any]],
) -> Script:
    """Call a tool with the arguments that its description and the rows give, until some calls have an answer; last with
    invented ones.
    """
    kind = f"call {schema['function']['name']}"
    questions = [question_of(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    tried = list[Script]()
    for calls in calls_of_tool(schema, rows, questions):
        script = play(environment, kind, calls.turns, prompts, columns, should_work=True, is_invented=calls.is_invented)
        tried.append(script)
        if not script.is_broken or script.reasons:
            return script
    return tried[0]


def paid_turns(
    environment: Replies, trial: PlayedScripts, rows: list[Row], prompts: list[Any], columns: dict[str, list[Any]]
) -> str:
    """Return what turns the environment rewards, of those that scripts have played and, where nothing else rewards an
    episode, of those that its right answers may be; "" if none.
    """
    paid = next((words_of_kind(script.kind) for script in trial.scripts if script.is_paid), "")
    if paid or not trial.is_alone:
        return paid
    for kind, turns in planted_turns(rows, trial.max_turns):
        if is_episode_paid(environment, turns, prompts, columns):
            return kind
        if trial.seconds >= SLOW_CALL_S:
            break
    return ""


def planted_turns(rows: list[Row], max_turns: int) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield turns of an episode for each row, and what they are: nonsense, then the values of each column as answers in
    each form; the items of a list are a turn each.
    """
    yield "nonsense", [[NONSENSE] * max_turns for _ in rows]
    [names, others] = columns_to_try(rows, named=set(), takes_any=True)
    for name in names + others:
        kind = f"column `{name}`"
        if all(isinstance(row.get(name), list) for row in rows):
            yield kind, [[str(item) for item in row[name]][:max_turns] for row in rows]
        elif given := answers_in(name, rows).given:
            for texts in in_forms([given.get(i, "") for i in range(len(rows))]).values():
                yield kind, [[text] * max_turns for text in texts]


def is_episode_paid(
    environment: Replies, turns: list[list[str]], prompts: list[Any], columns: dict[str, list[Any]]
) -> bool:
    """Play an episode of each row, with turns of its own, until one is rewarded; return whether one was."""
    transcripts: list[Transcript] = [[] for _ in turns]
    playing = [*range(len(turns))]
    for turn in range(max(map(len, turns))):
        playing = [i for i in playing if turn < len(turns[i])]
        if not playing:
            break
        for i in playing:
            transcripts[i].append({"role": "assistant", "content": turns[i][turn]})
        of_those = {name: [column[i] for i in playing] for name, column in columns.items()}
        asked = [prompts[i] for i in playing]
        replies: list[Reply | None] = environment.respond(asked, [transcripts[i] for i in playing], of_those).values
        if any(reply is not None and reply.reward is not None for reply in replies):
            return True
        going_on = list[int]()
        for i, reply in zip(playing, replies, strict=True):
            if reply is not None and not reply.done:
                transcripts[i].append({"role": "tool", "content": reply.text})
                going_on.append(i)
        playing = going_on
    return False


def line_of(script: Script) -> str:
    """Return what became of a script's turns."""
    counts = ", ".join(f"{count} {what}" for what, count in script.counts.items())
    line = f"  {words_of_kind(script.kind)}: {len(script.turns)} tried, {counts}"
    paid = [reply.reward for reply in script.given if reply.reward is not None]
    return f"{line}, mean reward {fmean(paid):.4g}" if paid else line


def notes_of(trial: PlayedScripts) -> list[str]:
    """Return an example, the seconds of a call, what is cut, and tools that only failed on invented arguments."""
    notes = [f"{one_line(turn, SHOWN)!r} -> {one_line(text, SHOWN)!r}" for turn, text in trial.asked[:1]]
    notes.append(f"{1e3 * trial.seconds:.1f} ms per call of {len(trial.scripts[0].turns)} episodes")
    if trial.is_alone and trial.paid_for:
        notes.append(f"rewards: its own, seen for turns of {trial.paid_for}")
    limit = trial.max_observation_tokens
    if trial.longest > CHARS_A_TOKEN * limit:
        most = -(-trial.longest // CHARS_A_TOKEN)
        cut = f"is cut at environment.max_observation_tokens={limit}"
        notes.append(f"the longest reply, some {most:,} tokens, {cut}")
    for script in trial.scripts:
        if script.is_broken and script.may_be_invention:
            advice = 'an example in its docstring (such as "...") is tried first'
            notes.append(f"note: {script.kind} failed with an invented argument: {script.first_reason}; {advice}")
    return notes
