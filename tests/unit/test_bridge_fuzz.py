"""The bridge's message code under the address and undefined-behaviour sanitizers, fed with damaged
messages.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

HERE = Path(__file__).resolve().parent
MESSAGES = HERE.parents[1] / "aifs" / "fuse"
COMPILER = shutil.which("cc") or shutil.which("gcc")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("there is no C compiler")
    program = tmp_path_factory.mktemp("fuzz") / "bridge_fuzz"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [COMPILER, "-std=c11", "-O1", "-g", *warnings, *SANITIZE, f"-I{MESSAGES}"]
    subprocess.run([*command, HERE / "bridge_fuzz.c", "-o", program], check=True, timeout=120)
    return program


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_message_makes_it_read_or_write_out_of_bounds(fuzz: Path, seed: int) -> None:
    done = subprocess.run(
        [fuzz, "300000", str(seed)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50_000  # most requests were well-formed enough to be looked at


@pytest.mark.long
def test_many_more_messages(fuzz: Path) -> None:
    for seed in range(100, 130):
        subprocess.run([fuzz, "5000000", str(seed)], capture_output=True, check=True, timeout=600)
