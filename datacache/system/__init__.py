"""Services of the operating system: private folders, locks, memory and free space."""
