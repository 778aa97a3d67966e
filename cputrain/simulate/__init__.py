"""What a training would do on hosts that are not here: images/s, efficiency, time to train. Pure arithmetic, no torch.

layers.py holds the networks layer by layer, compute.py the time of each on a worker, all_reduce.py and timeline.py the
communication and how much of it the backward pass hides, predict.py a job's figures with their uncertainty.
"""
