"""``chambers stage``: compute some of a run's middle blocks on another host of the coordinator."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from chambers.sources import option


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Compute middle blocks for a coordinator on another host.

    Whoever has the key can use it, one run after another. docs/operations.md says how to make one.
    """

    listen: Annotated[str, option("Address and port to listen on.", "HOST:PORT")]
    key: Annotated[Path, option("File with a private key and its certificate.", "FILE")]

    def __call__(self) -> int:
        """Serve until the process is interrupted."""
        from split.server.stage import serve_stage

        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
        serve_stage(self.listen, self.key)
