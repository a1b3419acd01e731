"""The message if files of this package are missing or another project's. PyPI's `memguard` uses the same folder."""

from __future__ import annotations


def explains(error: ImportError) -> bool:
    """Whether what could not be imported is a part of this package."""
    return (error.name or "").partition(".")[0] == "memguard"


def text(error: ImportError) -> str:
    """The cause, and the commands that install this package again."""
    try:
        from memguard._base.distribution import requirement

        again = requirement()
    except (ImportError, OSError):
        again = "memguard-gpu"
    install = "install memguard-gpu again" if again == "memguard-gpu" else f"`pip install {again}`"
    return (
        "memguard is damaged: another distribution wrote over it, or removed its files when it was uninstalled "
        f"({error})\n"
        f"    fix: `pip uninstall -y memguard memguard-gpu`, then {install}"
    )
