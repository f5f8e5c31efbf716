"""Write commands.md from the command line, settings.md from the configuration, and the table of findings in runs.md:
`python docs/generate.py`.

tests/test_docs.py fails where a page is not what this script would write.
"""

import ast
import inspect
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from tinyrl.cli.commands import app
from tinyrl.config.aliases import TABLE
from tinyrl.config.foreign_row import Foreign, Ours
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS, and_list
from tinyrl.config.schema import Config
from tinyrl.config.settings import SECTIONS, describe
from tinyrl.runs import findings

NOTE = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"
TRL = """
## Coming from TRL

A `GRPOConfig`, and the same run here. Give its names as settings (`tinyrl train grpo num_generations=8 beta=0.04`) or
as options (`--num_generations 8`), and the message ends with the line to copy. A name brings TRL's default along where
it decides another setting: `epsilon=0.2` is both clips. The line is tried first: what would be refused or have no
effect is not in it, and the message says why, and which counts were divided.
From Python the object itself is taken, with what TRL's trainer takes beside it: `tinyrl.from_trl(GRPOConfig(...),
model=..., peft_config=..., reward_funcs=[f], train_dataset=rows).train()`. TRL's defaults of what decides the result
hold, and without a `peft_config` the whole model trains; what cannot be taken is named, all at once.

```python
GRPOConfig(
    run_name="sums",
    learning_rate=1e-5,
    lr_scheduler_type="cosine",
    warmup_steps=20,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=16,
    num_generations=8,
    num_iterations=2,
    max_completion_length=512,
    beta=0.04,
    epsilon=0.2,
    epsilon_high=0.28,
    loss_type="dr_grpo",
    scale_rewards="none",
    num_train_epochs=1,
    save_steps=50,
    eval_strategy="steps",
    eval_steps=50,
    report_to="wandb",
    log_completions=True,
    seed=1,
)
LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")
```

```yaml
# tinyrl train grpo sums.yaml --name sums
method: grpo
model: {path: Qwen/Qwen2.5-0.5B-Instruct, gradient_checkpointing: true}
task: {data: rows.jsonl}
reward: {functions: [{use: "rewards.py:score"}]}
lora: {r: 32, alpha: 64}
optim: {learning_rate: 1.0e-5, schedule: cosine, warmup_steps: 10}
generation: {max_new_tokens: 512}
grpo:
  num_prompts: 32          # 16 x 16 completions in groups of 8
  group_size: 8
  num_epochs: 2
  kl_coef: 0.04
  kl_unbiased: true
  clip_eps: 0.2
  clip_eps_high: 0.28
  aggregation: constant
  advantage_scale: none
run:
  epochs: 1
  save_every: 25
  eval_every: 25
  trackers: [wandb]
  log_completions: true
  seed: 1
```

A step here is a rollout with all its optimizer steps. TRL counts optimizer steps, so `save_steps=50` with
`num_iterations=2` is `run.save_every=25`. A rollout has `num_iterations` optimizer steps while `steps_per_generation`
is `gradient_accumulation_steps`, as it is by default; else as many times more as the first is larger than the second
(then `grpo.minibatch_size` is the completions of one optimizer step). An epoch is all training rows once in both. What
differs where nothing is set:

| | TRL 1.16 | tinyrl |
|---|---|---|
| trained weights | all; LoRA with `peft_config` | LoRA, r 16, alpha 32; all with `lora.enabled=false` |
| LoRA modules | PEFT's: `q_proj` and `v_proj` of Llama and Qwen | all linear layers (`lora.target_modules`) |
| learning rate | 1e-6 | 5e-5 with LoRA, 1e-6 for all weights |
| schedule | linear to 0 | constant (`optim.schedule`) |
| length | 3 epochs | 200 steps (`run.num_steps`), or `run.epochs` |
| a step samples | 8 completions (`per_device_train_batch_size`) | 32 prompts x 8 completions |
| upper clip | as the lower, 0.2 | 0.28, DAPO's (`grpo.clip_eps_high`) |
| `top_p`, `top_k`, `min_p` | cut what is sampled | refused in training; `tinyrl eval` and `serve` take the first two |
| completion | at most 512 tokens | at most 256 (`generation.max_new_tokens`) |
| KL where `beta` > 0 | weighed by the ratio since 1.11 (`use_bias_correction_kl`) | not weighed; `grpo.kl_unbiased` |
| sampling mismatch | vLLM: sequences masked, cap 3 | weights of tokens, cap 2 (`grpo.importance_correction`) |
| gradient checkpointing | on | off (`model.gradient_checkpointing`) |
| held-out prompts | none without `eval_dataset` | a tenth of the prompts without `task.eval_data` |
| evaluation | none | every 25 steps, on 64 held-out prompts |
| checkpoints | every 500 optimizer steps, all kept | every 25 steps; three and the best are kept |
"""
NAMES = """
## Names from TRL, verl, OpenRLHF, PEFT and unsloth

A setting given by such a name is refused; the message has the name here, and at its end the line to copy. The end of
a dotted name is enough: `rollout.n` is verl's `actor_rollout_ref.rollout.n`. Most settings of `grpo` have the same name
under `ppo`. A section that is given as a name (`model=NAME`) is answered in the same way.
"""


def commands_page() -> str:
    """Return commands.md: help, arguments and options of each command."""
    command = typer.main.get_command(app)
    page = get_docs_for_click(obj=command, ctx=typer.Context(command), name="tinyrl", title="Commands")
    shared = ("* `--help`", "* `--debug`", "* `--install-completion`", "* `--show-completion`")
    page = page.replace(" <list[str]>", "")
    return NOTE + "".join(line for line in page.splitlines(keepends=True) if not line.startswith(shared)).strip() + "\n"


def settings_page() -> str:
    """Return settings.md: default, meaning and range of each setting, then the names that other libraries use."""
    lines = [
        "# Settings\n",
        "Write a setting as `section.key=value` on the command line, or in a recipe. `tinyrl list settings SECTION` "
        "prints the same as YAML. Where a preset gives the default, the one of the first preset is shown.",
        "\n```bash\ntinyrl train grpo optim.learning_rate=1e-5 grpo.group_size=16\ntinyrl list settings optim\n```",
    ]
    for section in SECTIONS:
        users = [name for name, method in METHODS.items() if section in method.sections]
        read_by = f" Read by {', '.join(users)}." if section in OPTIONAL_SECTIONS else ""
        field = Config.model_fields[section]
        about = str(field.description)
        lines += [
            f"\n## {section}\n",
            f"{about[:1].upper()}{about[1:]}.{read_by}\n",
            *head("setting", "default"),
        ]
        for name, default, meaning in describe(section):
            lines.append(row(f"`{section}.{name}`", f"`{default}`" if default else "", meaning))
    lines += [TRL, NAMES.lstrip(), "| there | here |", "|---|---|", *map(foreign_row, TABLE)]
    return NOTE + "\n".join(lines) + "\n"


def foreign_row(one: Foreign) -> str:
    """Return the table row of names of other libraries."""
    of_methods = dict[str, list[str]]()
    for method, other in one.under.items():
        of_methods.setdefault(_in_words(other), []).append(f"`{method}`")
    words = [_in_words(one.ours), *(f"{and_list(methods)}: {other}" for other, methods in of_methods.items())]
    return row(", ".join(f"`{name}`" for name in one.names.split()), "; ".join(words))


def _in_words(ours: Ours) -> str:
    """Return what a name of another library is here."""
    if ours.setting:
        return ours.setting + ours.remark
    return f"{'not needed' if ours.is_needless else 'cannot be set'}: {ours.reason}"


def head(*titles: str) -> list[str]:
    return [row(*titles, "meaning"), "|---|---|---|"]


def row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


def runs_page() -> str:
    """Return runs.md with the table of findings anew; the rest of it is written by hand."""
    page = (Path(__file__).parent / "runs.md").read_text(encoding="utf-8")
    header = "| finding | when |\n|---|---|\n"
    before, _, after = page.partition(header)
    _, _, after = after.partition("\n\n")
    rows = [row(name, when) for name, when in findings_in_words()]
    return before + header + "\n".join(rows) + "\n\n" + after


def findings_in_words() -> list[tuple[str, str]]:
    """Return the name of each finding of a run, and when there is one: the docstring of its function."""
    tree = ast.parse(inspect.getsource(findings))
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    checks = (findings.diverged, *findings.AT_ONCE, *findings.AFTER_SOME_STEPS)
    found = []
    for check in checks:
        name, *_ = names_of_findings(check.__name__, functions)
        when = inspect.getdoc(check) or ""
        found.append((name, when.strip().removesuffix(".")))
    return found


def names_of_findings(function: str, functions: dict[str, ast.FunctionDef]) -> list[str]:
    """Return the names that a function gives to a Finding, itself or by the private functions that it calls."""
    names = []
    for node in ast.walk(functions[function]):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "Finding":
            names += [ast.literal_eval(word.value) for word in node.keywords if word.arg == "name"]
        elif node.func.id.startswith("_"):
            names += names_of_findings(node.func.id, functions)
    return names


PAGES = {"commands.md": commands_page, "settings.md": settings_page, "runs.md": runs_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
