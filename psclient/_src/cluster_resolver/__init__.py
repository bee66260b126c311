"""Cluster resolvers: find the cluster and this process's task in `TF_CONFIG`, arguments, Slurm, or several of them."""
