"""The command line: the only place where strings become objects."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

from . import __version__
from .experiments import demo as zebra_demo

#: what typer raises for a wrong option, argument or command; it has no public name in typer
USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


class Commands(TyperGroup):
    """Answers Ctrl-C; what typer itself makes of it depends on its version."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(interrupted()) from None


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        return int(app(args, prog_name="psgd", standalone_mode=False) or 0)
    except USAGE_ERROR as error:
        return failed(error.format_message())


def failed(message: str) -> int:
    print(f"psgd: {message}", file=sys.stderr)
    return 2


def interrupted() -> int:
    """The exit code that shells expect of a command that was ended by Ctrl-C."""
    print("psgd: interrupted", file=sys.stderr)
    return 130


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def psgd(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Preconditioned stochastic gradient descent for PyTorch."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the figure is written.")] = Path("demo"),
    iterations: Annotated[int, typer.Option(min=1, help="Mini-batches for each optimizer.")] = zebra_demo.ITERATIONS,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of weights, mini-batches and probes.")] = 0,
) -> None:
    """Train the paper's zebra-stripe classifier with plain SGD and with PSGD, and draw what they learn."""
    console = Console()
    with _writing(out):
        # Now, and not after a minute of training.
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    path = out / "zebra.png"
    finished = zebra_demo.demo(console, iterations=iterations, seed=seed)
    with _writing(path):
        zebra_demo.draw(finished).savefig(path, dpi=150)
    console.print(f"Figure: {path}", highlight=False, soft_wrap=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror or error}", param_hint="'--out'") from None
