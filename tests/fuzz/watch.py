"""What a parser may not do: run code, start a process, open a connection, write outside its folder, take too much memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any, NoReturn

MIB = 1 << 20
NEVER = frozenset({
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile", "os.kill", "os.killpg", "pty.spawn",
    "subprocess.Popen", "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "ctypes.dlopen", "webbrowser.open",
    "pickle.find_class", "code.__new__", "function.__new__", "urllib.Request", "ftplib.connect", "smtplib.connect",
})  # fmt: skip
"""Audit events (PEP 578) that nothing which only reads a file brings about."""
NEVER_IMPORTED = frozenset({
    "pty", "runpy", "code", "antigravity", "pdb", "webbrowser", "numpy.f2py", "torch.utils.cpp_extension", "fuzz_payload", "http.server",
})  # fmt: skip
"""Modules that the made-up inputs name, and no reader needs."""
PATHS = {
    "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "os.truncate": 0, "os.chmod": 0,
    "os.chown": 0, "os.utime": 0, "os.mkfifo": 0, "os.mknod": 0, "shutil.rmtree": 0, "shutil.move": 1, "shutil.copyfile": 1,
    "shutil.unpack_archive": 1,
}  # fmt: skip
"""Events that change a path, and which of their arguments it is."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
OUR_CODE = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2] / "src"), "<frozen ")
WRITE_CODE = (
    "collections/__init__.py", "dataclasses.py", "typing.py", "scipy/stats/_distn_infrastructure.py", "mpmath/ctx_mp_python.py",
)  # fmt: skip
"""Library files that write code for classes, annotations and distributions of their own, and run it."""


class Escape(BaseException):
    """A parser did what it may not. No handler for `Exception` can hide it."""


class Watch:
    """An audit hook over this process. It cannot be taken away, so it is put into workers only, and armed around each input."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder) + os.sep
        self.armed = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        said = None
        if event in NEVER:
            said = f"{event} {args!r:.200}"
        elif event == "marshal.loads" and not sys._getframe(1).f_code.co_filename.startswith("<frozen importlib"):
            said = "marshal.loads outside of an import"
        elif event == "exec":
            source = getattr(args[0], "co_filename", "")
            caller = sys._getframe(1).f_code.co_filename
            ours = source.startswith(OUR_CODE) or (source == "<string>" and caller.endswith(WRITE_CODE))
            said = None if ours else f"exec of {source!r:.200} by {caller}"
        elif event == "open" and args[2] & WRITES and not self._inside(args[0]):
            said = f"opened {args[0]!r:.200} to write"
        elif event in PATHS and not self._inside(args[PATHS[event]]):
            said = f"{event} of {args[PATHS[event]]!r:.200}"
        if said is not None:
            self._stop(said)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Asked first for every module that is not loaded yet; importlib.import_module brings about no audit event."""
        if self.armed and name in NEVER_IMPORTED:
            self._stop(f"import of {name}")

    def _stop(self, said: str) -> NoReturn:
        self.seen.append(said)
        raise Escape(said)

    def _inside(self, path: object) -> bool:
        if isinstance(path, int) or path in (os.devnull, os.fsencode(os.devnull)):
            return True
        return f"{os.path.abspath(os.fsdecode(path))}{os.sep}".startswith(self.folder)  # type: ignore[arg-type]  # noqa: PTH100


def peak() -> int:
    """The most memory that this process has ever had resident, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def children_seconds() -> float:
    """What the processes that this one started, and waited for, have taken of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def limit_memory(more: int) -> None:
    """Let this process map so many bytes more than it has now, and leave no core behind."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/statm")
    if status.exists():  # elsewhere the resident peak alone is watched
        size = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def lift_limit() -> None:
    """Undo `limit_memory`."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def resident(process: int) -> int:
    """The memory that another process has resident, in bytes; 0 where that cannot be asked."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or one that it was made from, says that memory could not be had."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, MemoryError) or "allocate memory" in str(one):
            return True
        waiting += [one.__cause__, one.__context__]
    return False


def no_sentence(message: str) -> str | None:
    """What keeps a message from being one sentence (or a title with a list of them); None if nothing does."""
    title, *rest = message.split("\n")
    if not title.strip() or title != title.strip():
        return "it is blank, or begins or ends with a blank"
    if rest and not all(line.startswith("  - ") and line.endswith(".") for line in rest):
        return "it goes over several lines"
    if not rest and not title.endswith("."):
        return "it has no full stop"
    if len(message) > 6000:
        return f"it is {len(message)} characters long"
    return None
