"""What `tinyrl eval` begins with: targets, sides and rows, found before torch is imported and handed on."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from tinyrl.config.refusal import refusals_at
from tinyrl.config.schema import Config
from tinyrl.data.formats import ANSWERS, PAIR
from tinyrl.data.sources import placed_rows
from tinyrl.evaluation.side import OwnSide, own_side
from tinyrl.evaluation.targets import A_JUDGE, Asked, Side, Target, check_asked, find, find_side, locate
from tinyrl.process.launched import launched
from tinyrl.rewards.budget import check_judge_budgets
from tinyrl.rewards.rubric import check_rubrics
from tinyrl.rollout.preflight import check_images, check_named, check_sees_images, check_task
from tinyrl.rollout.prepared import PreparedRun, check_shown, unshown_images, warnings_of, with_tower
from tinyrl.tasks import task_of
from tinyrl.tasks.run_rows import rows_of_run


@dataclass(frozen=True)
class PreparedEvaluation:
    """A target, and what it is compared with. sampled, measured: the configurations of the first one, with the task and
    the rows that all sides are evaluated on; None where it is not sampled, or not measured by a trainer.
    """

    first: Target
    others: list[Side]
    asked: Asked
    sampled: PreparedRun | None
    measured: PreparedRun | None


def prepare_evaluation(target: str, asked: Asked, *, vs: str | None = None) -> PreparedEvaluation:
    """Check what `tinyrl eval TARGET` is asked for, find it, and read its rows. Raises ValueError for targets, tasks,
    rows, settings and options that cannot be used.
    """
    first = find(target, asked)
    return _prepared(first, [] if vs is None else [find_side(vs)], asked)


def prepare_comparison(targets: list[str], asked: Asked) -> PreparedEvaluation:
    """Check several policies, of which the first is the baseline that says how all are judged. Raises ValueError as
    `prepare_evaluation` does, and for options that are for one target.
    """
    own = own_side(targets[0])
    if own is not None:
        find_side(own)  # which may be meant as a folder
        raise ValueError(f"--vs {own} is of one run; several are compared with a run, a checkpoint or a model")
    if asked.split != "eval":
        raise ValueError(f"--split train is for one target, and these are {len(targets)}")
    if asked.save_samples is not None:
        raise ValueError(f"--save-samples is for one target, and these are {len(targets)}")
    first = find(targets[0], asked)
    others = [find_side(path) for path in targets[1:]]
    if first.sampled is None:
        raise ValueError(f"{first.path}: nothing says what samples are judged by; {_a_judge(others)}")
    return _prepared(first, others, asked)


def _prepared(first: Target, others: list[Side], asked: Asked) -> PreparedEvaluation:
    check_asked(first, asked)
    for side in others:
        _check_pair(first, side)
    of_run = first.run is not None
    sampled = _with_rows(first.sampled, asked, of_run=of_run)
    measured = _with_rows(first.measured, asked, of_run=of_run)
    have_images = any(prepared is not None and prepared.rows.has_images for prepared in (sampled, measured))
    for side in others:
        if have_images and isinstance(side, Target) and (theirs := side.sampled or side.measured) is not None:
            check_sees_images(theirs)
    return PreparedEvaluation(
        first=locate(first),
        others=[locate(side) if isinstance(side, Target) else side for side in others],
        asked=asked,
        sampled=sampled,
        measured=measured,
    )


def _check_pair(first: Target, side: Side) -> None:
    """Raise ValueError for a side that has no number in common with the first target."""
    if isinstance(side, OwnSide):
        if first.measured is not None and side is OwnSide.TEACHER:
            raise ValueError(f"--vs {side}: `tinyrl train {first.measured.method}` learns from no teacher")
        if not first.is_policy:
            what = "a reward model starts from nothing; name another `tinyrl train reward` run"
            raise ValueError(f"--vs {side}: {what}")
        return
    if first.sampled is not None and side.sampled is None:
        how = f"tinyrl eval POLICY reward.model={side.path}"
        raise ValueError(f"{side.path} is a reward model, which writes nothing: {how}")
    if first.is_policy is not side.is_policy:
        raise ValueError(f"--vs {side.path}: a policy and a reward model have no number in common")


def _with_rows(config: Config | None, asked: Asked, *, of_run: bool) -> PreparedRun | None:
    """Load the task and the rows of a configuration; settings that somebody has asked for are checked first. What seems
    an image and is not shown is refused for a model, and a warning for a run, whose class is that of its training.
    """
    if config is None:
        return None
    with refusals_at(config.given.places):
        task = task_of(config)
        if not asked.as_it_is:
            check_task(config, task)
            check_named(config, task, sections=("reward", "task"))
            check_rubrics(config)
            check_judge_budgets(config)
            _check_given_answers(config, asked)
        rows = rows_of_run(config, task)
        if rows.has_images:
            check_images(config)
        unshown = unshown_images(config, rows)
        if not of_run:
            check_shown(config, unshown)
        elif asked.other_rows and launched().rank == 0:  # of its own rows the run has warned
            for warning in warnings_of(unshown):
                print(warning, file=sys.stderr)
        return PreparedRun(config=with_tower(config, rows), task=task, rows=rows)


def _check_given_answers(config: Config, asked: Asked) -> None:
    """Raise ValueError for rows of prompts and reference answers, for a run that is measured on given answers: nothing
    says whether they are to be learnt from, or samples compared with them.
    """
    is_judged = asked.task is not None or asked.other_reward  # so that the run's own rows are measured
    is_measured = config.trains.policy and not config.trains.samples
    if asked.data is None or is_judged or not is_measured or config.task.columns:
        return
    [(_, row)] = placed_rows(asked.data, most=1)
    has_answers = any(form.is_in(row) for form in (*ANSWERS, PAIR))
    if "prompt" in row and "answer" in row and not has_answers:
        raise ValueError(
            f"--data {asked.data}: its rows have a prompt and an `answer`, and this is a run of {config.method}, which "
            "is measured on answers that it could have learnt. Add --task rows to sample completions and compare them "
            "with `answer`"
        )


def _a_judge(others: list[Side]) -> str:
    """Return how to name a judge of samples: by a side that has a reward, or by options."""
    with_reward = [side for side in others if isinstance(side, Target) and side.has_reward]
    if not with_reward:
        return f"name {A_JUDGE}"
    path = with_reward[0].path
    how = f"tinyrl eval OTHERS --vs {path}"
    return f"{path} has a reward: to use it, name it as what is compared with ({how}), or else name {A_JUDGE}"
