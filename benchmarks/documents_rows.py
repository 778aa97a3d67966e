"""The experiments of the reference documents: the command of each at its published size, and one for two cores."""

from benchmarks.documents_labs import LAB_ROWS
from benchmarks.documents_row import GIST, INTEL, PHOTOS, SMALL_8K, TRAINED, YOU, Row, same

ROWS = (
    Row(
        document=INTEL,
        experiment="images to TFRecords, categories shuffled over them (5)",
        full=("cputrain prepare imagenet SRC data/imagenet --format tfrecord --shards 1024",),
        small=("cputrain prepare imagefolder data/photos tf --format tfrecord --shards 4", "cputrain data verify tf"),
        shows=(r"(train [\d,]+ images in \d+ shards?)", r"(different classes among 32 .*)", r"(0 of .* damaged)"),
    ),
    same(
        INTEL,
        "batch, warm-up and rates derived (7)",
        "cputrain plan resnet50-skx-256node --machine skx-8160-2s --nodes 256 --curve",
        r"(global batch) .*= ([\d,]+):",
        r"(warm-up steps) +(\d+)",
        r"(total steps) +([\d,]+)",
        r"learning rate +(.*?):",
    ),
    same(
        INTEL,
        "2 workers a host, 22 + 2 threads each (4a)",
        "cputrain plan resnet50-skx-256node --machine skx-8160-2s --nodes 256 --profile bkm-2018",
        r"(workers per host) +(\d)",
        r"(OMP_NUM_THREADS=22)",
        r"(KMP_BLOCKTIME=1)",
        r"(KMP_AFFINITY=\S+)",
    ),
    Row(
        document=INTEL,
        experiment="convergence at 24,576 (4a)",
        full=("cputrain job slurm resnet50-skx-256node --nodes 256 --time 02:00:00 --submit",),
        small=(
            f"cputrain train resnet50-skx-256node {PHOTOS} data.images_per_epoch=null batch.local=8 epochs=2 "
            "schedule.warmup_epochs=1 schedule.start_rate=0.0",
        ),
        shows=TRAINED,
    ),
    Row(
        document=INTEL,
        experiment="the same started by mpirun (4a)",
        full=("mpirun -np 512 -ppn 2 cputrain train resnet50-skx-256node",),
        small=(
            f"cputrain launch --ppn 2 -- cputrain train resnet50-skx-256node {PHOTOS} data.images_per_epoch=null "
            "batch.local=8 max_steps=4 schedule.warmup_epochs=1",
        ),
        shows=(r"(top-1) +([\d.]+ %)",),
    ),
    Row(
        document=INTEL,
        experiment="convergence at 8,192 (its log is in 5b)",
        full=("cputrain job slurm resnet50-8k --nodes 256 --time 06:00:00 --submit",),
        small=(f"{SMALL_8K} epochs=2",),
        shows=TRAINED,
    ),
    Row(
        document=INTEL,
        experiment="throughput and efficiency (overview)",
        full=("cputrain train resnet50-skx-256node data.path=synthetic max_steps=50",),
        small=(
            "cputrain sweep resnet50-skx-256node data.path=synthetic data.crop=64 batch.local=8 max_steps=20 "
            "--workers 1,2",
        ),
        shows=(r"^ *(1 .*)$", r"^ *(2 .*)$"),
    ),
    Row(
        document=INTEL,
        experiment="validation with batches of 200 on one host (5a)",
        full=("cputrain eval runs/resnet50-skx-256node --format json evaluate.batch=200 plan.ppn=1 plan.threads=46",),
        small=(
            f"{SMALL_8K} epochs=1",
            "cputrain eval runs/resnet50-8k evaluate.batch=20 plan.ppn=1",
        ),
        shows=(r"(Evaluation \[\d+/5\])", r"^(step .*)$"),
    ),
    Row(
        document=YOU,
        experiment="Table 4: batch 256, 16 KNLs",
        full=("cputrain job slurm resnet50-knl-16node-256 --nodes 16 --time 48:00:00 --submit",),
        small=(f"cputrain train resnet50-knl-16node-256 {PHOTOS} batch.local=8 epochs=2 plan.ppn=2",),
        shows=TRAINED,
    ),
    Row(
        document=YOU,
        experiment="Table 4: 16,384, 1,024 CPUs",
        full=("cputrain job slurm resnet50-16k-1024cpu --nodes 512 --time 01:00:00 --submit",),
        small=(f"cputrain train resnet50-16k-1024cpu {PHOTOS} batch.local=16 epochs=4 schedule.warmup_epochs=1",),
        shows=(*TRAINED, r"(tuned for a global batch of 16,384)"),
    ),
    Row(
        document=YOU,
        experiment="Table 4: 16,000, 1,600 CPUs",
        full=("cputrain job slurm resnet50-16k-1600cpu --nodes 800 --time 01:00:00 --submit",),
        small=(f"cputrain train resnet50-16k-1600cpu {PHOTOS} batch.local=16 epochs=4 schedule.warmup_epochs=1",),
        shows=TRAINED,
    ),
    Row(
        document=YOU,
        experiment="Tables 1 and 4: 32,768, 2,048 KNLs, 90 and 64 epochs",
        full=(
            "cputrain job slurm resnet50-knl-2048node-32k --nodes 2048 --time 00:30:00 --submit",
            "cputrain job slurm resnet50-knl-2048node-32k-64epoch --nodes 2048 --time 00:30:00 --submit",
        ),
        small=(
            f"cputrain train resnet50-knl-2048node-32k {PHOTOS} batch.local=16 epochs=4 schedule.warmup_epochs=1 "
            "plan.ppn=2",
        ),
        shows=TRAINED,
    ),
    Row(
        document=YOU,
        experiment="AlexNet at 32,768, 2,048 CPUs; Table 3: norms of weights and gradients by layer",
        full=(
            "cputrain job slurm alexnet-bn-32k log_norms_every_steps=40 --nodes 1024 --time 00:30:00 --submit",
            "cputrain bench optimizer runs/alexnet-bn-32k",
        ),
        small=(
            "cputrain train alexnet-bn-32k data.path=data/photos data.crop=67 data.resize=67 batch.local=16 epochs=1 "
            "schedule.warmup_epochs=1 log_norms_every_steps=5",
            "cputrain bench optimizer runs/alexnet-bn-32k",
        ),
        shows=(r"^(features.0.weight .*)$", r"^(classifier.6.weight .*)$"),
    ),
    Row(
        document=YOU,
        experiment="Figure 1, Table 2: momentum loses accuracy at large batches, LARS does not",
        full=("cputrain reproduce large-batch data.path=data/mnist",),
        small=("cputrain plan large-batch-mnist data.path=data/mnist",),
        shows=(r"(total steps) +([\d,]+)",),
    ),
    same(YOU, "Tables 1 to 4 as printed", "cputrain reproduce tables you-et-al", r"(global batch +32,768 +32,768)"),
    Row(
        document=GIST,
        experiment="images to TFRecords in a PBS job (2b, 3a)",
        full=("cputrain job pbs --prepare imagenet SRC OUT --format tfrecord --ncpus 40 --time 08:00:00 --submit",),
        small=("cputrain job pbs --prepare imagefolder data/photos out --format tfrecord --ncpus 2 --time 00:10:00",),
        shows=(r"^#PBS (-l select=.*)$", r"(cputrain prepare|mpi\.\w+|--format tfrecord)"),
    ),
    Row(
        document=GIST,
        experiment="training in a container in a PBS job (2c)",
        full=("cputrain job pbs gist-sweep --nodes 2 --ncpus 40 --time 04:00:00 --container IMAGE --submit",),
        small=("cputrain job pbs gist-sweep --nodes 2 --ncpus 2 --ppn 2 --time 00:10:00 --container IMAGE",),
        shows=(r"^#PBS (-l select=.*)$", r"(apptainer)"),
    ),
    Row(
        document=GIST,
        experiment="Figures 2 and 3: batch size and weight decay",
        full=("cputrain sweep gist-sweep",),
        small=(
            f"cputrain sweep gist-sweep {PHOTOS} epochs=1 --grid batch.local=8,16 --grid optim.weight_decay=1e-3,1e-4",
        ),
        shows=(r"^(8 +16 +0.001 .*)$", r"^(16 +32 +0.0001 .*)$"),
    ),
    Row(
        document=GIST,
        experiment="Figure 3: the batch at which memory ends",
        full=("cputrain sweep gist-sweep --find-batch",),
        small=(f"cputrain sweep gist-sweep {PHOTOS} --find-batch --memory 3",),
        shows=(r"(largest .*)",),
    ),
    Row(
        document=GIST,
        experiment="Figures 4 and 5: when accuracy becomes stable",
        full=("cputrain sweep gist-sweep epochs=20 --grid optim.weight_decay=1e-3,1e-4",),
        small=(f"cputrain sweep gist-sweep {PHOTOS} epochs=4 batch.local=8 --grid optim.weight_decay=1e-3,1e-4",),
        shows=(r"^(0.001 .*)$", r"^(0.0001 .*)$"),
    ),
    Row(
        document=GIST,
        experiment="Figures 6 and 7: optimizers",
        full=("cputrain sweep gist-sweep",),
        small=(
            f"cputrain sweep gist-sweep {PHOTOS} epochs=1 batch.local=16 --run optim.name=momentum "
            "--run 'optim.name=sgd schedule.auto_rate_factor=10.0' --run 'optim.name=adam schedule.peak_rate=0.001' "
            "--run 'optim.name=adagrad_da schedule.peak_rate=0.01'",
        ),
        shows=(r"^(momentum .*)$", r"^(sgd .*)$", r"^(adam .*)$", r"^(adagrad_da .*)$"),
    ),
    *LAB_ROWS,
)
