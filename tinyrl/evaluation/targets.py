"""Resolve a TARGET (run, checkpoint or model) to the configurations it is loaded with.

`policy_at` is for chat and serve, `find` for evaluation, `find_side` for what a target is compared with. A run of grpo
or ppo is sampled on its held-out prompts and judged by its reward. A run of sft or dpo is measured by its trainer on
its held-out rows, and sampled too where a task or a reward is named. A reward model is only measured. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tinyrl.config.derive import derive_over
from tinyrl.config.evaluated import as_policy, with_rows, with_sections, with_task, without_reward
from tinyrl.config.foreign_names import setting_named
from tinyrl.config.methods import and_list
from tinyrl.config.refusal import refusals_at
from tinyrl.config.schema import Config
from tinyrl.config.sections import starter_path
from tinyrl.data.rows import prompt_keys
from tinyrl.evaluation.side import OwnSide, own_side
from tinyrl.rollout.preflight import check_model_path
from tinyrl.runs.places import checkpoint_of, named_run, run_of
from tinyrl.runs.records import holds_runs, nearest_run, not_a_run, run_name
from tinyrl.runs.resolve import config_of, model_facts, resolve
from tinyrl.runs.run_dir import open_run
from tinyrl.tasks import load_task, task_of
from tinyrl.tasks.run_rows import rows_of_run
from tinyrl.text import truncate
from tinyrl.workers.foreign_code import tell_code

JUDGES = ("reward", "reward.functions", "reward.model")  # settings that replace the run's own reward
A_JUDGE = "a task (--task NAME) or a reward (reward.model=PATH, 'reward.functions=[{use: FILE.py:FUNCTION}]')"
ROWS = ("data", "eval_data", "revision", "columns", "max_samples")  # task settings that say which rows there are
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")
TOWER = "model.with_images"  # of a model: a run has been trained with a tower or without one
CHAT = ("task", "environment", "reward", TOWER, "generation.stop", *(f"generation.{name}" for name in SAMPLING))
EVALUATION = ("reward", "generation", "task", TOWER)
SERVE = ("task.chat_template_kwargs", TOWER, "generation.engine", *(f"generation.{name}" for name in SAMPLING))


@dataclass(frozen=True)
class Asked:
    """The options of an evaluation; task, data (rows) and settings take the place of the run's own."""

    task: str | None = None
    data: str | None = None
    settings: tuple[str, ...] = ()
    split: str = "eval"
    num_prompts: int = 512
    samples: int = 1
    save_samples: str | None = None  # a file

    @property
    def as_it_is(self) -> bool:
        """Return whether a run is evaluated with its own configuration."""
        return self.task is None and self.data is None and not self.settings

    @property
    def other_rows(self) -> bool:
        """Return whether the rows are not those that a run holds out itself."""
        return self.task is not None or self.data is not None or any(map(_names_rows, self.settings))

    @property
    def other_reward(self) -> bool:
        return any(setting.partition("=")[0] in JUDGES for setting in self.settings)


@dataclass(frozen=True)
class Target:
    """A run, checkpoint or model to evaluate or to talk to."""

    path: str
    run: Path | None
    sampled: Config | None  # the configuration that it is sampled with, if it is
    measured: Config | None = None  # the run's own, where its trainer measures it on rows
    checkpoint: Path | None = None  # with the weights, once `locate` has found it

    @property
    def name(self) -> str:
        if self.run is None or self.checkpoint is None:
            return self.path
        return f"{run_name(self.run)}/{self.checkpoint.name}"

    @property
    def config(self) -> Config:
        assert self.sampled is not None, "a target that is only measured"
        return self.sampled

    @property
    def has_reward(self) -> bool:
        """Return whether this is a run that has its own judge of samples."""
        return self.run is not None and self.measured is None

    @property
    def is_policy(self) -> bool:
        return self.measured is None or self.measured.trains.policy


Side = Target | OwnSide


def find(path: str, asked: Asked) -> Target:
    """Return the target at `path`. Raises ValueError where there is none, and for options that do not fit it."""
    if asked.split not in ("eval", "train"):
        raise ValueError(f"--split {asked.split!r}: allowed are eval and train")
    if asked.task is not None:
        load_task(asked.task)
    _check_settings(asked.settings, EVALUATION)
    run = named_run(path)
    judged = asked.task is not None or asked.other_reward
    if run is None:
        if asked.task is None and asked.data is None:
            hint = " To evaluate a model, say what on: --task NAME (see `tinyrl list tasks`) or --data FILE"
            raise ValueError(not_a_run(path) + ("" if holds_runs(path) else hint))
        check_model_path("model", path)
        return Target(path, None, _as_asked(_of_model(path, task=asked.task or "rows"), asked))
    _refuse_tower(asked.settings)
    config = open_run(run).read_config()
    tell_code(run, config)
    if config.trains.samples:
        return Target(path, run, config if asked.as_it_is else _as_asked(config, asked))
    if not config.trains.policy and (judged or asked.settings):
        raise ValueError(f"{path} is a reward model, which writes nothing: tinyrl eval POLICY reward.model={path}")
    if judged:
        return Target(path, run, _as_asked(as_policy(config, model_facts), asked), config)
    if asked.settings:
        raise ValueError(f"{path} is a run of {config.method}, which is sampled where something judges it: {A_JUDGE}")
    if asked.data is not None:  # read as the run's rows are
        task = config.task.model_copy(update={"eval_data": asked.data})
        config = resolve(with_sections(config, task=task))
    return Target(path, run, None, config)


def policy_at(path: str, settings: list[str], *, takes: tuple[str, ...] = CHAT) -> Target:
    """Return the policy or the model at `path`, as grpo's, whatever has trained it, and with its checkpoint. takes:
    sections and settings that have an effect. Raises ValueError for a reward model, a run without a checkpoint, other
    settings.
    """
    _check_settings(settings, takes)
    run = named_run(path)
    if run is None:
        meant = nearest_run(path)
        if meant and starter_path(path) is None and not Path(path).expanduser().exists():  # else it may be a hub name
            raise ValueError(f"{path} is neither a run nor a model.{meant}")
        check_model_path("model", path)
        config = _of_model(path)
    else:
        _refuse_tower(settings)
        config = open_run(run).read_config()
        if not config.trains.policy:
            raise ValueError(f"{path} is a reward model, which writes nothing")
        config = as_policy(config, model_facts)
    return locate(Target(path, run, _over(config, settings)))


def check_asked(first: Target, asked: Asked) -> None:
    """Check options that depend on the target. Raises ValueError for those that nothing would read."""
    if asked.data is not None and asked.split == "train":
        raise ValueError("--data FILE replaces the held-out rows; --split train is of a run's own")
    nothing = f"nothing is sampled from {first.path}; for a policy, name {A_JUDGE}"
    if asked.samples != 1 and first.sampled is None:
        raise ValueError(f"--samples {asked.samples}: {nothing}")
    if asked.save_samples is not None:
        if first.sampled is None:
            raise ValueError(f"--save-samples: {nothing}")
        if not (folder := Path(asked.save_samples).absolute().parent).is_dir():
            raise ValueError(f"--save-samples {asked.save_samples}: there is no folder {folder}")


def find_side(path: str) -> Side:
    """Return what a target is compared with: a run, checkpoint or model, as it is judged by others, or a model of the
    target itself. Raises ValueError where there is none.
    """
    own = own_side(path)
    if own is not None:
        _check_side(own)
        return own
    run = named_run(path)
    if run is None:
        check_model_path("model", path)
        return Target(path, None, resolve(_of_model(path)))
    config = open_run(run).read_config()
    tell_code(run, config)
    if config.samples:
        return Target(path, run, config)
    sampled = resolve(as_policy(config, model_facts)) if config.trains.policy else None
    return Target(path, run, sampled, config)


def _check_side(vs: OwnSide) -> None:
    """Raise ValueError where a word for a model of the run itself is also the name of a run or a model in the current
    folder.
    """
    folder = Path(vs)
    is_model = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if run_of(folder) is not None or is_model:
        raise ValueError(
            f"--vs {vs}: this means the {vs} of the run itself, and there is a folder {vs} here too. For that folder "
            f"say ./{vs}; for the other, work in another folder"
        )


def locate(target: Target) -> Target:
    """Return the target with its verified checkpoint. Raises ValueError for a run without one."""
    return target if target.run is None else replace(target, checkpoint=checkpoint_of(target.path))


def trained_on(path: str) -> frozenset[str]:
    """Return the keys of the prompts that a run (or a checkpoint's) was trained on; none for a model."""
    run = named_run(path)
    if run is None:
        return frozenset()
    config = open_run(run).read_config()
    tell_code(run, config, sections=("task",))
    rows = rows_of_run(config, task_of(config))
    keys = (prompt_keys(rows.kind.prompt(row), system_prompt=config.task.system_prompt) for row in rows.train)
    return frozenset[str]().union(*keys)


def seen_in_training(first: Target, others: Sequence[Side], asked: Asked) -> frozenset[str]:
    """Return the keys of prompts that a comparison leaves out: those that one of its sides was trained on. The first
    side's own held-out rows are new to it. With split "train" none is left out: no side need be new to them; and none
    where nothing is compared.
    """
    if asked.split == "train" or not others:
        return frozenset()
    runs = [first.path] if asked.other_rows else []
    runs += [side.path for side in others if isinstance(side, Target)]
    return frozenset[str]().union(*map(trained_on, runs))


def _check_settings(settings: Sequence[str], takes: tuple[str, ...]) -> None:
    """Raise ValueError for a setting that is none of `takes` (sections, or settings by their whole names)."""
    for setting in settings:
        key = setting.partition("=")[0]
        if not _is_of(key, takes):
            meant = setting_named(key, None)
            near = f". Did you mean `{meant}`?" if meant and _is_of(meant, takes) else ""
            raise ValueError(f"override '{truncate(setting)}': here only settings of {and_list([*takes])} count{near}")


def _refuse_tower(settings: Sequence[str]) -> None:
    """Raise ValueError for a run that is to be loaded with a vision tower, or without one."""
    if any(setting.partition("=")[0] == TOWER for setting in settings):
        raise ValueError(f"{TOWER} is for a model: the weights of a run are of the class that it was trained as")


def _is_of(key: str, takes: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in takes)


def _names_rows(setting: str) -> bool:
    key = setting.partition("=")[0]
    return key == "task" or any(f"{key}.".startswith(f"task.{name}.") for name in ROWS)


def _as_asked(config: Config, asked: Asked) -> Config:
    """Return a configuration with the task, rows and settings asked for, and the reward that goes with them."""
    if asked.task not in (None, config.task.name):
        config = with_task(config, asked.task)
    if asked.data is not None:
        config = with_rows(config, asked.data)
    if asked.other_reward:
        config = without_reward(config)
    return _over(config, asked.settings)


def _of_model(path: str, *, task: str = "rows") -> Config:
    """Return the configuration of a model that no run has trained."""
    return config_of({"method": "grpo", "model": {"path": path}, "reference": {"kind": "none"}, "task": {"name": task}})


def _over(config: Config, settings: Sequence[str]) -> Config:
    """Return the resolved configuration with settings laid over it."""
    if settings:
        config = derive_over(config, settings, model_facts)
    with refusals_at(config.given.places):
        return resolve(config)
