"""Start and monitor ranks from a notebook, a command line, or a Slurm job."""
