"""smolagents' CodeAgent (1.26) as an agent: **it runs the Python that the model writes**, here in tinyrl's sandbox.

smolagents itself says that its local interpreter is not a security sandbox. This one has no network, no file, no
installed package and none of our environment, and takes Linux 5.13 or later with Landlock and seccomp; elsewhere every
episode is refused before the model is asked. Set: executor, address, key and model. Environment:
`pip install -c constraints.txt -e '.[serve]' smolagents==1.26.0`. The first line makes a model that was taught to play.

    python -m tests.agents.teach examples/smolagents_code_agent.py:run taught
    tinyrl train grpo task.name=examples/boxes.py:TASK environment.agent=examples/smolagents_code_agent.py:run \\
        model.path=taught/model lora.enabled=false optim.learning_rate=1e-3 generation.max_new_tokens=128 \\
        grpo.num_prompts=5 grpo.group_size=4 run.num_steps=4 run.eval_prompts=0

Seen: 80 episodes with 160 calls, none dropped.
"""

# pyright: reportMissingImports=none

from pathlib import Path
from typing import Any

from smolagents import CodeAgent, OpenAIModel, tool
from smolagents.local_python_executor import CodeOutput, PythonExecutor

from tinyrl.environments import cells
from tinyrl.workers.sandbox import Limits, Session

CELLS = Path(cells.__file__).read_text(encoding="utf-8")  # the program of `environment.name=python`
FINAL = "final answer: "
TOOLS = """
def look(colour): return BOXES.get(colour, "no such box")
def final_answer(answer): print(FINAL + str(answer))
"""


class Sandbox(PythonExecutor):
    """smolagents' interpreter of what the model writes, in tinyrl's sandbox; tools are part of the program there."""

    def __init__(self, tools: str) -> None:
        self.tools = tools
        self.start()

    def start(self) -> None:
        self.session = Session(f"{CELLS}\nanswer(0)\n", Limits())  # CannotIsolate: this system has no sandbox
        self(self.tools)

    def __call__(self, code_action: str) -> CodeOutput:
        outcome = self.session.ask(ascii((code_action, 5.0)).encode(), wall_s=5.0)
        if not outcome.ok:  # the interpreter has been stopped
            self.start()
            raise RuntimeError(f"stopped: {outcome.reason}")
        logs, _, answer = outcome.stdout.partition(FINAL)
        return CodeOutput(output=answer.strip() or outcome.stderr, logs=logs, is_final_answer=bool(answer))

    def send_tools(self, tools: dict[str, Any]) -> None: ...

    def send_variables(self, variables: dict[str, Any]) -> None: ...

    def cleanup(self) -> None:
        self.session.end()


def tools_with(boxes: dict[str, str]) -> str:
    return f"BOXES = {boxes!r}\nFINAL = {FINAL!r}{TOOLS}"


def run(row: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    @tool
    def look(colour: str) -> str:
        """Look into a box.

        Args:
            colour: of the box
        """
        raise NotImplementedError("it is called in the sandbox")

    sandbox = Sandbox(tools_with(row["boxes"]))
    policy = OpenAIModel(model, api_base=base_url, api_key=api_key)
    with CodeAgent(tools=[look], model=policy, executor=sandbox) as agent:
        return str(agent.run(row["prompt"]))
