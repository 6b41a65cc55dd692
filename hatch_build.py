"""The address of the repository in the metadata of a build, if there is one.

The environment variable ``PSGD_REPOSITORY`` names it, as for the documentation. The workflow ``dist`` sets it to the
repository that it runs in, so the package never names an address at which it is not.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        if address := os.environ.get("PSGD_REPOSITORY", "").rstrip("/"):
            changelog = f"{address}/blob/main/CHANGELOG.md"
            metadata["urls"] = {"Repository": address, "Issues": f"{address}/issues", "Changelog": changelog}
