"""Sizes of files and downloads, written for people."""

_UNITS = ((10**9, "GB", 1), (10**6, "MB", 1), (10**3, "kB", 0), (1, "bytes", 0))


def format_size(size: int) -> str:
    """Write a number of bytes in the units that disks and downloads are sold in: 12.1 GB, 340.0 MB."""
    unit, name, digits = next((each for each in _UNITS if size >= each[0]), _UNITS[-1])
    return f"{size / unit:.{digits}f} {name}"
