"""`cputrain find-lr`: a learning rate for a recipe, by a range test. curve.py is the arithmetic, rank.py the steps."""
