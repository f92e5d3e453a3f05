"""Everything about a run that the coordinator's and the institutions' apps share."""
