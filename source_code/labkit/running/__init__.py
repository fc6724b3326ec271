"""Start ranks and follow them: from a notebook, a command line, or a Slurm job."""
