"""The task of boxes.py as a taskset of `verifiers` (0.4), for verifiers_agent.py: with a tool server and a reward."""

# pyright: reportMissingImports=none

import random

import verifiers.v1 as vf

__all__ = ["BoxesTaskset"]

COLOURS = ("red", "blue", "green", "white", "black", "pink")
THINGS = ("apple", "key", "coin", "shell", "stone", "nail", "ring", "leaf")
PEOPLE = ("Ada", "Ben", "Eva", "Ida", "Jon", "Kim", "Leo", "Mia", "Noa", "Pia", "Ron", "Sam", "Uma", "Vic", "Zoe")


class BoxesData(vf.TaskData):
    boxes: dict[str, str]
    colour: str


class BoxesTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "boxes"
    boxes: dict[str, str]

    async def setup_task(self, task: BoxesData) -> None:
        self.boxes = task.boxes

    @vf.tool
    def look(self, colour: str) -> str:
        """Look into a box."""
        return self.boxes.get(colour, "no such box")


class BoxesConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class BoxesTask(vf.Task[BoxesData, vf.State, BoxesConfig]):
    @classmethod
    def toolsets(cls, config: BoxesConfig) -> list[vf.Toolset]:
        return [BoxesTools(config.tools)]

    @vf.reward(weight=1.0)
    async def on_top(self, trace: vf.Trace) -> float:
        """Return 1.0 where the last word is the thing on top, else 0.0."""
        words = trace.last_reply.replace(".", " ").split()
        return float(words[-1:] == [self.data.boxes[self.data.colour].partition(",")[0]])


class BoxesTasksetConfig(vf.TasksetConfig):
    task: BoxesConfig = BoxesConfig()


class BoxesTaskset(vf.Taskset[BoxesTask, BoxesTasksetConfig]):
    def load(self) -> list[BoxesTask]:
        made = []
        for person in PEOPLE:
            draw = random.Random(person)
            boxes = {colour: ", below it ".join(draw.sample(THINGS, 2)) for colour in COLOURS}
            for colour in COLOURS:
                prompt = f"{person} asks: what is on top in the {colour} box?"
                made.append(BoxesTask(BoxesData(prompt=prompt, boxes=boxes, colour=colour), self.config.task))
        return made


if __name__ == "__main__":
    BoxesTools.run()
