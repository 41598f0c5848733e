# Sourced by scripts/demo, scripts/test and scripts/bench: makes a fresh Debian or Ubuntu machine ready.
#
# bootstrap EXTRA,... [PACKAGE...]   installs the system packages that are missing, makes .venv, and installs this
# package with its optional dependencies EXTRA into it. Does nothing, quickly, when all is there already.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

# What building and mounting needs: libfuse's headers for pyfuse3, a compiler, fusermount3; and setfattr.
build_packages=(python3-venv python3-dev libfuse3-dev fuse3 pkg-config gcc git attr)

# What an installation depends on; the Python files are used where they are.
build_sources=(setup.cfg setup.py aifs/fuse/bridge.c aifs/fuse/{directories,entries,messages,names,opens,places,records}.h)

# install_missing [PACKAGE...]: the system packages.
install_missing() {
    local missing=() package
    for package in "${build_packages[@]}" "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if ((${#missing[@]})); then
        echo "installing system packages: ${missing[*]}" >&2
        as_root apt-get update -qq
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
    fi
}

bootstrap() {
    local extra=$1 stamp
    shift
    install_missing "$@"
    [ -x "$venv/bin/pip" ] || python3 -m venv "$venv"
    for stamp in "$venv"/installed-*; do  # what was installed with more dependencies will do
        if [[ ,${stamp#"$venv/installed-"}, == *",$extra,"* ]] && build_input | cmp -s - "$stamp"; then return; fi
    done
    echo "installing aifs-fuse[$extra] into .venv" >&2
    # Python compiles what is imported, which of torch is a small part.
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --editable "$root[$extra]"
    build_input >"$venv/installed-$extra"
}

build_input() {
    (cd "$root" && cat "${build_sources[@]}")
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}
