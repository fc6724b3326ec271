"""What the project proves about itself: each file is a command, run from source_code/ as ``python -m proofs.NAME``."""
