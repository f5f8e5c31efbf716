"""A person's own task, for tests."""

from tinyrl.tasks import Task, text_in

TASK = Task(
    name="toy",
    rows=lambda split: [{"q": f"{split} {i}"} for i in range(3)],
    prompt=lambda row: text_in(row, "q"),
    gold=lambda row: text_in(row, "gold") if "gold" in row else None,
    columns=("q",),
)
