"""torchvision's pretrained weights: where their file belongs, and fetching it."""

import hashlib
import re
import urllib.error
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from affinity.errors import InputError, RunError
from cputrain.models.vision import import_torchvision
from cputrain.recipe.schema.model import TORCHVISION

HASH = re.compile(r"-([0-9a-f]{8,})\.")  # of a file name: the first digits of the file's SHA-256
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """A file of pretrained weights: its URL, its place in torch's cache, the first digits of its SHA-256.

    `name` is torchvision's, as in IMAGENET1K_V2; `accuracy` the published top-1 in percent, None where there is none.
    """

    name: str
    url: str
    path: Path
    digits: str
    accuracy: float | None

    @property
    def remedy(self) -> str:
        """What to do by hand."""
        return f"on a machine with a network, fetch {self.url} and put it at {self.path}"


def find_pretrained(network: str, weights: str | None = None, mirror: str | None = None) -> Pretrained:
    """The weights of a network of torchvision, its best ones unless named; `mirror` is a URL with torchvision's files.

    Raises InputError for another name, or a network without weights.
    """
    models: Any = import_torchvision("models")
    name = network.removeprefix(TORCHVISION)
    known = models.list_models(module=models)
    if name not in known:
        near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.4) or known[:5])
        raise InputError(f"torchvision has no weights of a classifier {name!r}: nearest are {near}")
    kinds = {each.name: each for each in models.get_model_weights(name)}
    chosen = weights or models.get_model_weights(name).DEFAULT.name
    if chosen not in kinds:
        raise InputError(f"torchvision has no weights {chosen!r} of {name}: it has {', '.join(kinds)}")
    value = kinds[chosen].value
    file = value.url.rpartition("/")[2]
    digits = HASH.search(file)
    measured = value.meta.get("_metrics", {}).get("ImageNet-1K", {}).get("acc@1")
    return Pretrained(
        name=chosen,
        url=f"{mirror.rstrip('/')}/{file}" if mirror else value.url,
        path=Path(torch.hub.get_dir()) / "checkpoints" / file,
        digits=digits[1] if digits else "",
        accuracy=measured,
    )


def fetch(wanted: Pretrained) -> bool:
    """Have the file in its place, with the right checksum; whether it had to be fetched.

    Raises RunError where the file that is there is damaged, there is no network, or what came is another file.
    """
    if wanted.path.is_file():
        found = _sha256(wanted.path)
        if not found.startswith(wanted.digits):
            raise RunError(
                f"{wanted.path} is damaged: its SHA-256 begins with {found[: len(wanted.digits)]}, not "
                f"{wanted.digits}: remove it, then {wanted.remedy}"
            )
        return False
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(wanted.url, str(wanted.path), wanted.digits or None)
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise RunError(f"cannot fetch the weights ({reason}): {wanted.remedy}") from None
    except RuntimeError:  # torch's, for another checksum
        raise RunError(
            f"{wanted.url} is not the file that was expected: its SHA-256 does not begin with {wanted.digits}: "
            f"{wanted.remedy}"
        ) from None
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()
