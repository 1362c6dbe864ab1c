"""The shapes of ResNet-50's 161 trainable variables (25.6 M values), in the order of the forward pass."""

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))


def shapes():
    """He et al. 2016, Table 1; convolutions without biases, two parameters per normalised channel."""
    found = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for blocks, width in STAGES:
        for block in range(blocks):
            found += _normalised((1, 1, channels, width)) + _normalised((3, 3, width, width))
            found += _normalised((1, 1, width, 4 * width))
            if block == 0:
                found += _normalised((1, 1, channels, 4 * width))
            channels = 4 * width
    return [*found, (2048, 1000), (1000,)]


def _normalised(kernel):
    return [kernel, (kernel[-1],), (kernel[-1],)]
