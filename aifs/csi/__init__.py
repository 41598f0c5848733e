"""The driver of the Container Storage Interface: how Kubernetes makes, mounts and removes volumes,
which are directories of a mount that another process serves."""
