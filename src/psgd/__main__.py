"""``psgd`` and ``python -m psgd``: the command line, if its extra is installed."""

from __future__ import annotations

import sys

EXTRA = ("matplotlib", "rich", "typer")


def main() -> int:
    try:
        from .cli import main as cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        print(f"psgd: {error.name} is missing; pip install 'psgd[experiments]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("psgd: interrupted", file=sys.stderr)
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
