"""Jobs for a scheduler: batch scripts for Slurm and PBS, and manifests for Kubernetes.

work.py is what a job runs, directives.py what a scheduler is told, script.py makes the script from templates, and
submit.py submits it, the only file here that starts a program. kubernetes.py makes the manifests.
"""
