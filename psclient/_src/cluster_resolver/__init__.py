"""Where the cluster and this process's task come from: `TF_CONFIG`, arguments, Slurm, or several of them."""
