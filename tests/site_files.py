"""Site files, which name what decides at an institution."""

from pathlib import Path

import tomli_w


def write_site(folder: Path, name: str, data: Path, **other: Path | str) -> Path:
    """Write an institution's site file into a folder; return the file's path.

    Args:
        folder: The folder.
        name: The institution's name.
        data: Its rows.
        other: ``policy`` and ``worker``.

    """
    file = folder / "site.toml"
    values = {"name": name, "data-path": str(data)}
    file.write_text(tomli_w.dumps(values | {key: str(value) for key, value in other.items()}))
    file.chmod(0o644)
    return file
