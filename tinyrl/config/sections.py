"""Sections of the configuration that are not one method's own: model, data, rewards, sampling, optimizer, run.

Types are strict: 1 is not true, "3" is not 3 and true is not a number, so a wrong type is never taken for something
else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

LARGEST = 1_000_000  # of a coefficient, clip, cap or penalty: more is a slip, and overflows in float32 sooner or later

Positive = Annotated[int, Field(ge=1)]
NumPrompts = Annotated[int, Field(ge=1, le=1_000_000)]  # more would be minutes of counting, and no memory
NonNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, lt=1)]
LearningRate = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST)]
AtLeastOne = Annotated[float, Field(ge=1, le=LARGEST)]
AboveOne = Annotated[float, Field(gt=1, le=LARGEST)]
Weight = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]

BUILT_IN_ENVIRONMENTS = ("search", "python")
URL_SETTINGS = (("generation", "url"), ("environment", "corpus"))  # shown and kept without what is secret in a URL


class Section(BaseModel):
    """A group of fields; a field it does not know is an error, and so are NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class ModelConfig(Section):
    path: Text = Field(default="starter", description="folder with safetensors, hub name, or embedded: starter, lookup")
    revision: Text | None = Field(default=None, description="commit, tag or branch of a hub model; null: the newest")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="of weights and autocast; auto: float32 on a CPU, bfloat16 on a GPU, or else float16",
    )
    attention: Literal["sdpa", "eager"] = Field(default="sdpa", description="PyTorch's fused kernel, or plain products")
    gradient_checkpointing: bool = Field(default=False, description="recompute activations: less memory, more time")
    quantization: Literal["4bit"] | None = Field(default=None, description="hold the frozen base in 4 bits; needs LoRA")
    adapter: Text | None = Field(
        default=None, description="LoRA adapter to start from; the reference is a frozen copy of it"
    )
    random_init: bool = Field(default=False, description="draw the weights from run.seed: a model trained from nothing")


class LoraSection(Section):
    enabled: bool = Field(default=True, description="train low-rank adapters; false: train every weight")
    r: Annotated[int, Field(ge=1, le=16_384)] = Field(default=16, description="rank of the adapters")
    alpha: PositiveFloat = Field(default=32, description="scale: an adapter's output is multiplied by alpha / r")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="in the adapters; only sft, reward and dpo allow it"
    )
    target_modules: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="all-linear", description="modules that get an adapter"
    )


class ReferenceConfig(Section):
    kind: Literal["auto", "none"] = Field(
        default="auto", description="auto: the policy that training starts from, frozen"
    )


class CriticConfig(Section):
    kind: Literal["adapter", "shared", "shared-detached", "separate"] | None = Field(
        default=None,
        description="whose weights it has; null: as at critic.path, else an adapter with LoRA, else separate",
    )
    path: Text | None = Field(
        default=None, description="what it starts from: a ppo or reward run, or a model (separate); null: model.path"
    )
    warmup: NonNegative = Field(default=1, description="steps at the start that train only the critic")
    pretrain_steps: NonNegative = Field(
        default=0, description="steps at the start, warmup's among them, that train it on returns of lambda 1 (VC-PPO)"
    )


class TaskConfig(Section):
    name: Text | None = Field(default=None, description="a task of `tinyrl tasks`; null: `rows`, your own rows")
    data: Text | None = Field(
        default=None,
        description="rows: .jsonl, .json, .csv, .parquet, a save_to_disk folder, or owner/name:config@split",
    )
    eval_data: Text | None = Field(default=None, description="held-out rows; null: a tenth of the prompts of task.data")
    revision: Text | None = Field(default=None, description="commit, tag or branch of a hub data set; null: the newest")
    columns: dict[str, str] = Field(default_factory=dict, description="columns to rename, as {new: old}")
    system_prompt: str | None = Field(default=None, description="put before every prompt; replaces the data's own")
    max_samples: Positive | None = Field(default=None, description="use at most so many rows of each split")
    split_seed: Annotated[int, Field(ge=0, lt=10**18)] = Field(
        default=0, description="chooses the rows held out of task.data, whatever run.seed is"
    )
    chat: Literal["auto"] | bool = Field(default="auto", description="use the chat template; auto: where there is one")
    chat_template: dict[str, bool | int | float | str | None] = Field(
        default_factory=dict, description="variables of the chat template, such as {enable_thinking: false}"
    )
    long_prompts: Literal["error", "drop"] = Field(
        default="error",
        description="prompts over generation.max_prompt_tokens; sft, dpo: texts over positions or max_tokens",
    )
    skip_solved: NonNegative = Field(
        default=0, description="epochs that leave out a prompt whose last group was all right (grpo); 0: none do"
    )
    solved_reward: Weight = Field(
        default=1.0, description="least reward of a completion that is right, for skip_solved"
    )
    grading: Literal["task", "math"] = Field(
        default="task", description="the verifier's equality; math: of formulas, by math-verify (gsm8k, rows)"
    )


class RewardFunctionConfig(Section):
    use: Text = Field(description="FILE.py:FUNCTION")
    weight: Weight = Field(default=1.0, description="factor of its score in the sum")


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(
        default_factory=list, description="in place of the task's own verifier"
    )
    model: Text | None = Field(
        default=None, description="reward model: a classifier, or an adapter of `tinyrl train reward`"
    )
    model_label: int | str | None = Field(
        default=None, description="whose score counts, by index or name, where there are several"
    )
    model_weight: Weight = Field(default=1.0, description="factor of the reward model's score in the sum")
    timeout_s: PositiveFloat = Field(default=60.0, description="seconds a call of the reward functions may take")
    memory_gb: Literal["auto"] | PositiveFloat = Field(
        default="auto", description="for each process of a reward function; auto: half of the machine's"
    )
    truncated: Literal["keep", "mask", "penalize"] = Field(
        default="keep", description="completions cut off at max_new_tokens: as others, left out, or penalised"
    )
    truncated_penalty: NonNegativeFloat = Field(default=1.0, description="subtracted under reward.truncated=penalize")
    overlong_tokens: NonNegative = Field(
        default=0, description="DAPO's soft penalty over the last so many tokens; 0: none"
    )

    @property
    def is_verifier(self) -> bool:
        """Whether the reward is the task's verifier: it is where nothing else is named."""
        return not self.functions and self.model is None


class EnvironmentConfig(Section):
    use: Text | None = Field(
        default=None, description="what answers: search, python, or FILE.py:NAME of a function or class; null: the task"
    )
    tools: list[Text] = Field(default_factory=list, description="FILE.py:FUNCTION of tools that the model may call")
    max_turns: Annotated[int, Field(ge=1, le=1000)] = Field(default=4, description="turns of the policy in an episode")
    max_observation_tokens: Positive = Field(default=256, description="an answer is cut after so many tokens")
    timeout_s: PositiveFloat | None = Field(
        default=None, description="seconds that a call of it, or a cell of python, may take; null: 30, python 5"
    )
    memory_gb: Literal["auto"] | PositiveFloat = Field(
        default="auto", description="for each process of it; auto: half of the machine's"
    )
    corpus: Text | None = Field(
        default=None, description="of search: rows `contents` in a .jsonl or .parquet file, or a retrieval server's URL"
    )
    top_k: Annotated[int, Field(ge=1, le=100)] = Field(default=3, description="passages that a search gives")

    @property
    def seconds(self) -> float:
        """Seconds that a call, or a cell of python, may take."""
        return self.timeout_s or (5.0 if self.use == "python" else 30.0)

    @property
    def functions(self) -> list[tuple[str, str]]:
        """The fields that name people's code, each with what it names."""
        own = [("environment.use", self.use)] if self.use and self.use not in BUILT_IN_ENVIRONMENTS else []
        return [*own, *(("environment.tools", use) for use in self.tools)]


class GenerationConfig(Section):
    max_new_tokens: Positive = Field(default=256, description="longest completion, in tokens of the policy's own")
    max_prompt_tokens: Positive = Field(default=1024, description="longest prompt")
    temperature: Annotated[float, Field(ge=0.01, le=100)] = Field(
        default=1.0, description="of sampling, and of all log-probabilities"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="sample from the likeliest tokens with this total probability; 1: all"
    )
    top_k: NonNegative = Field(default=0, description="sample from the k likeliest tokens; 0: all")
    allow_truncated_sampling: bool = Field(
        default=False, description="allow top_p and top_k, which ratios and KL do not see"
    )
    stop: list[Text] = Field(default_factory=list, description="texts that end a completion")
    engine: Literal["auto", "fused", "hf-merged", "hf", "server"] = Field(
        default="auto", description="tinyrl's decoder, the library's modules (adapters merged or not), or a server"
    )
    url: Text | None = Field(default=None, description="of engine=server: vLLM on this machine, http://127.0.0.1:8000")
    timeout_s: PositiveFloat = Field(default=600.0, description="seconds that one completion of a server may take")
    max_rows: Positive | None = Field(default=None, description="completions decoded at a time; null: all")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="of sampling; auto: the model's"
    )

    @field_validator("engine", mode="before")
    @classmethod
    def _former_names(cls, name: Any) -> Any:
        return {"reference": "hf", "slim": "hf-merged"}.get(name, name) if isinstance(name, str) else name


class OptimConfig(Section):
    optimizer: Literal["adamw", "adamw8bit"] = Field(default="adamw", description="AdamW, with 32- or 8-bit state")
    learning_rate: LearningRate | None = Field(default=None, description="of the policy; null: LoRA 5e-5, full 1e-6")
    critic_learning_rate: LearningRate | None = Field(
        default=None, description="of the critic; null: LoRA 1e-4, full 1e-5"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the rates, after the warm-up"
    )
    warmup_steps: NonNegative = Field(default=0, description="steps over which the rates rise from 0")
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(default=0.0, description="decoupled weight decay")
    adam_eps: Annotated[float, Field(ge=1e-16, le=1)] = Field(
        default=1e-8, description="added to the root of Adam's second moment"
    )
    max_grad_norm: PositiveFloat = Field(default=1.0, description="gradients of each role are scaled down to this norm")


class RunConfig(Section):
    num_steps: Positive = Field(default=200, description="steps of the run: rollout and update, or one batch")
    seed: Annotated[int, Field(ge=0, lt=10**18)] = Field(default=0, description="of all random numbers")
    micro_batch_tokens: Literal["auto"] | Positive = Field(
        default="auto", description="tokens of a forward and backward pass; auto: by memory"
    )
    eval_every: NonNegative = Field(
        default=25, description="evaluate every so many steps, and at the first and last; 0: only then"
    )
    eval_prompts: NonNegative = Field(default=64, description="held-out prompts an evaluation takes; 0: no evaluation")
    save_every: NonNegative = Field(default=25, description="save every so many steps, and at the last; 0: only then")
    keep_samples: NonNegative = Field(default=16, description="completions of each step that go into samples.jsonl")
    samples_mb: PositiveFloat = Field(
        default=160.0, description="of samples.jsonl in a whole run; a long one records every 2nd, 4th, 8th ... step"
    )
    keep_checkpoints: Positive = Field(default=3, description="newest checkpoints that are kept, beside the best")
    best_metric: Text = Field(
        default="eval/reward_mean", description="metric whose highest value marks the best checkpoint"
    )
    deterministic: bool = Field(default=False, description="deterministic kernels on a GPU, at a cost in speed")
    threads: Literal["auto"] | Positive = Field(
        default="auto", description="CPU threads; auto: by the model's width and the cores"
    )
    trackers: list[Text] = Field(
        default_factory=list, description="beside metrics.jsonl: tensorboard, trackio, wandb, mlflow ..."
    )
