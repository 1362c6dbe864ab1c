"""Wraps services of the operating system: private folders, locks, threads and free space."""
