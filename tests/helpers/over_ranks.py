"""Exchanges values of tests between ranks."""

import horovod.tensorflow as hvd

from tfposeidon.communication.wire import exchange_objects

__all__ = ["exchange_objects", "on_one_rank"]


def on_one_rank(compute):
    """Calls a function without collectives on rank 0, and returns its result on all ranks.

    With more ranks than CPU cores, this is faster than computing the same result on all ranks.
    """
    if not hvd.is_initialized() or hvd.size() == 1:
        return compute()
    return hvd.broadcast_object(compute() if hvd.rank() == 0 else None, name="on one rank")
