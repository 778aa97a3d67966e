from cputrain.mpi.supervise import RankExit, describe_exit, first_cause


def exit_of(rank: int, status: int, time: float, tail: tuple[str, ...] = ()) -> RankExit:
    return RankExit(rank=rank, host="h1", status=status, time=time, log="rank.log", tail=tail)


def test_the_earliest_exit_is_the_cause() -> None:
    """A rank that gives up, and peers that abort because of it."""
    assert first_cause([exit_of(0, -6, 3.4), exit_of(1, 1, 3.0), exit_of(2, -6, 3.5)]).rank == 1


def test_of_exits_noticed_together_one_by_a_signal_is_the_cause() -> None:
    assert first_cause([exit_of(0, 1, 3.00), exit_of(1, 1, 3.02), exit_of(2, -9, 3.10)]).rank == 2
    assert first_cause([exit_of(1, 1, 3.0), exit_of(0, 1, 3.0)]).rank == 0


def test_an_exit_is_described_with_its_last_lines() -> None:
    text = describe_exit(exit_of(3, -9, 0.0, ("one", "two")))
    assert text == "rank 3 on h1 was ended by SIGKILL; log rank.log; its last lines:\n  | one\n  | two"
    assert describe_exit(exit_of(3, 7, 0.0)) == "rank 3 on h1 exited with status 7; log rank.log; it printed nothing"
