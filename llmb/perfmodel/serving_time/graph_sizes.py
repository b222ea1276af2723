"""Sizes of the CUDA graphs that the native engine captures: a step is padded to the next larger one.

decode_graph_sizes(1024)      -> [1, 2, 4, ..., 64, 80, 112, ..., 1024]: decodes
mixed_graph_tokens(8192)      -> [128, 192, ..., 2048]: tokens of a step with prefill chunks
"""

MAX_MIXED_TOKENS = 2048


def decode_graph_sizes(max_batch_size: int) -> list[int]:
    """Return the batch sizes to capture: small ones densely, then a quarter more each, up to the batch limit."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    while sizes[-1] < max_batch_size:
        sizes.append(-(-sizes[-1] * 5 // 4 // 16) * 16)
    return [*(size for size in sizes if size < max_batch_size), max_batch_size]


def mixed_graph_tokens(max_num_tokens: int) -> list[int]:
    """Return the token counts of mixed steps to capture, densely, as they cost time."""
    limit = min(max_num_tokens, MAX_MIXED_TOKENS)
    counts = (*range(128, 512, 64), *range(512, 1536, 128), *range(1536, MAX_MIXED_TOKENS, 256))
    return [*(count for count in counts if count < limit), limit]
