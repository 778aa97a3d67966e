"""Fine-tune an encoder like BERT (random weights) as scripts for Intel's extension do, then infer with it."""

import argparse

import intel_extension_for_pytorch as ipex
import torch
from torch import nn


class Encoder(nn.Module):
    """Embeddings, a few layers of attention, and a classifier of the first token."""

    def __init__(self, vocabulary: int = 1000, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, 2)

    def forward(self, tokens):
        """(N, L) -> (N, 2)."""
        states = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        return self.classify(torch.tanh(self.layers(states)[:, 0]))


parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--no-prepack", action="store_true", help="the original's blocked weights need AVX-512 in bfloat16")
args = parser.parse_args()
dtype = torch.bfloat16 if args.bf16 else torch.float32
prepack = {"weights_prepack": False} if args.no_prepack else {}
torch.manual_seed(1)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
model.train()
model, optimizer = ipex.optimize(model, dtype=dtype, optimizer=optimizer, inplace=True, **prepack)
tokens, labels = torch.randint(1000, (8, 32)), torch.arange(8) % 2
for step in range(10):
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        loss = nn.functional.cross_entropy(model(tokens).float(), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
# torch's inference kernel of a whole layer cannot read the weights that the original has blocked for AMX.
torch.backends.mha.set_fastpath_enabled(False)
trained = Encoder()
trained.load_state_dict(model.state_dict())
# The original's bfloat16 layer norm needs AVX-512, too.
trained = ipex.optimize(trained.eval(), dtype=torch.float32 if args.no_prepack else dtype)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16 and not args.no_prepack):
    print(f"correct {int((trained(tokens).argmax(1) == labels).sum())}")
