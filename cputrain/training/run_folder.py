"""The run folder of a training: what rank 0 writes there and prints at the start and end, and the use of resources.

Steps are logged by watchers/log.py.
"""

import json
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from cputrain.affinity.binding import bind_thread
from cputrain.affinity.bound_plan import PLAN_VARIABLE
from cputrain.affinity.filesystem import write_bytes
from cputrain.affinity.rank import Rank
from cputrain.affinity.wording import GIB
from cputrain.comm.group import all_gather, no_exit_limit, run_on_main_rank
from cputrain.data.formats.shards import staged_shards
from cputrain.files import ENVIRONMENT, PLAN, write_text
from cputrain.launch.rank_process import StartOptions
from cputrain.measurements import save_bf16_gain
from cputrain.mpi.usage import FOLDER as USAGE
from cputrain.mpi.usage import Sampler
from cputrain.recipe.resume import check_folder, recipe_text, record_precision
from cputrain.report.page import write_report
from cputrain.runs.events import EventLog, SilentEvents, TimeSpent, open_events, time_spent
from cputrain.runs.folder import finished, locked, make_folder
from cputrain.runs.trackers import Trackers
from cputrain.training.engine import bf16_speedups, has_bf16
from cputrain.training.environment import binding_record, describe_environment, startup_lines
from cputrain.training.session import Session
from cputrain.training.state import TrainState
from cputrain.training.step import Accuracy, TrainResult
from cputrain.training.watchers.log import TrainingLog
from cputrain.variables import is_restarted, lock_name_in

POLL_S = 0.5


class RunFolder:
    """The run folder of a training. All ranks make the same calls; rank 0 writes and prints.

    `events` is the event log within `opened`; `trackers` follow it.
    """

    def __init__(self, session: Session, options: StartOptions) -> None:
        self.session, self.options = session, options
        self.trackers = Trackers()
        self.events: EventLog = SilentEvents()
        self._environment: dict[str, Any] = {}
        self._bf16_speedups: list[float] = []  # speedups of a convolution, in rounds

    @contextmanager
    def opened(self, *, ends: bool) -> Iterator[bool]:
        """Check, lock and create the folder, record resource usage and stage the data until exit. Yields False, after a
        message, if the run is already finished and `ends`."""
        context, recipe, options = self.session.context, self.session.recipe, self.options
        with ExitStack() as stack:
            message = None if options.prepared else run_on_main_rank(lambda: self._make(stack, ends=ends))
            if finished_run := all_gather(message)[0]:
                if self.session.is_main_rank:
                    print(finished_run, flush=True)
                yield False
                return
            if options.prepared and self.session.precision_why and self.session.is_main_rank:
                record_precision(recipe.folder, recipe.precision)
            if not options.prepared:
                stack.enter_context(sample_usage(recipe.folder, context.rank, context.loader_pus))
            shards = staged_shards(self.session.dataset, recipe.data.stage_dir, context.rank, context.loader_pus)
            stack.enter_context(shards)
            if self.session.is_main_rank:
                self._measure_environment()
                context.startup.phase("building the network and the optimizer")
                self.events = stack.enter_context(open_events(recipe.folder, recipe.log, recipe.mlperf_settings))
            yield True

    def _make(self, stack: ExitStack, *, ends: bool) -> str | None:
        """Check, lock (until `stack` closes) and create the run folder. With `ends`, if the run is finished, write
        nothing and return a message."""
        session, recipe, env = self.session, self.session.recipe, self.session.context.env
        restarted, job = is_restarted(env), lock_name_in(env)
        replaces = {"resume": self.options.resume, "overwrite": self.options.overwrite}
        resumption = check_folder(recipe, session.scale, **replaces, restarted=restarted, job=job)
        if ends and (message := finished(recipe.folder, session.sizes.last_step(recipe.max_steps))):
            return message
        if resumption:
            print(resumption, flush=True)
        stack.enter_context(locked(recipe.folder, restarted=restarted, job=job))
        make_folder(recipe.folder, recipe_text(recipe), **replaces)
        write_bytes(recipe.folder / PLAN, Path(env[PLAN_VARIABLE]).read_bytes())
        return None

    def _measure_environment(self) -> None:
        recipe, context = self.session.recipe, self.session.context
        context.startup.phase("measuring this CPU")
        self._environment = describe_environment(self.session)
        self._write_environment()
        may_be_faster = recipe.precision == "float32" and not self.session.precision_why and has_bf16()
        self._bf16_speedups = bf16_speedups() if may_be_faster else []
        if self._bf16_speedups:
            save_bf16_gain(self._bf16_speedups, context.env)

    def _write_environment(self) -> None:
        write_text(self.session.recipe.folder / ENVIRONMENT, json.dumps(self._environment, indent=1))

    def begin(self, log: TrainingLog, step: int, state: TrainState) -> None:
        """Print the start-up lines, log the start, start the trackers and warn of settings, before the first step."""
        session, recipe, context = self.session, self.session.recipe, self.session.context
        bindings = all_gather(binding_record(session))
        if not session.is_main_rank:
            return
        self._environment["operators"] = state.operators
        if state.winograd is not None:
            self._environment["winograd"] = list(state.winograd)
        self._write_environment()
        ready = context.startup.done()
        if not self.options.quiet:
            ranks, speedup = session.rank.world_size, median(self._bf16_speedups or [1.0])
            lines = startup_lines(self._environment, ranks=ranks, bf16_speedup=speedup)
            notes = () if self.options.prepared else session.dataset.notes
            print("\n".join((*notes, *lines, ready)), flush=True)
        self.events.write(
            "start",
            recipe=recipe.name,
            data=recipe.data.kind,
            backend=session.group.backend,
            bindings=bindings,
            last_step=session.sizes.last_step(recipe.max_steps),
            steps_per_epoch=session.sizes.steps_per_epoch,
            **session.scale.model_dump(),
        )
        self.trackers.start(recipe.folder, recipe.log, context.loader_pus, context.env)
        if warning := session.sizes.rate_warning:
            log.warn(step, warning)
        measured = bool(session.precision_why)
        if recipe.precision == "bf16" and not measured and (gain := median(bf16_speedups())) < 1:
            slower = f"convolutions in bf16 take {1 / gain:.1f} times as long as in float32 on this CPU"
            log.warn(step, f"{slower}: set precision=float32")

    def end(self, result: TrainResult) -> None:
        """Log the end, within `opened`."""
        if not self.session.is_main_rank:
            return
        accuracy, test = result.accuracy, result.test
        spent = time_spent(self.session.recipe.folder, result.ended)
        self.events.write(
            "end",
            step=result.step,
            data=self.session.recipe.data.kind,
            top1=accuracy.top1 if accuracy else None,
            top5=accuracy.top5 if accuracy else None,
            val_loss=accuracy.loss if accuracy else None,
            test_top1=test.top1 if test else None,
            test_top5=test.top5 if test else None,
            steps=result.step,
            images=self.session.sizes.images_until(result.step),
            time_to_train_s=spent.training_s,
            wall_time_s=spent.wall_s,
            starts=spent.starts,
            trained_until=result.ended["time"],
            trained_until_monotonic_s=result.ended["monotonic_s"],
            status="done" if accuracy else "stopped",
        )

    def print_summary(self, result: TrainResult, peak_bytes: int) -> None:
        """Print the summary, write the report and let the trackers send the rest, after the process group has ended:
        waiting ranks would keep their cores busy."""
        if not self.session.is_main_rank:
            return
        recipe, folder = self.session.recipe, self.session.recipe.folder
        with no_exit_limit():
            lines = summary_lines(
                result,
                self.session.sizes.total_steps,
                time_spent(folder),
                kind=recipe.data.kind,
                resume=recipe.wording("resume", "true"),
                peak_bytes=peak_bytes,
                estimate_bytes=self.session.context.worker.memory_bytes,
            )
            print("\n".join(lines))
            if result.accuracy is not None:
                print(f"report               {write_report(folder)}")
            print(*(f"{line}\n" for line in self.trackers.finish()), sep="", end="", flush=True)


@contextmanager
def sample_usage(folder: Path, rank: Rank, pus: Collection[int]) -> Iterator[None]:
    """Record resource usage of this rank, and of the host on local rank 0, in the run folder, in a thread on `pus`."""
    sampler = Sampler(folder / USAGE, {rank.rank: os.getpid()}, whole_host=rank.local_rank == 0)
    done = threading.Event()

    def sample() -> None:
        bind_thread(tuple(pus))
        while not done.wait(POLL_S):
            sampler.tick()

    thread = threading.Thread(target=sample, name="cputrain-usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        sampler.close()


def summary_lines(
    result: TrainResult,
    steps: int,
    spent: TimeSpent,
    *,
    kind: str,
    resume: str,
    peak_bytes: int,
    estimate_bytes: int | None,
) -> list[str]:
    """Return the summary: times, accuracies, and memory of one worker. `steps` is the number of steps in all epochs,
    `kind` is data.kind, and `resume` what continues the run."""
    accuracy = result.accuracy
    if accuracy is None:
        return [f"stopped by a signal  after step {result.step:,}, checkpoint saved: continue with {resume}"]
    resumed = spent.starts > 1
    of_last = ", of the last start" if resumed else ""
    starts = f" over {spent.starts} starts" if resumed else ""
    lines = [f"ended by max_steps   after step {result.step:,} of {steps:,}"] if result.step < steps else []
    lines += [
        f"total training time  {result.trained_s:.1f} s (updates only{of_last})",
        f"time to train        {spent.training_s:.1f} s{starts} (with evaluations and checkpoints)",
    ]
    if resumed:
        lines.append(f"wall time            {spent.wall_s:.1f} s (from the first start to the end, waits included)")
    lines += _accuracy_lines(accuracy, kind)
    if (test := result.test) and test.top1 is not None:
        lines += [
            f"test top-1           {test.top1:.2f} %",
            f"test top-5           {test.top5:.2f} %  ({test.images} {kind}, each once, with the last weights)",
        ]
    estimated = f" (estimated {estimate_bytes / GIB:.2f})" if estimate_bytes else ""
    return [*lines, f"peak memory          {peak_bytes / GIB:.2f} GiB per worker{estimated}"]


def _accuracy_lines(accuracy: Accuracy, kind: str) -> list[str]:
    if accuracy.top1 is not None:
        return [
            f"top-1                {accuracy.top1:.2f} %",
            f"top-5                {accuracy.top5:.2f} %  ({accuracy.images} {kind}, each once)",
        ]
    if accuracy.images:
        return [f"validation loss      {accuracy.loss:.4f}  ({accuracy.images} {kind}, each once)"]
    return [f"data                 {kind}: nothing to evaluate"]
