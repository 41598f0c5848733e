"""A job that starts: it imports what it needs from an environment on a mount, loads a checkpoint,
and makes a step. Each is a stage, of which `aifs start report` tells how long it took.

    aifs start run --job example -- python scripts/examples/start.py ENVIRONMENT CHECKPOINT.npy
"""

import sys

from aifs.client import startup

if len(sys.argv) != 3:
    sys.exit(f"usage: {sys.argv[0]} ENVIRONMENT CHECKPOINT.npy")
environment, checkpoint = sys.argv[1:]

with startup.stage("imports"):
    sys.path.insert(0, environment)
    import numpy

with startup.stage("checkpoint"):
    weights = numpy.load(checkpoint)

with startup.stage("first step"):
    batch = numpy.random.default_rng(0).standard_normal((64, weights.shape[0]), dtype="float32")
    weights -= 0.1 * batch.T @ (batch @ weights)
    print(f"numpy {numpy.__version__} of {environment}: {numpy.abs(weights).mean():.3f}")
