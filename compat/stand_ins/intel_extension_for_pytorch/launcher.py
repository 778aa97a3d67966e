"""The console script ipexrun: the same entry point as the original's, which is imported if it is installed."""

from .cpu.launch import main as main
