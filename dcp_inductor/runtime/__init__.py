"""Running the exchange: groups, workspaces, backends, kernels. Knows no graphs."""
