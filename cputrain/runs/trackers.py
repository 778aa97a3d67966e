"""Experiment trackers, MLflow and Weights & Biases: for each, a process of rank 0 that sends what is in the run folder.

The process follows events.jsonl, which is the queue: a tracker that is slow, fails or hangs costs the training nothing,
and what was not sent is sent when the run is resumed, or by hand: python -m cputrain.runs.trackers NAME RUN. Rank 0
imports neither package, and its process is never forked: the new one is started by exec, on the loader's PUs.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

import yaml

from cputrain.affinity.binding import running_on
from cputrain.affinity.errors import RunError
from cputrain.affinity.start import isolated_command
from cputrain.affinity.terminal import ExitStatus, exit_status, one_line, status_of_signal, use_utf8
from cputrain.files import ENVIRONMENT, METRICS, PLAN, RECIPE, REPORT, write_text
from cputrain.runs.events import FILE, SCALARS, check_log_formats, read_event
from cputrain.runs.folder import flat

FOLLOWED = "--followed"
POLL_S = 1.0
END_S = 20.0  # at the end of a training, until its trackers are killed
FAILED_S = 3.0  # the same when the training has failed, whose job is waiting
NICENESS = 10  # the decoder threads, on the same PUs, go first
MAX_EVENTS = 200  # per round: 5 metrics each, and MLflow takes 1,000 a request
MAX_PARAMS, MAX_VALUE_LENGTH = 100, 6000  # MLflow's limits: parameters a request, characters a value
PASSWORD = re.compile("//[^/@]*@")  # of a user, in the address of a database
NO_PROJECT = str.maketrans(dict.fromkeys("/\\#?%:", "-"))  # characters that W&B refuses
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}  # unless the user sets them
FINAL = {
    "top1": "final/top1",
    "top5": "final/top5",
    "val_loss": "final/val_loss",
    "test_top1": "final/test_top1",
    "test_top5": "final/test_top5",
    "time_to_train_s": "final/time_to_train_s",
}
NAMES = {**SCALARS, "end": FINAL}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a tracker has of a run, in metrics/NAME.json: the run's ID there and where to see it; MLflow's default store
    as an absolute address ("" if a variable names the store); the bytes of events.jsonl that were sent, the last step
    of each kind of event among them, and the status after them."""

    run_id: str | None = None
    where: str = ""
    store: str = ""
    sent: int = 0
    last_step: Mapping[str, int] | None = None
    status: str = "running"


def read_record(folder: Path, name: str) -> Record:
    """Read a tracker's record of a run; an empty one if the tracker has nothing of it."""
    path = folder / METRICS / f"{name}.json"
    return Record(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else Record()


class Tracker(Protocol):
    """An open run of a tracker. Methods raise what the tracker's package raises."""

    run_id: str
    where: str
    store: str

    def set_params(self, params: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Set the run's parameters and upload files; a resumed run does so again, perhaps with other values."""

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Take metrics of a step, at a Unix time; steps never decrease."""

    def flush(self) -> None:
        """Send the metrics that were taken."""

    def end(self, status: str, files: Sequence[Path]) -> None:
        """Upload files and end the run; the status is "done", "stopped" or "running" if the training has failed."""


class DisabledError(Exception):
    """The user has disabled the tracker; the message says by what."""


def make_database(uri: str) -> None:
    """Create the database of MLflow's default store if it is missing, under another name first: this takes seconds, and
    MLflow never opens a database whose creation was killed, or that two runs of a sweep created at the same time."""
    from mlflow import MlflowClient

    path = Path(unquote(uri.removeprefix("sqlite:///")))
    if not uri.startswith("sqlite:///") or "?" in uri or path.exists():
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    MlflowClient(f"sqlite:///{partial}")
    with suppress(FileExistsError):
        os.link(partial, path)
    partial.unlink()


class MLflow:
    """A run in MLflow. MLflow's own variables say where: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and the like."""

    def __init__(self, folder: Path, experiment: str, record: Record, env: Mapping[str, str]) -> None:
        import mlflow
        from mlflow import MlflowClient

        given = env.get("MLFLOW_TRACKING_URI")
        uri = given or record.store or mlflow.get_tracking_uri()  # a default of the working directory, which may change
        make_database(uri)
        self._client, self._metrics = MlflowClient(uri), []  # type: tuple[Any, list[Any]]
        self.store = "" if given else uri
        if known := record.run_id or env.get("MLFLOW_RUN_ID"):
            self.run_id = known
            self._client.update_run(known, status="RUNNING")
        else:
            number = env.get("MLFLOW_EXPERIMENT_ID") or self._experiment(env.get("MLFLOW_EXPERIMENT_NAME", experiment))
            user = {"mlflow.user": env["USER"]} if "USER" in env else {}
            tags = {"mlflow.source.name": "cputrain", "cputrain.output": str(folder.resolve()), **user}
            run = self._client.create_run(number, run_name=env.get("MLFLOW_RUN_NAME", folder.resolve().name), tags=tags)
            self.run_id = run.info.run_id
        self.where = f"run {self.run_id} in {PASSWORD.sub('//', uri)}"

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if (found := self._client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:
            if (found := self._client.get_experiment_by_name(name)) is None:
                raise
            return str(found.experiment_id)  # another run of a sweep has created it meanwhile

    def set_params(self, params: Mapping[str, Any], files: Sequence[Path]) -> None:
        """MLflow's parameters keep their first value, so another value becomes the tag resumed.KEY."""
        from mlflow.entities import Param, RunTag

        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in params.items()}
        texts = {key: text[:MAX_VALUE_LENGTH] for key, text in texts.items()}
        known = self._client.get_run(self.run_id).data.params
        new = [Param(key, text) for key, text in texts.items() if key not in known]
        for start in range(0, len(new), MAX_PARAMS):
            self._client.log_batch(self.run_id, params=new[start : start + MAX_PARAMS])
        changed = [RunTag(f"resumed.{key}", text) for key, text in texts.items() if known.get(key, text) != text]
        for start in range(0, len(changed), MAX_PARAMS):
            self._client.log_batch(self.run_id, tags=changed[start : start + MAX_PARAMS])
        self._upload(files)

    def _upload(self, files: Sequence[Path]) -> None:
        for path in files:
            self._client.log_artifact(self.run_id, str(path))

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Take metrics of a step."""
        from mlflow.entities import Metric

        self._metrics += [Metric(key, value, round(1000 * time_s), step) for key, value in metrics.items()]

    def flush(self) -> None:
        """Send the metrics that were taken, in one request."""
        if self._metrics:
            self._client.log_batch(self.run_id, metrics=self._metrics)
            self._metrics = []

    def end(self, status: str, files: Sequence[Path]) -> None:
        """Upload files and end the run."""
        self._upload(files)
        self._client.set_terminated(self.run_id, {"done": "FINISHED", "stopped": "KILLED"}.get(status, "FAILED"))


class WandB:
    """A run in Weights & Biases, whose own variables say where: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and the like.

    Without a login the run is offline, in the run folder's metrics/wandb. wandb-core, a program of the package that
    the package starts, writes there and sends. Raises DisabledError if W&B is.
    """

    store = ""

    def __init__(self, folder: Path, project: str, record: Record, env: Mapping[str, str]) -> None:
        import wandb

        mode = env.get("WANDB_MODE")
        if mode is None:
            try:
                wandb.login(verify=False)
            except wandb.errors.UsageError:  # no API key, and no terminal to ask for one
                mode = "offline"
        self._run: Any = wandb.init(
            project=env.get("WANDB_PROJECT", project.translate(NO_PROJECT)),
            name=env.get("WANDB_NAME", folder.resolve().name),
            id=record.run_id or env.get("WANDB_RUN_ID"),
            resume="allow",
            dir=env.get("WANDB_DIR", str(folder / METRICS)),
            mode=mode,
            settings=wandb.Settings(  # what describes this process, not the training, is left out
                console="off", disable_git=True, silent=True, x_disable_meta=True, x_disable_stats=True
            ),
        )
        if self._run.disabled:  # by WANDB_MODE, or by the settings file that `wandb disabled` writes
            raise DisabledError(f"disabled by {'WANDB_MODE' if 'WANDB_MODE' in env else 'the settings of wandb'}")
        self._folder = folder
        self.run_id = self._run.id
        runs = Path(self._run.settings.sync_dir).parent / f"offline-run-*-{self.run_id}"  # one of each start
        self.where = f"offline, to be sent by: wandb sync {runs}" if self._run.offline else self._run.url or ""

    def set_params(self, params: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Set the run's config."""
        self._run.config.update(dict(params), allow_val_change=True)
        self._upload(files)

    def _upload(self, files: Sequence[Path]) -> None:
        for path in files:
            self._run.save(str(path), base_path=str(self._folder), policy="now")

    def log(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """Give the metrics of a step to wandb-core."""
        self._run.log(dict(metrics), step=step)

    def flush(self) -> None:
        """Do nothing: wandb-core sends by itself."""

    def end(self, status: str, files: Sequence[Path]) -> None:
        """Upload files and end the run, which waits until everything is sent."""
        self._upload(files)
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "done" else 1)


TRACKERS: dict[str, Callable[[Path, str, Record, Mapping[str, str]], Tracker]] = {"mlflow": MLflow, "wandb": WandB}


def params_of(folder: Path, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's parameters by dotted key: its recipe, `planned.` with the plan's numbers for each host, and what
    `environment.` says about versions and engines. `start` is the start event."""
    recipe = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    plan = json.loads((folder / PLAN).read_bytes())
    workers = plan["workers"]
    pus = {kind: {pu for worker in workers for pu in worker[f"{kind}_pus"]} for kind in ("compute", "comm", "loader")}
    cores = [set(core["pus"]) for core in plan["machine"]["core_list"]]
    planned = {
        "workers": start.get("workers"),
        "hosts": len({binding["host"] for binding in start["bindings"]}),
        "ppn": len(workers),
        "threads": sum(worker["intra_op"] for worker in workers),
        **{f"{kind}_cores": sum(not core.isdisjoint(used) for core in cores) for kind, used in pus.items()},
        "global_batch": start.get("global_batch"),
    }
    path = folder / ENVIRONMENT
    environment = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = {key: environment.get(key) for key in ("cputrain", "torch", "backend", "engine", "decoder", "allocator")}
    return {**flat(recipe), **flat({"planned": planned, "environment": named})}


def events_from(path: Path, start: int) -> tuple[list[dict[str, Any]], int]:
    """Read events after the first `start` bytes, at most MAX_EVENTS; return them without damaged lines, and the number
    of bytes up to here."""
    events = []
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(MAX_EVENTS):
            line = file.readline()
            if not line.endswith(b"\n"):
                break
            start += len(line)
            if (event := read_event(line)) is not None:
                events.append(event)
    return events, start


def send(tracker: Tracker, folder: Path, record: Record, events: Iterable[Mapping[str, Any]]) -> Record:
    """Send events to a tracker and return its new record. Steps and epochs that a resumed run repeats are left out."""
    last, status = dict(record.last_step or {}), record.status
    for event in events:
        name = event["event"]
        if name == "start":
            status = "running"
            files = [path for path in (folder / RECIPE, folder / PLAN, folder / ENVIRONMENT) if path.is_file()]
            tracker.set_params(params_of(folder, event), files)
        elif name == "end":
            status = event["status"]
        step = event["steps"] if name == "end" else event.get("step", 0)
        metrics = {to: event[key] for key, to in NAMES.get(name, {}).items() if event.get(key) is not None}
        if metrics and step > last.get(name, -1):
            tracker.log(step, event["time"], metrics)
            last[name] = step
    tracker.flush()
    return replace(record, last_step=last, status=status)


def follow(name: str, folder: Path, ended: threading.Event, env: Mapping[str, str]) -> Record:
    """Send a run to a tracker as its events are written, until `ended` is set and everything is sent, the report
    included. Continues the tracker's run that the record names; a disabled tracker gets nothing. Raises what the
    tracker's package raises."""
    recipe = yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8"))
    record, path = read_record(folder, name), folder / METRICS / f"{name}.json"
    try:
        tracker = TRACKERS[name](folder, str(recipe["name"]), record, env)
    except DisabledError as disabled:
        record = replace(record, where=f"{disabled}, nothing was sent")
        write_text(path, json.dumps(asdict(record)))
        ended.wait()
        return record
    record = replace(record, run_id=tracker.run_id, where=tracker.where, store=tracker.store)
    while True:
        write_text(path, json.dumps(asdict(record)))
        is_last = ended.is_set()  # read before the events, so that none is missed
        events, sent = events_from(folder / FILE, record.sent)
        if sent > record.sent:
            record = replace(send(tracker, folder, record, events), sent=sent)
        elif is_last:
            break
        else:
            ended.wait(POLL_S)
    tracker.end(record.status, [folder / REPORT] if (folder / REPORT).is_file() else [])
    return record


class Trackers:
    """The trackers of a training, each in a process; on entry there are none. On exit those that have not finished get
    a few seconds, as the training has failed."""

    def __init__(self) -> None:
        self._folder = Path()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._not_started: list[str] = []

    def start(self, folder: Path, log: Sequence[str], pus: tuple[int, ...], env: Mapping[str, str]) -> None:
        """Start the trackers among the formats in `log`, on PUs; their output goes to metrics/NAME.log."""
        self._folder = folder
        for name in {each for each in log if each in TRACKERS}:
            command = (*isolated_command("cputrain.runs.trackers"), name, str(folder), FOLLOWED)
            try:
                (folder / METRICS).mkdir(exist_ok=True)
                with open(self._log(name), "wb", opener=_private) as output, running_on(pus):
                    self._processes[name] = subprocess.Popen(
                        command, env={**QUIET, **env}, stdin=subprocess.PIPE, stdout=output, stderr=output
                    )
            except OSError as error:
                self._not_started.append(f"log={name} did not start: {error}; {self._rest(name)}")

    def failures(self) -> list[str]:
        """Return a warning for each tracker that has failed since the last call; it is dropped."""
        not_started, self._not_started = self._not_started, []
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        return [*not_started, *(self._failure(name, self._processes.pop(name)) for name in ended)]

    def finish(self, limit_s: float = END_S) -> list[str]:
        """Let the trackers send the rest, the report included; kill them after `limit_s`. Return a line for each: where
        the run is, or a warning."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            assert process.stdin is not None, "a pipe"
            process.stdin.close()
        deadline = time.monotonic() + limit_s
        lines = []
        for name, process in processes.items():
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()  # not awaited: a process in a system call of a file server does not end
                lines.append(f"warning: log={name} was not finished after {limit_s:g} s: {self._rest(name)}")
                continue
            if process.returncode != 0:
                lines.append(f"warning: {self._failure(name, process)}")
            else:
                lines.append(f"{name:<20} {read_record(self._folder, name).where}")
        return lines

    def _failure(self, name: str, process: "subprocess.Popen[bytes]") -> str:
        try:
            last = self._log(name).read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        except OSError as error:
            last = f"exit status {process.returncode}, and its log cannot be read ({error.strerror})"
        reason = PASSWORD.sub("//", last) or f"exit status {process.returncode}"
        return f"log={name} failed and is dropped: {reason} ({self._log(name)}; {self._rest(name)})"

    def _log(self, name: str) -> Path:
        return self._folder / METRICS / f"{name}.log"

    def _rest(self, name: str) -> str:
        return f"{shlex.join((sys.executable, '-m', 'cputrain.runs.trackers', name, str(self._folder)))} sends the rest"

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_error: object) -> None:
        self.finish(FAILED_S)


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, as the output of packages may have the server's password."""
    return os.open(path, flags, 0o600)


def main(arguments: Sequence[str]) -> int:
    """Send a run, NAME and RUN, to a tracker; with FOLLOWED as it is trained, until standard input ends."""
    ended = threading.Event()
    name, folder, *followed = (*arguments, "", "")
    if name not in TRACKERS or not all((Path(folder) / each).is_file() for each in (FILE, RECIPE)):
        print(f"trackers {shlex.join(arguments)}: give mlflow or wandb, and a run folder", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    if FOLLOWED in followed:
        for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, signal.SIG_IGN)  # for the training, which ends standard input
        os.nice(NICENESS)

        def wait() -> None:
            while os.read(0, 1):  # not sys.stdin, whose lock a failing process waits for at its exit
                pass
            ended.set()
            signal.alarm(int(END_S) + 1)  # also when rank 0 was killed and a call hangs

        threading.Thread(target=wait, daemon=True).start()
    else:
        ended.set()
    try:
        env = os.environ
        check_log_formats((name,), env)
        (Path(folder) / METRICS).mkdir(exist_ok=True)
        record = follow(name, Path(folder), ended, env)
    except KeyboardInterrupt:
        return status_of_signal(signal.SIGINT)
    except Exception as error:
        if FOLLOWED in followed:  # its log shows where the package failed
            raise
        return _say_failure(name, folder, error)
    print(f"{name}: {record.where}")
    return ExitStatus.DONE


def _say_failure(name: str, folder: str, error: Exception) -> int:
    """Print in one line why a run was not sent, as most errors are the tracker's own; return the exit status."""
    if one_line(error) is None:
        text = PASSWORD.sub("//", str(error)).strip().partition("\n")[0]
        text = text.removesuffix(".") or type(error).__name__
        error = RunError(f"log={name} of {folder} failed: {text}; mend this, and the same command sends the rest")
    return exit_status(error, "trackers")


if __name__ == "__main__":
    use_utf8()
    sys.exit(main(sys.argv[1:]))
