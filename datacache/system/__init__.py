"""Services of the operating system: private folders, locks, memory and room on disks."""
