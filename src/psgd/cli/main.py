"""The command ``psgd``: its help, and its commands, each of which is imported when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer

from .. import __version__
from .interrupts import ends_at_once
from .output import USAGE_ERROR, Commands, Stream, run

#: what each command does; the command ``NAME`` is the function ``NAME`` of the module ``commands.NAME``
COMMANDS = {
    "demo": "Train a classifier with SGD, Adam and PSGD, and plot what they learn.",
    "reproduce": "Run the paper's experiments and check its claims.",
    "report": "Make one HTML page of the results of reproduce and of monitors.",
    "watch": "Show the records of a monitor on the terminal.",
    "bench": "Measure costs and gains of PSGD compared with other optimizers.",
    "plan": "Compute in advance how much memory and work PSGD needs for a model.",
}


class LazyCommands(Commands):
    """Commands that are imported when they are called: help and version need neither torch nor matplotlib."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            likely = get_close_matches(cmd_name.lower(), COMMANDS, n=1)
            hint = f"did you mean {likely[0]}?" if likely else f"the commands are {', '.join(COMMANDS)}"
            raise USAGE_ERROR(f"No such command '{cmd_name}'; {hint}")
        with ends_at_once():
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
      psgd demo                              # compare SGD, Adam and PSGD in a minute
      psgd reproduce fig1 fig5               # draw two figures of the paper and check their claims
      psgd bench step --device cuda --json   # compare the cost of a step with other optimizers
      psgd plan gpt2 --ranks 8               # compute the memory of the optimizer's state
      psgd watch run.csv                     # show the curves of a psgd.Monitor during training

    \b
    Exit codes:
      0    success; claims that do not hold and measurements that fail are results too
      1    the command failed while it ran: a full disk, a process that was killed, a failed download
      2    the command could not start: a wrong argument, a folder that is not writable, a missing package
      130  the command was interrupted by Ctrl-C (watch ends with Ctrl-C and returns 0)
      141  the output is no longer read, as after psgd ... | head

    An error is one line on stderr. With --json, stdout contains one JSON document and nothing else; after an error it
    is empty. Colours and progress bars appear on terminals only; NO_COLOR=1 turns colours off there too.
    """
    if context.invoked_subcommand is None:
        Stream().say(context.get_help())
