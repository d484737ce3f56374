"""Jobs on a simulated cluster: the job port over a trace, the policies that are compared on it."""
