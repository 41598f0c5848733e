"""Small checkpoints, and what is in a directory."""

from pathlib import Path

from aifs import client


def save(path: Path, content: str = "content", **options: object) -> None:
    with client.checkpoint(path, **options) as tmp:
        (tmp / "sub").mkdir()
        (tmp / "sub" / "model.pt").write_text(content)
        (tmp / "config.json").write_text("{}")


def names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}
