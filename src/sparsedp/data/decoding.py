"""Image files to arrays of a fixed shape, and the loop of the worker process that does only that.

This file imports nothing of ours, so that a worker started on it alone is up in a moment and carries no torch.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "PPM", "GIF")
MAX_PIXELS = 1 << 26  # 67 million: more is refused before it is decompressed
MAX_BYTES = 1 << 29


class Undecodable(Exception):
    """The bytes are not an image that can be used; the message is the rule that they break."""


class Unreadable(Undecodable):
    """The bytes could not be had, or not be worked on: the machine's fault, which says nothing of the image and may pass."""


def decode_image(content: bytes, channels: int, size: int) -> Pixels:
    """[channels, size, size], uint16 for images of 16 bits and uint8 for all others.

    The largest central square is resized (bicubic); a square image of the right size keeps its pixels. Transparency and
    all frames after the first are dropped. Raises `Undecodable`, whatever the bytes, and `Unreadable` where the machine fails.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Undecodable(f"it claims more than {MAX_PIXELS} pixels")
                image.load()
                return _shaped(image, channels, size)
    except Undecodable:
        raise
    except Image.DecompressionBombError:
        raise Undecodable(f"it claims more than {MAX_PIXELS} pixels") from None
    except Image.UnidentifiedImageError:
        raise Undecodable(f"it is not an image of a known format ({', '.join(FORMATS)})") from None
    except Exception as error:  # noqa: BLE001 - decoders raise many things on damaged input, some with the input in the message
        if isinstance(error, MemoryError) or "out of memory" in str(error):
            raise Unreadable("memory ran out while it was decoded") from None
        if isinstance(error, OSError) and isinstance(error.errno, int):  # the system's; a decoder's own have no number
            raise Unreadable(f"it cannot be decoded ({os.strerror(error.errno)})") from None
        raise Undecodable("it is damaged or cut short") from None


def decode_file(path: str, channels: int, size: int) -> Pixels:
    """`decode_image` of a file. Raises `Unreadable` where the file cannot be read."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"it cannot be read ({error.strerror})") from None
    except MemoryError:
        raise Unreadable("memory ran out while it was read") from None
    if len(content) > MAX_BYTES:
        raise Undecodable(f"it is longer than {MAX_BYTES} bytes")
    return decode_image(content, channels, size)


def _shaped(image, channels: int, size: int) -> Pixels:  # type: ignore[no-untyped-def]
    from PIL import Image

    deep = image.mode.startswith("I")
    if image.mode == "F":
        raise Undecodable("its values are not whole numbers of 8 or 16 bits")
    if deep:
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise Undecodable("its values have more than 16 bits")
        image = Image.fromarray(values.astype(np.float32))
    else:
        image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.BICUBIC)
    array = np.asarray(image)
    if deep:
        grey = np.clip(np.rint(array), 0, 65535).astype(np.uint16)[None]
        return np.repeat(grey, channels, axis=0)
    return array[None] if channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers requests until the other side closes: a JSON line (and, without a path, the bytes), then a JSON line and pixels."""
    while line := requests.readline():
        request = json.loads(line)
        try:
            if "path" in request:
                pixels = decode_file(request["path"], request["channels"], request["size"])
            else:
                pixels = decode_image(requests.read(request["bytes"]), request["channels"], request["size"])
            head = {"bits": 8 * pixels.itemsize}
            body = pixels.tobytes()
        except Undecodable as error:
            head, body = {"rule": str(error), "passing": isinstance(error, Unreadable)}, b""
        answers.write(json.dumps(head).encode() + b"\n" + body)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
