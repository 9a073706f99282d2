from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sparsedp.config import Data
from sparsedp.data import download, load
from sparsedp.errors import UsageError

from . import pictures


class Site(HTTPServer):
    """A data set's home page on this machine. `cuts` transfers end in the middle; every request is counted."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.files, self.cuts, self.requests = files, 0, 0


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802
        site = self.server
        site.requests += 1
        content = site.files.get(self.path.lstrip("/"))
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if site.cuts:
            site.cuts -= 1
            content = (content or b"")[: len(content or b"") // 2]
        self.wfile.write(content or b"")

    def log_message(self, *given: object) -> None:
        del given


@pytest.fixture
def site(tmp_path, monkeypatch):
    pictures.save_idx(tmp_path / "made", ending=".gz")
    files = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    server = Site(files)
    remote = download.Remote(
        f"http://127.0.0.1:{server.server_port}/", {name: hashlib.md5(content).hexdigest() for name, content in files.items()}
    )
    monkeypatch.setitem(download.PUBLISHED, "fashion-mnist", remote)
    monkeypatch.setenv("SPARSEDP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_fetched_once_then_read_from_the_cache(site):
    assert len(load(Data(name="fashion-mnist")).train) == 30
    assert site.requests == 4
    load(Data(name="fashion-mnist"))
    assert site.requests == 4


def test_a_cut_transfer_is_tried_again(site):
    site.cuts = 2
    assert len(load(Data(name="fashion-mnist")).train) == 30
    assert site.requests == 6


def test_a_transfer_that_is_always_cut_leaves_nothing_and_says_what_to_do(site, tmp_path):
    site.cuts = 100
    with pytest.raises(UsageError, match="the download failed.*give their folder as --data.dir") as error:
        load(Data(name="fashion-mnist"))
    assert site.requests == download.ATTEMPTS
    assert "\n" not in str(error.value)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    site.cuts = 0
    load(Data(name="fashion-mnist"))


def test_a_wrong_checksum_is_refused_and_leaves_nothing(site, tmp_path):
    site.files["train-images-idx3-ubyte.gz"] += b"x"
    with pytest.raises(UsageError, match="train-images-idx3-ubyte.gz, but what arrived does not have the published checksum"):
        load(Data(name="fashion-mnist"))
    assert not (tmp_path / "cache" / "fashion-mnist" / "train-images-idx3-ubyte.gz").exists()


def test_a_damaged_cache_is_mended(site, tmp_path):
    load(Data(name="fashion-mnist"))
    path = tmp_path / "cache" / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    load(Data(name="fashion-mnist"))
    assert (site.requests, path.read_bytes()) == (5, whole)


def test_offline_and_missing_and_an_unusable_cache(site, tmp_path, monkeypatch):
    name = next(iter(download.PUBLISHED["fashion-mnist"].files))
    del site.files[name]
    with pytest.raises(UsageError, match="HTTPError.*--data.dir"):
        load(Data(name="fashion-mnist"))
    files = download.PUBLISHED["fashion-mnist"].files
    monkeypatch.setitem(download.PUBLISHED, "fashion-mnist", download.Remote("http://127.0.0.1:9/", files))
    with pytest.raises(UsageError, match="ConnectionError.*--data.dir"):
        load(Data(name="fashion-mnist"))
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("SPARSEDP_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="set SPARSEDP_CACHE"):
        load(Data(name="fashion-mnist"))


def test_the_table_names_home_pages_and_md5s():
    for remote in download.PUBLISHED.values():
        assert remote.base.startswith(("https://www.cs.toronto.edu/~kriz/", "http://fashion-mnist.s3-website"))
        assert all(len(md5) == 32 and int(md5, 16) for md5 in remote.files.values())
