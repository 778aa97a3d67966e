"""A trial: some steps of a candidate's training in its workers, and the seconds that an image takes."""

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from affinity.errors import InputError, RunError
from cputrain.bench.model_rank import Spec
from cputrain.bench.ranks import measure_training
from cputrain.tune.candidates import PlanCandidate, with_output
from cputrain.tune.race import Cost

logger = logging.getLogger(__name__)
WARM_UP = 2  # steps that do not count: the first ones allocate memory and make oneDNN's code


def trial_cost(candidates: Sequence[PlanCandidate], steps: int, env: Mapping[str, str]) -> Cost:
    """The cost of a candidate: its median step's seconds for each image. A failure is logged once and costs None.

    Raises KeyboardInterrupt where SIGINT or SIGTERM has stopped the trial.
    """
    spec = Spec(warm_up=WARM_UP, steps=steps, profiled=0, limits=(), quick=False)

    def cost(index: int) -> float | None:
        candidate = candidates[index]
        with tempfile.TemporaryDirectory() as folder:
            planned = with_output(candidate, str(Path(folder) / "run"))
            try:
                first, *_ = measure_training(planned, spec, env, what=candidate.name)
            except (InputError, RunError) as error:
                logger.warning("%s", error)
                return None
        seconds: list[float] = [step["seconds"] for step in first["steps"]]
        return median(seconds) / float(first["images"])

    return cost
