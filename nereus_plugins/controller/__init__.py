"""The controller: watches a job's records and says, at every boundary, in which plan to go on."""
