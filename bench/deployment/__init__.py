"""A deployment on one machine: hosts in network namespaces, and the programs of ``docker/``."""
