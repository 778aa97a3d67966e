"""Networks that torchvision does not have."""

from collections.abc import Callable

from torch import Tensor, nn

DROPOUT = 0.5


def alexnet_bn(alexnet: Callable[..., nn.Module], classes: int) -> nn.Module:
    """AlexNet with batch-norm after each convolution: B. Ginsburg's network for batches of 32K (You et al. 2018, 4).

    Its layers are torchvision's; their indexes in `features` are shifted by the batch-norm layers between them.
    """
    model = alexnet(num_classes=classes)
    layers: list[nn.Module] = []
    for layer in model.features.children():  # type: ignore[union-attr]
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    model.features = nn.Sequential(*layers)
    return model


class LeNet(nn.Module):
    """LeNet (LeCun et al. 1998) as in Caffe: 5 x 5 convolutions of 20 and 50 channels, 500 units, no batch-norm."""

    def __init__(self, classes: int, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(50 * lenet_side(side) ** 2, 500)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(500, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) -> (N, classes)."""
        maps = self.pool(self.conv2(self.pool(self.conv1(images))))
        logits: Tensor = self.fc(self.relu(self.fc1(maps.flatten(1))))
        return logits


def lenet_side(side: int) -> int:
    """Side of the last feature maps: 4 for images of 28 x 28."""
    return ((side - 4) // 2 - 4) // 2


class MnistCnn(nn.Module):
    """5 x 5 convolutions of 32 and 64 channels with pooling, 1,024 units, dropout (TensorFlow's "Deep MNIST")."""

    def __init__(self, classes: int, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.pool = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(64 * (side // 4) ** 2, 1024)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(DROPOUT)
        self.fc = nn.Linear(1024, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) -> (N, classes)."""
        maps = self.pool(self.conv2(self.pool(self.conv1(images))))
        logits: Tensor = self.fc(self.dropout(self.relu(self.fc1(maps.flatten(1)))))
        return logits


class Linear(nn.Module):
    """A single linear layer from pixels to classes (softmax regression), or from `features` values to outputs."""

    def __init__(self, classes: int, side: int, features: int | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(features or 3 * side * side, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, side, side) or (N, features) -> (N, classes)."""
        logits: Tensor = self.fc(images.flatten(1))
        return logits
