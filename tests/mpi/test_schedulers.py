"""The job around a process: its hosts and slots by the documentation of each scheduler, and what the commands say."""

import json
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cputrain.affinity.errors import InputError
from cputrain.doctor import job_check
from cputrain.mpi.schedulers import SCHEDULERS, scheduler_allocation
from tests.support.commands import CORES, here, mpi_path, refused

Slots = list[tuple[str, int | None]]
SLURM_TASKS = st.lists(st.integers(0, 10**12).map(str) | st.text("0123x()-,2\u0663\u00b2", max_size=12), max_size=5)


def hosts_of(env: dict[str, str]) -> Slots:
    found = scheduler_allocation(env)
    assert found is not None
    return [(host.name, host.slots) for host in found.hosts]


def test_the_hosts_of_slurm_and_pbs_are_found(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_NODELIST": "n[1-3],m1", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS": "7"}
    assert hosts_of(slurm) == [("n1", 2), ("n2", 2), ("n3", 2), ("m1", 1)]
    with pytest.raises(InputError, match=r"has 3 hosts, SLURM_JOB_NODELIST=.* has 4"):
        scheduler_allocation({**slurm, "SLURM_TASKS_PER_NODE": "2(x3)"})
    del slurm["SLURM_NTASKS"]  # TASKS_PER_NODE is a number of CPUs where no tasks are requested
    assert hosts_of(slurm)[0] == ("n1", None)
    (tmp_path / "nodes").write_text("a\na\nb\nb\nc\n")
    assert hosts_of({"PBS_NODEFILE": str(tmp_path / "nodes")}) == [("a", 2), ("b", 2), ("c", 1)]
    (tmp_path / "nodes").write_text("a\nb\n")
    assert hosts_of({"PBS_NODEFILE": str(tmp_path / "nodes")}) == [("a", 1), ("b", 1)]
    assert scheduler_allocation({}) is None


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("n[1-", r"'\[1-', which is neither a name nor a range"),
        ("n[3-1]", "'3-1', which is not a range"),
        ("n[1-2],n2", "contain n2 twice"),
        ("n1,n1;reboot", "'n1;reboot' is not a host name"),
        (",", "are an empty list"),
    ],
)
@pytest.mark.parametrize("variable", ["SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_1"])
def test_a_damaged_list_of_slurm_is_named_with_its_variable(variable: str, listed: str, said: str) -> None:
    env = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "a1", variable: listed}
    if variable.endswith("1"):
        env["SLURM_JOB_NODELIST_HET_GROUP_0"] = "a1"
    with pytest.raises(InputError, match=rf"^{variable}: .*{said}"):
        scheduler_allocation(env)


@given(st.text(max_size=30) | SLURM_TASKS.map(",".join))
def test_any_slurm_tasks_per_node_are_read_or_refused(tasks: str) -> None:
    try:
        found = hosts_of({"SLURM_JOB_NODELIST": "n[1-3],m1", "SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": tasks})
    except InputError:
        return
    assert len(found) == 4


@pytest.mark.parametrize("word", ["HET", "PACK"])  # PACK: before Slurm 20.02
def test_a_heterogeneous_slurm_job_has_the_hosts_of_all_its_components(word: str) -> None:
    env = {
        **{"SLURM_JOB_ID": "5", f"SLURM_{word}_SIZE": "2", "SLURM_JOB_NODELIST": "a1", "SLURM_NTASKS": "2"},
        **{
            "SLURM_TASKS_PER_NODE": "2",
            f"SLURM_JOB_NODELIST_{word}_GROUP_0": "a1",
            f"SLURM_NTASKS_{word}_GROUP_0": "2",
        },
        **{f"SLURM_TASKS_PER_NODE_{word}_GROUP_0": "2", f"SLURM_JOB_NODELIST_{word}_GROUP_1": "b[1-2]"},
        **{f"SLURM_NTASKS_{word}_GROUP_1": "8", f"SLURM_TASKS_PER_NODE_{word}_GROUP_1": "4(x2)"},
    }
    found = scheduler_allocation(env)
    assert found is not None and found.title == "Slurm job 5 of 2 components, 3 hosts"
    listed = [[(host.name, host.slots) for host in component] for component in found.components]
    assert listed == [[("a1", 2)], [("b1", 4), ("b2", 4)]]
    del env[f"SLURM_JOB_NODELIST_{word}_GROUP_1"]
    with pytest.raises(InputError, match=rf"SLURM_JOB_NODELIST_{word}_GROUP_1 is not set: name the hosts"):
        scheduler_allocation(env)
    env[f"SLURM_JOB_NODELIST_{word}_GROUP_1"] = "b1"
    for size in ("x", ""):  # the lists of the components are there all the same
        found = scheduler_allocation({**env, f"SLURM_{word}_SIZE": size, f"SLURM_TASKS_PER_NODE_{word}_GROUP_1": "4"})
        assert found is not None and [host.name for host in found.hosts] == ["a1", "b1"]


def test_srun_gets_a_part_for_each_component(tmp_path: Path) -> None:
    (tmp_path / "srun").symlink_to("/bin/true")
    env = {
        **{"SLURM_JOB_ID": "5", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a1"},
        **{"SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-2]", "PATH": f"{tmp_path}:/usr/bin:/bin"},
    }
    ran = here("launch", "--ppn", "1", "--dry-run", "--", "true", cwd=tmp_path, **env)
    line = next(line for line in ran.stdout.splitlines() if "--het-group=0" in line)
    first, second = line.split(" : ")
    assert "--nodes=1 --ntasks=1" in first and "--nodelist=a1" in first and first.endswith("true")
    assert second.startswith("--het-group=1 --nodes=2 --ntasks=2") and "--nodelist=b1,b2" in second
    shown = here("plan", "--ppn", "1", "--format", "command", cwd=tmp_path, **env)
    assert shown.returncode == 0 and "--het-group=1 --nodes=2" in shown.stdout
    refused = here("plan", "--ppn", "1", "--write", "out", cwd=tmp_path, **env)
    assert refused.returncode == 2 and "heterogeneous job: give a RECIPE" in refused.stderr
    colon = here("launch", "--ppn", "1", "--dry-run", "--", "true", ":", cwd=tmp_path, **env)
    assert colon.returncode == 2 and "separates a heterogeneous job's commands with ':'" in colon.stderr


@pytest.mark.parametrize(
    ("listed", "expected", "noted"),
    [
        ("batch02 1 c101 42 c102 42", [("c101", 42), ("c102", 42)], True),
        ("batch02 1 c101 42", [("c101", 42)], True),
        ("c101 42 c102 42", [("c101", 42), ("c102", 42)], False),
        ("h1 1 h2 1 h3 1", [("h1", 1), ("h2", 1), ("h3", 1)], False),  # span[ptile=1]
        ("h1 2 h2 1", [("h1", 2), ("h2", 1)], False),
        ("h1 4 h2 4 h1 2", [("h1", 6), ("h2", 4)], False),
        ("h1 1", [("h1", 1)], False),
    ],
)
def test_an_lsf_job_has_its_hosts_without_the_batch_host(listed: str, expected: Slots, noted: bool) -> None:
    env = {"LSB_JOBID": "118210", "LSB_MCPU_HOSTS": listed}
    found = scheduler_allocation(env)
    assert found is not None and hosts_of(env) == expected
    assert ("batch02, has 1 slot" in found.note) == noted


def test_lsf_s_file_and_its_list_have_a_host_for_each_slot(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("login1\nc1\nc1\nc1\nc2\nc2\nc2\n")
    assert hosts_of({"LSB_JOBID": "1", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}) == [("c1", 3), ("c2", 3)]
    assert hosts_of({"LSB_JOBID": "1", "LSB_HOSTS": "c1 c1 c2 c2"}) == [("c1", 2), ("c2", 2)]


MCPU, LINES = "LSB_MCPU_HOSTS", "c1\nc1\nc2\nc2\n"


@pytest.mark.parametrize(
    ("env", "files", "said"),
    [
        ({MCPU: "c1 2 c2 2", "LSB_HOSTS": "c1 c1 c2 c2"}, {"LSB_DJOB_HOSTFILE": LINES}, ""),
        ({MCPU: "b1 1 c1 2 c2 2"}, {"LSB_DJOB_HOSTFILE": f"b1\n{LINES}", "LSB_AFFINITY_HOSTFILE": LINES}, ""),
        ({MCPU: "c1.site 2 c2.site 2"}, {"LSB_AFFINITY_HOSTFILE": "c1 0,1 0 2\nc2 0,1 0 2\n"}, ""),
        ({MCPU: "c1 2 c2 2"}, {"LSB_AFFINITY_HOSTFILE": "", "LSB_DJOB_HOSTFILE": ""}, ""),
        ({MCPU: "c1 2 c2 2", "LSB_DJOB_HOSTFILE": "/none", "LSB_AFFINITY_HOSTFILE": "/none"}, {}, ""),
        ({MCPU: "c1 2 c2 2", "LSB_HOSTS": "c1 c1"}, {}, "LSB_HOSTS has 2 slots on 1 host (c1): "),
        ({MCPU: "c1 2 c2 2"}, {"LSB_DJOB_HOSTFILE": f"{LINES}c3\n"}, "FILE has 5 slots on 3 hosts (c1, c2, c3): "),
        ({MCPU: "c1 2 c2 2"}, {"LSB_DJOB_HOSTFILE": f"{LINES}c2\n"}, "FILE has 5 slots on 2 hosts (c1, c2): "),
        ({MCPU: "c1 2 c2 2"}, {"LSB_AFFINITY_HOSTFILE": "c1 0\nc9 0\n"}, "FILE has 2 slots on 2 hosts (c1, c9): "),
    ],
)
def test_lists_of_lsf_that_differ_are_said(
    env: dict[str, str], files: dict[str, str], said: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = scheduler_allocation({"LSB_JOBID": "5", **env, **{name: str(tmp_path / name) for name in files}})
    assert found is not None and [host.slots for host in found.hosts] == [2, 2]
    assert ("LSF's variables differ: LSB_MCPU_HOSTS is used, " in found.note) == bool(said) and said in found.note


def test_one_host_of_lsf_with_other_lists_is_not_used_in_silence(tmp_path: Path) -> None:
    env = {"LSB_JOBID": "5", MCPU: f"{socket.gethostname()} 1", "LSB_HOSTS": "c1 c2 c3"}
    said = "LSF's variables differ: LSB_MCPU_HOSTS is used, 1 slot on 1 host"
    for command in (("plan", "--ppn", "1"), ("launch", "--ppn", "1", "--dry-run", "--", "true")):
        ran = here(*command, cwd=tmp_path, **env)
        assert ran.returncode == 0 and ran.stderr.startswith(f"note: {said}"), ran.stderr
    ran = here("train", "demo-digits", "--dry-run", f"output={tmp_path}/run", cwd=tmp_path, **env)
    assert f"LSF job 5, 1 host; only this host is used; for cputrain launch, {said}" in ran.stderr


@pytest.mark.parametrize("env", [{MCPU: "c1 0"}, {MCPU: "c1 0 c2 0"}])
def test_a_job_without_a_slot_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"^LSB_MCPU_HOSTS has no host with a slot: name the hosts with --hosts$"):
        scheduler_allocation(env)


def test_grid_engine_s_file_has_a_line_for_each_queue_of_a_host(tmp_path: Path) -> None:
    # The columns of sge_pe(5): host, slots, queue, processors to use.
    path = tmp_path / "pe_hostfile"
    path.write_text("node1.site 8 all.q@node1.site UNDEFINED\nnode2 4 a.q@node2 <NULL>\nnode2 2 b.q@node2 0,0:0,1\n")
    assert hosts_of({"JOB_ID": "9", "PE_HOSTFILE": str(path)}) == [("node1.site", 8), ("node2", 6)]
    assert scheduler_allocation({"JOB_ID": "9"}) is None  # no parallel environment
    for damaged in ("", "node1\n", "node1 x all.q\n", "no;de 1 all.q\n"):
        path.write_text(damaged)
        with pytest.raises(InputError, match="PE_HOSTFILE"):
            scheduler_allocation({"PE_HOSTFILE": str(path)})


def flux_in(folder: Path, *, fails: str = "none") -> dict[str, str]:
    """The environment of a job with a `flux` that prints a resource set (Flux RFC 20), as no Flux can run here."""
    resources = {
        "version": 1,
        "execution": {
            "R_lite": [{"rank": "0-1", "children": {"core": "0-7"}}, {"rank": "2", "children": {"core": "0,4-6"}}],
            "nodelist": ["fluke[3-4],big"],
        },
    }
    (folder / "R").write_text(json.dumps(resources))
    program = folder / "flux"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in\n"{fails}") exit 1;;\n"getattr jobid") echo f1;;\n'
        f'"resource R" | "job info f1 R") cat {folder}/R;;\n*) exit 1;;\nesac\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    "env",
    [
        {"FLUX_URI": "local:///tmp/f"},  # a batch script
        {"FLUX_ENCLOSING_ID": "f1", "FLUX_URI": "local:///tmp/f"},
        {"FLUX_JOB_ID": "f1", "FLUX_URI": "local:///run/flux"},
    ],
)
def test_a_flux_job_has_the_hosts_and_cores_of_its_resource_set(env: dict[str, str], tmp_path: Path) -> None:
    assert hosts_of({**flux_in(tmp_path), **env}) == [("fluke3", 8), ("fluke4", 8), ("big", 4)]


def test_the_whole_cluster_of_flux_is_no_job(tmp_path: Path) -> None:
    found = scheduler_allocation({**flux_in(tmp_path, fails="getattr jobid"), "FLUX_URI": "local:///run/flux"})
    assert found is not None and found.hosts == ()
    found = scheduler_allocation({"PATH": "/nowhere", "FLUX_JOB_ID": "f1"})
    assert found is not None and "name the job's hosts with --hosts" in found.uses_one_host


def test_a_host_that_a_scheduler_spells_in_two_ways_is_one(tmp_path: Path) -> None:
    (tmp_path / "pe").write_text("n1.cl 4 all.q@n1 UNDEFINED\nN1.cl 2 b.q@n1 UNDEFINED\nn2.cl 6 all.q@n2 <NULL>\n")
    env = {"JOB_ID": "7", "PE_HOSTFILE": str(tmp_path / "pe")}
    assert hosts_of(env) == [("n1.cl", 6), ("n2.cl", 6)]
    found = scheduler_allocation(env)
    assert found is not None and found.title == "Grid Engine job 7, 2 hosts"
    assert hosts_of({"LSB_MCPU_HOSTS": "n1.cl 2 N1.CL. 2 n2.cl 4"}) == [("n1.cl", 4), ("n2.cl", 4)]


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"])
def test_a_scheduler_s_file_may_have_a_byte_order_mark_and_two_spellings(variable: str, tmp_path: Path) -> None:
    rest = " 1 all.q@n UNDEFINED" if variable == "PE_HOSTFILE" else ""
    lines = "".join(f"{name}{rest}\r\n" for name in ("N1.cl", "n1.cl.", "n2.cl", "n2.cl"))
    (tmp_path / "hosts").write_text(f"\ufeff{lines}", encoding="utf-8")
    assert hosts_of({variable: str(tmp_path / "hosts")}) == [("N1.cl", 2), ("n2.cl", 2)]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"LSB_MCPU_HOSTS": "n1 1 n1.invalid 1"}, "n1 and n1.invalid are one host"),
        ({"LSB_MCPU_HOSTS": "localhost 1 b 1"}, "localhost means a different host on b"),
        (
            {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a1", "SLURM_JOB_NODELIST_HET_GROUP_1": "A1"},
            "a1 and A1 are the same host",
        ),
    ],
)
def test_a_job_that_lists_a_host_by_two_names_is_refused(env: dict[str, str], said: str, tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID" if "SLURM_HET_SIZE" in env else "LSB_JOBID": "5", **env}
    assert said in refused(here("launch", "--ppn", "1", "--dry-run", "--", "true", cwd=tmp_path, **env))


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE"])
def test_a_scheduler_s_file_that_is_gone_is_named_with_its_variable(variable: str) -> None:
    with pytest.raises(InputError, match=rf"^{variable}\W/none\b.*: No such file or directory: "):
        scheduler_allocation({variable: "/none"})


@pytest.mark.parametrize("scheduler", [one for one in SCHEDULERS if one.found is None], ids=lambda one: one.name)
def test_any_other_scheduler_s_job_says_that_one_host_is_used(scheduler: object, tmp_path: Path) -> None:
    name, variables, give = (getattr(scheduler, field) for field in ("name", "variables", "give"))
    two = {"_CONDOR_NPROCS": "2", "AWS_BATCH_JOB_NUM_NODES": "2", "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"}
    for variable in variables:
        found = scheduler_allocation({**two, variable: "77"})
        assert found is not None
        assert found.uses_one_host == f"{name} job 77; only this host is used: name the job's hosts with {give}"


@pytest.mark.parametrize(
    ("env", "one"),
    [
        ({"SKYPILOT_TASK_ID": "sky-1", "SKYPILOT_NODE_IPS": "10.0.0.4\n"}, True),
        ({"SKYPILOT_TASK_ID": "sky-1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}, False),
        ({"DSTACK_RUN_NAME": "r", "DSTACK_NODES_IPS": "10.0.0.4"}, True),
        ({"DSTACK_RUN_NAME": "r", "DSTACK_NODES_IPS": "10.0.0.4\n10.0.0.5"}, False),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "1"}, True),
        ({"PET_NODE_RANK": "0", "PET_NNODES": "4"}, False),
        ({"SM_HOSTS": '["algo-1"]', "TRAINING_JOB_NAME": "t"}, True),
        ({"SM_HOSTS": '["algo-1","algo-2"]', "TRAINING_JOB_NAME": "t"}, False),
        ({"AZUREML_RUN_ID": "r", "AZUREML_NODE_COUNT": "1"}, True),
        ({"AZUREML_RUN_ID": "r", "AZUREML_NODE_COUNT": "4"}, False),
        ({"AZUREML_RUN_ID": "r"}, False),
        ({"_CONDOR_JOB_AD": "/s/.job.ad"}, True),  # vanilla universe
        ({"_CONDOR_JOB_AD": "/s/.job.ad", "_CONDOR_NPROCS": "1"}, True),
        ({"_CONDOR_JOB_AD": "/s/.job.ad", "_CONDOR_NPROCS": "2"}, False),
        ({"AWS_BATCH_JOB_ID": "j"}, True),  # not a multi-node parallel job
        ({"AWS_BATCH_JOB_ID": "j", "AWS_BATCH_JOB_NUM_NODES": "3"}, False),
        ({"AZ_BATCH_JOB_ID": "j"}, True),  # not a multi-instance task
        ({"AZ_BATCH_JOB_ID": "j", "AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"}, False),
        ({"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "1", "VC_PS_NUM": "0"}, True),
        ({"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "1", "VC_PS_NUM": "1"}, False),
        ({"VC_TASK_INDEX": "0"}, False),
        ({"OAR_JOB_ID": "3", "OAR_NODEFILE": "c1\nc1\nc1\n"}, True),  # a line for each core
        ({"COBALT_JOBID": "3", "COBALT_NODEFILE": "c1\nc2\n"}, False),
        ({"PJM_JOBID": "3", "PJM_O_NODEINF": "/none"}, False),
        ({"OMPI_MCA_orte_default_hostfile": "job-worker-0 slots=2\n"}, False),  # that host is another one
    ],
    ids=str,
)
def test_a_job_of_one_host_by_its_variables_needs_no_line(env: dict[str, str], one: bool, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in env if name.lower().endswith("file")}
    for name, path in files.items():
        path.write_text(env[name])
    env = env | {name: str(path) for name, path in files.items()}
    found = scheduler_allocation(env)
    assert found is not None and (found.uses_one_host == "", found.title.endswith(", 1 host")) == (one, one)
    noted = here("plan", "--ppn", "1", cwd=tmp_path, **env).stderr
    assert ("only this host is used" in noted) != one and (noted == "" or not one)


def test_launch_uses_lsf_s_hosts_and_says_which_it_leaves_out(tmp_path: Path) -> None:
    env = {"LSB_JOBID": "118210", "LSB_MCPU_HOSTS": "batch02 1 c101 42 c102 42", **mpi_path("openmpi4")}
    words = ("--dry-run", "--launcher", "openmpi", "--ppn", "1", "--", "true")
    ran = here("launch", *words, cwd=tmp_path, **env)
    assert ran.returncode == 0, ran.stderr
    assert "-np 2" in ran.stdout and "MASTER_ADDR=c101" in ran.stdout
    batch, slots = ran.stderr.splitlines()
    assert "batch02, has 1 slot" in batch and "without workers" in batch
    assert slots.startswith("note: LSF gives 42 slots on c[101-102], the plan has 1 worker on ")


def test_pbs_s_slots_that_differ_from_the_plan_are_said(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\nb\nb\n")
    env = {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": str(tmp_path / "nodes")}
    ran = here("plan", "--ppn", "1", cwd=tmp_path, **env)
    (note,) = ran.stderr.splitlines()
    assert note.startswith("note: PBS gives 2 slots on b, the plan has 1 worker on ")
    assert note.endswith(": --ppn 2 starts a worker for each; or request 1 slot per host")


def test_torque_s_slots_may_be_the_cores_of_a_host(tmp_path: Path) -> None:
    """nodes=2:ppn=N of Torque; PBS Professional's lines are MPI processes, which the plan should start."""
    cores = CORES
    (tmp_path / "nodes").write_text("a\n" * cores + "b\n" * cores)
    env = {"PBS_JOBID": "7.torque", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_NUM_PPN": str(cores)}
    assert hosts_of(env) == [("a", cores), ("b", cores)]
    found = scheduler_allocation(env)
    assert found is not None and found.title == "Torque job 7.torque, 2 hosts"
    assert here("plan", "--ppn", "1", cwd=tmp_path, **env).stderr == ""
    (tmp_path / "nodes").write_text("a\n" * (cores + 7) + "b\n" * (cores + 7))
    (note,) = here("plan", "--ppn", "1", cwd=tmp_path, **env).stderr.splitlines()
    assert note.startswith(f"note: Torque gives {cores + 7} slots on a,b, the plan has 1 worker on ")


@pytest.mark.parametrize("command", ["plan", "launch"])
def test_a_job_of_one_s_own_hosts_or_workers_alike_says_nothing(command: str, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\nb\n")
    launcher = mpi_path("openmpi4") if command == "launch" else {}
    env = {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": str(tmp_path / "nodes"), **launcher}
    behind = ("--dry-run", "--launcher", "openmpi", "--", "true") if command == "launch" else ()
    assert here(command, "--ppn", "1", *behind, cwd=tmp_path, **env).stderr == ""
    hosts = ("--hosts", "x,y") if command == "launch" else ("--machine", "skx-8160-2s")
    assert here(command, *hosts, *behind, cwd=tmp_path, COBALT_JOBID="5", **launcher).stderr == ""


def test_train_and_doctor_name_the_job(tmp_path: Path) -> None:
    env = {"LSB_JOBID": "118210", "LSB_MCPU_HOSTS": "c101 42 c102 42"}
    ran = here("train", "demo-digits", "--dry-run", f"output={tmp_path}/run", cwd=tmp_path, **env)
    assert "note: LSF job 118210, 2 hosts; only this host is used: cputrain launch uses all of them" in ran.stderr
    shown = json.loads(here("doctor", "--format", "json", cwd=tmp_path, **env).stdout)["checks"]
    (job,) = [check for check in shown if check["name"] == "job"]
    assert (job["status"], job["found"]) == ("ok", "LSF job 118210, 2 hosts: c[101-102]")
    (job,) = job_check({"OAR_JOB_ID": "3"})
    assert job.status == "warning" and job.remedy == 'name them with --hostfile "$OAR_NODEFILE"'
