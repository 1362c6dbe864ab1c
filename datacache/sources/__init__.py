"""Sources of samples."""
