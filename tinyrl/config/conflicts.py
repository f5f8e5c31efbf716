"""Settings that exclude each other, each a refusal with its sentence.

`conflicts`: no configuration may have them. `contradictions`: what somebody gives may not; config.yaml of a run, where
every value stands as given, may. `training_conflicts`: `tinyrl eval` takes them, and training does not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tinyrl.config.refusal import Refusal
from tinyrl.config.sections import BUILT_IN_ENVIRONMENTS, GenerationConfig, starter_path
from tinyrl.config.task_files import is_own
from tinyrl.text import truncate
from tinyrl.urls import is_address, mask_url

if TYPE_CHECKING:
    from tinyrl.config.schema import Config


# ---- conflicts ----


def conflicts(config: Config) -> Iterator[Refusal]:
    """Yield what would train on something else than was asked for, or not at all."""
    dropout = config.lora.dropout
    environment = config.environment
    if config.samples and dropout > 0:
        yield Refusal(
            ("lora.dropout",),
            f"lora.dropout={dropout} makes the ratio of new to old probabilities random: ppo and grpo need 0",
        )
    yield from _adapter_conflicts(config) if config.lora.enabled else _needs_adapters(config)
    if config.model.with_images:
        yield from _tower_conflicts(config)
    if environment.agent is not None and config.uses("environment"):
        yield from _agent_conflicts(config)
    if environment.name and environment.tools:
        yield Refusal(
            ("environment.tools", "environment.name"),
            f"environment.tools are answered by tinyrl, and environment.name={environment.name} answers itself",
        )
    if config.samples:
        yield from _step_conflicts(config)
        yield from _engine_conflicts(config)
    if config.learns_from_teacher:
        yield from _teacher_conflicts(config)
    if config.method == "grpo":
        yield from _grpo_conflicts(config)
    if config.method == "ppo" and config.ppo.ptx_coef > 0 and config.ppo.ptx_data is None:
        yield Refusal(
            ("ppo.ptx_coef", "ppo.ptx_data"),
            f"ppo.ptx_coef={config.ppo.ptx_coef} needs ppo.ptx_data: rows of text, as `tinyrl train sft` reads them",
        )
    if config.method == "dpo":
        yield from _dpo_conflicts(config)


def _needs_adapters(config: Config) -> Iterator[Refusal]:
    model = config.model
    if model.quantization is not None:
        yield Refusal(
            ("model.quantization", "lora.enabled"), f"model.quantization={model.quantization} needs lora.enabled=true"
        )
    if model.adapter is not None:
        yield Refusal(("model.adapter", "lora.enabled"), f"model.adapter={model.adapter} needs lora.enabled=true")
    if config.uses("critic") and config.critic.kind == "adapter":
        yield Refusal(("critic.kind", "lora.enabled"), "critic.kind=adapter needs lora.enabled=true")
    if config.samples and config.generation.engine == "server":
        yield Refusal(("generation.engine", "lora.enabled"), "generation.engine=server needs lora.enabled=true")


def _adapter_conflicts(config: Config) -> Iterator[Refusal]:
    """Yield what adapters on experts cannot be used with."""
    lora = config.lora
    if lora.target_parameters in (None, "peft"):
        return
    given = f"lora.target_parameters={json.dumps(lora.target_parameters)}"
    if lora.dropout > 0:
        yield Refusal(
            ("lora.dropout", "lora.target_parameters"),
            f"lora.dropout={lora.dropout} is for linear layers: with {given} PEFT has none",
        )
    if config.samples and config.generation.engine == "server":
        yield Refusal(
            ("generation.engine", "lora.target_parameters"),
            f"generation.engine=server takes adapters of linear layers, and {given} puts some on experts",
        )


def _tower_conflicts(config: Config) -> Iterator[Refusal]:
    """Yield what a model with a vision tower cannot be used with."""
    if config.method == "reward" and not config.lora.enabled:
        yield Refusal(
            ("lora.enabled", "model.with_images"),
            "lora.enabled=false makes a classification model of a reward model, which reads no images of rows: "
            "lora.enabled=true",
        )
    if config.uses("critic") and config.critic.kind == "separate" and config.critic.path is not None:
        yield Refusal(
            ("critic.path", "model.with_images"),
            f"critic.path={config.critic.path} has no part in the images of rows: a separate critic reads them on "
            "model.path, which leaves critic.path out",
        )


def _agent_conflicts(config: Config) -> Iterator[Refusal]:
    grpo = config.grpo
    no_agent = "environment.agent does not go with"
    if config.method not in ("grpo", "ppo"):
        yield Refusal(
            ("environment.agent", "method"), f"{no_agent} method={config.method}: it is trained by grpo or ppo"
        )
    if grpo.advantage not in ("group", "leave-one-out"):
        yield Refusal(
            ("environment.agent", "grpo.advantage"),
            f"{no_agent} grpo.advantage={grpo.advantage}: group and leave-one-out need no rewards of turns",
        )
    if grpo.dynamic_sampling_rounds > 0:
        yield Refusal(
            ("environment.agent", "grpo.dynamic_sampling_rounds"),
            f"{no_agent} grpo.dynamic_sampling_rounds={grpo.dynamic_sampling_rounds}",
        )
    if grpo.kl_coef > 0 and grpo.kl_in_reward:
        yield Refusal(
            ("environment.agent", "grpo.kl_estimator"),
            f"{no_agent} grpo.kl_estimator={grpo.kl_estimator}: k3 is in the loss",
        )
    if config.generation.engine == "server":
        yield Refusal(
            ("environment.agent", "generation.engine"), f"{no_agent} generation.engine=server, which samples elsewhere"
        )
    if config.teacher.hint is not None:
        yield Refusal(("environment.agent", "teacher.hint"), f"{no_agent} teacher.hint: it writes its own prompts")
    if config.environment.name or config.environment.tools:
        yield Refusal(
            ("environment.agent", "environment.name", "environment.tools"), f"{no_agent} environment.name and tools"
        )


def _step_conflicts(config: Config) -> Iterator[Refusal]:
    """Yield what is wrong with a step of grpo or ppo."""
    if config.method == "distill":
        return
    method = config.method
    section = config.policy_gradient
    size = section.update_size
    total = section.batch_size
    if total % size > 0:
        factors = f"{method}.num_prompts={section.num_prompts} x {method}.group_size={section.group_size}"
        yield Refusal(
            (f"{method}.minibatch_size", f"{method}.num_prompts", f"{method}.group_size"),
            f"{method}.minibatch_size={size} does not divide the {total} sequences of a step ({factors}); null: all",
        )
    if section.kl_coef > 0 and config.reference.kind == "none":
        yield Refusal(
            (f"{method}.kl_coef", "reference.kind"),
            f"{method}.kl_coef={section.kl_coef} needs a reference; set it to 0, or reference.kind=auto",
        )


def _engine_conflicts(config: Config) -> Iterator[Refusal]:
    generation = config.generation
    if generation.engine == "server" and not is_address(generation.url or ""):
        url = truncate(mask_url(generation.url or "null"))
        yield Refusal(
            ("generation.url", "generation.engine"),
            f"generation.url={url} is not the address of a server: http://HOST:PORT, such as http://127.0.0.1:8000",
        )


def _teacher_conflicts(config: Config) -> Iterator[Refusal]:
    teacher = config.teacher
    temperature = config.generation.temperature
    if teacher.kind in ("self", "start") and teacher.hint is None:
        yield Refusal(
            ("teacher.path", "teacher.hint"),
            f"teacher.path={teacher.path} needs teacher.hint: without one it knows no more than the policy",
        )
    if teacher.kind == "start" and not config.has_reference:
        yield Refusal(
            ("teacher.path", "reference.kind"),
            "teacher.path=start is the reference, and reference.kind=none leaves none",
        )
    if teacher.kind == "server" and temperature != 1.0:
        yield Refusal(
            ("generation.temperature", "teacher.path"),
            f"generation.temperature={temperature} is not the 1 at which a server's teacher answers",
        )


def _grpo_conflicts(config: Config) -> Iterator[Refusal]:
    grpo = config.grpo
    if grpo.group_size == 1 and grpo.advantage != "reinforce++":
        yield Refusal(
            ("grpo.group_size", "grpo.advantage"),
            f"grpo.group_size=1 leaves nothing to compare with for grpo.advantage={grpo.advantage}; take 2",
        )
    if grpo.reward_aggregation == "normalize-then-sum":
        yield from _aggregation_conflicts(config)
    if grpo.credit == "turn":
        yield from _credit_conflicts(config)
    if grpo.kl_unbiased and grpo.kl_coef > 0 and grpo.kl_estimator != "k3":
        yield Refusal(
            ("grpo.kl_unbiased", "grpo.kl_estimator"),
            f"grpo.kl_unbiased=true is for grpo.kl_estimator=k3; with {grpo.kl_estimator} it is the gradient of no KL",
        )


def _aggregation_conflicts(config: Config) -> Iterator[Refusal]:
    """Yield what is of the sum of the rewards, where each is compared by itself."""
    grpo = config.grpo
    reward = config.reward
    each = "grpo.reward_aggregation=normalize-then-sum"
    by_itself = f"{each} compares each reward by itself, and"
    if grpo.advantage != "group":
        yield Refusal(
            ("grpo.reward_aggregation", "grpo.advantage"), f"{each} needs grpo.advantage=group, not {grpo.advantage}"
        )
    if reward.truncated == "penalize":
        yield Refusal(
            ("grpo.reward_aggregation", "reward.truncated"), f"{by_itself} reward.truncated=penalize is of their sum"
        )
    if reward.overlong_tokens > 0:
        yield Refusal(
            ("grpo.reward_aggregation", "reward.overlong_tokens"),
            f"{by_itself} reward.overlong_tokens={reward.overlong_tokens} is of their sum",
        )
    if grpo.kl_coef > 0 and grpo.kl_in_reward:
        yield Refusal(
            ("grpo.reward_aggregation", "grpo.kl_estimator", "grpo.kl_coef"),
            f"{by_itself} the KL of grpo.kl_estimator={grpo.kl_estimator} is of their sum",
        )


def _credit_conflicts(config: Config) -> Iterator[Refusal]:
    """Yield what has no rewards of turns, and what is of a whole response, where each turn has its own advantage."""
    grpo = config.grpo
    environment = config.environment
    by_turn = "grpo.credit=turn"
    if environment.agent is not None:
        yield Refusal(
            ("grpo.credit", "environment.agent"), f"{by_turn} needs rewards of turns, and calls of an agent have none"
        )
    elif environment.name in BUILT_IN_ENVIRONMENTS or (environment.name is None and not is_own(config.task.name)):
        yield Refusal(
            ("grpo.credit", "environment.name"),
            f"{by_turn} needs rewards of turns, which replies of environment.name=FILE.py:NAME or of your own task may "
            f"have, and here environment.name={environment.name or 'null'}",
        )
    if grpo.advantage != "group":
        yield Refusal(("grpo.credit", "grpo.advantage"), f"{by_turn} needs grpo.advantage=group, not {grpo.advantage}")
    if grpo.surrogate == "sequence":
        yield Refusal(
            ("grpo.credit", "grpo.surrogate"),
            f"{by_turn} does not go with grpo.surrogate=sequence: with one ratio for a whole response, all of its "
            "turns learn from the mean of their advantages",
        )
    if grpo.reward_aggregation != "sum":
        yield Refusal(
            ("grpo.credit", "grpo.reward_aggregation"),
            f"{by_turn} needs grpo.reward_aggregation=sum: a turn has the sum of its rewards",
        )
    if grpo.kl_coef > 0 and grpo.kl_in_reward:
        yield Refusal(
            ("grpo.credit", "grpo.kl_estimator"),
            f"{by_turn} does not go with a KL in the reward (grpo.kl_estimator={grpo.kl_estimator}); k2 or k3 is in "
            "the loss",
        )


def _dpo_conflicts(config: Config) -> Iterator[Refusal]:
    dpo = config.dpo
    if dpo.needs_reference and config.reference.kind == "none":
        yield Refusal(
            ("reference.kind", "dpo.loss"),
            f"reference.kind=none: dpo.loss={dpo.loss} needs a reference; auto, or loss=orpo or simpo",
        )
    if dpo.loss == "kto" and dpo.batch_size == 1:
        yield Refusal(
            ("dpo.batch_size", "dpo.loss"),
            "dpo.batch_size=1 leaves dpo.loss=kto no answers of other prompts for its KL; take 2 or more",
        )


# ---- contradictions ----


def contradictions(config: Config) -> Iterator[Refusal]:
    """Yield what would train on something else than was asked for, or penalise everything."""
    yield from _model_contradictions(config)
    yield from _row_contradictions(config)
    if config.samples:
        yield from _length_contradictions(config)
        yield from _tool_contradictions(config)
        yield from _method_contradictions(config)


def _model_contradictions(config: Config) -> Iterator[Refusal]:
    model = config.model
    if model.revision is not None and _is_local(model.path):
        yield Refusal(
            ("model.revision", "model.path"),
            f"model.revision={truncate(model.revision)} is of a hub model, and model.path={model.path} is a folder",
        )
    if model.random_init and model.adapter is not None:
        yield Refusal(
            ("model.random_init", "model.adapter"),
            f"model.random_init=true draws other weights than model.adapter={model.adapter} was trained on",
        )


def _is_local(path: str) -> bool:
    return starter_path(path) is not None or os.path.exists(os.path.expanduser(path))


def _row_contradictions(config: Config) -> Iterator[Refusal]:
    task = config.task
    sources = [source for source in (task.data, task.eval_data) if source is not None]
    if task.columns and not sources:
        columns = json.dumps(task.columns)
        yield Refusal(
            ("task.columns", "task.data"), f"task.columns={columns} renames columns of task.data, which is not given"
        )
    if task.revision is not None and all(os.path.exists(source) for source in sources):
        found = f"task.data={task.data} is not on the hub" if sources else "task.data is not given"
        yield Refusal(
            ("task.revision", "task.data"), f"task.revision={truncate(task.revision)} is of the hub, and {found}"
        )


def _length_contradictions(config: Config) -> Iterator[Refusal]:
    longest = config.generation.max_new_tokens
    overlong = config.reward.overlong_tokens
    of_call = config.environment.max_call_tokens
    if overlong > longest:
        yield Refusal(
            ("reward.overlong_tokens", "generation.max_new_tokens"),
            f"reward.overlong_tokens={overlong} penalises every answer: generation.max_new_tokens={longest} is less",
        )
    if of_call is not None and of_call > longest:
        yield Refusal(
            ("environment.max_call_tokens", "generation.max_new_tokens"),
            f"environment.max_call_tokens={of_call} never holds: all calls of an episode have "
            f"generation.max_new_tokens={longest} together",
        )


def _tool_contradictions(config: Config) -> Iterator[Refusal]:
    tools = config.environment.tools
    names = [use.rpartition(":")[2] for use in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield Refusal(
            ("environment.tools",),
            f"environment.tools=[{', '.join(tools)}] has two tools called {twice}: only one would be run",
        )


def _method_contradictions(config: Config) -> Iterator[Refusal]:
    teacher = config.teacher
    ppo = config.ppo
    environment = config.environment
    fraction = config.distill.on_policy_fraction
    if teacher.quantization is not None and teacher.kind not in ("model", "none"):
        path = truncate(mask_url(str(teacher.path)))
        yield Refusal(
            ("teacher.quantization", "teacher.path"),
            f"teacher.quantization={teacher.quantization} is for a separate model, and teacher.path={path} is not one",
        )
    if config.method == "ppo" and ppo.target_kl is not None and ppo.kl_coef == 0:
        yield Refusal(
            ("ppo.target_kl", "ppo.kl_coef"),
            f"ppo.target_kl={ppo.target_kl} adapts ppo.kl_coef by a factor, and ppo.kl_coef=0 stays 0",
        )
    given_answers = f"distill.on_policy_fraction={fraction} takes given answers, which are not episodes of"
    if config.method == "distill" and fraction < 1 and environment.name:
        yield Refusal(
            ("distill.on_policy_fraction", "environment.name"), f"{given_answers} environment.name={environment.name}"
        )
    if config.method == "distill" and fraction < 1 and environment.tools:
        yield Refusal(
            ("distill.on_policy_fraction", "environment.tools"),
            f"{given_answers} environment.tools={json.dumps(environment.tools)}",
        )


# ---- what only an evaluation may have ----


def training_conflicts(config: Config) -> Iterator[Refusal]:
    """Yield settings that `tinyrl eval` takes and training does not."""
    generation = config.generation
    fields = GenerationConfig.model_fields
    why = (
        "cuts the distribution that is sampled, not the one that is scored: KL turns negative, ratios lie. Leave it "
        "out: training samples the whole distribution. `tinyrl eval` takes it"
    )
    if config.samples and generation.top_k != fields["top_k"].default:
        yield Refusal(("generation.top_k",), f"generation.top_k={generation.top_k} {why}")
    if config.samples and generation.top_p != fields["top_p"].default:
        yield Refusal(("generation.top_p",), f"generation.top_p={generation.top_p} {why}")


# ---- rows ----


def check_data_given(config: Config) -> None:
    """Raise Refusal for a method that learns from rows, without task.data."""
    if config.task.data is None:
        raise Refusal(
            ("task.data",), f"task.data is missing: `tinyrl train {config.method}` needs rows, a file or a hub name"
        )
