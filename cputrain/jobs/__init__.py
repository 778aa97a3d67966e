"""Batch scripts for Slurm and PBS: what a job runs (`work`), the scheduler's directives (`directives`), the script made
from templates (`script`), and its submission (`submit`, the only file here that starts a program)."""
