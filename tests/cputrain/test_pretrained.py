"""cputrain weights: torchvision's files, from a server on this host, or named where there is none."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cputrain.affinity.errors import InputError, RunError
from cputrain.cli import main
from cputrain.models.weights import Pretrained, fetch, find_pretrained, normalization_of

# What torchvision's transform_input makes of ImageNet's normalization: x * (0.229 / 0.5) + (0.485 - 0.5) / 0.5, ...
HALVES = "data.mean=[0.5,0.5,0.5] data.std=[0.5,0.5,0.5]"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of the folder served/."""
    (tmp_path / "served").mkdir()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "served"))
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_file_is_fetched_once_and_checked(server: str, tmp_path: Path) -> None:
    data = b"weights" * 1000
    digits = hashlib.sha256(data).hexdigest()[:8]
    file = f"net-{digits}.pth"
    wanted = Pretrained(name="V1", url=f"{server}/{file}", path=tmp_path / "hub" / file, digits=digits, accuracy=None)
    with pytest.raises(RunError, match=rf"File not found.*: on a machine with .*, download {server}/{file} to "):
        fetch(wanted)
    (tmp_path / "served" / file).write_bytes(b"a login page")
    with pytest.raises(RunError, match=f"its SHA-256 does not begin with {digits}"):
        fetch(wanted)
    assert list((tmp_path / "hub").iterdir()) == []
    (tmp_path / "served" / file).write_bytes(data)
    assert fetch(wanted) and wanted.path.read_bytes() == data
    (tmp_path / "served" / file).unlink()
    assert not fetch(wanted)
    wanted.path.write_bytes(data[:-1])
    with pytest.raises(RunError, match=r"is damaged, its SHA-256 begins with .*: remove it, then on a machine"):
        fetch(wanted)


def test_timm_s_files_are_named_with_their_place() -> None:
    with pytest.raises(
        InputError, match=r"timm:resnet50.a1_in1k is not torchvision's: download model.safetensors of res"
    ):
        find_pretrained("timm:resnet50.a1_in1k")


def test_torchvision_s_files_are_known_and_without_a_network_named(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    found = find_pretrained("torchvision:resnet50", "IMAGENET1K_V1")
    assert found.url == "https://download.pytorch.org/models/resnet50-0676ba61.pth" and found.digits == "0676ba61"
    assert found.path == tmp_path / "home/hub/checkpoints/resnet50-0676ba61.pth" and found.accuracy == 76.13
    assert main(["weights", "resnet50", "--mirror", f"{server}/models/"]) == 1
    message = capsys.readouterr().err
    assert f"download {server}/models/resnet50-11ad3fa6.pth to {tmp_path}/home/hub/checkpoints/" in message
    for network, settings in (("googlenet", HALVES), ("inception_v3", HALVES), ("resnet50", None)):
        assert normalization_of(find_pretrained(network).path) == settings
    assert main(["weights", "resnet51"]) == 2 and "did you mean resnet" in capsys.readouterr().err
    with pytest.raises(InputError, match="no weights 'V9' for resnet18: choose from IMAGENET1K_V1"):
        find_pretrained("resnet18", "V9")
