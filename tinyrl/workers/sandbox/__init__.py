"""The sandbox: untrusted programs run in isolation and are judged outside of it. Imports nothing else of tinyrl."""

from tinyrl.workers.sandbox.isolation import CannotIsolate, Limits
from tinyrl.workers.sandbox.probe import why_not_isolated
from tinyrl.workers.sandbox.programs import (
    Outcome,
    Verdict,
    call_function,
    passes_calls,
    passes_tests,
    python_block,
    run_program,
    same_output,
    same_value,
)

__all__ = [
    "CannotIsolate",
    "Limits",
    "Outcome",
    "Verdict",
    "call_function",
    "passes_calls",
    "passes_tests",
    "python_block",
    "run_program",
    "same_output",
    "same_value",
    "why_not_isolated",
]
