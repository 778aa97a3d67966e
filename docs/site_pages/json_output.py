"""Page of each command's output with `--format json`; the tests compare SHAPES with real output."""

from site_pages.text import code, plain, table

INTRODUCTION = """# JSON of commands

`--format json` prints one object on stdout and nothing else there: progress and warnings go to stderr. The exit status
is the same as without it ([exit status](exit-status.md)). Later versions may add fields;
the [changelog](../changelog.md) lists every field whose meaning changes.

`cputrain plan --format json` is described in [plan.json](plan-json.md), a run's log in [events](events.md), the JSON of
[simulate](../design/prediction.md#json) and [predict](../guides/trained-networks.md) on their pages. bench, tune,
find-lr and `cputrain reproduce tables` also take `--format json`; the last prints a list.
"""
Shape = list[tuple[str, str]]
CATALOG_RECIPE: Shape = [
    ("name", "name for `cputrain train`"),
    ("summary", "what it trains, in a sentence"),
    ("file", "path of the recipe"),
    ("network", "model.name"),
    ("optimizer", "optim.name"),
    ("epochs", "passes over the images"),
    ("data", "data.path, or null"),
]
CATALOG_MACHINE: Shape = [
    ("name", "name for `--machine`"),
    ("model", "the processor"),
    ("features", "instruction sets that oneDNN distinguishes"),
    ("packages", "number of packages"),
    ("cores", "number of cores"),
    ("cpus", "number of hardware threads"),
    ("numa_nodes", "list of id, kind (dram, hbm, slow), memory_bytes, memory_assumed, cpus, near"),
]
SHAPES: dict[str, Shape] = {
    "recipes": [("recipes", "list; each as `cputrain recipes show`, without text")],
    "recipes show": [*CATALOG_RECIPE, ("text", "the file")],
    "machines": [("machines", "list; each as `cputrain machines show`")],
    "machines show": CATALOG_MACHINE,
    "keys": [
        ("sections", "list of name, description, keys; each key has key, values, default, description"),
    ],
    "env": [
        ("cputrain", "version, folder"),
        ("python", "version, program, prefix"),
        ("system", "host, os, kernel, libc, architecture"),
        ("cpu", "model, features, packages, numa_nodes, cores, cpus, allowed_cpus, cpu_quota, memory_limit_bytes"),
        ("memory", "total_bytes, available_bytes, shm_bytes"),
        ("packages", "package -> version, null if it is not installed"),
        (
            "libraries",
            "openmp, allocator, compiler, fabric; launcher, decoder, torch, oneccl, torchvision: objects, with `error` "
            "if one is missing or cannot be imported",
        ),
        ("variables", "name -> value of the relevant variables; values of secrets are not shown"),
        ("problems", "list of sentences about imports that fail, each with its remedy"),
    ],
    "doctor": [
        ("status", "the exit status: 1 if a check is an error, else 0"),
        ("checks", "list of name, status (ok, warning, error), found, remedy"),
    ],
    "doctor affinity": [
        (
            "processes",
            "list of pid, command, worker, planned_cpus, cpus, threads, memory_bytes by NUMA node, misplaced_threads, "
            "remote_bytes, differs, differences (a sentence each)",
        ),
    ],
    "doctor ccl": [
        ("version", "of oneCCL"),
        ("oneccl", "path of its library"),
        ("mpi", "path of Intel MPI's library"),
        ("fabric", "path of libfabric"),
        ("backend", "path of the compiled backend"),
        ("all_reduce", "list of transport, bytes, seconds: medians of two ranks on this host"),
        ("problems", "list of sentences, one for each transport that does not work here"),
    ],
    "job": [
        ("scheduler", "slurm or pbs"),
        ("name", "name of the job"),
        ("script", "the whole script"),
        ("submitted", "ids of the submitted jobs; empty without --submit"),
    ],
    "data info": [
        ("classes", "names of the classes"),
        ("window", "images in a row, for the mixing"),
        (
            "splits",
            "split -> images, bytes, images_of_class, classes_in_window, expected_classes_in_window, shards, damaged, "
            "unusual",
        ),
        ("prepared_with", "options of cputrain prepare, null for other folders"),
    ],
    "data verify": [
        ("folder", "the data folder"),
        ("samples", "number of samples"),
        ("damaged", "list of sentences, one for each damaged sample"),
    ],
    "data show": [
        ("file", "the picture"),
        ("split", "the split that it shows"),
        ("images", "number of images in it"),
    ],
    "eval": [
        ("workers", "number of workers"),
        ("batch", "images of one worker's forward pass"),
        (
            "results",
            "list, one for each checkpoint: checkpoint, step, top1 and top5 in percent, loss, images, damaged, "
            "seconds, classes (accuracy of each), confused (the most frequent pairs)",
        ),
    ],
    "sweep": [
        ("folder", "of the trainings and results"),
        ("recipe", "its name"),
        ("runs", "list, one for each training: as in sweep.json"),
    ],
    "sweep --dry-run": [
        ("trainings", "list of settings, global_batch, steps, refused (why it cannot start here, or null)"),
    ],
    "sweep --find-batch": [
        ("folder", "of the trials"),
        ("largest", "the largest local batch that trains"),
        ("trials", "list of local_batch, status, peak_bytes and others"),
    ],
    "tune --dry-run": [
        ("recipe", "its name"),
        ("data", "data.path of the trials"),
        ("plans", "list of name and settings, the current plan first"),
        ("refused", "list of values that this host cannot run, and why"),
    ],
    "bench optimizer": [
        ("step", "with RUN: the recorded step"),
        ("rate", "its learning rate"),
        ("layers", "list of layer, weights, gradients, ratio, trust: norms, their ratio and the trust ratio"),
    ],
}


def json_output() -> str:
    """Return a table of the fields of each command."""
    parts = [
        f"## cputrain {name}\n\n{table(['field', 'value'], [[code(field), plain(text)] for field, text in shape])}\n"
        for name, shape in SHAPES.items()
    ]
    return "\n".join([INTRODUCTION, *parts])
