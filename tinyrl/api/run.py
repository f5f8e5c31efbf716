"""A run as an object: its metrics, samples, report and policy, and the way on."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyrl.api.given import Settings, overrides_of
from tinyrl.api.process import alone, interruptible, prepare_libraries
from tinyrl.config.schema import Config
from tinyrl.runs.records import json_lines, read_steps
from tinyrl.runs.run_dir import RunDir
from tinyrl.text import number

if TYPE_CHECKING:
    from tinyrl.chat.speaker import Speaker


class Metrics(list[dict[str, Any]]):
    """The lines of metrics.jsonl, one dictionary a step."""

    def frame(self) -> Any:
        """As a pandas data frame, indexed by step. Raises ValueError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ValueError(".frame() needs pandas: pip install pandas") from None
        frame = pandas.DataFrame(list(self))
        return frame.set_index("step") if "step" in frame else frame


class Report:
    """report.html of a run: shown inline in a notebook, without scripts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" sandbox="" style="width: 100%; height: 720px; border: 0"></iframe>'


class Run:
    """A run folder. exit_code: how its last training here ended (0 done, 3 a guard, 4 no room, 75 interrupted); None
    where it was only opened.
    """

    def __init__(self, folder: RunDir, *, exit_code: int | None = None) -> None:
        self._folder, self.exit_code = folder, exit_code

    @property
    def path(self) -> Path:
        return self._folder.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self._folder.read_config()

    @property
    def metrics(self) -> Metrics:
        """What every step measured, read anew."""
        file = self._folder.metrics
        return Metrics(read_steps(file, []).values() if file.is_file() else [])

    @property
    def finished(self) -> bool:
        """Whether the last step is done."""
        return bool(self.metrics) and self.metrics[-1]["step"] >= self.config.run.num_steps

    def samples(self, *, step: int | None = None, kind: str | None = None) -> list[dict[str, Any]]:
        """Lines of samples.jsonl, of a step and a kind (train, eval, eval-greedy) where they are given."""
        file = self._folder.samples
        rows = json_lines(file, []) if file.is_file() else ()
        return [row for row in rows if step in (None, row["step"]) and kind in (None, row.get("kind"))]

    def report(self) -> Report:
        """Write report.html and report.png anew, and show the page."""
        from tinyrl.report import write_report

        return Report(write_report(self.path)[0])

    def resume(
        self,
        settings: Settings | None = None,
        *,
        allow_config_change: bool = False,
        device: str = "auto",
        trust_remote_code: bool = False,
    ) -> Run:
        """`tinyrl train --resume RUN`: go on from the newest checkpoint that verifies. A finished run is returned."""
        with alone():
            from tinyrl.cli.preflight import check_before_loading

            config = self._folder.read_config(overrides_of(settings))
            check_before_loading(config)
            prepare_libraries()
            from tinyrl.components import Options
            from tinyrl.training.resume import resume

            options = Options(device=device, trust_remote_code=trust_remote_code)
            with interruptible():
                launch = resume(self._folder, options=options, config=config, allow_config_change=allow_config_change)
                self.exit_code = 0 if launch is None else launch.go()
            return self

    def policy(self, *, device: str = "auto", trust_remote_code: bool = False) -> Speaker:
        """The policy of the newest checkpoint, loaded: `policy("a prompt")` is its answer. Close it, or use `with`."""
        from tinyrl.chat.target import chat_target

        found = chat_target(str(self.path), [])
        prepare_libraries()
        from tinyrl.chat.speaker import load_speaker
        from tinyrl.components import Options

        return load_speaker(found, options=Options(device=device, trust_remote_code=trust_remote_code))

    def __repr__(self) -> str:
        lines = self.metrics
        step = lines[-1]["step"] if lines else 0
        said = [f"run {self.path}: step {step} of {self.config.run.num_steps}"]
        evaluated = [line for line in lines if isinstance(line.get("eval/reward_mean"), int | float)]
        if evaluated:
            first, last = (number(line["eval/reward_mean"]) for line in (evaluated[0], evaluated[-1]))
            said.append(f"held-out reward {first} -> {last}")
        if self.exit_code:
            how = {3: "stopped by a guard", 4: "no room", 75: "interrupted"}.get(self.exit_code, "not done")
            said.append(f"{how}; go on with .resume()")
        return ", ".join(said)
