"""One layer of a Llama by hand, forward and back: what runs where autograd would keep or move too much."""
