"""A data set of tensorflow-datasets that tests prepare from samples of their own."""

import pytest

tfds = pytest.importorskip("tensorflow_datasets")


class OwnBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Base of the data sets of tests, which are found by their class's name."""

    VERSION = tfds.core.Version("1.0.0")
    # Looking for it, 4.9.10 needs importlib_resources, which it does not ask for.
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
    """Writes the files of a data set, and returns it.

    Args:
      builder: The data set.
      **options: Options of `tfds.download.DownloadConfig`.
    """
    tfds.disable_progress_bar()
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(**options))
    return builder
