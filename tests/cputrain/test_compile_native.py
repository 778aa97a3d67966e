"""Native code is compiled with the installation; without a compiler that is a line for each part."""

from pathlib import Path

import pytest

from tools import compile_native


def test_without_a_compiler_the_installation_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile_native.main({"PATH": "/nowhere", "CPUTRAIN_CACHE": str(tmp_path)})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len({line.partition(":")[2] for line in lines}) == 3
    assert all(line.startswith("not compiled yet: ") for line in lines)
