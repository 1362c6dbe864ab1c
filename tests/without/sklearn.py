"""Hides scikit-learn from jobs, because Keras would import it, which takes two seconds."""

raise ImportError("scikit-learn is hidden from jobs of tests, except with `launch.WITH_SKLEARN`")
