"""`cputrain prepare`: images of any source -> shuffled shards with an index; and checking, counting, showing them."""
