"""``psgd`` and ``python -m psgd``: the command line, if the packages that it needs are installed."""

from __future__ import annotations

import sys

from .cli.interrupts import ends_at_once

#: extra of this package that installs each package that a command may need
EXTRAS = {"matplotlib": "experiments", "rich": "cli", "typer": "cli"}


def main() -> int:
    try:
        with ends_at_once():
            from .cli import main as cli

        return cli.main()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        print(f"psgd: {missing} is missing; pip install 'psgd[{EXTRAS[missing]}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("psgd: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
