"""Trials of a person's reward and environment on their own rows, in the worker processes of a run, without a model."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from tinyrl.config.schema import Config
from tinyrl.data.messages import as_messages
from tinyrl.data.readers import Row
from tinyrl.environments import Reply, Transcript
from tinyrl.environments.environment import NONSENSE, NOT_JSON, UNKNOWN_TOOL, Environment, asking_turn, tool_call
from tinyrl.rewards.functions import FunctionReward, RewardCall, call_in_process
from tinyrl.rewards.holes import find_holes
from tinyrl.rewards.trial import as_the_data_has_it
from tinyrl.runs.findings import Finding
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import row_columns
from tinyrl.text import number, one_line, visible
from tinyrl.tools.check.page import CheckSection
from tinyrl.workers.calls import MAX_FAILED_SHARE

REWARD_ROWS, ATTACKED_ROWS, EPISODES = 64, 8, 16
SLOW_CALL_S = 0.25  # a call of so many seconds is not made for each of some thousand wrong texts
SHOWN_HOLES, SHOWN = 6, 80
CHARS_A_TOKEN = 4  # of English: no tokenizer is loaded


def check_reward(config: Config, task: Task, rows: list[Row]) -> CheckSection:
    """Score gold answers, nothing and nonsense, and look for texts that score high and are wrong. Judges and reward
    models are left out: they are tried when the model is loaded.
    """
    section, reward = CheckSection("reward"), config.reward
    rows = rows[:REWARD_ROWS]
    prompts, columns = [task.prompt(row) for row in rows], row_columns(rows)
    messages = bool(config.environment.use or config.environment.tools or task.respond or task.environment)
    functions = [
        FunctionReward(f.use, weight=f.weight, timeout_s=reward.timeout_s) for f in reward.functions if not f.is_judge
    ]
    grader = FunctionReward(task.grader, timeout_s=reward.timeout_s) if task.grader and reward.is_verifier else None
    if not functions and (not reward.is_verifier or task.verify is None):
        section.lines = ["judged by a model; see below" if not reward.is_verifier else "none of its own"]
        return section
    failures: list[str] = []

    def call(function: FunctionReward | None, where: list[int], texts: list[str]) -> RewardCall:
        asked = [prompts[i] for i in where]
        said = [[{"role": "assistant", "content": t}] if messages else as_the_data_has_it(t, p)
                for t, p in zip(texts, asked, strict=True)]  # fmt: skip
        here = {name: [column[i] for i in where] for name, column in columns.items()}
        if function is not None:
            return function(asked, said, here)
        assert task.verify is not None
        return call_in_process(task.verify, task.name, asked, said, here)

    def score(where: list[int], texts: list[str]) -> list[float]:
        """Return the weighted sum over the functions; NaN where one fails or none applies."""
        total, failed = [math.nan] * len(where), set[int]()
        for function in functions or [grader]:
            found = call(function, where, texts)
            failed |= {failure.row for failure in found.failures if function is None or function.weight}
            failures.extend(failure.reason for failure in found.failures)
            weight = 1.0 if function is None else function.weight
            for i, one in enumerate(found.scores):
                if not math.isnan(one):
                    total[i] = weight * one + (0.0 if math.isnan(total[i]) else total[i])
        return [math.nan if i in failed else one for i, one in enumerate(total)]

    golds = [task.gold(row) for row in rows]
    kinds = {"gold": [str(gold) for gold in golds]} if None not in golds else {}
    kinds |= {"nothing": [""] * len(rows), "nonsense": [NONSENSE] * len(rows)}
    with ExitStack() as stack:
        for function in [*functions, *([grader] if grader else [])]:
            stack.enter_context(function).start()  # its imports are not part of a call's time
        everywhere, begun = list(range(len(rows))), time.perf_counter()
        scores = {what: score(everywhere, texts) for what, texts in kinds.items()}
        first = next(iter(kinds))
        again = score(everywhere, kinds[first])
        seconds = (time.perf_counter() - begun) / (len(kinds) + 1)
        names = " + ".join(f.name for f in functions) or task.name
        means = ", ".join(f"{what} {_mean(values)}" for what, values in scores.items())
        section.lines.append(f"{names}: {means}; {seconds * 1e3:.1f} ms for {len(rows)} rows")
        failed = len(failures) / (4 * len(rows))
        for what, values in scores.items():
            section.facts[what] = statistics.fmean(v) if (v := [s for s in values if not math.isnan(s)]) else None
        section.facts |= {"seconds": seconds, "failed": failed}
        hint = next((function.chat_hint for function in functions if function.chat_hint), None)
        section.findings += _reward_findings(scores, again == scores[first] or str(again) == str(scores[first]), hint)
        if failed > MAX_FAILED_SHARE:
            section.findings.append(Finding(
                "rewards fail", f"{failed:.0%} of the calls' rows failed, the first so: {failures[0]}.",
                "Mend the function; a run stops after three batches like that.", {"failed": failed},
            ))  # fmt: skip
        elif failures:
            section.lines.append(f"warning: {failed:.0%} of the rows failed, the first so: {failures[0]}")
        if functions and seconds < SLOW_CALL_S and not section.findings:
            _attack(section, score, task, rows[:ATTACKED_ROWS])
        for function in functions:
            section.lines += [f"printed: {one_line(line, SHOWN)}" for line in list(function.printed.kept)[-2:]]
    return section


def _mean(values: list[float]) -> str:
    valid = [value for value in values if not math.isnan(value)]
    return number(statistics.fmean(valid)) if valid else "no score"


def _reward_findings(scores: dict[str, list[float]], repeats: bool, hint: str | None) -> list[Finding]:
    found, valid = [], [s for values in scores.values() for s in values if not math.isnan(s)]
    change = "Print what the function gets and returns; it is called with the arguments shown in docs/rewards.md."
    if hint:
        found.append(Finding("messages taken for text", f"{hint}.", change, {}))
    elif not valid:
        found.append(Finding("no rewards", "No completion gets a score, not the gold answer either.", change, {}))
    elif "gold" in scores and min(valid) == max(valid):
        what = f"Gold answers, nothing and nonsense all score {valid[0]:.4g}."
        found.append(Finding("one reward for everything", what, change, {"reward": valid[0]}))
    elif "gold" in scores:
        rivals = [max(0.0, *pair) if math.isnan(sum(pair)) else max(pair)
                  for pair in zip(scores["nothing"], scores["nonsense"], strict=True)]  # fmt: skip
        beaten = sum(gold <= rival for gold, rival in zip(scores["gold"], rivals, strict=True)) / len(rivals)
        if beaten > MAX_FAILED_SHARE:
            what = f"In {beaten:.0%} of the rows the gold answer scores no more than nothing or nonsense."
            found.append(Finding("gold answers do not win", what, change, {"beaten": beaten}))
    if not repeats and valid:
        what = "The same completions got other scores when they were judged again."
        found.append(Finding("rewards by chance", what, "Draw random numbers from the row alone.", {}))
    return found


def _attack(section: CheckSection, score: Any, task: Task, rows: list[Row]) -> None:
    found = find_holes(score, task, rows)
    if found is None:
        section.lines.append("holes: not looked for, which takes two rows with different right answers")
        return
    tried = sum(text is not None for attempt in found.attempts for text in attempt.texts)
    about = f"{tried:,} wrong texts of {len(found.attempts)} kinds on {len(found.right)} rows"
    section.lines.append(f"holes: {len(found.holes) or 'none'} found by {about}")
    section.facts["holes"] = [
        {"name": hole.name, "share": hole.share, "text": hole.example()[0]} for hole in found.holes
    ]
    for hole in found.holes[:SHOWN_HOLES]:
        text, row = hole.example()
        ends = f"{hole.scores[row]:.3g} of a right answer's {found.right[row]:.3g}"
        section.lines.append(f"  {hole.name} ({hole.share:.0%} of the rows, {ends}): {one_line(text, SHOWN)!r}")
    if found.holes:
        what = f"Wrong texts score nearly as much as right answers: {', '.join(hole.name for hole in found.holes[:3])}."
        change = "Judge one marked answer, the last, and compare it whole."
        section.findings.append(Finding("holes in the reward", what, change, {"holes": float(len(found.holes))}))
    elif found.is_blind:
        what = "No right answer scores more than the worst wrong text of its row, in any form that was tried."
        section.findings.append(Finding("blind reward", what, "Judge a right answer as the data has it by hand.", {}))


# ---- environment ----


def check_environment(config: Config, task: Task, rows: list[Row]) -> CheckSection | None:
    """Ask the environment about gold answers, turns that it should answer, nothing, nonsense and bad calls of tools;
    None where there is none, or an agent, which needs a model.
    """
    ours, section, rows = config.environment, CheckSection("environment"), rows[:EPISODES]
    asked = ours.use or ours.tools or task.respond or task.environment
    if not config.uses("environment") or ours.agent or not asked:
        return None
    prompts, columns = [task.prompt(row) for row in rows], {"seed": list(range(len(rows))), **row_columns(rows)}
    environment = Environment(
        ours, task=task.name, respond=task.respond, use=task.environment, stop=task.stop,
        length=lambda text: len(text) // CHARS_A_TOKEN,
    )  # fmt: skip
    replies: dict[str, list[Reply | None]] = {}
    failures, unsteady, seconds, shown = defaultdict[str, list[str]](list), list[str](), list[float](), ""
    try:
        environment.start()
        opening = environment.openings(prompts, {k: v for k, v in columns.items() if k != "seed"})[0]
        for what, turns in _scripts(environment, task, rows, prompts).items():
            transcripts: list[Transcript] = [[{"role": "assistant", "content": turn}] for turn in turns]
            begun = time.perf_counter()
            answers = environment.respond(prompts, transcripts, columns)
            seconds.append(time.perf_counter() - begun)
            replies[what], failures[what] = answers.values, [failure.reason for failure in answers.failures]
            if not answers.failures and environment.respond(prompts, transcripts, columns).values != answers.values:
                unsteady.append(what)
            said = next((reply.text for reply in answers.values if reply and reply.text and not reply.done), "")
            shown = shown or (f"{one_line(turns[0], SHOWN)!r} -> {one_line(said, SHOWN)!r}" if said else "")
    finally:
        environment.close()
    section.lines = [environment.describe()]
    section.lines += [f"prompts end with {one_line(opening, SHOWN)!r}"] if opening else []
    for what, found in replies.items():
        answered = [reply for reply in found if reply is not None and reply.text]
        over = sum(reply is None or reply.done for reply in found) - len(failures[what])
        rewards = [reply.reward for reply in found if reply is not None]
        invalid = sum(reply is not None and reply.invalid for reply in found)
        counts = f"{len(answered)} answered, {over} over, {invalid} invalid, {len(failures[what])} failed"
        mean = f", mean reward {statistics.fmean(rewards):.4g}" if any(rewards) else ""
        section.lines.append(f"  {what}: of {len(found)} {counts}{mean}")
        section.facts[what] = {"answered": len(answered), "over": over, "failed": len(failures[what])}
    section.lines += [shown, f"{1e3 * statistics.fmean(seconds):.1f} ms a call of {len(rows)} episodes"]
    everything = [reply for found in replies.values() for reply in found if reply is not None]
    longest = max((len(reply.text) for reply in everything), default=0)
    if longest > CHARS_A_TOKEN * environment.max_observation_tokens:
        limit = f"environment.max_observation_tokens={environment.max_observation_tokens}"
        section.lines.append(f"the longest reply, some {longest // CHARS_A_TOKEN:,} tokens, is cut at {limit}")
    section.findings = _environment_findings(replies, failures, unsteady)
    return section


def _environment_findings(
    replies: dict[str, list[Reply | None]], failures: dict[str, list[str]], unsteady: list[str]
) -> list[Finding]:
    found, asked = list[Finding](), sum(map(len, replies.values()))
    reasons = [reason for of_kind in failures.values() for reason in of_kind]
    everything = [reply for of_kind in replies.values() for reply in of_kind]
    if len(reasons) > MAX_FAILED_SHARE * asked:
        what = f"{len(reasons) / asked:.0%} of the rows failed, the first so: {visible(reasons[0])}."
        change = "Mend it; a run stops after three batches like that."
        found.append(Finding("the environment fails", what, change, {"failed": len(reasons) / asked}))
    elif not any(reply is not None and reply.text for reply in everything):
        what = "It answers none of the turns that were tried, so no episode has a second turn."
        found.append(Finding("the environment is silent", what, "See what it expects a turn to hold.", {}))
    if unsteady:
        what = f"The same turns ({unsteady[0]}) got other answers the second time, so a resumed run is another run."
        found.append(Finding("answers by chance", what, "Draw random numbers from the `seed` of an episode.", {}))
    return found


def _scripts(environment: Environment, task: Task, rows: list[Row], prompts: list[Any]) -> dict[str, list[str]]:
    """Return scripted turns by what they are, one for each row."""
    own = [row.get("question") for row in rows]
    questions = [q if isinstance(q, str) else as_messages(p)[-1]["content"] for q, p in zip(own, prompts, strict=True)]
    golds = [task.gold(row) for row in rows]
    scripts = {"gold": [str(gold) for gold in golds]} if None not in golds else {}
    if environment.built_in is not None:
        scripts[environment.built_in] = [asking_turn(environment.built_in, None, q) or "" for q in questions]
    elif task.asking_turn is not None and not environment.workers:
        scripts["a call"] = [task.asking_turn(row) or "" for row in rows]
    for schema in environment.schemas or []:
        scripts[f"call {schema['function']['name']}"] = [tool_call(schema, question) for question in questions]
    bad = {"nothing": "", "nonsense": NONSENSE}
    bad |= {"unknown tool": UNKNOWN_TOOL, "not JSON": NOT_JSON} if environment.schemas else {}
    return scripts | {what: [turn] * len(rows) for what, turn in bad.items()}
