"""`tinyrl eval TARGET --benchmark gsm8k`: public tasks through lm-eval (EleutherAI's harness), the policy as it is.

The harness asks, reads and scores; here the policy is loaded with its adapter and template, and what a number depends
on is written beside it: versions, settings, and the SHA-256 of the documents that were asked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from contextlib import closing
from typing import Any

import torch

from tinyrl.evaluation.targets import Target
from tinyrl.models.roles import load_policy
from tinyrl.rollout.components import Options, Parts, resolve_threads
from tinyrl.runs.checkpoint import MANIFEST
from tinyrl.tasks.prompts import in_chat
from tinyrl.text import did_you_mean
from tinyrl.text import number as shown

NAMES = {"math500": "hendrycks_math500", "aime24": "aime24", "arc": "arc_challenge"}  # what people say
SEEDS = {"random_seed": 0, "numpy_random_seed": 1234, "torch_random_seed": 1234, "fewshot_random_seed": 1234}


def benchmark(
    target: Target,
    names: list[str],
    *,
    few_shot: int | None = None,
    limit: int | None = None,
    folder: str | None = None,
    batch_size: int = 8,
    options: Options,
) -> dict[str, Any]:
    """Scores by task of lm-eval, with all that they depend on. few_shot: examples in the prompt, limit: documents of
    each task (None: as the task says); folder: with further tasks, as YAML. Prompts go through the chat template as the
    run's do (task.chat). Raises ValueError for tasks that lm-eval does not have, and where
    it, or something a task needs, is not installed.
    """
    evaluate, model_of, manager = _harness(folder)
    asked = {"names": names, "few_shot": few_shot, "limit": limit, "folder": folder, "batch_size": batch_size}
    names = [NAMES.get(name, name) for name in names]
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"--benchmark: lm-eval has no task '{name}'.{did_you_mean(name, manager.all_tasks)}")
    config, where = target.config, target.config.task
    manifest = target.checkpoint and target.checkpoint / MANIFEST  # it has the SHA-256 of every file
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest else None
    with closing(Parts(config, options=options)) as parts:
        if target.checkpoint is not None:
            load_policy(parts.roles, target.checkpoint)
        device = resolve_threads(parts)
        chat = in_chat(parts.tokenizer, where.chat)
        model = model_of(pretrained=parts.roles.causal, tokenizer=parts.tokenizer, batch_size=batch_size)
        try:
            with torch.inference_mode(), parts.roles.acting("policy" if target.checkpoint is not None else "base"):
                found = evaluate(
                    model,
                    tasks=names,
                    num_fewshot=few_shot,
                    limit=limit,
                    apply_chat_template=chat,
                    system_instruction=where.system_prompt if chat else None,
                    task_manager=manager,
                    **SEEDS,
                )
        except ImportError as error:
            raise ValueError(f"a task needs {error.name}, which is not installed: pip install {error.name}") from None
    return {
        "target": target.name,
        "checkpoint_sha256": digest,
        "device": device,
        "harness": f"lm-eval {importlib.metadata.version('lm_eval')}",
        "settings": {
            **asked,
            "chat": chat,
            "system_prompt": where.system_prompt if chat else None,
            **SEEDS,
        },
        "tasks": {name: _task(found, name) for name in found["results"]},
    }


def _harness(folder: str | None) -> tuple[Any, Any, Any]:
    """lm-eval's evaluation, its model class, and its tasks with those of `folder`."""
    try:
        import lm_eval
        from lm_eval.models import huggingface
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'tinyrl[benchmarks]'") from None
    return lm_eval.simple_evaluate, huggingface.HFLM, TaskManager(include_path=folder)


def _task(found: Any, name: str) -> dict[str, Any]:
    """One task: its numbers, and what they depend on."""
    config, samples = found["configs"].get(name, {}), found["samples"].get(name, [])
    documents = sorted(json.dumps(sample["doc"], sort_keys=True, default=str) for sample in samples)
    digest = hashlib.sha256("\n".join(dict.fromkeys(documents)).encode()).hexdigest() if samples else None
    scores = found["results"][name].items()
    numbers = {key: value for key, value in scores if isinstance(value, int | float) and key != "sample_len"}
    kept = ("dataset_path", "dataset_name", "test_split", "validation_split", "generation_kwargs", "output_type")
    return {
        "scores": numbers,
        "documents": len(dict.fromkeys(documents)),
        "documents_sha256": digest,
        "few_shot": found["n-shot"].get(name),
        "version": found["versions"].get(name),
        **{key: config[key] for key in kept if config.get(key) is not None},
    }


def render(result: dict[str, Any]) -> str:
    """A table of the scores, with standard errors, and what they depend on."""
    lines = [f"{result['target']}, {result['harness']}, {result['device']}"]
    for name, task in result["tasks"].items():
        digest = f", sha256 {task['documents_sha256'][:16]}" if task["documents_sha256"] else ""
        lines.append(f"{name}: {task['documents']:,} documents{digest}, {task['few_shot'] or 0} examples in the prompt")
        for key, value in task["scores"].items():
            metric, _, how = key.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = task["scores"].get(f"{metric}_stderr,{how}")
            beside = f" ± {shown(error)}" if isinstance(error, float) else ""
            lines.append(f"  {metric + (f' ({how})' if how not in ('none', '') else ''):40} {shown(value)}{beside}")
    chat = "through the chat template" if result["settings"]["chat"] else "as plain text"
    return "\n".join([*lines, f"prompts {chat}; {_limit(result['settings']['limit'])}"])


def _limit(limit: int | None) -> str:
    return f"the first {limit:,} documents only: not a number to publish" if limit else "all documents"
