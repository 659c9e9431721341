"""Folders of files that must be there after the power fails."""

from __future__ import annotations

import os


def fsync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
