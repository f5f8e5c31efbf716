"""Other people's programs, run in a cage and judged outside of it. Imports nothing else of tinyrl."""

from tinyrl.sandbox.programs import (
    CannotIsolate,
    Limits,
    Outcome,
    Verdict,
    call_function,
    passes_calls,
    passes_tests,
    python_block,
    run_program,
    same_output,
    same_value,
    why_not_isolated,
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
