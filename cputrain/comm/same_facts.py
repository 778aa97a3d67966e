"""What has to be the same on all ranks, compared before they communicate: versions, recipe, data."""

import json
import socket
from collections.abc import Mapping
from typing import Any

from affinity.errors import InputError
from affinity.ranks.rank import Rank
from affinity.wording import first_named
from cputrain.comm.store import SignedKeys

FACTS = "facts"


def check_same(facts: Mapping[str, str], rank: Rank, keys: SignedKeys) -> None:
    """Compare this rank's facts, texts by name, with rank 0's, and wait until every rank has done so.

    Raises InputError on every rank where one differs, naming it and what differs, RunError where the store is another
    job's.
    """
    own = {"host": socket.gethostname(), "facts": dict(facts)}
    if rank.rank == 0:
        keys.set(FACTS, json.dumps(own))
    problem = describe_difference(rank.rank, own, json.loads(keys.read(FACTS)))
    if found := keys.problem_of_any(FACTS, problem, rank):
        raise InputError(found)


def describe_difference(rank: int, own: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """A line about the facts in which a rank differs from rank 0; "" where there are none.

    Both are {"host", "facts"}.
    """
    ours, theirs = own["facts"], first["facts"]
    pairs = ((name, ours.get(name, "nothing"), theirs.get(name, "nothing")) for name in {**theirs, **ours})
    different = [f"{name}: {mine} instead of {other}" for name, mine, other in pairs if mine != other]
    if not different:
        return ""
    return (
        f"rank {rank} on {own['host']} differs from rank 0 on {first['host']} in {first_named(different)}: start all "
        "ranks with the same program, recipe and data"
    )
