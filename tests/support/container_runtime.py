"""A stand-in for apptainer, podman and docker, for root: a new root folder with this system's programs and this Python.

    python tests/support/container_runtime.py RUNTIME exec|run OPTION... IMAGE CMD...

Of the host's folders only the mounted ones are visible, of its environment only what the runtime passes on (apptainer:
all but PATH; podman and docker: the variables of --env); docker starts with all CPUs, as its daemon does. Options that
the runtime does not have are rejected. The arguments are appended to $CONTAINER_LOG.
"""

import csv
import json
import os
import sys
from pathlib import Path

from cputrain.affinity.topology.machine import parse_list

# Options from their manuals, with a value and without.
BOTH = {"--mount", "--env"}
VALUED = {
    "apptainer": BOTH | {"--bind", "--pwd"},
    "podman": BOTH
    | {"--user", "--workdir", "--label", "--entrypoint", "--network", "--ipc", "--pid", "--cap-add"}
    | {"--security-opt", "--ulimit", "--userns", "--device", "--group-add"},
}
VALUED["docker"] = (VALUED["podman"] - {"--userns"}) | {"--cpuset-cpus"}
FLAGS = {"apptainer": {"--nv"}, "podman": {"--rm"}, "docker": {"--rm"}}
IMAGE = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc", "/sys")
PYTHONS = (sys.base_prefix, sys.prefix, str(Path(__file__).parents[2]))
ENTER = """
root="$1"; folder="$2"; shift 2
mount -t tmpfs image "$root"
while [ "$1" != : ]; do
    if [ -d "$1" ]; then mkdir -p -- "$root$1"; else mkdir -p -- "$root$(dirname -- "$1")"; : > "$root$1"; fi
    mount --rbind -- "$1" "$root$1"
    shift
done
shift
mkdir -p -- "$root/tmp"
exec /usr/sbin/chroot "$root" sh -c 'cd -- "$1" && shift && exec "$@"' sh "$folder" "$@"
"""


def parsed(runtime: str, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Split arguments into options with values, and the image with its command."""
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        option, equals, value = words.pop(0).partition("=")
        if option in VALUED[runtime]:
            options.setdefault(option, []).append(value if equals else words.pop(0))
        elif option in FLAGS[runtime] and not equals:
            options[option] = []
        else:
            sys.exit(f"{runtime}: unknown flag: {option}")
    return options, words


def source_of(mount: str) -> str:
    """Return the folder of a --mount, which must have the same path inside."""
    (fields,) = csv.reader([mount])
    values = dict(field.partition("=")[::2] for field in fields)
    assert values["type"] == "bind" and values["source"] == values["destination"], mount
    return values["source"]


def main(runtime: str, verb: str, words: list[str]) -> None:
    """Replace this process by the command, inside the new root."""
    with Path(os.environ["CONTAINER_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps([runtime, verb, *words]) + "\n")
    if verb == "ps":
        return
    if verb != ("exec" if runtime == "apptainer" else "run"):
        sys.exit(f"{runtime}: unknown command {verb}")
    options, (_image, *command) = parsed(runtime, words)
    mounts = [source_of(mount) for mount in options.get("--mount", [])]
    if len(set(mounts)) < len(mounts):
        sys.exit(f"{runtime}: duplicate mount point")
    env = dict(os.environ)
    if runtime != "apptainer":
        given = (variable.partition("=") for variable in options.get("--env", []))
        env = {name: value if equals else os.environ[name] for name, equals, value in given}
    if runtime == "docker":
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        for cpus in options.get("--cpuset-cpus", []):
            os.sched_setaffinity(0, parse_list(cpus))
    folder = (options.get("--pwd") or options["--workdir"])[0]
    root = os.environ["CONTAINER_ROOT"]
    env["PATH"] = f"{sys.prefix}/bin:/usr/bin:/bin"
    inside = [path for path in (*IMAGE, *PYTHONS) if Path(path).exists()]
    argv = ["unshare", "--mount", "sh", "-ec", ENTER, "enter", root, folder, *inside, *mounts, ":", *command]
    os.execvpe("/usr/bin/unshare", argv, env)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
