"""ResNet v1.5, with the changes of the record runs."""

import keras

layers = keras.layers


def resnet(blocks, width, classes, bottleneck=True, large_stem=True):
    """Builds a ResNet v1.5 for square images of any size.

    In v1.5 the 3 x 3 convolution of a block has the stride, not the 1 x 1 before it. The last gamma
    of each block starts at 0, so blocks start as identities (Goyal et al. 2017, section 5.1).

    Args:
      blocks: Number of blocks in each stage; each stage after the first halves the resolution.
      width: Channels of the first stage; each later stage has twice as many as the stage before.
      classes: Number of classes.
      bottleneck: True for blocks of 1 x 1, 3 x 3 and 1 x 1 convolutions with four times as many
        channels at their end, as in ResNet-50; False for two 3 x 3, as in ResNet-18.
      large_stem: True for a 7 x 7 convolution of stride 2 and pooling at the start, as for
        ImageNet; False for a 3 x 3 convolution, for images of a few dozen pixels.

    Returns:
      Model from `[batch, size, size, 3]` uint8 images to `[batch, classes]` float32 logits.
    """
    images = keras.Input((None, None, 3))
    x = layers.Rescaling(1 / 64, offset=-2.0)(images)
    if large_stem:
        x = _normalized(_convolution(x, width, 7, 2))
        x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(x))
    else:
        x = layers.ReLU()(_normalized(_convolution(x, width, 3, 1)))
    block = _bottleneck if bottleneck else _basic
    for stage, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if stage and not index else 1
            x = block(x, width * 2**stage, stride)
    x = layers.GlobalAveragePooling2D()(x)
    # Logits are float32 also under mixed precision, because their exponentials would overflow.
    small = keras.initializers.RandomNormal(stddev=0.01)
    logits = layers.Dense(classes, kernel_initializer=small, dtype="float32")(x)
    return keras.Model(images, logits)


def _bottleneck(x, channels, stride):
    inside = layers.ReLU()(_normalized(_convolution(x, channels, 1, 1)))
    inside = layers.ReLU()(_normalized(_convolution(inside, channels, 3, stride)))
    inside = _normalized(_convolution(inside, 4 * channels, 1, 1), gamma="zeros")
    return _added(x, inside, stride)


def _basic(x, channels, stride):
    inside = layers.ReLU()(_normalized(_convolution(x, channels, 3, stride)))
    inside = _normalized(_convolution(inside, channels, 3, 1), gamma="zeros")
    return _added(x, inside, stride)


def _added(x, inside, stride):
    """Adds the output of a block to its input, which is projected if shapes differ."""
    if stride > 1 or x.shape[-1] != inside.shape[-1]:
        x = _normalized(_convolution(x, inside.shape[-1], 1, stride))
    return layers.ReLU()(layers.Add()([x, inside]))


def _convolution(x, channels, side, stride):
    return layers.Conv2D(
        channels,
        side,
        stride,
        padding="same",
        use_bias=False,
        kernel_initializer=keras.initializers.HeNormal(),
    )(x)


def _normalized(x, gamma="ones"):
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma)(x)
