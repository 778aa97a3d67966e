"""What a network predicts for each image of an evaluation."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cputrain.comm.group import all_gather
from cputrain.data.batches import Batch
from cputrain.data.order.permutations import Indices
from cputrain.report.confusion import Predicted


@dataclass(slots=True, kw_only=True)
class PredictionLog:
    """This rank's predictions, batch by batch; images that could not be read are left out."""

    parts: list[np.ndarray] = field(default_factory=list)

    def add(self, outputs: Tensor, losses: Tensor, batch: Batch, numbers: Indices) -> None:
        """Take a batch's outputs (N, classes), losses (N,) and the numbers of its images (N,)."""
        shares = torch.softmax(outputs.double(), dim=1)
        highest, predicted = shares.max(dim=1)
        of_label = shares.gather(1, batch.labels[:, None])[:, 0]
        columns = (torch.from_numpy(np.asarray(numbers)), batch.labels, predicted, losses, of_label, highest)
        rows = torch.stack([each.double() for each in columns], dim=1)[batch.weights > 0]
        self.parts.append(rows.numpy())

    def gathered(self) -> Predicted:
        """The predictions of all ranks, in the order of the images' numbers. To be called by every rank."""
        own = np.concatenate(self.parts) if self.parts else np.empty((0, len(Predicted.__dataclass_fields__)))
        rows = np.concatenate(all_gather(own))
        image, label, predicted, loss, of_label, highest = rows[rows[:, 0].argsort()].T
        return Predicted(
            image=image.astype(np.int64),
            label=label.astype(np.int64),
            predicted=predicted.astype(np.int64),
            loss=loss,
            label_share=of_label,
            predicted_share=highest,
        )
