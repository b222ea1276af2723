"""A Llama layer with explicit forward and backward, for memory and speed that autograd does not reach."""
