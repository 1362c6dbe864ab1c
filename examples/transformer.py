"""Trains a small language model on the help texts of Python.

horovodrun -np 2 python examples/transformer.py --scheme hybcomm

The loss does not depend on the number of ranks, because the global batches do not.
"""

import argparse
import collections
import re
import sys
from pydoc_data import topics

import keras
import numpy as np
import tensorflow as tf

import tfposeidon as tp

WORDS, LENGTH = 4096, 64
"""Size of the vocabulary, and words per sample."""


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps to train (200)")
    parser.add_argument(
        "--global-batch", type=int, default=32, help="samples per step over all ranks together (32)"
    )
    parser.add_argument("--width", type=int, default=128, help="width of the model (128)")
    parser.add_argument("--blocks", type=int, default=2, help="blocks of the model (2)")
    parser.add_argument("--scheme", default="auto", help="name of a communication scheme (auto)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and samples (0)")
    parser.add_argument(
        "--goal", type=float, default=4.6, help="loss per word above which the job fails (4.6)"
    )
    return parser.parse_args()


def words():
    """Returns all texts as word indices, ordered by frequency; rare words have index 0."""
    text = " ".join(topics.topics[name] for name in sorted(topics.topics))
    found = re.findall(r"\w+|[^\w\s]", text.lower())
    frequent = collections.Counter(found).most_common(WORDS - 1)
    numbers = {word: number for number, (word, _) in enumerate(frequent, 1)}
    return np.array([numbers.get(word, 0) for word in found], "int32")


def batches(text, options):
    """Returns this rank's share of each global batch: words, and the words that follow them."""
    rng = np.random.default_rng(options.seed)
    begins = rng.integers(0, len(text) - LENGTH - 1, (options.steps, options.global_batch))
    # Every rank selects the same global batches, and its own rows of each.
    samples = text[begins[:, tp.rank() :: tp.size(), None] + np.arange(LENGTH + 1)]
    return tf.data.Dataset.from_tensor_slices((samples[..., :-1], samples[..., 1:])).prefetch(2)


class Embedded(keras.layers.Layer):
    """Embeds words and their positions.

    The gradient of the word table has rows only for the words of a batch.
    """

    def __init__(self, width):
        super().__init__()
        self.words = keras.layers.Embedding(WORDS, width)
        self.positions = keras.layers.Embedding(LENGTH, width)

    def call(self, numbers):
        """Returns `[batch, LENGTH, width]` for `[batch, LENGTH]` word indices."""
        return self.words(numbers) + self.positions(keras.ops.arange(LENGTH))


def build_model(width, blocks):
    layers = keras.layers
    numbers = keras.Input((LENGTH,), dtype="int32")
    x = Embedded(width)(numbers)
    for _ in range(blocks):
        normalized = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(4, width // 4)
        x = layers.Add()([x, attention(normalized, normalized, use_causal_mask=True)])
        inside = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(inside)])
    return keras.Model(numbers, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def main():
    options = parse_arguments()
    tp.init()
    if tp.size() > options.global_batch:
        sys.exit(
            "--global-batch must be at least the number of ranks. Received: --global-batch "
            f"{options.global_batch} on {tp.size()} ranks. Use a larger batch, or fewer ranks"
        )
    keras.utils.set_random_seed(options.seed)
    model = build_model(options.width, options.blocks)
    rate = tp.optimizers.schedules.PolynomialDecayWithWarmup(
        0.01, warmup_steps=options.steps // 10, decay_steps=options.steps, power=1
    )
    # As in the paper, LAMB includes embeddings: the norm of the whole table scales their rows.
    optimizer = tp.DistributedOptimizer(
        tp.optimizers.LAMB(rate, weight_decay=0.01), scheme=options.scheme
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    text = words()
    model.fit(batches(text, options), verbose=0, shuffle=False)
    # All ranks evaluate the same samples, whatever the number of ranks.
    samples = text[: 128 * (LENGTH + 1)].reshape(128, LENGTH + 1)
    final = model.evaluate(samples[:, :-1], samples[:, 1:], verbose=0)
    if tp.rank() == 0:
        print(f"\n{optimizer.plan}\n\nloss per word: {final:.4f}")
    return 0 if final <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
