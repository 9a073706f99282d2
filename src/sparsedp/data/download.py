"""Fetching published data sets from their home pages into a cache, checked against their published md5."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sparsedp.errors import UsageError

ATTEMPTS = 3


@dataclass(frozen=True)
class Remote:
    """Files on one server: name to md5."""

    base: str
    files: dict[str, str]


PUBLISHED = {
    "fashion-mnist": Remote(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": Remote(
        "https://www.cs.toronto.edu/~kriz/", {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
    ),
    "cifar100": Remote(
        "https://www.cs.toronto.edu/~kriz/", {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}
    ),
}  # fmt: skip


def cache_folder() -> Path:
    """SPARSEDP_CACHE, or the operating system's cache folder."""
    import pooch

    return Path(os.environ.get("SPARSEDP_CACHE") or pooch.os_cache("sparsedp"))


def fetch(name: str, attempts: int = ATTEMPTS) -> Path:
    """The folder with the files of `name`, downloading those that the cache lacks or holds damaged.

    A file appears under its name only when whole and checked; a transfer that is cut is tried again.
    """
    import pooch
    import requests

    remote = PUBLISHED[name]
    folder = cache_folder() / name
    shelf = pooch.create(folder, remote.base, registry={file: f"md5:{md5}" for file, md5 in remote.files.items()},
                         retry_if_failed=attempts - 1)  # fmt: skip
    pooch.get_logger().setLevel("WARNING")
    for file in remote.files:
        try:
            shelf.fetch(file)
        except ValueError as error:
            raise _failed(name, remote, file, "what arrived does not have the published checksum") from error
        except requests.RequestException as error:
            raise _failed(name, remote, file, f"the download failed ({type(error).__name__})") from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UsageError(
                f"the cache folder is {str(folder)!r}, but it cannot be used ({reason}); set SPARSEDP_CACHE."
            ) from error
    return folder


def _failed(name: str, remote: Remote, file: str, why: str) -> UsageError:
    return UsageError(
        f"data set {name!r} needs {remote.base}{file}, but {why}; try again, or fetch {', '.join(remote.files)} on another"
        " machine and give their folder as --data.dir."
    )
