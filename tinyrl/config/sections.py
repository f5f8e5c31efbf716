"""Sections of the configuration that are not one method's own: model, data, rewards, sampling, optimizer, run.

Types are strict: 1 is not true, "3" is not 3 and true is not a number, so a wrong type is never taken for something
else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from tinyrl.config.marks import Names, OnlyIf, OnlyKeeps, RunKind
from tinyrl.config.task_files import has_turns, searches
from tinyrl.text import truncate
from tinyrl.urls import is_address

MOST = 1_000_000_000  # of a count: more is a slip, and products of it overflow
LARGEST = 1_000_000  # of a coefficient, clip, cap or penalty: more is a slip, and overflows in float32 sooner or later

Positive = Annotated[int, Field(ge=1, le=MOST)]
NumPrompts = Annotated[int, Field(ge=1, le=1_000_000)]  # more would be minutes of counting, and no memory
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Rounds = Annotated[int, Field(ge=0, le=1000)]  # of work within a step, which ends when the last of them has
Epochs = Annotated[int, Field(ge=1, le=1000)]
Rate = Annotated[float, Field(gt=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
Weight = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Scale = Annotated[list[float], Field(min_length=2, max_length=2)]  # worst and best
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]  # of Adam
Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=10**18)]
Temperature = Annotated[float, Field(ge=0.01, le=100)]
TopP = Annotated[float, Field(gt=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
AutoOrCount = Literal["auto"] | Positive
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Modules = Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)]
Parameters = Literal["experts", "peft"] | Annotated[list[Text], Field(min_length=1)]
CriticKind = Literal["adapter", "shared", "shared-detached", "separate"]
Variables = dict[str, bool | int | float | str | None]
Truncated = Literal["keep", "mask", "penalize"]
Engine = Literal["auto", "fused", "hf", "server"]
Schedule = Literal["constant", "linear", "cosine"]
Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]

EMBEDDED = {  # models by name; tinyrl/starter has their weights
    "starter": "model", "starter-reward": "reward_model", "starter-teacher": "teacher", "lookup": "lookup_model"
}  # fmt: skip
BUILT_IN_ENVIRONMENTS = ("search", "python")
MOST_CRITERIA = 64  # of a judge; Rubrics as Rewards has 7 to 20

# The runs that settings take in place of a model.
FULL_POLICY = RunKind(
    "a fully trained policy (one of adapters is model.adapter, with its base as model.path)",
    lambda run: run.trains.policy and not run.lora.enabled,
)
ADAPTER_POLICY = RunKind("a policy of adapters", lambda run: run.trains.policy and run.lora.enabled)
ANY_POLICY = RunKind("a policy", lambda run: run.trains.policy)
REWARD_RUN = RunKind("a run of `tinyrl train reward`", lambda run: not run.trains.policy)
WITH_VALUES = RunKind(
    "a ppo or reward run, or a fully trained policy",
    lambda run: run.uses("critic") or not run.trains.policy or not run.lora.enabled,
)


def starter_path(name: str) -> Path | None:
    """Return the folder of the embedded model called `name`, one of EMBEDDED; None for every other name."""
    return Path(__file__).parents[1] / "starter" / EMBEDDED[name] if name in EMBEDDED else None


class Section(BaseModel):
    """A group of fields; a field it does not know is an error, and so are NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


# When settings count.
LORA = OnlyIf(lambda config: config.lora.enabled, "lora.enabled is true", why="every weight is trained")
FRESH = OnlyIf(
    lambda config: config.model.adapter is None,
    "model.adapter is null",
    why="the adapter has its own",
    remedy="model.adapter=null",
)
LEARNS = OnlyIf(
    lambda config: config.learns_from_teacher,
    "method is distill or teacher.kl_coef > 0",
    why="nothing is learnt from a teacher",
    of_method=True,
)
SAMPLES = OnlyIf(
    lambda config: config.samples,
    "method is grpo, ppo or distill",
    why="the method learns from given answers",
    of_method=True,
)
SEARCHES = OnlyIf(
    lambda config: (
        config.environment.name == "search" or (config.environment.name is None and searches(config.task.name))
    ),
    "environment.name is search, or it is null and task.name is a task that searches",
    why="nothing is searched",
)
TURNS = OnlyIf(
    lambda config: config.environment.is_given or has_turns(config.task.name),
    "environment.name, tools or agent is given, or task.name is a task with turns",
    why="an answer is one turn without an environment",
)
OBSERVES = OnlyIf(
    lambda config: config.environment.observes or (config.environment.agent is None and has_turns(config.task.name)),
    "environment.name or tools is given, or task.name is a task with turns and environment.agent is null",
    why="this run has no environment that replies to the policy",
)
OWN_POLICY = OnlyIf(
    lambda config: config.method != "distill",
    "method is not distill",
    why="it is the only loss there",
    of_method=True,
)
HAS_CRITIC = OnlyIf(lambda config: config.method == "ppo", "method is ppo", why="there is no critic", of_method=True)
TEMPLATED = OnlyIf(lambda config: config.task.chat is not False, "task.chat is not false", why="no template is applied")
SCORED_BY_MODEL = OnlyIf(
    lambda config: config.reward.model is not None, "reward.model is not null", why="there is no reward model"
)
COUNTS_STEPS = OnlyIf(
    lambda config: config.run.epochs is None,
    "run.epochs is null",
    why="run.epochs gives the number of steps",
    remedy="run.epochs=null",
)
EVALUATES = OnlyIf(
    lambda config: config.run.eval_prompts > 0 and config.run.eval_every > 0,
    "run.eval_prompts and run.eval_every are above 0",
    why="no evaluation comes between the first step and the last",
)
TRACKED = OnlyIf(lambda config: bool(config.run.trackers), "run.trackers is not []", why="there is no tracker")
AGENT = OnlyIf(
    lambda config: config.environment.agent is not None, "environment.agent is not null", why="there is no agent"
)
NO_AGENT = OnlyIf(
    lambda config: config.environment.agent is None,
    "environment.agent is null",
    why="an agent's requests hold their own",
    remedy="environment.agent=null",
)
ON_SERVER = OnlyIf(
    lambda config: config.generation.engine == "server",
    "generation.engine is server",
    why="completions are sampled in this process",
)


class ModelConfig(Section):
    path: Annotated[Text, Names("model", run=FULL_POLICY)] = Field(
        default="starter", description="folder with safetensors, hub name, or embedded model (starter, lookup)"
    )
    revision: Text | None = Field(default=None, description="commit, tag or branch of a hub model; null: the newest")
    dtype: Dtype = Field(
        default="auto", description="dtype of weights and autocast; auto: bfloat16 on a GPU, else float32"
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    quantization: Literal["4bit"] | None = Field(default=None, description="load the frozen base in 4 bits; needs LoRA")
    adapter: Annotated[Text | None, Names("model", run=ADAPTER_POLICY)] = Field(
        default=None, description="LoRA adapter to start from; a frozen copy is the reference"
    )
    random_init: bool = Field(default=False, description="start from random weights (run.seed), to train from scratch")
    with_images: bool | None = Field(
        default=None,
        description="load the model with its vision tower, frozen; null: where rows have images, or it has to be",
    )
    image_cache_gb: NonNegativeFloat = Field(
        default=1.0, description="memory for image features that are kept: the vision tower runs once per image"
    )


class LoraSection(Section):
    enabled: bool = Field(default=True, description="train low-rank adapters; false: train every weight")
    r: Annotated[int, Field(ge=1, le=16_384), LORA, FRESH] = Field(default=16, description="rank of the adapters")
    alpha: Annotated[PositiveFloat, LORA, FRESH] = Field(
        default=32, description="LoRA alpha: an adapter's output is scaled by alpha / r"
    )
    dropout: Annotated[Dropout, LORA] = Field(default=0.0, description="LoRA dropout; only for sft, reward and dpo")
    target_modules: Annotated[Modules, LORA, FRESH] = Field(
        default="all-linear", description="modules that get an adapter, such as [q_proj, v_proj]"
    )
    target_parameters: Annotated[Parameters | None, LORA, FRESH] = Field(
        default=None,
        description="matrices of experts that get an adapter: all (experts), or by name, such as "
        "[mlp.experts.down_proj]; null: none; peft: those that PEFT adds to all-linear, and routers",
    )


class ReferenceConfig(Section):
    kind: Literal["auto", "none"] = Field(
        default="auto", description="auto: the frozen initial policy; none: no reference"
    )


class CriticConfig(Section):
    kind: CriticKind | None = Field(
        default=None, description="architecture of the critic; null: adapter with LoRA, else separate"
    )
    path: Annotated[Text | None, Names("model", run=WITH_VALUES)] = Field(
        default=None, description="ppo run, reward run or model that the critic starts from; null: model.path"
    )
    warmup_steps: NonNegative = Field(default=1, description="number of steps at the start that train only the critic")


class TeacherConfig(Section):
    path: Annotated[Text | None, Names("model", "server", "self", "start", run=ANY_POLICY), LEARNS] = Field(
        default=None,
        description="teacher: a run, adapter, model or server; self or start: the policy, now or as it began",
    )
    hint: Annotated[Text | None, LEARNS] = Field(
        default=None, description="extra text that only the teacher reads, such as 'Answer: {answer}'"
    )
    divergence: Annotated[Share, LEARNS] = Field(
        default=1.0, description="divergence from the teacher; 0: forward KL, 1: reverse KL, between: Jensen-Shannon"
    )
    top_k: Annotated[Positive | None, LEARNS] = Field(
        default=None,
        description="distil on the teacher's top-k tokens and one bucket for the rest; null: full vocabulary",
    )
    kl_coef: Annotated[NonNegativeFloat, OWN_POLICY] = Field(
        default=0.0, description="weight of the teacher loss in grpo and ppo"
    )
    quantization: Annotated[Literal["4bit", "8bit"] | None, LEARNS] = Field(
        default=None, description="load the teacher in 4 or 8 bits"
    )

    @property
    def kind(self) -> str:
        """Return what `path` names: none, self, start, server, adapter or model."""
        if self.path is None or self.path in ("self", "start"):
            return self.path or "none"
        if is_address(self.path):
            return "server"
        folder = starter_path(self.path) or Path(self.path).expanduser()
        return "adapter" if os.path.isfile(folder / "adapter_config.json") else "model"


class TaskConfig(Section):
    name: Annotated[Text | None, Names("task", "code")] = Field(
        default=None, description="task: one of `tinyrl list tasks`, or FILE.py:TASK; null: `rows`, your own rows"
    )
    data: Annotated[Text | None, Names("rows")] = Field(
        default=None, description="rows: a file, a folder of save_to_disk, or owner/name:config@split"
    )
    eval_data: Annotated[Text | None, Names("rows")] = Field(
        default=None, description="held-out rows; null: a tenth of the prompts of task.data"
    )
    revision: Text | None = Field(default=None, description="commit, tag or branch of a hub data set; null: the newest")
    columns: dict[str, str] = Field(default_factory=dict, description="columns to rename, as {new: old}")
    system_prompt: Annotated[str | None, NO_AGENT] = Field(
        default=None, description="system message of every prompt; replaces that of the data"
    )
    max_samples: Positive | None = Field(default=None, description="maximum number of rows of each split")
    chat: Literal["auto"] | bool = Field(
        default="auto", description="apply the model's chat template; auto: if it has one"
    )
    chat_template_kwargs: Annotated[Variables, TEMPLATED] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking: false}"
    )
    on_overlong_prompt: Literal["error", "drop"] = Field(
        default="error", description="refuse a run with a prompt that is too long, or drop the prompt"
    )
    sampler: Annotated[Literal["uniform", "difficulty"], SAMPLES] = Field(
        default="uniform",
        description="uniform: prompts in epochs; difficulty: prompts with a pass rate near 0.5 more often",
    )
    solved_reward: Annotated[Weight, SAMPLES] = Field(
        default=1.0,
        description="reward (of an episode, the sum) from which a completion is solved, for sampler and teacher.hint",
    )
    grading: Literal["task", "math"] = Field(
        default="task", description="task: the task's verifier; math: math-verify, for formulas"
    )
    max_pixels: Positive = Field(
        default=401_408, description="maximum pixels of an image; one with more is scaled down, its aspect ratio kept"
    )
    fetch_images: bool = Field(
        default=False, description="fetch images at http addresses, once, into a cache; false: refuse them"
    )


class CriterionConfig(Section):
    text: Text = Field(description="what the judge scores; {column} inserts the row's value")
    name: Annotated[str, Field(pattern=r"^\w+(?:[ .-]\w+)*$", max_length=40)] | None = Field(
        default=None, description="name of its metric, reward/judge/NAME; null: criterion_1 and so on"
    )
    weight: NonNegativeFloat = Field(default=1.0, description="weight in the mean; 0: it is a metric alone")
    scale: Scale | None = Field(default=None, description="worst and best score; null: the judge's scale")


class RewardFunctionConfig(Section):
    use: Annotated[Text, Names("code", "judge")] = Field(description="FILE.py:FUNCTION, or judge")
    weight: Weight = Field(default=1.0, description="weight of the score in the sum")
    url: Annotated[Text | None, Names("server")] = Field(
        default=None, description="judge: URL of its OpenAI endpoint, such as http://127.0.0.1:8000/v1"
    )
    model: Text | None = Field(default=None, description="judge: name of the model")
    rubric: Annotated[Text | None, Names("file")] = Field(
        default=None, description="judge: text file with the rubric; {column} inserts the row's value"
    )
    criteria: Annotated[list[CriterionConfig], Field(max_length=MOST_CRITERIA)] = Field(
        default_factory=list,
        description="judge: criteria that are scored apart, in one request; the reward is their weighted mean",
    )
    criteria_column: Text | None = Field(
        default=None,
        description="judge: column with each row's own criteria, a list of {text, weight}; a weight may be negative",
    )
    mode: Literal["score", "rank"] = Field(
        default="score", description="judge: score each answer, or rank the answers of a group"
    )
    scale: Scale = Field(
        default_factory=lambda before: [0.0, 10.0] if before.get("criteria_column") is None else [0.0, 1.0],
        description="judge: worst and best score, which become rewards of 0 and 1; default: [0, 10], of a row's own "
        "criteria [0, 1]",
    )
    images: bool = Field(
        default=False, description="judge: show it the images of prompts; it must be a model that reads them"
    )
    key_env: Text | None = Field(default=None, description="judge: environment variable with the API key")
    max_tokens: Positive = Field(default=1024, description="judge: maximum tokens of a reply")
    max_concurrency: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=16, description="judge: maximum number of concurrent requests"
    )
    cache: Annotated[Text | None, Names("file", made=True)] = Field(
        default=None, description="judge: cache file; null: ~/.cache/tinyrl/judge.sqlite"
    )
    max_requests: Positive | None = Field(
        default=None, description="judge: maximum requests of a run; a run that may need more is refused"
    )
    allow_weak: bool = Field(default=False, description="judge: train even if reference answers do not score best")

    @property
    def is_judge(self) -> bool:
        return self.use == "judge"

    @property
    def criterion_names(self) -> list[str]:
        return [one.name or f"criterion_{number}" for number, one in enumerate(self.criteria, start=1)]

    @model_serializer(mode="wrap")
    def _as_written(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = whole(self)
        return values if self.is_judge else {"use": self.use, "weight": self.weight}

    @model_validator(mode="after")
    def _judge_is_whole(self) -> Self:
        of_judges = [name for name in type(self).model_fields if name not in ("use", "weight")]
        unread = [name for name in of_judges if name in self.model_fields_set and not self.is_judge]
        if unread:
            raise ValueError(f"{', '.join(unread)}: only of a judge, and use={truncate(self.use)} is a function")
        missing = [name for name in ("url", "model") if self.is_judge and getattr(self, name) is None]
        if self.is_judge and self.rubric is None and not self.criteria and self.criteria_column is None:
            missing.append("rubric, criteria or criteria_column")
        if missing:
            raise ValueError(f"use=judge needs {', '.join(missing)}")
        if self.url is not None and (not is_address(self.url) or "@" in self.url or "?" in self.url):
            raise ValueError("url: an http address without a password; its key is in the environment: key_env")
        scales = [self.scale, *(one.scale for one in self.criteria if one.scale is not None)]
        if any(low >= high for low, high in scales):
            raise ValueError("scale: the worst score, then the best")
        if self.criteria and self.criteria_column is not None:
            raise ValueError("criteria, criteria_column: one of them; the criteria of a run, or each row's own")
        if self.mode == "rank" and (self.criteria or self.criteria_column is not None):
            raise ValueError("criteria: only with mode: score; in a ranking the answers of a group have one order")
        if self.criteria:
            self._check_criteria()
        return self

    def _check_criteria(self) -> None:
        names = self.criterion_names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"criteria: two have the name {twice}, which is that of a metric")
        if not any(one.weight for one in self.criteria):
            raise ValueError("criteria: the weight of one, at least, is above 0")


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(
        default_factory=list, description="reward functions and judges, instead of the task's verifier"
    )
    model: Annotated[Text | None, Names("model", run=REWARD_RUN)] = Field(
        default=None, description="reward model: a classifier, or a run of `tinyrl train reward`"
    )
    model_label: Annotated[int | str | None, SCORED_BY_MODEL] = Field(
        default=None, description="index or name of the label whose score counts"
    )
    timeout_s: PositiveFloat = Field(
        default=60.0, description="time limit per call of the reward functions, in seconds"
    )
    truncated: Truncated = Field(
        default="keep", description="truncated completions: keep, mask in the loss, or penalize by subtracting 1"
    )
    overlong_tokens: NonNegative = Field(default=0, description="DAPO's soft penalty over the last N tokens; 0: none")

    @property
    def is_verifier(self) -> bool:
        """Return whether the task's verifier is the reward: no function and no model is named."""
        return not self.functions and self.model is None


class EnvironmentConfig(Section):
    name: Annotated[Text | None, Names("code", *BUILT_IN_ENVIRONMENTS)] = Field(
        default=None, description="environment: search, python or FILE.py:NAME; null: the task's own"
    )
    tools: list[Annotated[Text, Names("code")]] = Field(
        default_factory=list, description="tools that the model may call, each as FILE.py:FUNCTION"
    )
    agent: Annotated[Text | None, Names("code")] = Field(
        default=None, description="agent that plays episodes over an OpenAI-compatible URL: FILE.py:FUNCTION"
    )
    max_concurrency: Annotated[int, Field(ge=1, le=1024), AGENT] = Field(
        default=8, description="maximum number of concurrent agents"
    )
    max_call_tokens: Annotated[Positive | None, AGENT] = Field(
        default=None, description="maximum tokens per call of an agent; null: generation.max_new_tokens / max_turns"
    )
    side_prompts: Annotated[list[Text], AGENT] = Field(
        default_factory=list,
        description="an agent's conversations with one of these texts in a system message, or in the prompt of a text "
        "completion, are answered, and not trained on",
    )
    min_tools: Annotated[int, Field(ge=0, le=1000), AGENT] = Field(
        default=0,
        description="an agent's conversations with fewer tools than this are answered, and not trained on; a text "
        "completion has none",
    )
    max_turns: Annotated[int, Field(ge=1, le=1000), TURNS] = Field(default=4, description="maximum turns per episode")
    max_observation_tokens: Annotated[Positive, OBSERVES] = Field(
        default=256, description="maximum tokens of an observation; a longer one is cut"
    )
    timeout_s: Annotated[PositiveFloat | None, TURNS] = Field(
        default=None,
        description="time limit in seconds; null: 30 per tool call, 5 per Python cell, 300 per agent episode",
    )
    corpus: Annotated[Text | None, Names("file", "server"), SEARCHES] = Field(
        default=None, description="search: a .jsonl or .parquet file, or the URL of a server"
    )
    top_k: Annotated[int, Field(ge=1, le=100), SEARCHES] = Field(default=3, description="search: passages per query")

    @property
    def observes(self) -> bool:
        """Return whether an environment that these settings name answers turns."""
        return self.name is not None or bool(self.tools)

    @property
    def is_given(self) -> bool:
        """Return whether these settings name an environment, or an agent."""
        return self.observes or self.agent is not None

    def call_tokens(self, max_new_tokens: int) -> int:
        """Return the most tokens of one call of an agent: an equal share of the episode's, unless one is set."""
        return self.max_call_tokens or max(1, max_new_tokens // self.max_turns)

    @property
    def seconds(self) -> float:
        """Return the limit of a tool call, a search or an agent; a cell of Python has its own (python.py)."""
        return self.timeout_s or (300.0 if self.agent is not None else 30.0)


class GenerationConfig(Section):
    max_new_tokens: Positive = Field(
        default=256, description="maximum tokens of a completion, not counting observations"
    )
    max_prompt_tokens: Positive = Field(default=1024, description="maximum tokens of a prompt")
    temperature: Temperature = Field(
        default=1.0, description="sampling temperature, also used for all log-probabilities"
    )
    top_p: TopP = Field(default=1.0, description="nucleus sampling; 1: off")
    top_k: NonNegative = Field(default=0, description="top-k sampling; 0: off")
    stop: Annotated[list[Text], NO_AGENT] = Field(default_factory=list, description="strings that end a completion")
    engine: Engine = Field(
        default="auto", description="sampling engine: tinyrl's (fused), transformers' (hf), or a vLLM server"
    )
    url: Annotated[Text | None, Names("server"), ON_SERVER] = Field(
        default=None, description="URL of a vLLM server on this machine, such as http://127.0.0.1:8000"
    )
    server_sleep: Annotated[bool, ON_SERVER] = Field(
        default=False, description="put a server on the same GPU to sleep between rollouts"
    )
    max_rows: Positive | None = Field(
        default=None, description="maximum number of completions decoded at once; null: all"
    )


class OptimConfig(Section):
    optimizer: Literal["adamw", "adamw8bit"] = Field(default="adamw", description="AdamW, with 32-bit or 8-bit state")
    learning_rate: LearningRate | None = Field(
        default=None, description="learning rate of the policy; null: 5e-5 with LoRA, else 1e-6"
    )
    critic_learning_rate: Annotated[LearningRate | None, HAS_CRITIC] = Field(
        default=None, description="learning rate of the critic; null: 1e-4 with LoRA, else 1e-5"
    )
    schedule: Schedule = Field(default="constant", description="learning rate schedule after the warm-up")
    warmup_steps: NonNegative = Field(default=0, description="steps of linear warm-up")
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(default=0.0, description="decoupled weight decay")
    betas: Betas = Field(
        default=[0.9, 0.999],
        description="AdamW's decay rates of the mean gradient and the mean square, for policy and critic",
    )
    max_grad_norm: PositiveFloat = Field(
        default=1.0, description="gradient clipping: maximum norm, for policy and critic separately"
    )


class RunConfig(Section):
    num_steps: Annotated[Positive, COUNTS_STEPS] = Field(
        default=200, description="number of steps; a step is a rollout with its update, or one batch"
    )
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = Field(
        default=None, description="passes over the training rows, rounded up to whole steps; null: num_steps"
    )
    seed: Seed = Field(default=0, description="seed of all random numbers")
    micro_batch_tokens: AutoOrCount = Field(
        default="auto", description="tokens per forward-backward pass; auto: as many as fit in memory"
    )
    eval_every: NonNegative = Field(
        default=25, description="evaluate every N steps, and always at the start and the end"
    )
    eval_prompts: NonNegative = Field(default=64, description="held-out prompts per evaluation; 0: no evaluation")
    patience: Annotated[Positive | None, EVALUATES, OnlyKeeps()] = Field(
        default=None, description="end the run after N evaluations without a gain beyond the interval; null: do not"
    )
    save_every: Annotated[NonNegative, OnlyKeeps()] = Field(
        default=25, description="save a checkpoint every N steps, and always at the end"
    )
    keep_checkpoints: Annotated[Positive, OnlyKeeps()] = Field(
        default=3, description="number of latest checkpoints to keep, besides the best"
    )
    deterministic: bool = Field(default=False, description="use deterministic kernels on a GPU, which are slower")
    kernels: Literal["auto", "plain"] = Field(
        default="auto", description="auto: try faster kernels on a GPU and use those that are as exact; plain: do not"
    )
    threads: AutoOrCount = Field(
        default="auto", description="number of CPU threads; auto: by the model's width and the cores"
    )
    trackers: Annotated[list[Tracker], OnlyKeeps()] = Field(
        default_factory=list, description="experiment trackers that get the metrics, besides metrics.jsonl"
    )
    log_completions: Annotated[bool, TRACKED, OnlyKeeps()] = Field(
        default=False, description="upload the completions of each evaluation as a table to wandb and trackio"
    )
