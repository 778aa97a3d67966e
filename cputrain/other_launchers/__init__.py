"""Command lines of other launchers in our words: what each option becomes (`programs`), the words read as options
(`read`), what they ask for (`wanted`), and the `cputrain launch` that does it (`ours`)."""
