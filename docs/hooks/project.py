"""What the site says about the project: its version in the title and, if it is known, the address of the repository.

The environment variable ``PSGD_REPOSITORY`` names the repository, as for builds of the package. With it, each page
links to the repository and has a button that edits the page there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

#: pages that are made from files at the root of the repository
ROOT_FILES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_config(config: Any) -> Any:
    source = Path(config["config_file_path"]).parent / "src" / "psgd" / "__init__.py"
    config["site_name"] = f"psgd {version(source.read_text('utf-8'))}"
    if address := os.environ.get("PSGD_REPOSITORY", "").rstrip("/"):
        config["repo_url"] = address
        config["repo_name"] = "/".join(address.split("/")[-2:])
        config["edit_uri"] = "edit/main/docs/"
    return config


def on_pre_page(page: Any, *, config: Any, files: Any) -> Any:
    if page.edit_url and page.file.src_uri in ROOT_FILES:
        page.edit_url = f"{config['repo_url']}/edit/main/{ROOT_FILES[page.file.src_uri]}"
    return page


def on_post_build(*, config: Any) -> None:
    """The report is a page of its own, which links to nothing: here it gets a way back."""
    report = Path(config["site_dir"]) / "results" / "report.html"
    if report.exists():
        report.write_text(with_way_back(report.read_text("utf-8"), config["site_name"]), "utf-8")


def with_way_back(page: str, name: str) -> str:
    """
    >>> with_way_back("<header>\\n<h1>x</h1>", "psgd 1.2")
    '<header>\\n<p class="meta"><a href="../results.html">Results</a> in the documentation of psgd 1.2</p>\\n<h1>x</h1>'
    """
    if page.count("<header>\n") != 1:
        raise ValueError("results/report.html: it has no header, or several, so there is no place for a link")
    link = f'<p class="meta"><a href="../results.html">Results</a> in the documentation of {name}</p>'
    return page.replace("<header>\n", f"<header>\n{link}\n")


def version(source: str) -> str:
    """
    >>> version('__all__ = []\\n__version__ = "1.2.3"\\n')
    '1.2.3'
    """
    found = re.search(r'^__version__ = "(.+)"$', source, flags=re.MULTILINE)
    if found is None:
        raise ValueError("src/psgd/__init__.py: no __version__")
    return found[1]
