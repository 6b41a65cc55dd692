"""``make dist``: builds the sdist and the wheel, and checks what users will get. It needs the package ``build``.

The wheel is built from the sdist, and must be the same to the byte as one built from this tree. Both hold what they
should and nothing else. Then the wheel is installed into an empty environment, with torch alone, where the first
example of the README must run from an empty folder; and at last with the command line.
"""

from __future__ import annotations

import argparse
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: what the package is made of
KINDS = (".py", ".html", ".css", "py.typed")
DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


class WrongError(Exception):
    """What was built is not what it should be."""


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(info))


def check_wheel(wheel: Path) -> str:
    """That it is the package and its metadata, and that the library needs torch alone; returns its version."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = metadata_of(wheel)
    info = next(name for name in names if name.endswith(".dist-info/METADATA"))
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.name.endswith(KINDS)}
    wanted |= {info.replace("METADATA", name) for name in DIST_INFO}
    if names != wanted:
        raise WrongError(f"{wheel.name}: missing {sorted(wanted - names)}, superfluous {sorted(names - wanted)}")
    if "psgd/py.typed" not in names:
        raise WrongError(f"{wheel.name}: no py.typed, so type checkers will ignore all types")
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    if [re.split(r"[^\w-]", text)[0] for text in needed] != ["torch"]:
        raise WrongError(f"{wheel.name}: needs {needed}, and not torch alone")
    return str(metadata["Version"])


def check_sdist(sdist: Path) -> None:
    """That it has nothing which is not in the repository, and all that ``make test`` needs."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt", "hatch_build.py"}
    if missing := {*wanted, "tests/conftest.py"} - names:
        raise WrongError(f"{sdist.name}: missing {sorted(missing)}")
    git = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0 and (superfluous := names - {"PKG-INFO", *git.stdout.splitlines()}):
        raise WrongError(f"{sdist.name}: superfluous {sorted(superfluous)}")


def build(*options: str, into: Path) -> None:
    run([sys.executable, "-m", "build", *options, "--outdir", str(into), str(ROOT)])


def try_out(wheel: Path, version: str, folder: Path) -> None:
    """As a new user would, without the tree at hand."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    empty = folder / "empty"
    empty.mkdir()
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)], cwd=empty)
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    if example is None:
        raise WrongError("README.md: there is no first example")
    quietly = [str(python), "-W", "ignore"]  # torch warns where there is no numpy
    run([*quietly, "-c", example[1]], cwd=empty)
    found = run([*quietly, "-c", "import psgd; print(psgd.__version__)"], cwd=empty)
    if found.stdout.strip() != version:
        raise WrongError(f"installed is {found.stdout.strip()}, and not {version}")
    bare = run([*quietly, "-m", "psgd", "--version"], cwd=empty, code=2)
    if "pip install 'psgd[cli]'" not in bare.stderr or len(bare.stderr.splitlines()) != 1:
        raise WrongError(f"without its extra the command says {bare.stderr!r}")
    run([*pip, "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[experiments]"], cwd=empty)
    run([str(python), "-m", "psgd", "demo", "--iterations", "1", "--json"], cwd=empty)
    if [path.name for path in empty.iterdir()] != ["demo"]:
        raise WrongError(f"the folder has {sorted(path.name for path in empty.iterdir())}, and not demo alone")


def run(command: list[str], *, cwd: Path = ROOT, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != code:
        print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
        raise WrongError(f"{' '.join(command)[:120]}: exit code {done.returncode}, and not {code}")
    return done


def main() -> int:
    options = argparse.ArgumentParser(description="Build the sdist and the wheel, and check them.")
    options.add_argument("--out", type=Path, default=ROOT / "dist", help="where they are written (dist)")
    options.add_argument("--no-install", action="store_true", help="do not try the wheel in an environment of its own")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="psgd-dist-") as name:
        folder = Path(name)
        try:
            build(into=folder / "dist")  # an sdist of the tree, and a wheel of the sdist
            build("--wheel", into=folder / "again")
            (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
            if wheel.read_bytes() != (folder / "again" / wheel.name).read_bytes():
                raise WrongError("the wheels of the sdist and of the tree differ")
            version = check_wheel(wheel)
            check_sdist(sdist)
            if not asked.no_install:
                try_out(wheel, version, folder)
        except WrongError as error:
            print(f"check_dist: {error}", file=sys.stderr)
            return 1
        shutil.rmtree(asked.out, ignore_errors=True)
        shutil.copytree(folder / "dist", asked.out)
    for path in sorted(asked.out.iterdir()):
        print(f"{path}: {path.stat().st_size / 1000:,.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
