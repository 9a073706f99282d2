"""Where keys come from: the operating system, or a user who wants the run to be reproducible and therefore not private."""

from __future__ import annotations

import hashlib
import os

from sparsedp.dp.randomness import Key


def fresh() -> Key:
    """A new key from the operating system's generator."""
    return Key(os.urandom(32), given=False)


def chosen(text: str) -> Key:
    """The key that belongs to a text. Whoever knows the text can subtract the noise: runs with it are not private."""
    return Key(hashlib.shake_256(b"sparsedp chosen key\0" + text.encode()).digest(32), given=True)
