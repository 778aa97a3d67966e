"""Command lines of other launchers as `cputrain launch`: what each option becomes (`programs`), the words read as
options (`read`), what they request (`wanted`), and the `cputrain launch` that does it (`translation`)."""
