"""Provides a data set of tensorflow-datasets with the samples of a test."""

import pytest

tfds = pytest.importorskip("tensorflow_datasets")


class OwnBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Base class of data sets in tests; the name of a subclass is the name of the data set."""

    VERSION = tfds.core.Version("1.0.0")
    # tensorflow-datasets 4.9.10 would search for the code with importlib_resources, which it does
    # not require.
    code_path = None

    def features(self):
        """Returns the features of a sample, by name."""
        raise NotImplementedError

    def splits(self):
        """Returns the samples of each split, by its name."""
        raise NotImplementedError

    def _info(self):
        features = tfds.features.FeaturesDict(self.features())
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, manager):
        del manager
        return {split: enumerate(samples) for split, samples in self.splits().items()}

    def _generate_examples(self, **_):
        raise NotImplementedError("splits come from `splits`")


def prepare(builder, **options):
    """Writes the files of a data set, and returns the data set.

    Args:
      builder: The data set.
      **options: Options of `tfds.download.DownloadConfig`.
    """
    tfds.disable_progress_bar()
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(**options))
    return builder
