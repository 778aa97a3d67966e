"""An option of another launcher, and what becomes of it."""

from dataclasses import dataclass

# What an option sets in `Wanted` -> how `cputrain launch` has it.
LAUNCH_OPTIONS = {
    "nodes": "--nodes N",
    "ppn": "--ppn N",
    "ranks": "--ppn N",
    "hosts": "--hosts LIST",
    "hostfile": "--hostfile FILE",
    "threads": "--threads N",
    "comm_cores": "--comm-cores N",
    "smt": "--smt on",
    "cores": "--cores CPUS",
    "openmp": "--openmp",
    "allocator": "--allocator",
    "instances": "--instances",
    "instance": "--instance LIST",
    "distributed": "the default: without --instances",
    "output": "--output DIR",
    "restarts": "--restarts N",
    "environment": "env NAME=VALUE before the command",
    "folder": "cd DIR first",
    "dry_run": "--dry-run",
    "module": "-m",
    "no_python": "the command after --",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option by its `names`, with the number of words that follow it.

    `field` is what it sets in `Wanted` ("" where it has no counterpart), to the word behind it or to `value`, in which
    {} stands for that word. `why` says why there is no counterpart, or what else to know, of values that `when`
    matches. With `parts` it sets each field to what its pattern finds in that word; what then remains of it, but for
    words that are `understood`, has no counterpart. A name that ends in * stands for all that begin so.
    """

    names: tuple[str, ...]
    takes: int
    field: str = ""
    value: str = "{}"
    why: str = ""
    when: str = ".*"
    parts: tuple[tuple[str, str], ...] = ()
    understood: str = r"(?!)"

    @property
    def launch_option(self) -> str:
        """How `cputrain launch` has it; "" where it does not."""
        if self.parts:
            return ", ".join(LAUNCH_OPTIONS[field] for field, _ in self.parts)
        if "{}" in self.value or self.field in ("environment", "smt", "module", "no_python", "dry_run", "distributed"):
            return LAUNCH_OPTIONS.get(self.field, "")
        return f"{LAUNCH_OPTIONS[self.field].split()[0]} {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A launcher: the words that call it, the modules that `python -m` calls it by, and its options.

    `starts_python`: the command behind its options is a Python script, not a program. `joins_letters`: letters behind
    one dash are options of their own, the last one with its value, as in -lN2. `remark`: what to know of all its
    command lines; `remark_on_one_host`: of those that name no other hosts; `remark_without_ranks`: of those that give
    no number of ranks.
    """

    name: str
    title: str
    called: tuple[tuple[str, ...], ...]
    options: tuple[Option, ...]
    modules: tuple[str, ...] = ()
    starts_python: bool = False
    joins_letters: bool = False
    remark: str = ""
    remark_on_one_host: str = ""
    remark_without_ranks: str = ""


def to(field: str, *names: str, takes: int = 1, value: str = "{}", why: str = "", when: str = ".*") -> Option:
    """An option that becomes one of ours."""
    return Option(names=names, takes=takes, field=field, value=value, why=why, when=when)


def parts_to(
    parts: tuple[tuple[str, str], ...], *names: str, why: str, when: str = "", understood: str = r"(?!)"
) -> Option:
    """An option whose value has parts that become ours."""
    return Option(names=names, takes=1, parts=parts, why=why, when=when, understood=understood)


def without(why: str, *names: str, takes: int = 1) -> Option:
    """An option that has no counterpart."""
    return Option(names=names, takes=takes, why=why)
