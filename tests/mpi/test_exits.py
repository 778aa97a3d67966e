from mpi.supervise.exits import End, first_cause, obituary


def end(rank: int, status: int, at: float, tail: tuple[str, ...] = ()) -> End:
    return End(rank=rank, host="h1", status=status, at=at, log="rank.log", tail=tail)


def test_the_earliest_end_is_the_cause() -> None:
    """A rank that gives up, and peers that abort because of it."""
    assert first_cause([end(0, -6, 3.4), end(1, 1, 3.0), end(2, -6, 3.5)]).rank == 1


def test_of_ends_seen_together_a_signal_s_is_the_cause() -> None:
    assert first_cause([end(0, 1, 3.00), end(1, 1, 3.02), end(2, -9, 3.10)]).rank == 2
    assert first_cause([end(1, 1, 3.0), end(0, 1, 3.0)]).rank == 0


def test_an_end_is_told_with_its_last_lines() -> None:
    told = obituary(end(3, -9, 0.0, ("one", "two")))
    assert told == "rank 3 on h1 was ended by SIGKILL; log rank.log; its last lines:\n  | one\n  | two"
    assert obituary(end(3, 7, 0.0)) == "rank 3 on h1 exited with status 7; log rank.log; it printed nothing"
