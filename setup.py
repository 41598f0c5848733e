"""The one part of the package that is compiled: the bridge, which a mount needs and the client does
not. Where there is no compiler the package is built without it, and ``aifs mount`` says so."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "aifs.fuse._bridge",
            sources=["aifs/fuse/bridge.c"],
            depends=[
                "aifs/fuse/directories.h",
                "aifs/fuse/entries.h",
                "aifs/fuse/messages.h",
                "aifs/fuse/names.h",
                "aifs/fuse/opens.h",
                "aifs/fuse/places.h",
                "aifs/fuse/records.h",
            ],
            # Functions of a module have parameters whether they need them or not.
            extra_compile_args=["-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter"],
            optional=True,
        )
    ]
)
