"""Write commands.md from the command line and settings.md from the configuration: `python docs/generate.py`.

tests/test_docs.py fails where a page is not what this script would write.
"""

from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from tinyrl.cli.commands import app
from tinyrl.config.aliases import ANSWERS
from tinyrl.config.methods import METHODS, OPTIONAL_SECTIONS
from tinyrl.config.schema import Config
from tinyrl.config.settings import SECTIONS, describe

NOTE = "<!-- Written by docs/generate.py. Do not edit. -->\n\n"
NAMES = """
## Names from TRL, verl, OpenRLHF, PEFT and unsloth

A setting given by such a name is refused, and the message has the name here: `beta` is `grpo.kl_coef`. The end of a
dotted name is enough: `rollout.n` is verl's `actor_rollout_ref.rollout.n`. Most settings of `grpo`
have the same name under `ppo`.
"""


def commands_page() -> str:
    """Return commands.md: help, arguments and options of each command."""
    command = typer.main.get_command(app)
    page = get_docs_for_click(obj=command, ctx=typer.Context(command), name="tinyrl", title="Commands")
    shared = ("* `--help`", "* `--debug`", "* `--install-completion`", "* `--show-completion`")
    return NOTE + "".join(line for line in page.splitlines(keepends=True) if not line.startswith(shared)).strip() + "\n"


def settings_page() -> str:
    """Return settings.md: default, meaning and range of each setting, then the names that other libraries use."""
    lines = [
        "# Settings\n",
        "Write a setting as `section.key=value` on the command line, or in a recipe. `tinyrl list settings SECTION` "
        "prints the same as YAML. Where a preset gives the default, the one of the first preset is shown.",
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
    lines += [NAMES, "| there | here |", "|---|---|", *names(ANSWERS)]
    return NOTE + "\n".join(lines) + "\n"


def names(answers: dict[str, str]) -> list[str]:
    """Return table rows of {names there: answer}."""
    rows = []
    for found, answer in answers.items():
        rows.append(row(", ".join(f"`{name}`" for name in found.split()), answer.replace("!", "not needed: ")))
    return rows


def head(*titles: str) -> list[str]:
    return [row(*titles, "meaning"), "|---|---|---|"]


def row(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in cells)} |"


PAGES = {"commands.md": commands_page, "settings.md": settings_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
