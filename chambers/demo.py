"""``python -m chambers.demo ['key=value …']``: the demonstration, from nothing to results.

Three generated institutions fine-tune the embedded tiny model together, with the settings of
``presets/demo.toml``, or of ``presets/demo-split.toml`` where the strategy is ``fl-glm``; keys of
the run config can be overridden. Everything is kept in ``.chambers``
and ``runs`` inside the checkout.
"""

import os
import sys
import tomllib

from flwr.common.config import flatten_dict, parse_config_args

from chambers.errors import CommandError
from chambers.simulation import CHECKOUT, simulate
from strategies.run_config import ConfigError, Scalar, parse_run_config

_PRIVATE = CHECKOUT / ".chambers"
_CLIENTS = 3


def main(overrides: list[str]) -> int:
    """Run the demonstration; the exit status is 0 only if the run completed."""
    given = parse_config_args([text for text in overrides if text.strip()])
    name = "demo-split.toml" if given.get("strategy") == "fl-glm" else "demo.toml"
    preset = tomllib.loads((CHECKOUT / "presets" / name).read_text())
    config: dict[str, Scalar] = {
        "output-dir": str(CHECKOUT / "runs"),
        "state-path": str(_PRIVATE / "state"),
        "min-nodes": _CLIENTS,
        **flatten_dict(preset),
        **given,
    }
    try:
        parse_run_config(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    os.environ.setdefault("CHAMBERS_CACHE", str(_PRIVATE / "cache"))
    try:
        return simulate(config, _CLIENTS, _PRIVATE / "flower")
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
