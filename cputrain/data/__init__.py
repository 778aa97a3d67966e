"""Images: from raw files to shards, from either to batches."""
