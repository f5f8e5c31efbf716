"""Facts about the built-in tasks that decide which settings have an effect.

Environment settings have an effect only for tasks with turns. The configuration imports no task, so the facts are
written down here; tests/config/test_task_files.py compares them with the tasks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskFacts:
    """room: where its file is, beside the embedded models or among the tasks that people train on; environment: the
    built-in one that replies; replies: it has replies of its own.
    """

    room: str
    environment: str | None = None
    replies: bool = False

    @property
    def has_turns(self) -> bool:
        return self.replies or self.environment is not None


SHIPPED = {  # by the names of their files
    "lookup": TaskFacts("starter", replies=True),
    "reviews": TaskFacts("starter"),
    "sort": TaskFacts("starter"),
    "countdown": TaskFacts("tasks"),
    "gsm8k": TaskFacts("tasks"),
    "knights_and_knaves": TaskFacts("tasks"),
    "reasoning_gym": TaskFacts("tasks"),
    "rows": TaskFacts("tasks"),
    "search_qa": TaskFacts("tasks", environment="search"),
    "sums": TaskFacts("tasks"),
}


def has_turns(name: str | None) -> bool:
    """Return whether a task has replies between turns; a user task (FILE.py:TASK) may have some."""
    return is_own(name) or (name in SHIPPED and SHIPPED[name].has_turns)


def searches(name: str | None) -> bool:
    """Return whether a task's replies are those of a search; those of a user task may be."""
    return is_own(name) or (name in SHIPPED and SHIPPED[name].environment == "search")


def is_own(name: str | None) -> bool:
    """Return whether a name is of a user task, FILE.py:TASK."""
    return name is not None and ".py:" in name
