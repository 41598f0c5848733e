"""The file with the secret of a cluster."""

from pathlib import Path

import pytest

from aifs.core.errors import StoreError
from aifs.core.secret import read_secret


def test_a_secret_is_the_line_of_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a b:c/ü\n")
    file.chmod(0o600)
    assert read_secret(str(file)) == "a b:c/ü"


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        (None, 0o600, "No such file or directory; copy it from the host that serves"),
        (b"x\n", 0o640, "others may read the secret of the cluster: chmod 600 "),
        (b"x\n", 0o604, "others may read the secret of the cluster: chmod 600 "),
        (b" \n", 0o600, "is not a secret"),
        (b"a\nb\n", 0o600, "is not a secret"),
        (b"x" * 1025, 0o600, "is not a secret"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(
    tmp_path: Path, content: bytes | None, mode: int, expected: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    with pytest.raises(StoreError, match=expected) as refused:
        read_secret(str(file))
    assert str(refused.value).startswith(f"{file}: ")
