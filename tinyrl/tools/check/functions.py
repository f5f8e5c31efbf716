"""Try a reward and an environment on rows, in the worker processes of a run, without a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import numpy as np

from tinyrl.config.schema import Config
from tinyrl.data.messages import as_messages
from tinyrl.data.readers import Row
from tinyrl.environments import Reply
from tinyrl.environments.environment import NONSENSE, NOT_JSON, UNKNOWN_TOOL, Environment, asking_turn, tool_call
from tinyrl.rewards.functions import FunctionReward, as_completion, verifier_of
from tinyrl.rewards.holes import find_holes
from tinyrl.rewards.scores import MAX_FAILED_SHARE, mean
from tinyrl.runs.findings import Rule
from tinyrl.tasks import Task
from tinyrl.tasks.prompts import row_columns, shows_tools
from tinyrl.text import escape_control, format_number, one_line
from tinyrl.tools.check.offline import CheckSection

REWARD_ROWS, ATTACKED_ROWS, EPISODES = 64, 8, 16
SLOW_CALL_S = 0.25  # a call of so many seconds is not made for each of some thousand wrong texts
SHOWN_HOLES, SHOWN = 6, 80
CHARS_A_TOKEN = 4  # of English: no tokenizer is loaded for this
IDS = "completion_ids"
CALLED = "Print what the function gets and returns; it is called with the arguments shown in docs/rewards.md."
REWARD = (
    Rule("no rewards", lambda f: not f.known and f.failed <= MAX_FAILED_SHARE and not f.played,
        "No completion gets a score, not the gold answer either.", CALLED),
    Rule("one reward for everything", lambda f: f.golds and f.low == f.high and f.complete,
        "Gold answers, nothing and nonsense all score {low:.4g}.", CALLED),
    Rule("gold answers do not win",
        lambda f: f.beaten > MAX_FAILED_SHARE and not (f.low == f.high and f.complete),
        "In {beaten:.0%} of the rows the gold answer scores no more than nothing or nonsense.", CALLED),
    Rule("gold answers lack full marks", lambda f: f.low < f.high and f.lacking > MAX_FAILED_SHARE,
        "In {lacking:.0%} of the rows the task's own gold answer has less than full marks, which are 1.",
        "Correct `verify` or `gold` of the task: docs/data.md."),
    Rule("rewards by chance", lambda f: f.known and not f.repeats,
        "The same completions got other scores the second time.", "Draw random numbers from the row alone."),
    Rule("rewards fail", lambda f: f.failed > MAX_FAILED_SHARE,
        "{failed:.0%} of the calls' rows failed, the first so: {why}.",
        "Correct the function (reward.timeout_s limits a call). Training stops after three such batches."),
    Rule("holes in the reward", lambda f: f.holes,
        "Wrong texts score nearly as much as right answers: {worst}.",
        "Read one marked answer, the last one, and compare all of it."),
    Rule("blind reward", lambda f: f.blind,
        "No right answer scores more than the worst wrong text of its row, in any form that was tried.",
        "Judge a right answer as the data has it by hand."),
)  # fmt: skip
ENVIRONMENT = (
    Rule("the environment fails", lambda f: f.failed > MAX_FAILED_SHARE,
        "{failed:.0%} of the rows failed, the first so: {why}.",
        "Correct it. Training stops after three such batches."),
    Rule("tools are not shown", lambda f: f.hidden,
        "The model's chat template shows no tools, or prompts do not go through one (task.chat).",
        "Take a model whose template shows tools (Qwen2.5, Llama 3, Mistral), or describe them in the prompt and "
        "answer with environment.name=FILE.py:FUNCTION."),
    Rule("the environment is silent", lambda f: f.failed <= MAX_FAILED_SHARE and not f.longest,
        "It answers none of the turns that were tried, so no episode has a second turn.",
        "See what it expects a turn to hold."),
    Rule("every call is invalid", lambda f: f.broken,
        "Each turn that should be answered ({broken}) was answered as invalid, the first by: {answer}.",
        "Correct the tool, or add the columns that it needs to the rows."),
    Rule("answers by chance", lambda f: f.unsteady,
        "The same turns ({unsteady}) got other answers the second time, so a resumed run is another run.",
        "Draw random numbers from the `seed` of an episode."),
    Rule("no turn to read a reply", lambda f: f.turns == 1 and f.asked,
        "Episodes end after one turn, so the policy reads no reply of the environment.",
        "environment.max_turns=2, or as many as the task needs."),
    Rule("replies are cut", lambda f: f.typical > 2 * f.limit,
        "Half of the replies have some {typical:.0f} tokens or more, and the policy reads the first {limit}.",
        "environment.max_observation_tokens={most}, within the model's positions."),
)  # fmt: skip


def check_reward(config: Config, task: Task, rows: list[Row]) -> CheckSection:
    """Score gold answers, nothing and nonsense, and look for texts that score high and are wrong. Judges and reward
    models are left out: they are tried when the model is loaded.
    """
    section, reward, rows, failures = CheckSection("reward"), config.reward, rows[:REWARD_ROWS], list[str]()
    used = [(f.use, f.weight) for f in reward.functions if not f.is_judge]
    functions = [FunctionReward(use, weight=weight, timeout_s=reward.timeout_s) for use, weight in used]
    verified = reward.is_verifier and task.verify is not None
    if verified:
        functions.append(verifier_of(task, timeout_s=reward.timeout_s))
    if not functions:
        section.lines = ["judged by a model; see below" if not reward.is_verifier else "none of its own"]
        return section
    golds, everywhere = [task.gold(row) for row in rows], [*range(len(rows))]
    texts = {"gold": [str(gold) for gold in golds]} if None not in golds else {}
    texts |= {"nothing": [""] * len(rows), "nonsense": [NONSENSE] * len(rows)}
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(function).start()  # its imports are not part of a call's time
        score = _scorer(functions, config, task, rows, failures)
        begun = time.perf_counter()
        scores = {kind: score(everywhere, of) for kind, of in texts.items()}
        again = score(everywhere, next(iter(texts.values())))
        seconds = (time.perf_counter() - begun) / (len(texts) + 1)
        f = _reward_figures(scores, again)
        f.failed, f.why = len(failures) / (4 * len(rows)), next(iter(failures), "")
        ours = config.environment
        f.played = bool(ours.name or ours.tools or task.respond or task.environment)  # which may give the reward
        lacking = [not task.is_pass(one) for one in scores.get("gold", []) if not math.isnan(one)]
        f.lacking = fmean(lacking) if lacking and verified and not task.grader else 0.0
        means = {kind: mean(of) for kind, of in scores.items()}
        shown = ", ".join(
            f"{kind} {'no score' if math.isnan(one) else format_number(one)}" for kind, one in means.items()
        )
        names = " + ".join(function.name for function in functions)
        section.lines = [f"{names}: {shown}; {seconds * 1e3:.1f} ms for {len(rows)} rows"]
        if f.played and not f.known:
            section.lines = [f"{names} gives none: it is the environment's alone"]
        section.facts = {kind: None if math.isnan(one) else one for kind, one in means.items()}
        section.facts |= {"seconds": seconds, "failed": f.failed}
        if 0 < f.failed <= MAX_FAILED_SHARE:
            section.lines.append(f"warning: {f.failed:.0%} of the rows failed, the first so: {f.why}")
        if reward.functions and seconds < SLOW_CALL_S and not any(rule.when(f) for rule in REWARD):
            section.lines += _attack(f, score, task, rows[:ATTACKED_ROWS])
            section.facts["holes"] = f.holes
    for function in functions:
        section.lines += [f"printed: {one_line(line, SHOWN)}" for line in list(function.printed.kept)[-2:]]
    section.findings = [rule.finding(f) for rule in REWARD if rule.when(f)]
    return section


def _scorer(
    functions: list[FunctionReward], config: Config, task: Task, rows: list[Row], failures: list[str]
) -> Callable[[list[int], list[str]], list[float]]:
    """Return a function that scores texts for some of the rows: the weighted sum over the reward functions; NaN where
    one that weighs something fails or none applies. Failures are noted.
    """
    ours, prompts, columns = config.environment, [task.prompt(row) for row in rows], row_columns(rows)
    chat = bool(ours.name or ours.tools or task.respond or task.environment)
    facts = [function.start() for function in functions]
    wants_ids = any(IDS in [*(of["parameters"] or []), *of["required"]] for of in facts)
    tokenizer = tokenizer_of(config) if wants_ids else None

    def score(where: list[int], texts: list[str]) -> list[float]:
        asked, here = [prompts[i] for i in where], {name: [of[i] for i in where] for name, of in columns.items()}
        answers = [as_completion(text, [] if chat else prompt) for text, prompt in zip(texts, asked, strict=True)]
        if tokenizer is not None:  # no completion is longer
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
            here[IDS] = [of[: config.generation.max_new_tokens] for of in ids]
        calls = [(function(asked, answers, here), function.weight) for function in functions]
        scores = np.array([weight * np.array(call.values) for call, weight in calls])
        total = np.where(np.isnan(scores).all(0), math.nan, np.nansum(scores, 0))
        for call, weight in calls:
            failures.extend(failure.reason for failure in call.failures)
            total[[failure.row for failure in call.failures if weight]] = math.nan
        return total.tolist()

    return score


def tokenizer_of(config: Config) -> Any:
    """Load the tokenizer of the model, without its weights."""
    from tinyrl.models.loading import load_tokenizer  # transformers, and torch with it

    return load_tokenizer(config.model.path, revision=config.model.revision)


def _reward_figures(scores: dict[str, list[float]], again: list[float]) -> SimpleNamespace:
    """Compute what REWARD needs from the scores of gold answers (where there are any), nothing and nonsense."""
    known = [one for of in scores.values() for one in of if not math.isnan(one)]
    f = SimpleNamespace(golds="gold" in scores, known=known, holes=[], blind=False)
    f.low, f.high = min(known, default=math.nan), max(known, default=math.nan)
    rivals = np.nan_to_num([scores["nothing"], scores["nonsense"]]).max(0)
    gold, other = np.array(scores.get("gold", [])), ~np.isnan([scores["nothing"], scores["nonsense"]]).all(0)
    f.beaten = fmean(np.where(np.isnan(gold), other, gold <= rivals)) if f.golds else 0.0
    f.complete = len(known) == sum(map(len, scores.values()))
    f.repeats = str(again) == str(next(iter(scores.values())))  # as text, where NaN is equal to itself
    return f


def _attack(f: SimpleNamespace, score: Any, task: Task, rows: list[Row]) -> list[str]:
    """Look for holes; return lines about them."""
    found = find_holes(score, task, rows)
    if found is None:
        return ["holes: not looked for, which takes two rows with different right answers"]
    (tried, kinds), f.blind = found.tried, found.is_blind and not found.holes
    f.worst = ", ".join(hole.name for hole in found.holes[:3])
    lines = [f"holes: {len(found.holes) or 'none'} found by {tried:,} wrong texts of {kinds} kinds"]
    for hole in found.holes:
        ends = f"{hole.score:.3g} of a right answer's {hole.right:.3g}"
        lines.append(f"  {hole.name} ({hole.share:.0%} of the rows, {ends}): {one_line(hole.text, SHOWN)!r}")
        f.holes.append({"name": hole.name, "share": hole.share, "text": hole.text})
    return lines[: 1 + SHOWN_HOLES]


def check_environment(config: Config, task: Task, rows: list[Row]) -> CheckSection | None:
    """Ask the environment about gold answers, turns that it should answer, nothing, nonsense and bad calls of tools;
    None where there is none.
    """
    ours, section, rows = config.environment, CheckSection("environment"), rows[:EPISODES]
    answers = ours.name or ours.tools or task.respond or task.environment
    if config.uses("environment") and ours.agent:
        section.lines = [f"{ours.agent}: an agent, which is played when the model is loaded"]
        return section
    if not config.uses("environment") or not answers:
        return None
    prompts, columns = [task.prompt(row) for row in rows], row_columns(rows)
    environment = Environment(
        ours, task=task.name, respond=task.respond, use=task.environment, stop=task.stop,
        length=lambda text: len(text) // CHARS_A_TOKEN, worker=task.replies_worker(timeout_s=ours.seconds),
    )  # fmt: skip
    f, seconds, longest = SimpleNamespace(unsteady="", broken="", answer=""), list[float](), list[int]()
    reasons, asked = list[str](), list[tuple[str, str]]()
    with closing(environment):
        environment.start()
        f.hidden = bool(environment.schemas) and not shows_tools(tokenizer_of(config), config.task.chat)
        opening, columns = environment.openings(prompts, columns)[0], {"seed": [*range(len(rows))], **columns}
        section.lines = [environment.describe()]
        section.lines += [f"prompts end with {one_line(opening, SHOWN)!r}"] if opening else []
        for kind, turns in _scripts(environment, task, rows, prompts).items():
            transcripts: list[Any] = [[{"role": "assistant", "content": turn}] for turn in turns]
            begun = time.perf_counter()
            answers = environment.respond(prompts, transcripts, columns)
            seconds.append(time.perf_counter() - begun)
            if not answers.failures and environment.respond(prompts, transcripts, columns).values != answers.values:
                f.unsteady = f.unsteady or kind
            replies: list[Reply] = [reply for reply in answers.values if reply is not None]
            asked += [(turns[0], reply.text) for reply in replies if reply.text and not reply.done]
            reasons += [failure.reason for failure in answers.failures]
            longest.append(max((len(reply.text) for reply in replies), default=0))
            counts = {"answered": sum(bool(reply.text) for reply in replies), "failed": len(answers.failures)}
            counts["ended"] = len(turns) - sum(not reply.done for reply in replies) - counts["failed"]
            counts["invalid"] = sum(reply.invalid for reply in replies)
            if kind.startswith("call ") and counts["invalid"] == len(turns):
                f.broken, f.answer = f.broken or kind, f.answer or one_line(replies[0].text, SHOWN)
            paid = [reply.reward for reply in replies if reply.reward is not None]
            section.lines.append(
                f"  {kind}: {len(turns)} tried, {', '.join(f'{count} {what}' for what, count in counts.items())}"
                + (f", mean reward {fmean(paid):.4g}" if any(paid) else "")
            )
            section.facts[kind] = counts
    section.lines += [f"{one_line(turn, SHOWN)!r} -> {one_line(text, SHOWN)!r}" for turn, text in asked[:1]]
    section.lines.append(f"{1e3 * fmean(seconds):.1f} ms a call of {len(rows)} episodes")
    f.turns, f.asked, f.longest, f.limit = ours.max_turns, asked, max(longest), environment.max_observation_tokens
    f.most, f.typical = -(-f.longest // CHARS_A_TOKEN), 0.0
    if asked:
        f.typical = median(len(text) for _, text in asked) / CHARS_A_TOKEN
    if f.longest > CHARS_A_TOKEN * f.limit:
        limit = f"environment.max_observation_tokens={f.limit}"
        section.lines.append(f"the longest reply, some {f.most:,} tokens, is cut at {limit}")
    f.failed, f.why = len(reasons) / (len(rows) * len(seconds)), escape_control(reasons[0]) if reasons else ""
    section.findings = [rule.finding(f) for rule in ENVIRONMENT if rule.when(f)]
    return section


def _scripts(environment: Environment, task: Task, rows: list[Row], prompts: list[Any]) -> dict[str, list[str]]:
    """Return scripted turns by what they are, one for each row."""
    own = [row.get("question") for row in rows]
    questions = [q if isinstance(q, str) else as_messages(p)[-1]["content"] for q, p in zip(own, prompts, strict=True)]
    golds = [task.gold(row) for row in rows]
    scripts = {"gold": [str(gold) for gold in golds]} if None not in golds else {}
    if environment.built_in is not None:
        scripts[environment.built_in] = [asking_turn(environment.built_in, q) for q in questions]
    elif task.asking_turn is not None and environment.name == task.name:
        scripts["a call"] = [task.asking_turn(row) or "" for row in rows]
    for schema in environment.schemas or []:
        scripts[f"call {schema['function']['name']}"] = [tool_call(schema, question) for question in questions]
    bad = {"nothing": "", "nonsense": NONSENSE}
    bad |= {"unknown tool": UNKNOWN_TOOL, "not JSON": NOT_JSON} if environment.schemas else {}
    return scripts | {kind: [turn] * len(rows) for kind, turn in bad.items()}
