"""The one part of the package that is compiled: the bridge, without which everything else works."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "aifs.fuse._bridge",
            sources=["aifs/fuse/bridge.c"],
            depends=["aifs/fuse/messages.h"],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
