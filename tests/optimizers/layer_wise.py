"""References of LARS and LAMB in NumPy, and variables for them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.optimizers import LAMB, LARS

SHAPES = {
    "conv/kernel": (3, 3, 2, 4),
    "dense/kernel": (5, 4),
    "gru/bias": (2, 6),
    "norm/gamma": (4,),
    "scale": (),
}
BY_DEFAULT = {"gru/bias", "norm/gamma", "scale"}
STEPS = 20
BOTH = pytest.mark.parametrize(
    "make", [lambda **o: LARS(1.0, **o), lambda **o: LAMB(0.05, **o)], ids=["LARS", "LAMB"]
)


# ---------------------------------------------------------------- LARS and LAMB in NumPy


class NumpyLARS:
    def __init__(
        self,
        rate,
        momentum=0.9,
        nesterov=False,
        trust=0.001,
        decay=0.0,
        ratio="sum_of_norms",
        epsilon=0.0,
    ):
        self.rate, self.momentum, self.nesterov, self.trust = rate, momentum, nesterov, trust
        self.decay, self.ratio, self.epsilon, self.velocity = decay, ratio, epsilon, {}

    def __call__(self, path, w, g, excluded):
        step = g if excluded else g + self.decay * w
        local = 1.0
        if not excluded:
            length = np.sqrt((w * w).sum())
            norm = (
                np.sqrt((g * g).sum())
                if self.ratio == "sum_of_norms"
                else np.sqrt((step * step).sum())
            )
            if length > 0 and norm > 0:
                below = norm + self.decay * length if self.ratio == "sum_of_norms" else norm
                local = self.trust * length / (below + self.epsilon)
        step = self.rate * local * step
        # The velocity has the sign of the paper, unlike in the optimizer.
        self.velocity[path] = self.momentum * self.velocity.get(path, 0.0) + step
        return w - (
            self.momentum * self.velocity[path] + step if self.nesterov else self.velocity[path]
        )


class NumpyLAMB:
    def __init__(self, rate, beta_1=0.9, beta_2=0.999, epsilon=1e-6, decay=0.0):
        self.rate, self.betas, self.epsilon, self.decay = rate, (beta_1, beta_2), epsilon, decay
        self.moments = {}

    def __call__(self, path, w, g, excluded):
        m, v, t = self.moments.get(path, (0.0, 0.0, 0))
        t += 1
        m, v = (
            b * old + (1 - b) * new
            for b, old, new in zip(self.betas, (m, v), (g, g * g), strict=True)
        )
        self.moments[path] = m, v, t
        unbiased_m, unbiased_v = (x / (1 - b**t) for x, b in zip((m, v), self.betas, strict=True))
        r = unbiased_m / (np.sqrt(unbiased_v) + self.epsilon)
        if excluded:
            return w - self.rate * r
        r = r + self.decay * w
        lengths = np.linalg.norm(w), np.linalg.norm(r)
        return w - self.rate * (lengths[0] / lengths[1] if min(lengths) > 0 else 1.0) * r


# ------------------------------------------------------------------ helpers


class Named(keras.Variable):
    """Variable with the path of a variable in a layer."""

    def __init__(self, value, path, dtype="float32"):
        super().__init__(value, dtype=dtype, trainable=True, name=path.rpartition("/")[2])
        self._where = path

    @property
    def path(self):
        return self._where


def starts(seed=0):
    generator = np.random.default_rng(seed)
    return {path: generator.normal(size=shape) for path, shape in SHAPES.items()}


def gradients(step):
    return starts(100 + step)


def variables(dtype="float32"):
    return [Named(value.astype("float32"), path, dtype) for path, value in starts().items()]


def apply(optimizer, made, step, scale=1.0):
    optimizer.apply([tf.constant(g * scale, "float32") for g in gradients(step).values()], made)


def trained(optimizer, steps=STEPS, dtype="float32", scale=1.0):
    made = variables(dtype)
    for step in range(steps):
        apply(optimizer, made, step, scale)
    return [variable.numpy() for variable in made]


def trained_by_numpy(rule, excluded=frozenset(BY_DEFAULT), steps=STEPS):
    weights = starts()
    for step in range(steps):
        weights = {
            path: rule(path, w, gradients(step)[path], path in excluded)
            for path, w in weights.items()
        }
    return list(weights.values())


def assert_close(actual, expected, rtol=2e-5, atol=2e-6):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(a, "float64"), np.asarray(b, "float64"), rtol=rtol, atol=atol
        )


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def one(value, path="layer/kernel", dtype="float32"):
    return Named(np.asarray(value, "float32"), path, dtype)
