"""Job scripts: script.py renders and submits scripts for Slurm and PBS, kubernetes.py makes manifests."""
