"""Ask each judge of a configuration one question, as `tinyrl check --quick` does."""

from __future__ import annotations

from contextlib import closing

from tinyrl.config.schema import Config
from tinyrl.data.readers import Row
from tinyrl.formatting import format_number
from tinyrl.rewards.judge import JudgeGone, JudgeReward
from tinyrl.runs.finding import Finding
from tinyrl.tasks import Task
from tinyrl.text import escape_control
from tinyrl.tools.check.section import CheckSection


def check_judges(config: Config, task: Task, rows: list[Row]) -> CheckSection | None:
    """Ask each judge one question about the first row; None without a judge."""
    section = CheckSection("judge")
    for function in config.reward.functions:
        if not function.is_judge:
            continue
        failed = ""
        scored = ""
        with closing(JudgeReward(function, timeout_s=config.reward.timeout_s)) as judge:
            judge.start()
            try:
                call = judge.ask_once(task, rows[0])
                parts = [f"{name} {format_number(of[0])}" for name, of in call.parts.items()]
                by_criterion = f" ({', '.join(parts)})" if parts else ""
                scored = f"{format_number(call.values[0])}{by_criterion}"
                failed = next((failure.reason for failure in call.failures), "")
            except JudgeGone as gone:
                failed = str(gone)
        section.lines += judge.notes
        if failed:
            section.lines.append(escape_control(failed))
            section.findings.append(a_judge_without_a_score(failed))
        else:
            section.lines.append(f"{function.model}: {scored} for the first row's answer")
    return section if section.lines else None


def a_judge_without_a_score(why: str) -> Finding:
    return Finding(
        name="a judge without a score",
        what=f"{escape_control(why)}.",
        change="Correct url, model, key_env or max_tokens of the judge, or start its server; if it has answered, see "
        "what a reply must hold (docs/rewards.md, Replies).",
    )
