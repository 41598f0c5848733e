"""The error tree: each class has its errno, and every error of the system becomes one of them."""

import errno

from aifs.core import errors
from aifs.core.errors import FsError, Unavailable, UserError, from_oserror

PASSED_ON = {
    errno.ENOSPC: errors.NoSpace,
    errno.EDQUOT: errors.QuotaExceeded,
    errno.EFBIG: errors.FileTooLarge,
    errno.EMFILE: errors.OutOfMemory,  # ours, of which programs know nothing
    errno.ENFILE: errors.OutOfMemory,
    errno.ENOMEM: errors.OutOfMemory,
}


def below(kind: type) -> list[type]:
    return [one for child in kind.__subclasses__() for one in (child, *below(child))]


def test_each_class_has_an_errno_of_its_own() -> None:
    kinds = [kind for kind in below(FsError) if kind.__module__ == errors.__name__]
    assert len(kinds) > 20
    assert all("errno" in vars(kind) and kind.errno in errno.errorcode for kind in kinds)
    assert len({kind.errno for kind in kinds}) == len(kinds)


def test_the_tree_has_two_branches() -> None:
    assert set(errors.AifsError.__subclasses__()) == {FsError, UserError}
    assert not set(below(FsError)) & set(below(UserError))


def test_every_error_of_the_system_is_mapped() -> None:
    for number, name in errno.errorcode.items():
        error = from_oserror(OSError(number, "what happened", "/some/file"), "server 3")
        assert type(error) is PASSED_ON.get(number, Unavailable), name
        kept = number in PASSED_ON and number not in (errno.EMFILE, errno.ENFILE)
        assert error.errno == (number if kept else type(error).errno), name
        assert "server 3" in str(error) and "/some/file" in str(error)


def test_an_error_without_a_number_is_mapped() -> None:
    assert type(from_oserror(OSError("strange"))) is Unavailable


def test_messages_default_to_the_systems() -> None:
    assert str(errors.NotFound()) == "No such file or directory"
    assert str(errors.NotFound("no inode 7")) == "no inode 7"


def test_commands_exit_with_different_codes() -> None:
    codes = [kind.exit_code for kind in (UserError, *below(UserError)) if "exit_code" in vars(kind)]
    assert len(set(codes)) == len(codes)
    assert 0 not in codes and 2 not in codes  # 2 is the command line's own
