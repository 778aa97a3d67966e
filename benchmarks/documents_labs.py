"""The experiments of the two labs: the command of each at its published size, and one for two cores."""

from benchmarks.documents_row import LAB3, NO_WEIGHTS, TOP1, WORKERS, Row

LAB_ROWS = (
    Row(
        document=WORKERS,
        experiment="fruits, fine-tuned on 1, 2 and 4 workers (parts 1 and 2)",
        full=(
            "cputrain prepare imagefolder SRC data/fruits-fresh-rotten",
            "cputrain sweep fruits-fresh-rotten --workers 1,2,4",
        ),
        small=(f"cputrain sweep fruits-fresh-rotten {NO_WEIGHTS} batch.local=8 epochs=2 --workers 1,2,4",),
        shows=(r"^ *(1 .*)$", r"^ *(2 .*)$", r"^ *(4 .*)$"),
    ),
    Row(
        document=WORKERS,
        experiment="Caltech-256, a new last layer on 2, 4 and 8 workers (parts 3 and 4)",
        full=(
            "cputrain prepare caltech256 SRC data/caltech256 --val-fraction 0.2 --seed 1",
            "cputrain sweep caltech256-finetune-frozen --workers 2,4,8",
        ),
        small=(f"cputrain sweep caltech256-finetune-frozen {NO_WEIGHTS} batch.local=8 epochs=2 --workers 1,2",),
        shows=(r"^ *(1 .*)$", r"^ *(2 .*)$"),
    ),
    Row(
        document=WORKERS,
        experiment="a batch that stays while workers are added",
        full=("cputrain sweep fruits-fresh-rotten batch.global=64 --workers 1,2,4",),
        small=(f"cputrain sweep fruits-fresh-rotten {NO_WEIGHTS} batch.global=16 epochs=1 --workers 1,2",),
        shows=(r"^ *(1 .*)$", r"^ *(2 .*)$"),
    ),
    Row(
        document=LAB3,
        experiment="exercise 1: gradient descent, momentum, Adam on a line, several rates",
        full=("cputrain sweep linear-regression",),
        small=("cputrain sweep linear-regression",),
        shows=(
            r"^(sgd +0.01 .*)$",
            r"^(sgd +0.05 .* diverged)$",
            r"^(momentum +0.01 +.*0\.9 .*)$",
            r"^(adam +0.05 .*)$",
        ),
        status=1,  # one of the lab's rates diverges
    ),
    Row(
        document=LAB3,
        experiment="any script as a Slurm job (exercise 1)",
        full=("cputrain job slurm --qos debug --module-purge --time 00:02:00 --submit -- python script.py",),
        small=("cputrain job slurm --qos debug --module-purge --time 00:02:00 -- python script.py",),
        shows=(r"^#SBATCH (--qos=.*)$", r"^(module purge)$"),
    ),
    Row(
        document=LAB3,
        experiment="exercise 2: the same on softmax regression, the best rates",
        full=("cputrain sweep mnist-linear-study",),
        small=("cputrain sweep mnist-linear-study max_steps=300",),
        shows=(r"^(sgd +0.5 .*)$", r"^(momentum +0.05 .*)$", r"^(adam +0.005 .*)$"),
    ),
    Row(
        document=LAB3,
        experiment="exercise 3: two convolutions, three splits, 99.2 % on the test images",
        full=("cputrain sweep mnist-multilayer --run optim.name=adam --grid seed=1,2,3",),
        small=("cputrain train mnist-multilayer epochs=1",),
        shows=(TOP1, r"^(test top-1) +([\d.]+ %)"),
    ),
    Row(
        document=LAB3,
        experiment="exercise 4: workers, more epochs, batches of 5,000",
        full=("cputrain sweep mnist-workers",),
        small=("cputrain sweep mnist-workers max_steps=12 --workers 1,2 --grid batch.local=50,5000",),
        shows=(r"^ *(local 50 +1 .*)$", r"^ *(local 50 +2 .*)$", r"^ *(local 5000 +1 .*)$", r"^ *(local 5000 +2 .*)$"),
    ),
)
