"""Hides scikit-learn from jobs: Keras imports it where it is installed, in two seconds."""

raise ImportError("jobs of tests do without scikit-learn, but for `launch.WITH_SKLEARN`")
