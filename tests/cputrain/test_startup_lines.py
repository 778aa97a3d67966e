"""What a run says at its start of what it uses."""

from cputrain.training import startup_lines

NO_CCL = 'rank 0: oneCCL is not installed: pip install "cputrain[ccl]", or set comm.backend=gloo'
NO_TURBO = "Pillow: data.decoder=turbo: it needs libjpeg-turbo 3, but none was found: pip install 'cputrain[turbo]'"


NATIVE = ("native", "/cache/batchnorm.so")
NO_COMPILER = "no C++ compiler on PATH; install g++, or set engine=eager"


def output(
    backend: str,
    why: str,
    decoder: str,
    allocator: str,
    ranks: int = 2,
    engine: tuple[str, str] = NATIVE,
    bf16_speedup: float = 1.0,
) -> list[str]:
    names = ("backend", "backend_why", "engine", "engine_why", "decoder", "allocator")
    environment = dict(zip(names, (backend, why, *engine, decoder, allocator), strict=True))
    return startup_lines(environment, ranks=ranks, bf16_speedup=bf16_speedup)


def test_where_all_is_fast_there_is_one_line() -> None:
    why = "over MPI (measured: 25 MiB all-reduce 10.8 ms over MPI, 38.9 ms over libfabric)"
    rest = "engine native, decoder libjpeg-turbo, allocator tcmalloc"
    turbo = "libjpeg-turbo: /lib/libturbojpeg.so"
    assert output("ccl", why, turbo, "tcmalloc") == [f"backend ccl {why}, {rest}"]
    assert output("ccl", why, turbo, "tcmalloc", ranks=1) == [f"backend ccl, {rest}"]


def test_what_would_be_faster_is_said_with_how_to_get_it() -> None:
    first, ccl, engine, turbo, allocator = output("gloo", NO_CCL, NO_TURBO, "glibc", engine=("eager", NO_COMPILER))
    assert first == "backend gloo, engine eager, decoder Pillow, allocator glibc"
    assert ccl == f"faster: oneCCL (all-reduces of 25 MiB up to 3.2 times as fast): {NO_CCL}"
    assert engine.startswith("faster: native kernels (") and engine.endswith(NO_COMPILER)
    assert turbo.endswith("CPU-second): it needs libjpeg-turbo 3, but none was found: pip install 'cputrain[turbo]'")
    assert "libtcmalloc-minimal4" in allocator


def test_what_the_user_has_chosen_or_nobody_uses_is_not_said_to_be_slow() -> None:
    assert len(output("gloo", "comm.backend=gloo", "Pillow: data.decoder=pillow", "jemalloc")) == 1
    assert len(output("gloo", NO_CCL, "libjpeg-turbo: /lib/libturbojpeg.so", "tcmalloc", ranks=1)) == 1
    for why in ("engine=eager", "precision=float64, which the native kernels do not support"):
        made = output("ccl", "", "libjpeg-turbo: /lib/libturbojpeg.so", "tcmalloc", engine=("eager", why))
        assert len(made) == 1


def test_bf16_is_named_where_its_convolutions_are_faster() -> None:
    fast = ("ccl", "", "libjpeg-turbo: /lib/libturbojpeg.so", "tcmalloc")
    line = output(*fast, bf16_speedup=2.13)[1]
    assert line.startswith("faster: precision=bf16, with which a convolution is 2.1 times as fast on this CPU")
    assert len(output(*fast, bf16_speedup=1.1)) == 1
