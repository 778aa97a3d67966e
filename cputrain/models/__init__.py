"""Networks: networks.py builds a recipe's network, weights.py loads weights into it."""
