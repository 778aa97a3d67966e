"""Networks and their batch-norm and initialisation variants."""
