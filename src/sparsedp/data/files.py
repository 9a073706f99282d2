"""Reading bytes from files and archives, bounded in size, with one sentence for everything that can be wrong."""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sparsedp.errors import UsageError, wrong

MIB = 1 << 20
COPY_AGAIN = "copy or download it again"


def broken(source: str | Path, rule: str, remedy: str = COPY_AGAIN) -> UsageError:
    """The error for a file whose content breaks a rule. `rule` may name sizes and formats, never what a record holds."""
    return wrong("the file", str(source), rule, remedy)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the operating system and the decompressors raise into one sentence that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise wrong("the file", str(path), "there is no such file", "give its folder as --data.dir") from error
    except UsageError:
        raise
    except (gzip.BadGzipFile, zlib.error, EOFError, tarfile.TarError, TypeError, ValueError) as error:
        # the last two: tarfile on a gzip header that is cut short, or on numbers in a header that make no sense
        raise broken(path, "it is cut short or damaged: it cannot be decompressed") from error
    except OSError as error:
        raise wrong(
            "the file", str(path), f"it cannot be read ({error.strerror or type(error).__name__})", "check it"
        ) from error


def read_bytes(path: Path, limit: int = 256 * MIB) -> bytes:
    """The content of `path`, decompressed if its name ends in .gz; more than `limit` bytes is an error, not an allocation."""
    with reading(path), gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise broken(path, f"it holds more than the {limit // MIB} MiB that such a file can need")
    return content


def existing(folder: Path, names: Sequence[str]) -> Path:
    """The first of `names` that is a file in `folder`; the last error names them all."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise wrong(
        "the folder", str(folder), f"it holds none of {', '.join(names)}", "give the folder with the files as --data.dir"
    )


def read_members(archive: Path, names: Sequence[str], limit: int = 256 * MIB) -> Iterator[tuple[str, bytes]]:
    """The files of a tar archive whose last path component is one of `names`, in the archive's order.

    Nothing is extracted to disk, so paths that climb out of a folder, links and devices have no effect.
    """
    wanted = set(names)
    with reading(archive), tarfile.open(archive, "r|*") as tar:
        for member in tar:
            name = os.path.basename(member.name)  # noqa: PTH119 - a name inside an archive, not a path of this machine
            if member.isfile() and name in wanted:
                if member.size > limit:
                    raise broken(archive, f"its member {name} claims more than {limit // MIB} MiB")
                content = tar.extractfile(member)
                assert content is not None
                wanted.remove(name)
                yield name, content.read()
            if not wanted:
                return
    raise broken(archive, f"it does not hold {', '.join(sorted(wanted))}")
