"""The command ``psgd``: its help, and its commands, each of which is imported when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from .. import __version__
from .output import Commands, Stream, run

#: what each command does; the command ``NAME`` is the function ``NAME`` of the module ``commands.NAME``
COMMANDS = {
    "demo": "Train with SGD, Adam and PSGD, and draw what they learn.",
    "reproduce": "Run the paper's experiments and check its claims.",
    "report": "Make one page of what reproduce or monitors wrote.",
    "watch": "Show on the terminal what a monitor records.",
    "bench": "Measure costs and gains compared with other optimizers.",
    "plan": "Tell beforehand how much memory the state of PSGD needs.",
}


class LazyCommands(Commands):
    """Commands that are imported when they are called: help and version need neither torch nor matplotlib."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f".commands.{cmd_name}", __package__)
        only = typer.Typer(**SETTINGS)
        only.command(cmd_name)(getattr(module, cmd_name))
        return typer.main.get_command(only)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # help is plain text, which can be piped and searched
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}
app = typer.Typer(cls=LazyCommands, **SETTINGS)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    return run(app, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        Stream().say(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def psgd(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Preconditioned stochastic gradient descent for PyTorch: the paper's experiments, benchmarks, and plans.

    \b
    Examples:
      psgd demo                              # SGD, Adam and PSGD, in a minute
      psgd reproduce fig1 fig5               # two figures of the paper, and whether its claims hold
      psgd bench step --device cuda --json   # what a step costs beside other optimizers, for a script
      psgd plan gpt2 --ranks 8               # memory of the optimizer's state
      psgd watch run.csv                     # curves of a psgd.Monitor, while a model is trained

    \b
    Exit codes:
      0    done; claims that do not hold and measurements that fail are results too
      1    failed on the way: a full disk, a process that was killed, a download
      2    could not begin: a wrong argument, a folder that cannot be written, a missing package
      130  interrupted by Ctrl-C, which is how watch ends: there it is 0
      141  its output is no longer read, as after psgd ... | head

    An error is one line on stderr. With --json stdout holds one JSON document and nothing else, or nothing after an
    error. Colours and bars are for terminals only; NO_COLOR=1 turns colours off there too.
    """
    if context.invoked_subcommand is None:
        Stream().say(context.get_help())
