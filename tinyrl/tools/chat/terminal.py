"""A conversation in a terminal: lines in, answers out as they are written; words that begin with / are commands.

All that a model or a tool says is made safe to show, piece by piece.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable

from tinyrl.errors import Interrupted
from tinyrl.runs.signals import StopFlag
from tinyrl.text import visible
from tinyrl.tools.chat.speaker import ChatAnswer, Hear, Speaker

HELP = """/temperature T   set the sampling temperature; 0: greedy
/compare         show the start's answer to the last prompt, with the same random numbers
/reward          show the rewards of the last answers
/prompt I        ask the prompt of held-out row I, with its columns
/reset           forget the conversation
/help, /quit"""
Write = Callable[[str], None]


def converse(speaker: Speaker, *, read: Callable[[str], str] = input, write: Write | None = None) -> None:
    say = _to_terminal if write is None else write
    kind = "the conversation goes on" if speaker.chats else "no chat template: each line is a prompt of its own"
    say(f"{visible(speaker.target.name)} ({kind}); /help says what else there is\n")
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            say("\n")
            return
        if line in ("/quit", "/exit"):
            return
        if not line:
            continue
        try:
            with StopFlag(signals=(signal.SIGINT,), leaves=False):
                _answer_line(speaker, line, say)
        except Interrupted:
            say("\n(stopped; it is not part of the conversation)\n")
        except ValueError as error:
            say(f"{visible(str(error))}\n")


def _answer_line(speaker: Speaker, line: str, write: Write) -> None:
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if not command.startswith("/"):
        _ended(speaker.say(line, _shown(write)), write)
    elif command == "/temperature":
        speaker.set_temperature(_number(rest, "/temperature"))
        write("greedy\n" if speaker.greedy else f"temperature {speaker.settings.temperature:g}\n")
    elif command == "/reset":
        speaker.reset()
        write("forgotten\n")
    elif command == "/compare":
        write("the start: ")
        _ended(speaker.compare(_shown(write)), write)
    elif command == "/reward":
        write("".join(f"{line}\n" for line in _reward_lines(speaker)))
    elif command == "/prompt":
        index = _number(rest, "/prompt")
        if index != int(index):
            raise ValueError(f"/prompt takes the number of a row, and not {index:g}")
        _ended(speaker.say_row(int(index), _shown(write)), write)
    else:
        write(f"{HELP}\n" if command == "/help" else f"there is no {visible(command)}\n{HELP}\n")


def _shown(write: Write) -> Hear:
    """Pieces as they come; what the policy only reads is in brackets."""
    return lambda who, text: write(visible(text) if who == "policy" else f"\n[{visible(text.strip())}]\n")


def _ended(answer: ChatAnswer, write: Write) -> None:
    episode = answer.episode
    reason = answer.completion.finish_reason if episode is None else episode.finish_reason
    why = {"length": "cut off: no more tokens", "turns": "no more turns"}.get(reason)
    notes = [why] if why else []
    if episode is not None and episode.failure is not None:
        notes.append(f"the environment gave no answer: {visible(episode.failure)}")
    last = episode.transcript[-1] if episode is not None and episode.transcript else None
    if last is not None and last["role"] == "tool":
        write(f"\n[{visible(last['content'].strip())}]")
    write("".join([*(f"\n({note})" for note in notes), "\n"]))


def _reward_lines(speaker: Speaker) -> list[str]:
    lines = []
    for role, scores, why in speaker.rewards():
        who = {"reference": "the start", "base": "the model"}.get(role, role)
        said = [f"{name} {'-' if math.isnan(score) else f'{score:.4g}'}" for name, score in scores.items()]
        lines.append(f"{who}: {', '.join(said)}" + (f" ({visible(why.splitlines()[-1])})" if why else ""))
    return lines


def _number(text: str, command: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"{command} takes a number, and not {visible(text)!r}")
    return found


def _to_terminal(text: str) -> None:
    # A terminal that cannot write a character gets its escape; a lone surrogate is named by `visible` before.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
