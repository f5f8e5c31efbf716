"""A person's task with three rows, in a file that imports little: the worker of each test loads it."""

from tinyrl.tasks import Task, text_in

TASK = Task(
    name="toy",
    rows=lambda split: [{"q": f"{split} {i}"} for i in range(3)],
    prompt=lambda row: text_in(row, "q"),
    columns=("q",),
)
