from .async_checkpoint import AsyncCheckpoint as AsyncCheckpoint
from .async_checkpoint import Restored as Restored
