"""What tests share: clusters in one process and of real processes, faults, programs, files."""
