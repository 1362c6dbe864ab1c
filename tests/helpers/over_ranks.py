"""What the tests themselves exchange between ranks."""

import horovod.tensorflow as hvd

from tfposeidon.communication.wire import exchange_objects

__all__ = ["exchange_objects", "on_one_rank"]


def on_one_rank(compute):
    """Returns on every rank what a function without collectives gives on rank 0.

    There are more ranks than CPU cores: what all would compute alike takes one of them.
    """
    if not hvd.is_initialized() or hvd.size() == 1:
        return compute()
    return hvd.broadcast_object(compute() if hvd.rank() == 0 else None, name="on one rank")
