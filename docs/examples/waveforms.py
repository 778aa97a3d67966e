"""A network and data of one's own with cputrain.train: which waveform is in a noisy signal?

python waveforms.py                                   # one process
cputrain launch -- python waveforms.py                # one for each worker of the plan, bound; --hosts for several
python waveforms.py epochs=4 optim.name=lars schedule.peak_rate=0.5 output=runs/waveforms-lars
python waveforms.py --resume                          # continue from the last checkpoint
"""

import sys

import torch
from torch import Tensor, nn

from cputrain import train

NAMES = ("sine", "square", "sawtooth")
LENGTH = 128


class Waveforms(torch.utils.data.Dataset):
    """Noisy signals of random frequency and phase: sample i is the same in every run and on every rank."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(self.seed * 1_000_000 + i)
        label = i % len(NAMES)
        frequency, phase = 2 + 6 * torch.rand(1, generator=random), torch.rand(1, generator=random)
        turns = frequency * torch.linspace(0, 1, LENGTH) + phase
        wave = (torch.sin(2 * torch.pi * turns), torch.sign(turns % 1 - 0.5), 2 * (turns % 1) - 1)[label]
        return (wave + 0.3 * torch.randn(LENGTH, generator=random))[None], label  # (1, LENGTH)


class Network(nn.Module):
    """(N, 1, LENGTH) -> (N, 3) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 16, 9, stride=2, padding=4),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 32, 9, stride=2, padding=4),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(128, len(NAMES)),
        )

    def forward(self, signals: Tensor) -> Tensor:
        return self.layers(signals)


if __name__ == "__main__":
    torch.manual_seed(1)  # of the initial weights
    result = train(
        Network(),
        nn.CrossEntropyLoss(),
        Waveforms(1536, seed=1),
        Waveforms(300, seed=2),
        classes=NAMES,
        resume="--resume" in sys.argv,
        settings=[
            "name=waveforms",
            "batch.global=64",
            "epochs=3",
            "schedule.peak_rate=0.05",
            "schedule.warmup_epochs=0.5",
            *(word for word in sys.argv[1:] if word != "--resume"),
        ],
    )
    if result.accuracy is not None:
        print(f"{result.step} steps, top-1 {result.accuracy.top1:.1f} %")
