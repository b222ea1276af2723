"""Waves of a serving benchmark: requests that are all sent at once, more of them than an engine runs at once.

    balanced_batch(896, 900, 900)      -> 900: one wave instead of 896 and then 4 alone
    balanced_batch(896, 3000, 3000)    -> 896: the last wave is a third of a batch and costs little more than its work

A decode step takes about as long for 4 requests as for 40, so a last wave of few requests is a whole run of steps in
which the device is nearly idle. Few means at most 1/8 of a batch: these slots are spread over the waves before it.
"""

LAST_WAVE_FRACTION = 1 / 8  # of the batch: the largest last wave that is spread over the others


def balanced_batch(batch: int, requests: int, concurrency: int) -> int:
    """Return the batch with which a small last wave joins the others; the same batch if it is not small.

    Never more than `concurrency`, the requests that are sent and not finished: a closed loop keeps its limit.
    """
    waves, last = divmod(requests, batch)
    if waves == 0 or not 0 < last <= batch * LAST_WAVE_FRACTION:
        return batch
    balanced = -(-requests // waves)
    return balanced if balanced <= concurrency else batch
